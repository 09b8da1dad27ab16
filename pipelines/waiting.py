"""A pipeline on a runner, from its start to its end, however that comes."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._beam_compat import WORKER_THREAD, PipelineResult, control_address
from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import BeamjaxError, WorkerError
from beamjax.pipelines.clusters import flink_cluster
from beamjax.pipelines.runners.cluster_options import ClusterOptions
from beamjax.telemetry.watchdog import SECONDS_TO_STOP

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_BETWEEN_LOOKS_AT_WORK = 0.5
_SHORTEST_PAUSE = 0.02
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_END = 15.0  # from the end of the first worker to that of the pipeline

Look = Callable[[], BeamjaxError | None]
"""Looks at the workers of a pipeline, and gives an error if it has to end."""


def run(
    pipeline: beam.Pipeline,
    flags: PipelineOptions,
    running: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    look: Look | None = None,
) -> None:
    """Runs a pipeline and waits for it.

    Args:
      pipeline: what to run.
      flags: its options; `pipeline_timeout` and `flink_cluster` among them.
      running: makes a context of the result of Beam, which is entered while the pipeline runs.
      look: is asked while the pipeline runs, and ends it.

    Raises:
      WorkerError: the time is over, or workers are gone.
      BeamjaxError: what `look` gave.
      RuntimeError: the runner says that the pipeline failed.
    """
    result = pipeline.run()
    with running(result):
        if not isinstance(result, PipelineResult):
            result.wait_until_finish()
            return
        try:
            _wait(result, flags, look)
        except BaseException:
            # A run that gives up here must leave no workers that go on.
            _in_thread(result.cancel).join(_SECONDS_TO_CANCEL)
            raise


def run_apart(pipeline: beam.Pipeline, look: Look, end: Callable[[], None] | None) -> None:
    """Runs a pipeline on Beam's in-memory runner, and gives up where that would wait for ever.

    It runs in a thread, as does all that the runner starts from there, which dies with the process.

    Args:
      pipeline: what to run.
      look: is asked while the pipeline runs.
      end: ends the workers; None where they are threads of this process, which can't be ended.

    Raises:
      BeamjaxError: what `look` gave.
      Exception: what Beam raises.
    """
    failure: list[BaseException] = []

    @with_settings_of_here
    def run() -> None:
        pipeline.run().wait_until_finish()

    def work() -> None:
        try:
            run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="beamjax pipeline", daemon=True)
    with _worker_threads() as ended:
        thread.start()
        pause = _SHORTEST_PAUSE
        try:
            while thread.is_alive():
                thread.join(pause)
                pause = min(1.2 * pause, _SECONDS_BETWEEN_LOOKS_AT_WORK)
                trouble = look() or ended() if thread.is_alive() else None
                if trouble is not None:
                    raise trouble
        except BaseException:
            if end is not None:
                end()
            thread.join(SECONDS_TO_STOP if end is None else _SECONDS_TO_CANCEL)
            raise
    if failure:
        raise look() or failure[0]


_apart: set[object] = set()
"""The pipelines that run apart at this time."""


@contextlib.contextmanager
def _worker_threads() -> Iterator[Look]:
    """Watches the threads in which Beam waits for its worker processes.

    Beam waits for ever if a process dies that had not yet asked for work.

    Yields:
      What says that one has ended, but the pipeline has not. It can't distinguish the threads of
      several pipelines at a time, and says nothing then.
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


def _wait(result: PipelineResult, flags: PipelineOptions, look: Look | None) -> None:
    options = flags.view_as(ClusterOptions)
    left = float("inf") if options.pipeline_timeout is None else options.pipeline_timeout
    failure: list[BaseException] = []

    def wait() -> None:
        try:
            result.wait_until_finish()
        except BaseException as error:
            failure.append(error)

    thread = _in_thread(wait)
    while thread.is_alive():
        if left <= 0:
            raise WorkerError(
                f"the pipeline was cancelled: it took longer than {options.pipeline_timeout} s "
                "(option pipeline_timeout); are there workers, and do they reach the runner?"
            )
        step = min(_SECONDS_BETWEEN_LOOKS if look is None else _SECONDS_BETWEEN_LOOKS_AT_WORK, left)
        thread.join(step)
        left -= step
        if thread.is_alive() and options.flink_cluster:
            trouble = flink_cluster.trouble(options.flink_cluster)
            if trouble:
                raise WorkerError(trouble)
        found = look() if look is not None and thread.is_alive() else None
        if found is not None:
            raise found
    if failure:
        raise RuntimeError(str(failure[0])) from failure[0]


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread
