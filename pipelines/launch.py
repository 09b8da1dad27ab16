"""Runs a Beam pipeline and waits for its end, while it looks for workers that died or hang."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from beamjax._beam_compat import WORKER_THREAD, control_address, temporary_folder
from beamjax.bodies.jax_settings import in_thread
from beamjax.errors import BeamjaxError, OptionsError, WorkerError
from beamjax.options import Options
from beamjax.pipelines.clusters import guard, processes
from beamjax.pipelines.clusters.flags import ClusterOptions
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.build import Outputs
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.runners.loopback import loopback_only, submission_files_in
from beamjax.pipelines.runners.runner_table import spec_of
from beamjax.pipelines.runners.spec import Look
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import lost_workers, orphans
from beamjax.pipelines.worker.tasks import StoredBodies
from beamjax.pipelines.worker.worker_errors import PipelineError, own_errors
from beamjax.plan.steps import Plan
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.values import Ref
from beamjax.storage import temporary
from beamjax.telemetry import interrupts
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.watchdog import SECONDS_TO_STOP


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline."""

    connection: Connection
    store: Store
    monitor: Monitor
    bodies: StoredBodies
    # The placed values that are materialized.
    results: MaterializedOutputs = NOTHING
    # The programs that resident workers run, by their step, so that rounds share them.
    programs: dict[Any, Any] = field(default_factory=dict)
    # The names of the files in the store that outlive the run.
    lasting: frozenset[str] = frozenset()

    def files(self) -> set[str]:
        """The names of the files in the store that later passes need."""
        return self.bodies.files() | self.lasting

    def run(self, plan: Plan, inputs: build.GraphInputs, stem: str) -> dict[str, Ref]:
        """Runs a pipeline and waits for it; returns the outputs that steps compute, by name."""
        connection = self.connection
        with (
            self.monitor.pipeline(stem) as reports,
            self._heard() as store,
            new_pipeline(connection) as pipeline,
        ):
            store = replace(store, reports=reports)
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
            # Before the results are read: they may be incomplete.
            orphans.check_heard(store)
            refs = outputs.find()
            self.monitor.computed(outputs.provenance())
            self.monitor.drop(outputs.dropped(), plan.sizes)
            return refs

    def _heard(self) -> contextlib.AbstractContextManager[Store]:
        """The store for a pipeline, whose workers hear from this process if they may outlive it."""
        connection = self.connection
        outlive = connection.spec.outlives_launcher and not connection.shared
        return orphans.heard(self.store) if outlive else contextlib.nullcontext(self.store)

    def _wait(self, pipeline: beam.Pipeline, store: Store, plan: Plan) -> None:
        connection = self.connection
        look = lost_workers.Look(store, plan.steps, not connection.spec.replaces_workers)
        end = lost_workers.end_pipeline if connection.shared else lost_workers.end_workers
        progress = connection.spec.job(pipeline.options).look()
        run_pipeline(pipeline, [self.monitor.tick, look, progress], functools.partial(end, store))

    def outputs(
        self,
        pipeline: beam.Pipeline,
        plan: Plan,
        inputs: build.GraphInputs,
        stem: str,
        store: Store,
    ) -> Outputs:
        """Adds to a pipeline the steps of a plan and the steps that write its outputs."""
        graph = build.Graph(pipeline, plan, inputs, store, self.connection, self.bodies)
        graph.build()
        outputs = Outputs(graph, stem, self.results)
        outputs.write()
        return outputs


