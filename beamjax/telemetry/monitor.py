"""Follows a job in the launching process, and cancels it."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from beamjax.errors import JobCancelledError
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.plan.steps import Plan, Step
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.meters import Listener, Reports
from beamjax.telemetry.progress import (
    Progress,
    ShardEvent,
    Tally,
    WorkerRecord,
    expected,
    step_name,
    tallies,
)
from beamjax.telemetry.timeline import Moments

_log = logging.getLogger("beamjax")
HERE = "launching process"
"""The name of this process in events."""


class Monitor(Listener):
    """Adds up the work of all workers on a plan.

    Work in this process is added directly. Other workers write records to the folder.

    Args:
      plan: the plan of the run.
      folder: the folder of the job, through which other processes follow it, or None.
      letters: records the members that are dropped.

    Attributes:
      provenance: the kinds of machine that computed the values of the run.
      folder, letters: as given.
      round_ends: when rounds ended, in seconds since the job began.
      checkpoints: when checkpoints were saved, in seconds since the job began.
      events: the shards that were computed, in this process and in pipelines that have ended.
    """

    def __init__(
        self,
        plan: Plan,
        folder: JobFolder | None = None,
        letters: DeadLetters | None = None,
    ):
        super().__init__(HERE, traces=folder is not None)  # nothing else reads the events
        self.provenance = UNKNOWN
        self.folder = folder
        self.letters = DeadLetters() if letters is None else letters
        self.round_ends: Moments[float] = Moments()
        self.checkpoints: Moments[float] = Moments()
        self._plan = plan
        self._began = time.monotonic()
        self._rounds = 0
        self._resumed: list[Step] = []
        self._workers: set[str] = set()
        self._pipeline: str | None = None
        self._cancelled = threading.Event()

    # --- work in this process

    def reported(
        self, worker: str, spent: Mapping[str, Tally], events: Iterable[ShardEvent] = ()
    ) -> None:
        """Adds the work, by step, and the shards that a worker reported."""
        with self._lock:
            self._workers.add(worker)
            for step, more in spent.items():
                self._count(step, more)
            for event in events:
                self.events.add(event)
                self.step = event.step

    def _count(self, step: str, spent: Tally) -> None:
        """Adds work to the sum of a step over all rounds. The caller holds the lock."""
        super()._count(step_name(step), spent)

    def tick(self) -> None:
        """Called after each shard, to end a cancelled job.

        Raises:
          JobCancelledError: the job was cancelled.
        """
        if self._cancelled.is_set():
            raise JobCancelledError("the job was cancelled")

    def round_ended(self) -> None:
        """Records that a round of a loop has ended."""
        with self._lock:
            self._rounds += 1
            self.round_ends.add(round(time.monotonic() - self._began, 4))

    def resumed(self, steps: Iterable[Step]) -> None:
        """Records that a checkpoint has the results of steps, which are not computed again."""
        with self._lock:
            self._resumed += steps

    def saved(self) -> None:
        """Records that a checkpoint was saved."""
        with self._lock:
            self.checkpoints.add(round(time.monotonic() - self._began, 4))

    def computed(self, provenance: Provenance) -> None:
        """Merges the provenance of values, and warns once if they may have different last bits."""
        if provenance is self.provenance:  # as for each step of a run in one process
            return
        with self._lock:
            was_mixed = self.provenance.is_mixed
            self.provenance |= provenance
            found = self.provenance
        if found.is_mixed and not was_mixed:
            _log.warning("%s", found.mixture())

    def drop(self, found: Sequence[Dropped], sizes: Mapping[str, int]) -> None:
        """Records dropped members; see `DeadLetters.add`."""
        if found:
            self.letters.add(found, sizes)
            if self.folder is not None:
                self.folder.write_dropped(self.letters.dropped)

    # --- work in pipelines

    @contextlib.contextmanager
    def pipeline(self, name: str) -> Iterator[Reports | None]:
        """One pipeline of the job, from its start to its end.

        Yields:
          Where its workers write their records; None if nothing reads them.

        Raises:
          JobCancelledError: the job was cancelled.
        """
        self.tick()
        with self._lock:
            self._pipeline = name
        try:
            yield None if self.folder is None else Reports(self.folder.path, name)
        finally:
            self._fold(name)
        self.tick()

    def _fold(self, name: str) -> None:
        found = self.folder.workers(name) if self.folder is not None else []
        with self._lock:
            self._pipeline = None
            for step, spent in tallies(found).items():
                self._count(step, spent)
            self.step = _last_step(found, self.step)
            self._workers.update(record.worker for record in found)
            for event in sorted(
                (e for record in found for e in record.events), key=lambda event: event.time
            ):
                self.events.add(event)
        if found and self.folder is not None:
            self.folder.forget_workers(name)

    # --- for other threads

    def cancel(self) -> None:
        """Cancels the job, which ends when it next calls `tick`."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether this or another process has cancelled the job."""
        if not self._cancelled.is_set() and self.folder is not None:
            with contextlib.suppress(Exception):
                if self.folder.cancel_requested():  # workers may see it first
                    self._cancelled.set()
        return self._cancelled.is_set()

    @functools.cached_property
    def _expected(self) -> Progress:
        return expected(self._plan, self._plan.steps)

    def progress(self) -> Progress:
        """The progress of the job."""
        with self._lock:
            name = self._pipeline
        found = self.folder.workers(name) if self.folder is not None and name is not None else []
        with self._lock:
            if name != self._pipeline:  # the pipeline ended meanwhile and is counted already
                found = []
            steps = dict(self.spent)
            for step, spent in tallies(found).items():
                steps[step] = steps.get(step, Tally()) + spent
            whole, resumed = self._expected, expected(self._plan, self._resumed)
            return replace(
                whole,
                shards=_less(whole.shards, resumed.shards),
                done=sum(steps.values(), Tally()),
                steps=steps,
                rounds=self._rounds + (resumed.rounds_total or 0),
                rounds_resumed=resumed.rounds_total or 0,
                dropped=len(self.letters),
                step=_last_step(found, self.step),
                workers=len(self._workers.union(record.worker for record in found)),
                seconds=time.monotonic() - self._began,
            )


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None else whole - (part or 0)


def _last_step(found: Sequence[WorkerRecord], before: str) -> str:
    last = max(found, key=lambda record: record.time, default=None)
    return last.step if last is not None and last.step else before
