"""The progress of a job: the sum of the spans of all workers, in which no shard counts twice."""

from __future__ import annotations

import collections
import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from beamjax.plan.shard import Shards
from beamjax.plan.steps import Branch, Loop, Map, Plan, Step, walk
from beamjax.spans import KINDS, Range, Work, add_sums, merged
from beamjax.storage.schema import to_plain

Sums = dict[str, dict[str, float]]
"""Seconds, bytes and counts, by step and name."""


@dataclass(frozen=True)
class Totals:
    """The work of all workers together.

    Seconds are those of threads. Where a worker reads one shard while it computes another, both
    count, so that together they may be more than have passed; what a thread waits for another is
    in none of them.

    Attributes:
      members: that were computed, each once a pass.
      shards: likewise.
      retries: shards that were computed again, for example after a bundle failed.
      bytes_read: of placed inputs.
      bytes_padding: the part of `bytes_read` that pads members of unequal length.
      bytes_reduced: bytes of the partials of shards.
      executables: executables that JAX made; each worker makes its own, one for each body and
        bucket.
      cache_hits: those of them that JAX found in its cache on disk, if it has one
        (JAX_COMPILATION_CACHE_DIR).
      cache_misses: those that were not there, and were compiled.
      bodies_loaded: bodies of steps that workers read from their bytes, each once.
      bodies_reused: those that a worker had in memory when it began a step.
      broadcasts: server values that were put on devices.
      shards_cached: shards that were not computed, because the cache (option `cache`) had their
        results.
      read: seconds of reading them.
      transfer: seconds of moving values. To accelerators and back: a worker waits for the copies
        that a body needs, and then for those of what it gave. On a CPU, arrays are read where they
        are, or copied as part of `compute`. And between workers: encoding and decoding server
        values and partials, and writing and reading their files and those of placed results. What
        Beam does with its elements is not seen here.
      compile: seconds of making executables.
      compute: seconds of running them, on the server too.
      merge: seconds of adding up partials, on workers and in the launching process.
    """

    members: int = 0
    shards: int = 0
    retries: int = 0
    bytes_read: int = 0
    bytes_padding: int = 0
    bytes_reduced: int = 0
    executables: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    bodies_loaded: int = 0
    bodies_reused: int = 0
    broadcasts: int = 0
    shards_cached: int = 0
    read: float = 0.0
    transfer: float = 0.0
    compile: float = 0.0
    compute: float = 0.0
    merge: float = 0.0

    @classmethod
    def of(cls, sums: Iterable[Mapping[str, float]]) -> Totals:
        """The total of sums by name."""
        total: Sums = {"": {}}
        for amounts in sums:
            add_sums(total, {"": amounts})
        amounts_of = total[""]
        counts: Any = {name: int(amounts_of.get(name, 0)) for name in cls.__annotations__}
        return cls(**(counts | {kind: float(amounts_of.get(kind, 0.0)) for kind in KINDS}))


@dataclass(frozen=True, repr=False)
class Progress:
    """The progress of a job.

    Attributes:
      done: the work of all workers so far.
      members: the number of members, each counted once however many passes there are; None if it is
        not known yet.
      shards: the number of shards to compute in all passes together, without passes whose results
        are in a checkpoint; None if a loop or a branch decides it while the job runs.
      rounds: the number of complete rounds of loops around placed operators, with those that the
        run has resumed from a checkpoint.
      rounds_resumed: the number of rounds that were complete in the checkpoint.
      rounds_total: the number of rounds of the job; None if a condition decides it.
      dropped: the number of dropped members of all placements.
      step: the name of the step on which a worker has last worked.
      workers: the number of processes that have written records.
      seconds: seconds since the job began.
      planning: seconds of tracing and planning, before the job began.
      starting: seconds until the first worker began to work, or until now if none has.
      steps: the work so far for each step, by name, in all of its rounds together.
    """

    done: Totals = field(default_factory=Totals)
    members: int | None = None
    shards: int | None = None
    rounds: int = 0
    rounds_resumed: int = 0
    rounds_total: int | None = None
    dropped: int = 0
    step: str = ""
    workers: int = 0
    seconds: float = 0.0
    planning: float = 0.0
    starting: float = 0.0
    steps: Mapping[str, Totals] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Progress {self}>"

    def __str__(self) -> str:
        # One line: the step, the share that is done, the speed, and the shares of time.
        return f"{self.step or 'starting'}: {details(self)}"

    def _repr_html_(self) -> str:
        done = "" if self.fraction is None else f' value="{self.fraction:.3f}"'
        return f"<progress{done}></progress> {html.escape(str(self))}"

    @property
    def members_per_second(self) -> float:
        """Members computed per second since the job began."""
        return self.done.members / self.seconds if self.seconds > 0 else 0.0

    @property
    def fraction(self) -> float | None:
        """The share of shards that are done, from 0 to 1; None if their number is unknown."""
        if not self.shards:
            return None
        return min(1.0, self.done.shards / self.shards)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of work in the measured time of the workers, from 0 to 1."""
        total = sum(getattr(self.done, name) for name in KINDS)
        return {name: getattr(self.done, name) / total if total else 0.0 for name in KINDS}

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as JSON values."""
        values: dict[str, Any] = to_plain(self)
        return values


