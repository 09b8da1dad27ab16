"""Follows a job in the launching process, and cancels it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from beamjax.bodies.provenance import UNKNOWN, Provenance
from beamjax.errors import JobCancelledError
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.plan.steps import Plan, Step
from beamjax.spans import MAX_SPANS, Span, Spans, Thinned, Work, add_sums

if TYPE_CHECKING:
    from beamjax.telemetry.job_folder import JobFolder
    from beamjax.telemetry.progress import Progress, Sums
    from beamjax.telemetry.worker_records import Reports

_log = logging.getLogger("beamjax")
HERE = "launching process"
"""The name of this process in a trace."""
MAX_MOMENTS = 400
"""Largest number of the ends of rounds, and of the times of checkpoints, in a report."""


class Monitor:
    """Adds up the spans of all workers on a plan."""

    def __init__(
        self,
        plan: Plan,
        folder: JobFolder | None = None,
        letters: DeadLetters | None = None,
        planning: float = 0.0,
    ):
        # Those of this process, and the sums of what workers have reported. Nothing but a report,
        # which is in the folder, reads single spans.
        self.spans = Spans(traces=folder is not None)
        self.provenance = UNKNOWN  # the kinds of machine that computed the values
        self.folder = folder  # through which other processes follow the job
        self.letters = DeadLetters() if letters is None else letters
        self._moments: dict[str, Thinned[float]] = {}
        self._plan = plan
        self._planning = planning  # seconds
        self._time, self._began = time.time(), time.monotonic()
        self._rounds = 0
        self._resumed: list[Step] = []
        # Single spans of workers, with their workers; see `spans`.
        self._trace = None if folder is None else Thinned[tuple[str, Span]](MAX_SPANS)
        self._workers: set[str] = set()
        self._pipeline: str | None = None
        self._lock = threading.Lock()

    # --- work in this process

    def reported(self, worker: str, work: Work) -> None:
        """Adds the work that a worker reported."""
        with self._lock:
            self._workers.add(worker)
            self.spans.add(replace(work, spans=()))
            if self._trace is not None:
                for span in work.spans:
                    self._trace.add((worker, span))

    def tick(self) -> None:
        """Raises `JobCancelledError` if the job was cancelled."""
        if self.spans.cancelled:
            raise JobCancelledError("the job was cancelled")

    def round_ended(self) -> None:
        """Records that a round of a loop has ended."""
        with self._lock:
            self._rounds += 1
            self._note("round")

    def resumed(self, steps: Iterable[Step]) -> None:
        """Records that a checkpoint has the results of steps, which are not computed again."""
        with self._lock:
            self._resumed += steps

    def saved(self) -> None:
        """Records that a checkpoint was saved."""
        with self._lock:
            self._note("checkpoint")

    def _note(self, what: str) -> None:
        moments = self._moments.setdefault(what, Thinned(MAX_MOMENTS))
        moments.add(round(time.monotonic() - self._began, 4))

    def moments(self, what: str) -> tuple[float, ...]:
        """When rounds ended ("round") or checkpoints were saved, in seconds since the job began."""
        with self._lock:
            return self._moments[what].entries if what in self._moments else ()

    def computed(self, provenance: Provenance) -> None:
        """Merges the provenance of values, and warns once if they may have different last bits."""
        if provenance is self.provenance:  # as for each step of a run in one process
            return
        with self._lock:
            was_mixed = self.provenance.is_mixed
            self.provenance |= provenance
            merged = self.provenance
        if merged.is_mixed and not was_mixed:
            _log.warning("%s", merged.mixture())

    def drop(self, dropped: Sequence[Dropped], sizes: Mapping[str, int]) -> None:
        """Records dropped members; see `DeadLetters.add`."""
        if dropped:
            self.letters.add(dropped, sizes)
            if self.folder is not None:
                self.folder.write_dropped(self.letters.dropped)

    # --- work in pipelines

    @contextlib.contextmanager
    def pipeline(self, name: str) -> Iterator[Reports | None]:
        """One pipeline of the job; yields where its workers write records, None if nowhere."""
        from beamjax.telemetry.worker_records import Reports  # local runs have no pipelines

        self.tick()
        with self._lock:
            self._pipeline = name
        try:
            yield None if self.folder is None else Reports(self.folder.path, name)
        finally:
            self._fold(name)
        self.tick()

    def _fold(self, name: str) -> None:
        works = self._read(name)
        with self._lock:
            self._pipeline = None
            if works:
                self._add(works)
        if works and self.folder is not None:
            self.folder.forget_workers(name)

    def _add(self, works: Mapping[str, Work]) -> None:
        from beamjax.telemetry.progress import folded

        self._workers.update(works)
        began = [work.began for work in works.values() if work.began is not None]
        sums = folded(works.values(), self._plan)
        last = _last_step(works.values())
        self.spans.add(Work(sums, step=last, began=min(began, default=None)))
        if self._trace is not None:
            spans = [(worker, span) for worker, work in works.items() for span in work.spans]
            for entry in sorted(spans, key=lambda entry: entry[1].start):
                self._trace.add(entry)

    def _read(self, pipeline: str | None) -> dict[str, Work]:
        """The work in a pipeline that runs, by worker; those that worked last come last."""
        if self.folder is None or pipeline is None:
            return {}
        return self.folder.workers(pipeline)

    # --- for other threads

    def cancel(self) -> None:
        """Cancels the job, which ends when it next calls `tick`."""
        self.spans.cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Whether this or another process has cancelled the job."""
        if not self.spans.cancelled and self.folder is not None:
            with contextlib.suppress(Exception):
                if self.folder.cancel_requested():  # workers may see it first
                    self.spans.cancelled = True
        return self.spans.cancelled

    @functools.cached_property
    def _expected(self) -> Progress:
        from beamjax.telemetry.progress import expected

        return expected(self._plan, self._plan.steps)

    @property
    def trace(self) -> tuple[tuple[str, Span], ...]:
        """Spans of this process, and of workers whose pipelines have ended, with their workers."""
        here = [(HERE, span) for span in self.spans.work().spans]
        with self._lock:
            return (*here, *(() if self._trace is None else self._trace.entries))

    def progress(self) -> Progress:
        """The progress of the job."""
        from beamjax.telemetry.progress import Totals, expected, folded  # if somebody asks

        with self._lock:
            name = self._pipeline
        others = self._read(name)
        with self._lock:
            own = self.spans.work()
            if name != self._pipeline:  # the pipeline ended meanwhile and is counted already
                others = {}
            works = [own, *others.values()]
            sums: Sums = {step: dict(amounts) for step, amounts in own.sums.items()}
            add_sums(sums, folded(others.values(), self._plan))
            whole, resumed = self._expected, expected(self._plan, self._resumed)
            seconds = time.monotonic() - self._began
            began = min((work.began for work in works if work.began is not None), default=math.inf)
            return replace(
                whole,
                shards=_less(whole.shards, resumed.shards),
                done=Totals.of(sums.values()),
                steps={step: Totals.of([amounts]) for step, amounts in sums.items()},
                rounds=self._rounds + (resumed.rounds_total or 0),
                rounds_resumed=resumed.rounds_total or 0,
                dropped=len(self.letters),
                step=_last_step(works),
                workers=len(self._workers | others.keys()),
                seconds=seconds,
                planning=self._planning,
                starting=min(max(began - self._time, 0.0), seconds),
            )


def _last_step(works: Iterable[Work]) -> str:
    return next((work.step for work in reversed([*works]) if work.step), "")


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None else whole - (part or 0)
