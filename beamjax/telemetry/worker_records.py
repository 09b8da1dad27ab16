"""Writes what this process does in a pipeline to the folder of the job, about once a second."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from beamjax.errors import JobCancelledError
from beamjax.spans import Spans, Work
from beamjax.storage import files, records
from beamjax.storage.schema import to_plain
from beamjax.storage.shared_cache import SharedCache

EVERY_SECONDS = 1.0
"""Time between two records of a worker, and so the longest time to notice a cancellation."""
MAX_RECORDERS = 64
FOLDER = "records"
"""The name of the folder of the records, in that of the job."""
CANCEL = "cancel"
"""The name of the record that requests the end of the job."""


@dataclass(frozen=True)
class Reports:
    """Where workers write their records."""

    folder: str  # of the job
    pipeline: str  # its name in the job


def slowness(folder: str) -> float:
    """Factor on the time between reads of the folder of a job, relative to a local one."""
    return 5.0 if files.is_url(folder) else 1.0


def cancel_requested(folder: str) -> bool:
    """Whether a process has requested the end of the job of a folder."""
    return f"{CANCEL}{records.SUFFIX}" in files.names(folder)


class _Recorder:
    """The record of this process in one pipeline."""

    def __init__(self, reports: Reports):
        self.spans = Spans(traces=True, ranges=True)
        self._folder = reports.folder
        self._pipeline = reports.pipeline
        self._worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._writing = threading.Lock()
        self._looked = time.monotonic()

    def write(self) -> None:
        """Writes the record, if it can be written; ends a job that another process cancelled."""
        with self._writing, contextlib.suppress(Exception):
            name = f"{self._pipeline}.{self._worker}{records.SUFFIX}"
            path = files.join(files.join(self._folder, FOLDER), name)
            record = {"time": time.time(), "work": to_plain(self.spans.work())}
            files.write(path, records.encode(record), make=False)
        if time.monotonic() - self._looked >= EVERY_SECONDS * slowness(self._folder):
            self._looked = time.monotonic()
            cancelled = False
            with contextlib.suppress(OSError):
                cancelled = cancel_requested(self._folder)
            if cancelled:
                raise JobCancelledError("the job was cancelled")


_recorders: SharedCache[_Recorder] = SharedCache(MAX_RECORDERS, lambda _: 1)


class _Local(threading.local):
    collector: Spans | None = None


_here = _Local()


@contextlib.contextmanager
def collecting() -> Iterator[Spans]:
    """A context in which `report` adds the work of this thread to the sum that it yields."""
    # The caller sends the sum to another process in a message.
    former, _here.collector = _here.collector, Spans(traces=True)
    try:
        yield _here.collector
    finally:
        _here.collector = former


def report(work: Work, reports: Reports | None) -> None:
    """Reports work since the last report; JobCancelledError if the job was cancelled."""
    if _here.collector is not None:
        _here.collector.add(work)
    elif reports is not None:
        recorder = _recorders.get(reports, lambda: _Recorder(reports))
        recorder.spans.add(work)
        recorder.write()
