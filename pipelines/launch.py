"""Runs a Beam pipeline and waits for its end, while it looks for workers that died or hang."""

from __future__ import annotations

import collections
import contextlib
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._beam_compat import (
    WORKER_THREAD,
    FnApiRunner,
    PipelineResult,
    PrismRunner,
    SparkRunner,
    control_address,
    temporary_folder,
)
from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import BeamjaxError, OptionsError, WorkerError
from beamjax.options import Options
from beamjax.pipelines.clusters import flink_cluster
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.build import Outputs
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.runners.loopback import loopback_only, submission_files_in
from beamjax.pipelines.runners.options import ClusterOptions
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.values import Value
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker.errors import own_errors
from beamjax.pipelines.worker.tasks import StoredBody
from beamjax.plan.steps import Plan
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.watchdog import SECONDS_TO_STOP

NEVER_REPLACE_WORKERS = (FnApiRunner, PrismRunner, SparkRunner)
"""Runners that neither notice nor replace a worker process that died."""


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      connection: the connection to the runner.
      store: the store of the run.
      monitor: the monitor of the job.
      program: the pickled program, for bodies that run as Python in other processes.
      results: the placed values that are materialized.
      bodies: the bodies that are in the store, by key.
      programs: the programs that resident workers run, by their step, so that rounds share them.
      lasting: the names of the files in the store that outlive the run.
    """

    connection: Connection
    store: Store
    monitor: Monitor
    program: Ref | None = None
    results: MaterializedOutputs = NOTHING
    bodies: dict[str, StoredBody] = field(default_factory=dict)
    programs: dict[Any, Any] = field(default_factory=dict)
    lasting: frozenset[str] = frozenset()

    def files(self) -> set[str]:
        """The names of the files in the store that later passes need."""
        return files_of(self.bodies, self.program) | self.lasting

    def run(self, plan: Plan, inputs: build.GraphInputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the plan, whose outputs are the requested values.
          inputs: its inputs.
          stem: the prefix of the names of the files with the results.

        Returns:
          The outputs that steps compute, by name.

        Raises:
          WorkerError: a body failed, or the runner did.
          JobCancelledError: the job was cancelled.
        """
        connection = self.connection
        with self.monitor.pipeline(stem) as reports, new_pipeline(connection) as pipeline:
            store = replace(self.store, reports=reports)
            outputs = self.outputs(pipeline, plan, inputs, stem, store)
            names = [step.name for step in plan.steps]
            lost = functools.partial(lost_workers.lost_worker, store, plan.steps)
            lost_workers.begin_pipeline(store, connection.shared)
            name = type(connection.runner).__name__
            try:
                with own_errors(store, name, names, connection.shared, lost):
                    self._wait(pipeline, store, plan)
            finally:
                lost_workers.end_pipeline(store)
            found = outputs.find()
            self.monitor.computed(outputs.provenance)
            self.monitor.drop(outputs.dropped(), outputs.sizes(found))
            return found

    def _wait(self, pipeline: beam.Pipeline, store: Store, plan: Plan) -> None:
        connection, running = self.connection, self.monitor.running
        runner, shared = connection.runner, connection.shared
        if connection.is_one_process and connection.options.shard_timeout is None:
            # Threads of this process can't die, and without a limit they can't be late.
            run_pipeline(pipeline, running=running)
            return
        look = lost_workers.Look(store, plan.steps, isinstance(runner, NEVER_REPLACE_WORKERS))
        end = None if shared else functools.partial(lost_workers.end_workers, store)
        run_pipeline(pipeline, look, running, end)

    def outputs(
        self,
        pipeline: beam.Pipeline,
        plan: Plan,
        inputs: build.GraphInputs,
        stem: str,
        store: Store,
    ) -> Outputs:
        """Adds to a pipeline the steps of a plan and the steps that write its outputs."""
        inputs = replace(inputs, program=self.program)
        graph = build.Graph(pipeline, plan, inputs, store, self.connection, self.bodies)
        graph.build()
        outputs = Outputs(graph, stem, self.results)
        outputs.write()
        return outputs


def files_of(bodies: Mapping[str, StoredBody], program: Ref | None) -> set[str]:
    """The names of the files in a store that hold bodies and the pickled program."""
    refs = [ref for body in bodies.values() for ref in body.artefacts.values()]
    refs += [program] if program else []
    return {name for ref in refs for name, _ in ref.files}


def run_steps(
    pipeline: beam.Pipeline,
    connection: Connection,
    store: Store,
    steps: list[str],
    errors: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Runs a pipeline that was not made from a plan, and waits for it.

    Args:
      pipeline: the pipeline to run.
      connection: the connection to its runner.
      store: the store in which workers leave records of errors.
      steps: the labels of beamjax's own steps in it.
      errors: a context that replaces errors of the runner, see `transform_errors`.

    Raises:
      BeamjaxError: one of these steps raised it on a worker.
      WorkerError: the runner failed.
    """
    name = type(connection.runner).__name__
    own = own_errors(store, name, steps, connection.shared)
    with own, errors or contextlib.nullcontext():
        run_pipeline(pipeline)


@contextlib.contextmanager
def new_pipeline(connection: Connection, runner: Any = None) -> Iterator[beam.Pipeline]:
    """A pipeline whose temporary folder is removed at the end.

    Args:
      connection: the connection to the runner.
      runner: replaces the runner of the connection.
    """
    pipeline = beam.Pipeline(runner=runner or connection.runner, options=connection.flags)
    try:
        with submission_files_in(temporary_folder(pipeline)):
            yield pipeline
    finally:
        # Beam creates this folder with the pipeline, and removes it only if the pipeline runs.
        shutil.rmtree(temporary_folder(pipeline), ignore_errors=True)


class OwnPipeline(beam.Pipeline):
    """A Beam pipeline whose servers in this process listen at loopback addresses only."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with loopback_only(), submission_files_in(temporary_folder(self)):
            return super().run(*args, **kwargs)


def own_pipeline(runner: Any, options: Options) -> OwnPipeline:
    """An empty pipeline; see `beamjax.pipeline`."""
    found = [name for name, value in vars(options).items() if value != getattr(Options, name, ())]
    if misplaced := [name for name in found if name != "beam"]:
        raise OptionsError(
            f"{misplaced[0]}: found in the options of a pipeline, expected Beam's own; give it to "
            "beamjax.transform in the pipeline"
        )
    connection = connect(runner, options)
    return OwnPipeline(connection.runner, connection.flags)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two checks of a running pipeline: at first, so that short pipelines end without
delay, and later."""
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_END = 15.0
"""Seconds after the end of a worker in which a pipeline that is about to end surely ends."""

Look = Callable[[], BeamjaxError | None]
"""Checks a running pipeline; returns an error if the pipeline must end."""


def run_pipeline(
    pipeline: beam.Pipeline,
    look: Look | None = None,
    running: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    end: Callable[[], None] | None = None,
) -> None:
    """Runs a pipeline and waits for it.

    Args:
      pipeline: the pipeline to run; its options may have `pipeline_timeout` and `flink_cluster`.
      look: called while the pipeline runs; if it returns an error, the pipeline is ended. Beam's
        in-memory runner then runs in another thread, since it would wait forever for a worker that
        has died.
      running: makes a context from Beam's `PipelineResult`, which is entered while the pipeline
        runs.
      end: ends the worker processes of the in-memory runner; None where workers are threads.

    Raises:
      WorkerError: the time limit is exceeded, or workers died.
      BeamjaxError: the error that `look` returned.
      RuntimeError: the runner reports that the pipeline failed.
    """
    with loopback_only():
        if isinstance(pipeline.runner, FnApiRunner) and look is not None:
            _run_apart(pipeline, look, end)
            return
        result = pipeline.run()
        with running(result):
            if not isinstance(result, PipelineResult):
                result.wait_until_finish()
                return
            looks = [*_looks_by_options(pipeline.options), *([look] if look else [])]
            try:
                thread, failure = _in_thread(result.wait_until_finish)
                _watch(thread, looks)
                if failure:
                    raise RuntimeError(str(failure[0])) from failure[0]
            except BaseException:
                # Workers must not continue after the run has failed. The thread is for runners
                # that do not answer any more.
                _in_thread(result.cancel)[0].join(_SECONDS_TO_CANCEL)
                raise


def _run_apart(pipeline: beam.Pipeline, look: Look, end: Callable[[], None] | None) -> None:
    """Runs a pipeline of Beam's in-memory runner in a daemon thread, and watches it.

    Threads inherit being daemons, so all threads that the runner starts end with the process.
    """

    @with_settings_of_here
    def work() -> None:
        pipeline.run().wait_until_finish()

    with _worker_threads() as ended:
        thread, failure = _in_thread(work)
        try:
            _watch(thread, [look, ended])
        except BaseException:
            if end is not None:
                end()
            thread.join(SECONDS_TO_STOP if end is None else _SECONDS_TO_CANCEL)
            raise
    if failure:
        raise look() or failure[0]


def _looks_by_options(flags: PipelineOptions) -> Iterator[Look]:
    options, begun = flags.view_as(ClusterOptions), time.monotonic()

    def late() -> BeamjaxError | None:
        if time.monotonic() - begun <= options.pipeline_timeout:
            return None
        return WorkerError(
            f"the pipeline was cancelled: it took longer than {options.pipeline_timeout} s "
            "(option pipeline_timeout); are there workers, and do they reach the runner?"
        )

    def lost_cluster() -> BeamjaxError | None:
        folder = options.flink_cluster
        if flink_cluster.read(folder) is not None:
            return None
        return WorkerError(
            f"the Flink cluster in {folder} has ended; what `beamjax flink up` printed and the "
            "logs in this folder say why"
        )

    if options.pipeline_timeout is not None:
        yield late
    if options.flink_cluster:
        yield lost_cluster


def _watch(thread: threading.Thread, looks: Sequence[Look]) -> None:
    """Waits until a thread ends; raises the first error that a look returns while it runs."""
    pause = _SHORTEST_PAUSE
    while thread.is_alive():
        thread.join(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
        for look in looks:
            error = look() if thread.is_alive() else None
            if error is not None:
                raise error


def _in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Runs `work` in a thread. If it fails, its error is in the list when the thread has ended."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="beamjax pipeline", daemon=True)
    thread.start()
    return thread, failure


_apart: set[object] = set()
"""Tokens of the pipelines that `_run_apart` is running."""


@contextlib.contextmanager
def _worker_threads() -> Iterator[Look]:
    """Watches the threads in which Beam waits for its worker processes.

    Beam waits forever for a process that dies before it asks for work.

    Yields:
      A look that reports a worker that ended before its pipeline. It can't distinguish the workers
      of concurrent pipelines, and reports nothing if there have been several at once.
    """
    seen: dict[threading.Thread, str] = {}
    since, mixed = float("inf"), False

    def look() -> dict[threading.Thread, str]:
        threads = [t for t in threading.enumerate() if t.name == WORKER_THREAD]
        return {t: address for t in threads if (address := control_address(t)) is not None}

    # Beam may start a worker when the others have already done all the work of the pipeline. Such a
    # worker ends while the next pipeline runs, which must not count as a lost worker.
    _earlier.extend(set(look().values()) - set(_earlier))

    def ended() -> BeamjaxError | None:
        nonlocal since, mixed
        mixed = mixed or len(_apart) > 1
        seen.update(look())
        if mixed or all(t.is_alive() for t, address in seen.items() if address not in _earlier):
            return None
        since = min(since, time.monotonic())
        if time.monotonic() - since < _SECONDS_TO_END:
            return None
        return WorkerError(
            "a worker process ended before the pipeline did, and did not say why; what it wrote to "
            "stderr may. Can it import what it needs, and is there memory for so many workers?"
        )

    me = object()
    _apart.add(me)
    try:
        yield ended
    finally:
        _apart.discard(me)
        _earlier.extend(set(seen.values()) - set(_earlier))


_earlier: collections.deque[str] = collections.deque(maxlen=64)
"""The control addresses of earlier pipelines. Each pipeline has its own."""
