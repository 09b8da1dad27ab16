"""Counters and timers of a worker, and the record that it writes every second."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from beamjax.bodies import compile_time as _compile_time  # noqa: F401  (counts compilations)
from beamjax.bodies.counts import counts
from beamjax.errors import JobCancelledError
from beamjax.plan.shard import Shard
from beamjax.storage.shared_cache import SharedCache
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import (
    MOST_EVENTS,
    SECONDS,
    Range,
    ShardEvent,
    StepCount,
    Tally,
    WorkerRecord,
    merged,
)
from beamjax.telemetry.timeline import Moments

EVERY = 1.0
"""Seconds between two records of a worker, and so the longest time to notice a cancellation."""


@dataclass(frozen=True)
class Reports:
    """Where workers write their records.

    Attributes:
      folder: the folder of the job.
      pipeline: the name of the pipeline in it.
    """

    folder: str
    pipeline: str


class Listener:
    """Adds up the work on each step in a process.

    Args:
      worker: the name of the process in events.
      traces: whether to record events.

    Attributes:
      spent: the work so far, by the name of the step.
      events: the shards that were computed, evenly thinned if they are many.
      step: the name of the step of the last shard.
    """

    def __init__(self, worker: str, traces: bool = True):
        self.worker = worker
        self.traces = traces
        self.spent: dict[str, Tally] = {}
        self.events: Moments[ShardEvent] = Moments(MOST_EVENTS)
        self.step = ""
        self._lock = threading.Lock()

    def add(self, step: str, shard: Shard, spent: Tally) -> None:
        """Adds a shard of a step that was just computed, with the work on it."""
        event: ShardEvent | None = None
        if self.traces:
            seconds = round(sum(getattr(spent, kind) for kind in SECONDS), 6)
            now = round(time.time(), 6)
            event = ShardEvent(self.worker, step, shard.start, shard.count, now, seconds)
        with self._lock:
            self._count(step, spent)
            if event is not None:
                self.events.add(event)
            self.step = step

    def spend(self, step: str, spent: Tally) -> None:
        """Adds work on a step that belongs to no shard."""
        with self._lock:
            self._count(step, spent)

    def _count(self, step: str, spent: Tally) -> None:
        """Adds work to the sum of a step. The caller holds the lock."""
        before = self.spent.get(step)
        self.spent[step] = spent if before is None else before + spent

    def tick(self) -> None:
        """Called after each shard; a subclass may write a record, if it is time.

        Raises:
          JobCancelledError: the job was cancelled.
        """

    def flush(self) -> None:
        """Writes a record, in a subclass that writes any."""


class Meter:
    """Measures one step in one bundle.

    Args:
      step: the name of the step.
      listener: receives the shards as well.
      sends: bytes of the partials of a shard.
    """

    def __init__(
        self,
        step: str,
        listener: Listener | None = None,
        sends: int = 0,
    ):
        self.step = step
        self.sends = sends
        self.listener = listener
        self.total = _NONE
        self.start()

    def start(self) -> None:
        """Starts to measure."""
        self._laps = _NOTHING.copy()
        self.resume()

    def resume(self) -> None:
        """Skips the time since the last lap, in which the thread waited."""
        self._last = _readings()

    def lap(self, name: str, nbytes: int = 0) -> None:
        """Counts the time since the last lap or the start as "read", "compute" or "merge".

        Compilation and transfers in that time are counted separately.
        """
        last, before, laps = *self._last, self._laps
        now, found = self._last = _readings()
        passed = now - last
        moving = min(found["transfer"] - before["transfer"], passed)
        making = min(found["compile"] - before["compile"], passed - moving)
        laps["transfer"] += moving
        laps["compile"] += making
        laps[name] += passed - making - moving
        laps["bytes_read"] += nbytes
        if found != before:
            for kind in COUNTED:
                laps[kind] += found[kind] - before[kind]

    @property
    def seconds(self) -> float:
        """Seconds of all laps since the start, without compilation."""
        laps = self._laps
        return float(laps["read"] + laps["transfer"] + laps["compute"] + laps["merge"])

    @property
    def compiling(self) -> float:
        """Seconds of compilation in all laps since the start."""
        return float(self._laps["compile"])

    def shard(self, shard: Shard) -> None:
        """Adds a shard.

        Raises:
          JobCancelledError: the job was cancelled.
        """
        spent = self._spent(Tally(shard.count, 1, **self._laps, bytes_reduced=self.sends))
        if self.listener is not None:
            self.listener.add(self.step, shard, spent)
            self.listener.tick()

    def apart(self) -> None:
        """Adds the work measured since the start to the step, but to no shard, as for a merge."""
        spent = self._spent(Tally(**self._laps))
        if self.listener is not None:
            self.listener.spend(self.step, spent)

    def _spent(self, more: Tally) -> Tally:
        self.total = more if self.total is _NONE else self.total + more
        return more


_NONE = Tally()
COUNTED = (
    "bytes_padding", "executables", "cache_hits", "cache_misses",
    "bodies_loaded", "bodies_reused", "broadcasts", "shards_cached",
)  # fmt: skip
"""The counters that `Counts` and `Tally` have in common."""
_NOTHING: dict[str, Any] = dict.fromkeys(("bytes_read", *COUNTED), 0) | dict.fromkeys(SECONDS, 0.0)


def _readings() -> tuple[float, dict[str, Any]]:
    """The clock, and a copy of the counts of this thread."""
    return time.perf_counter(), counts().__dict__.copy()


class Recorder(Listener):
    """Writes records of the work of this process in one pipeline to the folder of the job.

    The work continues if a record can't be written.

    Args:
      reports: the folder and the pipeline.
    """

    def __init__(self, reports: Reports):
        super().__init__(_new_worker())
        self._folder = JobFolder(reports.folder)
        self._pipeline = reports.pipeline
        self._writing = threading.Lock()
        # For each step, ranges of members and of shards.
        self._ranges: dict[str, tuple[list[Range], list[Range]]] = {}
        self._every = EVERY * self._folder.slowness
        self._written = time.monotonic()

    def add(self, step: str, shard: Shard, spent: Tally) -> None:
        """Adds a shard that is done now; see `Listener.add`."""
        super().add(step, shard, spent)
        with self._lock:
            members, shards = self._ranges.setdefault(step, ([], []))
            _extend(members, shard.start, shard.start + shard.count)
            _extend(shards, shard.index, shard.index + 1)

    def tick(self) -> None:
        """Writes a record if the last one is older than `EVERY`.

        Raises:
          JobCancelledError: the job was cancelled.
        """
        if time.monotonic() - self._written < self._every:
            return
        self._written = time.monotonic()
        self.flush()
        with contextlib.suppress(OSError):
            if self._folder.cancel_requested():
                raise JobCancelledError("the job was cancelled")

    def flush(self) -> None:
        """Writes a record."""
        with self._writing, contextlib.suppress(Exception):
            self._folder.write_worker(self._pipeline, self.record())

    def record(self) -> WorkerRecord:
        """Returns the work of this process so far."""
        with self._lock:
            counts = {}
            for step, spent in self.spent.items():
                # Joins the ranges of shards that were computed out of order, or again.
                members, shards = map(merged, self._ranges.get(step, ([], [])))
                self._ranges[step] = members, shards
                counts[step] = StepCount(tuple(members), tuple(shards), spent)
            return WorkerRecord(self.worker, time.time(), self.step, counts, self.events.times)


def _extend(ranges: list[Range], start: int, stop: int) -> None:
    """Adds a range that often begins where the last one ends."""
    if ranges and ranges[-1][1:] == (start, 1):
        ranges[-1] = ranges[-1][0], stop, 1
    else:
        ranges.append((start, stop, 1))


_recorders: SharedCache[Recorder] = SharedCache(64, lambda _: 1)
"""Recorders of the pipelines in which this process works, at most 64."""
_collectors = threading.local()


def _new_worker() -> str:
    """Returns a name for a worker of this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def collecting() -> Iterator[Listener]:
    """A context in which the work of this thread goes to a listener of its own, not to a record.

    The caller sends the sums to another process in a message.
    """
    if not hasattr(_collectors, "worker"):
        _collectors.worker = _new_worker()
    former = getattr(_collectors, "current", None)
    _collectors.current = collector = Listener(_collectors.worker)
    try:
        yield collector
    finally:
        _collectors.current = former


def recorder_for(reports: Reports | None) -> Listener | None:
    """The listener of this thread: that of `collecting`, the recorder for a pipeline, or None."""
    collector: Listener | None = getattr(_collectors, "current", None)
    if collector is not None or reports is None:
        return collector
    return _recorders.get(reports, lambda: Recorder(reports))
