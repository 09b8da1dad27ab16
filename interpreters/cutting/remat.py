"""Decides which placed values are stored for later passes, and which are rematerialized.

A value that one pass computes and a later pass reads is either written and read, or computed anew
from the inputs of the program. The predicted times of both depend only on counted costs and fixed
rates, so that a program is cut in the same way on all machines and for all runners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from beamjax.interpreters.cutting.cost import member_cost
from beamjax.interpreters.cutting.stages import Emission, MapStage
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Eqn, FlatBlock, Var
from beamjax.interpreters.rules.factors import ELEMENTWISE
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule
from beamjax.interpreters.staging.flatten import host_call
from beamjax.plan.cost import USUAL

CHEAP = frozenset(ELEMENTWISE) - {"threefry2x32", "random_gamma"} | {
    "bj_broadcast", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "pad", "rev",
    "concatenate", "split", "stack", "unstack", "random_wrap", "random_unwrap", "iota",
}  # fmt: skip
"""Primitives whose results are rematerialized unless storing them takes clearly less time."""
STORE_RATE = 5e8
"""Bytes per second at which a Beam worker writes placed values or reads them in a later pass. It is
faster in a single process."""
INPUT_RATE = 1e9
"""Bytes per second at which inputs are read again."""
USUAL_SHARD = 64
"""Assumed shard size: the number of members that share the overhead of starting an operation."""
CLEARLY = 3.0
"""Factor by which the other way must be faster than the default. Predictions are rough, and a
small difference must not change which passes a program has."""
WORTH_SECONDS = 1.0
"""Predicted seconds that the other way must also save."""


@dataclass(frozen=True)
class RematerializationTimes:
    """Predicted times for values that later passes read.

    Attributes:
      nbytes: bytes of the values, for all members.
      stored: seconds to write them once and to read them in each later pass.
      recomputed: seconds to rematerialize them in each later pass; None if that is impossible.
    """

    nbytes: int
    stored: float
    recomputed: float | None

    def is_clear(self, recompute: bool) -> bool:
        """Whether rematerializing, or else storing, clearly takes less time than the other way."""
        if self.recomputed is None:
            return not recompute
        less, more = self.stored, self.recomputed
        if recompute:
            less, more = more, less
        return more - less >= WORTH_SECONDS and more >= CLEARLY * less


@dataclass
class Decisions:
    """For each value that a later pass reads, in program order, whether it is rematerialized.

    Attributes:
      recompute: the option of that name, see `Options`.
      saved: decisions of a saved plan; None if costs decide.
      made: decisions for this program, as far as it has been cut.
    """

    recompute: str | None = None
    saved: tuple[bool, ...] | None = None
    made: list[bool] = field(default_factory=list)

    def decide(self, recompute: bool) -> bool:
        """Whether to rematerialize the next value; `recompute` is the decision by cost."""
        if self.saved is not None and len(self.made) < len(self.saved):
            recompute = self.saved[len(self.made)]
        self.made.append(recompute)
        return recompute


def rematerialization_times(
    program: PlacedProgram,
    values: Sequence[Var],
    emissions: Sequence[Emission] | None,
    placement: str,
    reads: float,
    writes: float = 1.0,
) -> RematerializationTimes:
    """Predicts the times to store values for later passes and to rematerialize them.

    Args:
      program: the program.
      values: the values; their sizes must be known.
      emissions: equations that compute them from inputs of the program; None if there are none.
      placement: the placement of the values.
      reads: how often later passes read them.
      writes: how often they would be written.
    """
    n = program.sizes[placement]
    nbytes = sum(map(_nbytes, values))
    stored = nbytes * (writes + reads) / STORE_RATE
    if emissions is None:
        return RematerializationTimes(nbytes, stored, None)
    cost = member_cost(MapStage(placement, list(emissions), [], [], []), n)
    made = {var for emission in emissions for var in emission.eqn.outputs}
    given = {var for emission in emissions for var in _read(program, emission)} - made
    each = USUAL.seconds(cost) + cost.calls * USUAL.call / USUAL_SHARD
    once = n * each + sum(map(_nbytes, given)) / INPUT_RATE
    return RematerializationTimes(nbytes, stored, None if cost.guessed else reads * once)


def by_cost(
    program: PlacedProgram,
    block: FlatBlock,
    levels: Mapping[Eqn | Var, int],
    default: set[Var],
    possible: set[Var],
    decisions: Decisions,
) -> set[Var]:
    """The values of a block that later passes rematerialize.

    Args:
      program: the program of the block.
      block: the block.
      levels: levels of its equations and values.
      default: values that are rematerialized by default.
      possible: values that can be rematerialized.
      decisions: saved decisions; those of this program are recorded in it.
    """
    makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
    chosen = set(default)
    for var, readers in _crossing(program, block, levels, makers).items():
        placement, _ = program.rules[makers[var]]
        if var not in possible or is_unknown(program.sizes[placement]):
            continue
        chain = ancestors(program, [var], makers)
        if any(host_call(emission.eqn) for emission in chain):
            continue
        predicted = rematerialization_times(program, [var], chain, placement, readers)
        recompute = var in default
        if predicted.is_clear(not recompute):
            recompute = not recompute
        if not decisions.decide(recompute):
            chosen.discard(var)
        elif var not in default:
            # A pass needs all that the value is computed from as well.
            chosen.update(v for emission in chain for v in emission.eqn.outputs)
    return chosen


def ancestors(
    program: PlacedProgram, values: Iterable[Var], makers: Mapping[Var, Eqn]
) -> list[Emission]:
    """The equations that compute placed values from values without an entry in `makers`, in order.

    Args:
      program: the program.
      values: placed values.
      makers: the equation that defines each value, in program order.
    """
    requested: set[Eqn] = set()
    agenda = [makers[var] for var in values if var in makers]
    while agenda:
        eqn = agenda.pop()
        if eqn in requested or eqn not in program.rules:
            continue
        requested.add(eqn)
        _, rule = program.rules[eqn]
        for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True):
            if axis is not None and isinstance(atom, Var) and atom in makers:
                agenda.append(makers[atom])
    ordered = [eqn for eqn in dict.fromkeys(makers.values()) if eqn in requested]
    return [Emission(eqn, program.rules[eqn][1]) for eqn in ordered]


def _crossing(
    program: PlacedProgram,
    block: FlatBlock,
    levels: Mapping[Eqn | Var, int],
    makers: Mapping[Var, Eqn],
) -> dict[Var, int]:
    """Values of earlier passes that only later passes read, with the number of those passes.

    Outputs of the block and values that a loop or a branch reads are stored in any case.
    """
    readers: dict[Var, set[int]] = {}
    stored = {atom for atom in block.outputs if isinstance(atom, Var)}
    for eqn in block.eqns:
        if eqn not in levels:
            continue
        for atom, along in program.reads(eqn):
            if not isinstance(atom, Var) or program.place(atom) is None:
                continue
            if eqn.blocks or program.place(atom) != along or eqn not in program.rules:
                stored.add(atom)
            elif atom in makers and levels[eqn] > levels[atom]:
                readers.setdefault(atom, set()).add(levels[eqn])
    return {
        var: len(found)
        for var, found in readers.items()
        if var not in stored and makers[var] in program.rules and not makers[var].blocks
    }


# --- for reports


@dataclass(frozen=True)
class Crossing:
    """Values that later passes read or rematerialize.

    Attributes:
      step: name of the pass that computes them first.
      later: names of the passes that need them.
      is_stored: whether they are stored.
      predicted: predicted times of storing and of rematerializing.
      is_elementwise: whether cheap, elementwise operations compute them.
    """

    step: str
    later: tuple[str, ...]
    is_stored: bool
    predicted: RematerializationTimes
    is_elementwise: bool = False


def crossings(
    program: PlacedProgram, named: Iterable[tuple[str, MapStage, float]]
) -> Iterator[Crossing]:
    """The values that cross from one pass of a program to others.

    Args:
      program: the placed program.
      named: its passes, with their names and how often they run.
    """
    passes = [p for p in named if not is_unknown(program.sizes[p[1].placement])]
    readers: dict[Var, list[tuple[str, float]]] = {}
    for name, stage, rounds in passes:
        for var, _ in stage.operands:
            readers.setdefault(var, []).append((name, rounds))
    stored = {var for _, stage, _ in passes for var in stage.results}
    # For each equation, the first pass that evaluates it, and how often that pass runs.
    first: dict[Eqn, tuple[str, float]] = {}
    for name, stage, rounds in passes:
        yield from _rematerialized(program, name, stage, rounds, first)
        values = [var for var in stage.results if var in readers]
        if values:
            makers = {var: e.eqn for e in stage.emissions for var in e.eqn.outputs}
            chain = ancestors(program, values, makers)
            made = {var for e in chain for var in e.eqn.outputs}
            given = {var for e in chain for var in _read(program, e)} - made
            possible = set(values) <= made and not given & stored
            possible = possible and not any(e.eqn.effects or host_call(e.eqn) for e in chain)
            later = dict(reader for var in values for reader in readers[var])
            predicted = rematerialization_times(
                program, values, chain if possible else None, stage.placement,
                sum(later.values()), rounds,
            )  # fmt: skip
            yield Crossing(name, tuple(later), True, predicted)
        first |= {
            e.eqn: (name, rounds)
            for e in stage.emissions
            if e.eqn not in first and e.eqn in program.rules
        }


def _rematerialized(
    program: PlacedProgram,
    name: str,
    stage: MapStage,
    rounds: float,
    first: Mapping[Eqn, tuple[str, float]],
) -> Iterator[Crossing]:
    """The values that a pass rematerializes, grouped by the pass that computes them first."""
    shared = [e for e in stage.emissions if e.eqn in first and isinstance(e.rule, MemberwiseRule)]
    read = {var for e in stage.emissions if e.eqn not in first for var in _read(program, e)}
    for other, times in dict.fromkeys(first[e.eqn] for e in shared):
        mine = [e for e in shared if first[e.eqn] == (other, times)]
        front = [var for e in mine for var in e.eqn.outputs if var in read]
        makers = {var: e.eqn for e in shared for var in e.eqn.outputs}
        if front:
            chain = ancestors(program, front, makers)
            predicted = rematerialization_times(
                program, front, chain, stage.placement, rounds, times
            )
            cheap = all(e.eqn.primitive.name in CHEAP for e in chain)
            yield Crossing(other, (name,), False, predicted, cheap)


def _read(program: PlacedProgram, emission: Emission) -> Iterator[Var]:
    """The placed values that an equation of a pass reads along the members."""
    for atom, axis in zip(emission.eqn.inputs, emission.rule.in_axes, strict=True):
        if axis is not None and isinstance(atom, Var) and program.place(atom) is not None:
            yield atom


def _nbytes(var: Var) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    if any(map(is_unknown, shape)):
        return 0
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0))