# --- what there is to do


def expected(plan: Plan, steps: Iterable[Step]) -> Progress:
    """The progress at the start of steps of a plan: all work to do, nothing done."""
    steps = tuple(steps)
    shards, rounds = _expected(plan, steps)
    sizes = [plan.sizes[placement] for placement in _placements(steps)]
    members = None if None in sizes else sum(size or 0 for size in sizes)
    return Progress(members=members, shards=shards, rounds_total=rounds)


def _placements(steps: Iterable[Step]) -> set[str]:
    """The placements over which these steps pass."""
    placements: set[str] = set()
    for step in steps:
        match step:
            case Map(placement=placement):
                placements.add(placement)
            case Loop(block=block):
                placements |= _placements(block.steps)
            case Branch(blocks=blocks):
                placements = placements.union(*(_placements(block.steps) for block in blocks))
    return placements


_Counts = tuple[int | None, int | None]


def _expected(plan: Plan, steps: Iterable[Step]) -> _Counts:
    """Shards and rounds; None where the number is found while the plan runs."""
    total: _Counts = (0, 0)
    for step in steps:
        match step:
            case Map(placement=placement):
                counts: _Counts = (plan.shards(placement).count, 0)
            case Loop(rounds=None):
                counts = (None, None)
            case Loop(rounds=int(rounds), block=block):
                shards, inner = _expected(plan, block.steps)
                counts = _times(rounds, shards), _times(rounds, inner, 1)
            case Branch(blocks=blocks):
                ways = [_expected(plan, block.steps) for block in blocks]
                shards, inner = (_alike(way[i] for way in ways) for i in range(2))
                counts = shards, inner
            case _:
                continue
        shards, inner = (_plus(a, b) for a, b in zip(total, counts, strict=True))
        total = shards, inner
    return total


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _times(rounds: int, per_round: int | None, more: int = 0) -> int | None:
    return None if per_round is None else rounds * (per_round + more)


def _alike(counts: Iterable[int | None]) -> int | None:
    distinct = set(counts)
    return distinct.pop() if len(distinct) == 1 else None


# --- what was done


def folded(works: Iterable[Work], plan: Plan) -> Sums:
    """The work of a pipeline by step; a shard that several workers computed counts once."""
    sums: Sums = {}
    ranges: dict[str, list[Range]] = collections.defaultdict(list)
    for work in works:
        add_sums(sums, work.sums)
        for step, more in work.shards.items():
            ranges[step] += more
    placements = {step.name: step.placement for step in walk(plan.steps) if isinstance(step, Map)}
    for step, done in ranges.items():
        if step in placements:
            sums[step] = sums.get(step, {}) | _counted(plan.shards(placements[step]), done)
    return sums


def _counted(shards: Shards, ranges: Iterable[Range]) -> dict[str, float]:
    counts: dict[str, float] = dict.fromkeys(("members", "shards", "retries"), 0)
    for start, stop, times in merged(ranges):
        if stop > len(shards):  # a record of another plan
            continue
        first, last = (next(shards.between(index, index + 1)) for index in (start, stop - 1))
        counts["members"] += last.start + last.count - first.start
        counts["shards"] += stop - start
        counts["retries"] += (times - 1) * (stop - start)
    return counts


def details(progress: Progress) -> str:
    """The share that is done, the speed, and the shares of time."""
    done = progress.done
    members = "" if progress.members is None else f" of {progress.members:,} members"
    parts = [_of("shards", done.shards, progress.shards) + members]
    if progress.rounds or progress.rounds_total:
        parts.append(_of("rounds", progress.rounds, progress.rounds_total))
    parts.append(f"{progress.members_per_second:,.0f}/s")
    shares = [f"{name} {share:.0%}" for name, share in progress.shares.items() if share >= 0.005]
    parts += [" ".join(shares)] * bool(shares)
    if done.retries:
        parts.append(f"{done.retries:,} shards retried")
    return ", ".join(parts)


def _of(what: str, done: int, total: int | None) -> str:
    return f"{done:,} {what}" if total is None else f"{done:,} of {total:,} {what}"
