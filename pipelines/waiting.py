"""A pipeline on a runner, from its start to its end, however that comes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.portable_runner import PipelineResult

from beamjax import errors
from beamjax.errors import BeamjaxError, WorkerError
from beamjax.pipelines import flink_cluster
from beamjax.pipelines.cluster_options import ClusterOptions

_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_CANCEL = 10.0
_TOLD_CHARACTERS = 4000
_TOLD = re.compile(r"beamjax\.errors\.(\w+): (.*?)(?=\n\S*Traceback|\n\n|\\n|\Z)", re.S)


def run(pipeline: beam.Pipeline, flags: PipelineOptions) -> None:
    """Runs a pipeline and waits for it.

    Args:
      pipeline: what to run.
      flags: its options; `pipeline_timeout` and `flink_cluster` among them.

    Raises:
      WorkerError: a body failed, or the runner did, or the time is over.
    """
    with _own_errors():
        result = pipeline.run()
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
        raise _Failed(str(failure[0])) from failure[0]


class _Failed(RuntimeError):
    """What a job server tells of a pipeline that failed."""


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Makes errors of beamjax again of those that come as text, from workers elsewhere."""
    try:
        yield
    except BeamjaxError:
        raise
    except RuntimeError as error:
        told = _TOLD.search(str(error))
        kind = getattr(errors, told[1], None) if told else None
        if told is not None and kind is not None:
            raise kind(told[2].strip()) from error
        if isinstance(error, _Failed):
            raise WorkerError(
                f"{str(error)[:_TOLD_CHARACTERS].strip()}\nNo step says why: a worker or the "
                "runner may have died, for want of memory or by a body that ends its process, or "
                "be out of reach; see their logs"
            ) from error
        raise
