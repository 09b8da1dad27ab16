"""One graph on a Beam runner, to its end."""

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

KEEP_WORKERS = (FnApiRunner, PrismRunner, SparkRunner)
"""Runners that neither notice nor replace a worker process that died."""


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      connection: to the runner.
      store: where values are, before and after.
      monitor: of the job.
      results: placed values that go where the results of the run are kept.
      program: what workers make the bodies from that run as Python.
      bodies: those that are in the store.
      programs: those that resident workers have of this run, by what they do.
      lasting: names of the files in the store that outlive the run.
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
        """The names of the files in the store that further passes need."""
        return files_of(self.bodies, self.program) | self.lasting

    def run(self, plan: Plan, inputs: build.GraphInputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the steps, and as outputs the values that are requested.
          inputs: what the steps read.
          stem: of the names of the files with the results.

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
            run_pipeline(pipeline, running=running)
            return
        look = lost_workers.Look(store, plan.steps, isinstance(runner, KEEP_WORKERS))
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
        """Adds the steps of a plan to a pipeline, which writes their outputs."""
        inputs = replace(inputs, program=self.program)
        graph = build.Graph(pipeline, plan, inputs, store, self.connection, self.bodies)
        graph.build()
        outputs = Outputs(graph, stem, self.results)
        outputs.write()
        return outputs


def files_of(bodies: Mapping[str, StoredBody], program: Ref | None) -> set[str]:
    """The names of the files of bodies, and of what workers make bodies from, in a store."""
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
    """Runs a pipeline that is no plan, and waits for it.

    Args:
      pipeline: what to run.
      connection: to its runner.
      store: where workers leave records of errors.
      steps: labels of those of beamjax.
      errors: makes errors of beamjax of those that a runner raises, see `transform_errors`.

    Raises:
      BeamjaxError: what one of these steps, by their labels, raised on a worker.
      WorkerError: the runner failed.
    """
    name = type(connection.runner).__name__
    own = own_errors(store, name, steps, connection.shared)
    with own, errors or contextlib.nullcontext():
        run_pipeline(pipeline)


@contextlib.contextmanager
def new_pipeline(connection: Connection, runner: Any = None) -> Iterator[beam.Pipeline]:
    """A pipeline that leaves no folder behind; `runner` replaces the runner of the connection."""
    pipeline = beam.Pipeline(runner=runner or connection.runner, options=connection.flags)
    try:
        with submission_files_in(temporary_folder(pipeline)):
            yield pipeline
    finally:
        # Beam makes this folder at once, and removes it only if the pipeline runs.
        shutil.rmtree(temporary_folder(pipeline), ignore_errors=True)


class OwnPipeline(beam.Pipeline):
    """A pipeline of Beam for which nothing of this process listens beyond loopback addresses."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with loopback_only(), submission_files_in(temporary_folder(self)):
            return super().run(*args, **kwargs)


def own_pipeline(runner: Any, options: Options) -> OwnPipeline:
    """An empty pipeline; see `beamjax.pipeline`."""
    found = [name for name, value in vars(options).items() if value != getattr(Options, name, ())]
    if misplaced := [name for name in found if name != "beam"]:
        raise OptionsError(
            f"{misplaced[0]}: found in the options of a pipeline, which are Beam's; give it to "
            "beamjax.transform in the pipeline"
        )
    connection = connect(runner, options)
    return OwnPipeline(connection.runner, connection.flags)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two looks at a pipeline that runs: at first, and later."""
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_END = 15.0
"""Seconds from the end of the first worker to that of the pipeline, at most."""

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
      pipeline: what to run; `pipeline_timeout` and `flink_cluster` are among its options.
      look: is called while the pipeline runs, and ends it by returning an error. Beam's in-memory
        runner then runs in a thread of its own, because it would wait forever for a worker that has
        died.
      running: makes a context of the result of Beam, which is entered while the pipeline runs.
      end: ends the worker processes of the in-memory runner; None where they are threads.

    Raises:
      WorkerError: the time is over, or workers are gone.
      BeamjaxError: what `look` gave.
      RuntimeError: the runner says that the pipeline failed.
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
                # A run that gives up here must not leave workers running.
                _in_thread(result.cancel)[0].join(_SECONDS_TO_CANCEL)
                raise


def _run_apart(pipeline: beam.Pipeline, look: Look, end: Callable[[], None] | None) -> None:
    """Runs a pipeline in a thread, as is all that the runner starts from there: it dies with the
    process.
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
        trouble = flink_cluster.trouble(options.flink_cluster)
        return WorkerError(trouble) if trouble else None

    if options.pipeline_timeout is not None:
        yield late
    if options.flink_cluster:
        yield lost_cluster


def _watch(thread: threading.Thread, looks: Sequence[Look]) -> None:
    """Waits until a thread ends; raises the first error that a check returns before that."""
    pause = _SHORTEST_PAUSE
    while thread.is_alive():
        thread.join(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
        for look in looks:
            error = look() if thread.is_alive() else None
            if error is not None:
                raise error


def _in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Starts a thread that does work; why it failed is in the list once the thread has ended."""
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
"""The pipelines that run apart at this time."""


@contextlib.contextmanager
def _worker_threads() -> Iterator[Look]:
    """Watches the threads in which Beam waits for its worker processes.

    Beam waits for ever if a process dies that had not yet asked for work.

    Yields:
      A check that reports a worker that ended before its pipeline did. It can't tell the threads of
      concurrent pipelines apart, and reports nothing while there are several.
    """
    seen: dict[threading.Thread, str] = {}
    since, mixed = float("inf"), False

    def look() -> dict[threading.Thread, str]:
        threads = [t for t in threading.enumerate() if t.name == WORKER_THREAD]
        return {t: address for t in threads if (address := control_address(t)) is not None}

    # Beam may start a worker of a pipeline when its others have done all the work already; such a
    # worker ends while the next pipeline runs.
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
"""The control addresses of pipelines that ran apart before: each pipeline has its own."""
