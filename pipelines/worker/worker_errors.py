"""Raises errors of workers in the launching process, on runners that lose the types of errors.

A worker writes a record of an error to the store before it raises it (`reporting`). If the pipeline
fails, the launching process looks for such records, and raises the first error, whatever the runner
reports.
"""

from __future__ import annotations

import collections
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from beamjax import errors
from beamjax._text import as_cause, cut
from beamjax.errors import BeamjaxError, WorkerError
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.reporting import ERROR
from beamjax.storage import files, records

_SECONDS_BETWEEN_LOOKS = 10.0
OFTEN = 3
"""Failures of one shard after which the run ends, even if the runner would retry."""


def recorded_error(store: Store) -> BeamjaxError | None:
    """The first error that a worker has recorded; None if there is no readable record."""
    return _first([_read(store, name) for name in _names(store)])


class RepeatedError:
    """Looks for a shard that fails repeatedly, so a run ends before the runner gives up."""

    def __init__(self, store: Store):
        self.store = store
        self._every = _SECONDS_BETWEEN_LOOKS if files.is_url(store.root) else 0.0
        self._looked = float("-inf")
        self._found: dict[str, BeamjaxError | None] = {}

    def __call__(self) -> BeamjaxError | None:
        """The first error, if a shard, or a step without shards, failed `OFTEN` times."""
        if time.monotonic() - self._looked < self._every:
            return None
        self._looked = time.monotonic()
        for name in _names(self.store):
            if name not in self._found:
                self._found[name] = _read(self.store, name)
        known = [error.failure for error in self._found.values() if error and error.failure]
        counts = collections.Counter((failure.step, failure.shard) for failure in known)
        often = max(counts.values(), default=0) >= OFTEN
        return _first(list(self._found.values())) if often else None


def _names(store: Store) -> list[str]:
    with contextlib.suppress(Exception):
        names = files.names(store.root)
        return [name for name in names if name.startswith(ERROR) and name.endswith(records.SUFFIX)]
    return []


def _read(store: Store, name: str) -> BeamjaxError | None:
    path = files.join(store.root, name)
    with contextlib.suppress(Exception):
        return records.error_of(records.decode(files.read(path), path), path)
    return None


def _first(errors: Sequence[BeamjaxError | None]) -> BeamjaxError | None:
    """The first of some errors, which says how many others there are."""
    failures = [error for error in errors if error is not None]
    if not failures:
        return None
    first = min(failures, key=lambda error: error.failure.time if error.failure else 0.0)
    if len(failures) == 1 or first.failure is None:
        return first
    others = len(failures) - 1
    error = type(first)(f"{first} (the first of {len(failures)} failures in this pipeline)")
    error.failure = replace(first.failure, others=others)
    return error


_RAISED = re.compile(r"beamjax\.errors\.(\w+): (.*?)(?=\n\S*Traceback|\n\n|\\n|\Z)", re.S)


class PipelineError(RuntimeError):
    """A runner reports that a pipeline failed which it had started."""


@contextlib.contextmanager
def own_errors(
    store: Store,
    runner: str,
    steps: list[str],
    here: bool,
    lost: Callable[[], BeamjaxError | None] = lambda: None,
) -> Iterator[None]:
    """A context that replaces errors of a runner by the errors that workers raised."""
    try:
        yield
    except Exception as error:
        # The record first: most runners report an error as text, cut off, or from a later worker.
        worker_error = recorded_error(store)
        if worker_error is not None:
            traced = worker_error.failure.traceback if worker_error.failure else ""
            # `here`: workers are threads of this process, so the error has its real cause.
            raise worker_error from (as_cause(error) if here else records.WorkerTraceback(traced))
        # What this process raised before the pipeline ran.
        if isinstance(error, BeamjaxError):
            raise
        # A worker process that died before it could write a record.
        died = lost()
        if died is not None:
            raise died from error
        # Without a record, the runner's message may have the text of the traceback.
        raised = _RAISED.search(str(error))
        kind = getattr(errors, raised[1], None) if raised else None
        if raised is not None and kind is not None:
            raise kind(cut(raised[2].strip())) from as_cause(error)
        where = f"in the pipeline of {', '.join(steps)}"
        if not isinstance(error, PipelineError):
            error.add_note(f"{runner} raised this in the launching process, {where}")
            raise
        text = _unexplained(cut(str(error).strip()), runner, where, None if here else store)
        raise WorkerError(text) from as_cause(error)


def _unexplained(text: str, runner: str, where: str, store: Store | None) -> str:
    """The message of an error of a runner of which no worker has left a record in the store."""
    if _NO_ANSWER in text:
        return (
            f"{runner}: its job server does not answer any more, {where}; start it again, and "
            f"run again: {text}"
        )
    if _FORGOTTEN in text:
        return (
            f"{runner}: the job manager has forgotten the job, {where}: it was restarted, and "
            f"has no high availability; run again: {text}"
        )
    if store is None:
        return f"{runner} failed {where}: {text}"
    return (
        f"{runner} failed {where}, and no worker left a record of an error. A worker process may "
        f"have died (out of memory, a signal), or see another folder than {store.root}; the logs "
        f"of the runner say more: {text}"
    )


_FORGOTTEN = "FlinkJobNotFoundException"
"""In the text of an error of Flink's client."""
_NO_ANSWER = "StatusCode.UNAVAILABLE"
"""In the text of an error of gRPC: the connection is gone, and can't be made again."""

_WHILE = re.compile(r"((?:(?!\\n).)*?) ?\[while running '(.+?)'\]")


@contextlib.contextmanager
def transform_errors(where: str, own: str) -> Iterator[None]:
    """A context that replaces the error of a user's transform by one that names it."""
    try:
        yield
    except Exception as error:
        text = str(error)
        match = _WHILE.search(text)
        # `own` is the prefix of the labels of beamjax's own transforms.
        if match is None or match[2].startswith(own):
            raise
        message = match[1]
        if "Traceback" not in text:  # the error itself, without the text that a runner adds
            kind = type(error.__cause__ if isinstance(error, PipelineError) else error)
            message = f"{kind.__name__}: {text[: match.end(1)]}"
        failed = WorkerError(f"{where}: the transform {match[2]!r} failed: {cut(message)}")
        raise failed from as_cause(error)