def run_steps(
    pipeline: beam.Pipeline,
    connection: Connection,
    store: Store,
    steps: list[str],
    errors: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Runs a pipeline that was not made from a plan, and waits for it."""
    # `steps` are the labels of beamjax's own steps; `errors` replaces errors of the runner, see
    # `transform_errors`.
    name = type(connection.runner).__name__
    own = own_errors(store, name, steps, connection.shared)
    with own, errors or contextlib.nullcontext():
        run_pipeline(pipeline)


@contextlib.contextmanager
def new_pipeline(connection: Connection, runner: Any = None) -> Iterator[beam.Pipeline]:
    """A pipeline whose temporary folder is removed at the end."""
    pipeline = beam.Pipeline(runner=runner or connection.runner, options=connection.flags)
    connection.spec.begin(pipeline.options)
    # Beam creates this folder with the pipeline, and removes it only if the pipeline runs.
    folder = temporary_folder(pipeline)
    temporary.adopt(folder)
    try:
        with submission_files_in(folder):
            yield pipeline
    finally:
        temporary.remove(folder)


class OwnPipeline(beam.Pipeline):
    """A Beam pipeline whose servers in this process listen at loopback addresses only."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with loopback_only(), submission_files_in(temporary_folder(self)):
            return super().run(*args, **kwargs)


def own_pipeline(runner: Any, options: Options) -> OwnPipeline:
    """An empty pipeline; see `beamjax.pipeline`."""
    changed = [
        option.name for option in fields(options) if getattr(options, option.name) != option.default
    ]
    if misplaced := [name for name in changed if name != "beam"]:
        raise OptionsError(
            f"{misplaced[0]}: found in the options of a pipeline, expected Beam's own; give it to "
            "beamjax.transform in the pipeline"
        )
    connection = connect(runner, options)
    return OwnPipeline(connection.runner, connection.flags)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two checks of a running pipeline: at first, so that a failure in a short pipeline
is seen soon, and later."""
_SECONDS_TO_LISTEN = 10.0
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_END = 15.0
"""Seconds after the end of a worker in which a pipeline that is about to end surely ends."""


def run_pipeline(
    pipeline: beam.Pipeline,
    looks: Sequence[Look] = (),
    end: Callable[[], None] = lambda: None,
) -> None:
    """Runs a pipeline in another thread, and waits for it; the error of a look ends it."""
    # `end` ends the workers of Beam's in-memory runner.
    with loopback_only():
        if spec_of(pipeline.runner).in_this_process:
            _run_in_memory(pipeline, looks, end)
        else:
            _run_remotely(pipeline, looks)


def _run_in_memory(pipeline: beam.Pipeline, looks: Sequence[Look], end: Callable[[], None]) -> None:
    spec = spec_of(pipeline.runner)
    with _worker_threads() as ended:
        outcome = in_thread(lambda: pipeline.run().wait_until_finish())
        try:
            _watch(outcome, [*looks, ended])
        except BaseException:
            # Beam waits forever for a worker process that has died.
            end()
            ended_now = not wait([outcome], SECONDS_TO_STOP).not_done
            if not ended_now and spec.shares_memory(pipeline.runner, pipeline.options):
                interrupts.abandon(outcome)  # It may compute; otherwise it only waits.
            raise
    error = outcome.exception()
    if error is not None:
        known = next(filter(None, (look() for look in looks)), error)
        if type(known) is RuntimeError:
            raise PipelineError(str(known)) from known
        raise known


def await_job_server(options: PipelineOptions) -> None:
    """Waits until the job server of a pipeline takes connections."""
    # Beam would wait for a minute, and then say that a future has timed out.
    endpoint = options.view_as(PortableOptions).job_endpoint or ""
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdigit()):  # Beam starts one, or has one in this process.
        return
    if not processes.wait_until(lambda: processes.listens(host, int(port)), _SECONDS_TO_LISTEN):
        raise WorkerError(
            f"job_endpoint: no job server takes connections at {endpoint}; start it, or check the "
            "host and port"
        )


def _run_remotely(pipeline: beam.Pipeline, looks: Sequence[Look]) -> None:
    await_job_server(pipeline.options)
    with guard.needed():
        _run_to_its_end(pipeline, pipeline.run(), looks)


def _run_to_its_end(pipeline: beam.Pipeline, result: Any, looks: Sequence[Look]) -> None:
    job = spec_of(pipeline.runner).job(pipeline.options)
    outcome = in_thread(result.wait_until_finish)
    looks = [*looks, *_looks_by_options(pipeline.options)]
    try:
        _watch(outcome, looks)
        if outcome.exception() and job.goes_on():
            # The job server is gone, but the job goes on without it.
            outcome = in_thread(job.wait)
            _watch(outcome, looks)
        if error := outcome.exception():
            raise job.gone() or PipelineError(str(error)) from error
    except BaseException:
        # Workers must not continue after the run has failed. The threads are for runners that do
        # not answer any more.
        cancels = [in_thread(cancel) for cancel in (result.cancel, job.cancel)]
        wait(cancels, _SECONDS_TO_CANCEL)
        raise


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
        from beamjax.pipelines.clusters import flink_cluster

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


def _watch(outcome: Future[Any], looks: Sequence[Look]) -> None:
    """Waits until a pipeline ends; raises the first error of a look while it runs."""
    pause = _SHORTEST_PAUSE
    while wait([outcome], pause).not_done:
        pause = min(1.2 * pause, _LONGEST_PAUSE)
        for look in looks:
            error = look()
            if error is not None and not outcome.done():
                raise error


_together: set[object] = set()
"""Tokens of the pipelines of Beam's in-memory runner that are running."""


@contextlib.contextmanager
def _worker_threads() -> Iterator[Look]:
    """Watches the threads in which Beam waits for its worker processes; yields a look."""
    # Beam waits forever for a process that dies before it asks for work. The look reports a worker
    # that ended before its pipeline. It can't distinguish the workers of concurrent pipelines, and
    # reports nothing if there have been several at once.
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
        mixed = mixed or len(_together) > 1
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
    _together.add(me)
    try:
        yield ended
    finally:
        _together.discard(me)
        _earlier.extend(set(seen.values()) - set(_earlier))


_earlier: collections.deque[str] = collections.deque(maxlen=64)
"""The control addresses of earlier pipelines. Each pipeline has its own."""
