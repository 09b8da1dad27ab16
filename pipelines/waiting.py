"""A pipeline on a runner, from its start to its end, however that comes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.portable_runner import PipelineResult

from beamjax.errors import WorkerError
from beamjax.pipelines import flink_cluster
from beamjax.pipelines.cluster_options import ClusterOptions

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_CANCEL = 10.0


def run(
    pipeline: beam.Pipeline,
    flags: PipelineOptions,
    running: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Runs a pipeline and waits for it.

    Args:
      pipeline: what to run.
      flags: its options; `pipeline_timeout` and `flink_cluster` among them.
      running: makes a context of the result of Beam, which is entered while the pipeline runs.

    Raises:
      WorkerError: the time is over, or workers are gone.
      RuntimeError: the runner says that the pipeline failed.
    """
    result = pipeline.run()
    with running(result):
        if not isinstance(result, PipelineResult):
            result.wait_until_finish()
            return
        try:
            _wait(result, flags)
        except BaseException:
            # Whoever gives up here wants no workers that go on.
            _in_thread(result.cancel).join(_SECONDS_TO_CANCEL)
            raise


def _wait(result: PipelineResult, flags: PipelineOptions) -> None:
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
        step = min(_SECONDS_BETWEEN_LOOKS, left)
        thread.join(step)
        left -= step
        if thread.is_alive() and options.flink_cluster:
            trouble = flink_cluster.trouble(options.flink_cluster)
            if trouble:
                raise WorkerError(trouble)
    if failure:
        raise RuntimeError(str(failure[0])) from failure[0]


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread
