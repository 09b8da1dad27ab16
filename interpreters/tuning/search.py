"""Searches for the fastest shard sizes and vectorization of passes.

A probe times the choice of the rules first, then neighbours of the best choice so far, until its
time is up. A choice replaces that of the rules only if it is clearly faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from beamjax.interpreters.cutting.cost import GUESSED_ROUNDS, stage_waits_for_data
from beamjax.interpreters.cutting.stages import (
    BranchStage,
    GatherStage,
    LoopStage,
    MapStage,
    ScatterStage,
    ServerStage,
    Stage,
    blocks_of,
)
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering import shard_size
from beamjax.interpreters.lowering.map_bodies import can_run_sequentially
from beamjax.interpreters.placement.places import FileGroups
from beamjax.interpreters.program import Eqn, MemberEqn
from beamjax.options.choices import MULTIPLE, Trial, Vectorization
from beamjax.plan.cost import USUAL
from beamjax.plan.steps import Map, Plan, walk

MIN_SPEEDUP = 1.15
"""Factor by which a choice must be faster than that of the rules; less may be noise."""
MIN_STEP_SPEEDUP = 1.04
"""Factor by which a neighbour must be faster for its own neighbours to be tried."""
CLOSE = 1.6
"""Largest factor by which vmap over a whole shard may be slower than the best way to be tried with
other shard sizes as well."""
WORKING_BYTES = 64 << 20
"""Largest working memory of a shard that is tried, in bytes. A probe has no other bound of memory.
"""


@dataclass(frozen=True)
class SearchedPass:
    """What the search knows about a pass.

    Attributes:
      rounds: how often it runs.
      size: shard size by the rules.
      vectorization: vectorization by the rules.
      loops: whether it can compute members sequentially.
      largest: largest shard size to try.
      seconds: predicted seconds per member.
    """

    name: str
    placement: str
    rounds: float
    size: int
    vectorization: Vectorization
    loops: bool
    largest: int
    seconds: float


def passes_of(
    plan: Plan, stages: Sequence[Stage], memory: int | None, groups: Mapping[str, FileGroups]
) -> list[SearchedPass]:
    """The passes of a plan over placements of known size.

    Args:
      plan: the plan by the rules.
      stages: its stages.
      memory: memory of a worker process in bytes, None without a limit.
      groups: the groups of files of placements whose shards are cut there.
    """
    steps = {step.name: step for step in walk(plan.steps) if isinstance(step, Map)}
    limit = WORKING_BYTES if memory is None else min(WORKING_BYTES, memory // 8)
    found = []
    for name, stage, rounds in named_passes(stages):
        step, n = steps[name], plan.sizes[stage.placement]
        if n is None:
            continue
        size, cost = plan.shard_sizes[stage.placement], plan.costs[name]
        # Members that are computed at once share the overhead of starting each operation.
        at_once = {"loop": 1, "vmap": size}.get(step.vectorization.kind, step.vectorization.batch)
        calls = cost.calls * USUAL.call / at_once
        seconds = USUAL.seconds(cost) + calls + USUAL.shard / size
        largest = shard_size.largest_size(stage, n, limit)
        if stage.placement in groups:  # A probe times full shards, so groups need many of them.
            largest = min(largest, shard_size.power_of_two(groups[stage.placement].rows / 8))
        largest = max(largest, size)
        loops = can_run_sequentially(stage, step.buffers)
        found.append(
            SearchedPass(
                name, stage.placement, rounds, size, step.vectorization, loops, largest, seconds
            )
        )
    return found


def named_passes(stages: Iterable[Stage]) -> Iterator[tuple[str, MapStage, float]]:
    """The passes, with the names of their steps and how often they run."""
    return _named(stages, {}, 1.0)


def _named(
    stages: Iterable[Stage], counts: dict[str, int], rounds: float
) -> Iterator[tuple[str, MapStage, float]]:
    for stage in stages:
        match stage:
            case MapStage(placement=placement):
                number = counts[placement] = counts.get(placement, -1) + 1
                # As `lower` names the steps: both visit the stages in the same order.
                yield f"map_{placement}_{number}", stage, rounds
            case LoopStage(eqn=eqn):
                more = rounds * (GUESSED_ROUNDS if eqn.rounds is None else eqn.rounds)
                for block in blocks_of(stage):
                    yield from _named(block.stages, counts, more)
            case BranchStage(branches=branches):
                for branch in branches:
                    yield from _named(branch.stages, counts, rounds)


def obstacle(plan: Plan, stages: Sequence[Stage], platform: str) -> str:
    """Why a program can't be timed on made-up members; "" if it can."""
    maps = [stage for _, stage, _ in named_passes(stages)]
    if not maps:
        return "there is no pass over members"
    if any(n is None for n in plan.sizes.values()):
        return "the number of members is found while the program runs"
    if any(body.python for body in plan.bodies.values()):
        return "a body calls back to Python"
    if any(map(stage_waits_for_data, maps)):
        return "a body holds a loop whose rounds depend on its data"
    platforms = {name for body in plan.bodies.values() for name in body.artefacts}
    if platforms != {platform}:
        return f"the program is for {', '.join(sorted(platforms))}, and this machine has {platform}"
    return ""


def magnitude(n: Any) -> int:
    """The number of bits of n; choices are cached for all n with the same number of bits."""
    return 0 if n is None or is_unknown(n) else int(n).bit_length()


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def program_text(stages: Iterable[Stage], sizes: Iterable[Any]) -> list[Any]:
    """A description of a program as JSON values, which is the same in every process.

    Args:
      stages: the stages of the program.
      sizes: numbers of members; all axes with one of these lengths are written as "n".
    """
    return list(_Texts(frozenset(sizes)).stages(stages))


class _Texts:
    def __init__(self, sizes: frozenset[Any]):
        self.sizes = sizes

    def stages(self, stages: Iterable[Stage]) -> Iterator[Any]:
        for stage in stages:
            match stage:
                case MapStage():
                    kinds = [type(e.rule).__name__ for e in stage.emissions]
                    operands = [self.type(var) for var, _ in stage.operands]
                    served = [self.type(var) for var in stage.broadcasts]
                    eqns = [self.eqn(e.eqn) for e in stage.emissions]
                    yield ["map", stage.placement, operands, served, kinds, eqns]
                case ServerStage(eqns=server):
                    yield ["server", *map(self.eqn, server)]
                case GatherStage() | ScatterStage():
                    yield [type(stage).__name__, self.type(stage.var)]
                case LoopStage():
                    yield ["loop", stage.eqn.rounds, *self.blocks(stage)]
                case BranchStage():
                    yield ["branch", *self.blocks(stage)]

    def blocks(self, stage: Stage) -> list[Any]:
        return [list(self.stages(block.stages)) for block in blocks_of(stage)]

    def eqn(self, eqn: Eqn) -> list[Any]:
        bodies = [_ADDRESS.sub("", str(jaxpr)) for jaxpr in jex.jaxprs_in_params(eqn.params)]
        structure = eqn.structure if isinstance(eqn, MemberEqn) else eqn
        blocks = [list(map(self.eqn, block.eqns)) for block in structure.blocks]
        return [eqn.primitive.name, *map(self.type, eqn.outputs), *bodies, *blocks]

    def type(self, var: Any) -> str:
        aval: Any = getattr(var, "aval", None)
        if not hasattr(aval, "shape"):
            return str(aval)
        dims = ("n" if dim in self.sizes else str(dim) for dim in aval.shape)
        return f"{aval.dtype}[{','.join(dims)}]"


# --- the search

Measure = Callable[[int, Mapping[str, Vectorization]], Mapping[str, float]]
"""Measures seconds per shard of each pass, by name, for a shard size and vectorizations by name."""


@dataclass(frozen=True)
class Found:
    """The result of a search for the passes over a placement.

    Attributes:
      size: the shard size.
      vectorizations: the vectorization of each pass, by name.
      speedup: by which it is faster than the choice of the rules; 1 if it is that choice.
      trials: all measurements, in order.
    """

    size: int
    vectorizations: Mapping[str, Vectorization]
    speedup: float
    trials: tuple[Trial, ...]


class Search:
    """Searches for the fastest way to run the passes over one placement.

    Args:
      passes: the passes.
      measure: times a choice; only its first call has to succeed.
      left: returns the seconds that are left.
      size: the shard size, if the user fixed it.
      fixed: whether the user fixed the vectorization.
    """

    def __init__(
        self,
        passes: Sequence[SearchedPass],
        measure: Measure,
        left: Callable[[], float],
        size: int | None = None,
        fixed: bool = False,
    ):
        self.passes = passes
        self.measure = measure
        self.left = left
        self.fixed_size = size
        self.fixed = fixed
        self.times: dict[tuple[str, int, Vectorization], float] = {}
        # Seconds of the last trial, including compilation, and its shard size.
        self.last = 0.0
        self.last_size = 0
        self.stopped: Exception | None = None

    def run(self) -> Found:
        """Times choices until the time is up, and returns the best one.

        Raises:
          BeamjaxError: the choice of the rules can't be timed.
        """
        first = self.passes[0].size
        rule = {p.name: p.vectorization for p in self.passes}
        self._time(first, rule)
        try:
            self._try_all(first)
        except Exception as error:  # The choice of the rules did not fail, which is enough.
            self.stopped = error
        size = min(self._sizes(), key=self._score)
        before = sum(
            p.rounds * self.times[p.name, first, p.vectorization] / first for p in self.passes
        )
        speedup = before / max(self._score(size), 1e-12)
        if speedup < MIN_SPEEDUP:
            size, vectorizations, speedup = first, rule, 1.0
        else:
            vectorizations = {p.name: self._best(p, size)[1] for p in self.passes}
        trials = (Trial(name, s, way, t) for (name, s, way), t in self.times.items())
        return Found(size, vectorizations, speedup, tuple(trials))

    def _try_all(self, first: int) -> None:
        for way in self._ways(first):
            self._attempt(first, {p.name: way if p.loops else p.vectorization for p in self.passes})
        if self.fixed_size is not None:
            return
        for factor in (4, 1 / 4, 2, 1 / 2):
            self._climb(factor)

    def _ways(self, size: int) -> list[Vectorization]:
        """The vectorizations to try at the shard size of the rules."""
        if self.fixed or not any(p.loops for p in self.passes):
            return []
        ways = [Vectorization(), Vectorization("loop")]
        return [*ways, Vectorization("batches", MULTIPLE)] if size >= 4 * MULTIPLE else ways

    def _climb(self, factor: float) -> None:
        """Multiplies the best shard size by a factor, as long as this makes shards faster."""
        largest = min(p.largest for p in self.passes)
        size = min(self._sizes(), key=self._score)
        while True:
            other = int(size * factor) // MULTIPLE * MULTIPLE
            if not MULTIPLE <= other <= largest or other == size:
                return
            best = {p.name: self._best(p, size)[1] for p in self.passes}
            best = {name: _fitting(way, other) for name, way in best.items()}
            if not self._attempt(other, best):
                return
            if any(self._is_close(p, size) for p in self.passes):
                self._attempt(other, {p.name: Vectorization() for p in self.passes})
            if self._score(size) < MIN_STEP_SPEEDUP * self._score(other):
                return
            size = other

    def _is_close(self, a_pass: SearchedPass, size: int) -> bool:
        """Whether vmap over the shard is not the best way at this size, but close to it."""
        together = self.times.get((a_pass.name, size, Vectorization()))
        best, way = self._best(a_pass, size)
        return way != Vectorization() and together is not None and together < CLOSE * best

    def _attempt(self, size: int, vectorizations: Mapping[str, Vectorization]) -> bool:
        """Times a choice if there is time; returns whether its times are known."""
        if all((name, size, way) in self.times for name, way in vectorizations.items()):
            return True
        # Most of a trial is compilation, which takes no longer for larger shards; only runs do.
        shard = sum(self._best(p, self.last_size)[0] for p in self.passes)
        more = 3 * shard * max(0.0, size / self.last_size - 1)
        if self.left() < 1.2 * (self.last + more):
            return False
        self._time(size, vectorizations)
        return True

    def _time(self, size: int, vectorizations: Mapping[str, Vectorization]) -> None:
        before = self.left()
        for name, seconds in self.measure(size, vectorizations).items():
            self.times[name, size, vectorizations[name]] = seconds
        self.last, self.last_size = before - self.left(), size

    def _best(self, a_pass: SearchedPass, size: int) -> tuple[float, Vectorization]:
        """The best time of a pass at this shard size, and its vectorization."""
        ways = [
            (t, w) for (name, s, w), t in self.times.items() if (name, s) == (a_pass.name, size)
        ]
        return min(ways, key=lambda pair: pair[0])

    def _score(self, size: int) -> float:
        """Seconds per member in all passes, with the best vectorizations at this shard size."""
        return sum(p.rounds * self._best(p, size)[0] for p in self.passes) / size

    def _sizes(self) -> list[int]:
        return list(dict.fromkeys(size for _, size, _ in self.times))


def _fitting(way: Vectorization, size: int) -> Vectorization:
    """A vectorization for another shard size: vmap if the size is no multiple of its batch."""
    fits = way.kind != "batches" or (size > way.batch and size % way.batch == 0)
    return way if fits else Vectorization()
