"""What a worker counts and times, and how it tells of that: a small record a second."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from beamjax.bodies.compile_time import compile_clock
from beamjax.bodies.counts import counts
from beamjax.bodies.transfer_time import transfer_seconds
from beamjax.errors import JobCancelledError
from beamjax.sources.padded_bytes import padding_bytes
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import SECONDS, Range, StepCount, Tally, WorkerRecord, merged

EVERY = 1.0
"""Seconds between two records of a worker, in which a job that is cancelled goes on."""
MAX_RECORDERS = 64


@dataclass(frozen=True)
class Reports:
    """Where workers tell how far they are.

    Attributes:
      folder: of the job.
      pipeline: name of the pipeline in it.
    """

    folder: str
    pipeline: str


class Listener(Protocol):
    """Who is told of the shards that are done."""

    def add(self, step: str, size: int, start: int, count: int, spent: Tally) -> None:
        """A shard of a step is done: its first member, its members, all that it took."""

    def spend(self, step: str, spent: Tally) -> None:
        """A step took these seconds, which are not those of a shard."""

    def tick(self) -> None:
        """Time has passed.

        Raises:
          JobCancelledError: the work is in vain.
        """


class Meter:
    """Measures one step, for one bundle.

    Args:
      step: its name.
      size: members in a full shard.
      listener: who else is told.
      sends: bytes that a shard is reduced to, and those that compression saved of them.
    """

    def __init__(
        self,
        step: str,
        size: int,
        listener: Listener | None = None,
        sends: tuple[int, int] = (0, 0),
    ):
        self.step = step
        self.sends = {"bytes_reduced": sends[0], "bytes_saved": sends[1]}
        self.size = size
        self.listener = listener
        self.total = _NONE
        self.start()

    def start(self) -> None:
        """What comes now is measured."""
        self._laps = _NOTHING.copy()
        self.resume()

    def resume(self) -> None:
        """What was done since the last lap is not measured, it was waiting."""
        self._last = _readings()

    def lap(self, name: str, nbytes: int = 0) -> None:
        """What was done since the last lap, or the start, was this: "read", "compute" or "merge".

        Compiling and transfers are told apart by themselves.
        """
        readings, last, laps = _readings(), self._last, self._laps
        passed = readings[0] - last[0]
        moving = min(readings[1] - last[1], passed)
        making = min(readings[2] - last[2], passed - moving)
        laps["transfer"] += moving
        laps["compile"] += making
        laps[name] += passed - making - moving
        laps["bytes_read"] += nbytes
        if readings[3:] != last[3:]:
            for kind, now, then in zip(COUNTED, readings[3:], last[3:], strict=True):
                laps[kind] += now - then
        self._last = readings

    @property
    def seconds(self) -> float:
        """Of all laps since the start, without those in which JAX compiled."""
        laps = self._laps
        return float(laps["read"] + laps["transfer"] + laps["compute"] + laps["merge"])

    @property
    def compiling(self) -> float:
        """Seconds of all laps since the start in which JAX compiled."""
        return float(self._laps["compile"])

    def shard(self, start: int, count: int) -> None:
        """The shard from this member on is done.

        Raises:
          JobCancelledError: those that follow are in vain.
        """
        spent = Tally(count, 1, **self._laps, **self.sends)
        self.total = spent if self.total is _NONE else self.total + spent
        if self.listener is not None:
            self.listener.add(self.step, self.size, start, count, spent)
            self.listener.tick()

    def apart(self) -> None:
        """What was measured since the start is of the step, but of no shard: a merge, say."""
        spent = Tally(**self._laps)
        self.total += spent
        if self.listener is not None:
            self.listener.spend(self.step, spent)


_NONE = Tally()
COUNTED = (
    "bytes_padding", "executables", "cache_hits", "cache_misses",
    "bodies_loaded", "bodies_reused", "broadcasts",
)  # fmt: skip
"""What a thread counts by itself, by the names of a tally."""
_NOTHING: dict[str, Any] = dict.fromkeys(("bytes_read", *COUNTED), 0) | dict.fromkeys(SECONDS, 0.0)


def _readings() -> tuple[Any, ...]:
    """The time, seconds of transfers and of compiling of this thread, and what it has counted."""
    clock = compile_clock()
    return (
        time.perf_counter(), transfer_seconds(), clock.seconds,
        padding_bytes(), clock.executables, clock.cache_hits, clock.cache_misses,
        counts.bodies_loaded, counts.bodies_reused, counts.broadcasts,
    )  # fmt: skip


class Recorder:
    """Writes what this process did in one pipeline into the folder of the job.

    A record that can't be written is left out: the work itself goes on.

    Args:
      reports: where to.
    """

    def __init__(self, reports: Reports):
        self._folder = JobFolder(reports.folder)
        self._pipeline = reports.pipeline
        self._worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._ranges: dict[str, list[Range]] = {}
        self._spent: dict[str, Tally] = {}
        self._step = ""
        self._every = EVERY * self._folder.slowness
        self._written = time.monotonic()

    def add(self, step: str, size: int, start: int, count: int, spent: Tally) -> None:
        """A shard is done."""
        with self._lock:
            ranges = self._ranges.setdefault(step, [])
            if ranges and ranges[-1][1:] == (start, 1):
                ranges[-1] = ranges[-1][0], start + count, 1
            else:
                ranges.append((start, start + count, 1))
            self._sizes[step] = size
            self._spent[step] = self._spent.get(step, Tally()) + spent
            self._step = step

    def spend(self, step: str, spent: Tally) -> None:
        """A step took these seconds, which are not those of a shard."""
        with self._lock:
            self._ranges.setdefault(step, [])
            self._sizes.setdefault(step, 1)
            self._spent[step] = self._spent.get(step, Tally()) + spent

    def tick(self) -> None:
        """Writes a record if the last one is old.

        Raises:
          JobCancelledError: somebody has cancelled the job.
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
        """All that this process did so far."""
        with self._lock:
            for ranges in self._ranges.values():
                ranges[:] = merged(ranges)
            counts = {
                name: StepCount(self._sizes[name], tuple(ranges), self._spent[name])
                for name, ranges in self._ranges.items()
            }
            return WorkerRecord(self._worker, time.time(), self._step, counts)


_recorders: collections.OrderedDict[Reports, Recorder] = collections.OrderedDict()
_making = threading.Lock()


def recorder_for(reports: Reports | None) -> Recorder | None:
    """The recorder of this process for a pipeline; None if nobody wants to know."""
    if reports is None:
        return None
    with _making:
        if reports not in _recorders:
            _recorders[reports] = Recorder(reports)
            if len(_recorders) > MAX_RECORDERS:
                _recorders.popitem(last=False)
        return _recorders[reports]
