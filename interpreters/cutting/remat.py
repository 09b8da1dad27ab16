"""Which placed values later passes make again, and which are kept for them: what that takes.

A value that one pass makes and a later one reads is written and read, or is made again from what
the program was given. Both are told by what is counted and by usual rates alone, so that the same
program is cut in the same way on all machines and for all runners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from beamjax.interpreters.cutting.cost import member_cost
from beamjax.interpreters.cutting.pieces import Emission, MapPiece
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Eqn, FlatBlock, Var
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.table import Local
from beamjax.interpreters.staging.flatten import host_call
from beamjax.plan.cost import USUAL

CHEAP = frozenset(rules.ELEMENTWISE) - {"threefry2x32", "random_gamma"} | {
    "bj_broadcast", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "pad", "rev",
    "concatenate", "split", "stack", "unstack", "random_wrap", "random_unwrap", "iota",
}  # fmt: skip
"""Operations whose results are made again rather than kept, unless that takes clearly longer."""
KEPT_RATE = 5e8
"""Bytes a second at which placed values are written for later passes, or read by them, by a worker
of Beam; where all is in one process it is faster."""
INPUT_RATE = 1e9
"""Bytes a second at which inputs are read once more."""
USUAL_SHARD = 64
"""Members for which the operations of a body are started once."""
CLEARLY = 3.0
"""How much less one way has to take than that of the rule."""
WORTH_SECONDS = 1.0
"""How many seconds less it has to take besides."""


@dataclass(frozen=True)
class Remaking:
    """Values that cross from a pass to later ones.

    Attributes:
      nbytes: of the values, all members.
      kept: seconds to write them, and to read them in each later pass.
      again: seconds to make them again in each later pass; None if they can't be.
    """

    nbytes: int
    kept: float
    again: float | None

    def is_clear(self, again: bool) -> bool:
        """Whether making the values again, or keeping them, takes clearly less than the other."""
        if self.again is None:
            return not again
        less, more = (self.again, self.kept) if again else (self.kept, self.again)
        return more - less >= WORTH_SECONDS and more >= CLEARLY * less


@dataclass
class Decisions:
    """Which values that cross from a pass to later ones are made again, in the program's order.

    Attributes:
      recompute: by which rule, see `Options`.
      saved: those of a saved plan; None if costs decide.
      made: those of this program, as far as it is cut.
    """

    recompute: str | None = None
    saved: tuple[bool, ...] | None = None
    made: list[bool] = field(default_factory=list)

    def decide(self, again: bool) -> bool:
        """Whether the next value is made again; `again` is what costs say."""
        if self.saved is not None and len(self.made) < len(self.saved):
            again = self.saved[len(self.made)]
        self.made.append(again)
        return again


def remaking(
    program: PlacedProgram,
    values: Sequence[Var],
    emissions: Sequence[Emission] | None,
    placement: str,
    reads: float,
    writes: float = 1.0,
) -> Remaking:
    """What values take that cross from one pass to others.

    Args:
      program: that they belong to.
      values: of known size.
      emissions: that make them from what was given to the program; None if others are needed.
      placement: of the members.
      reads: how often later passes need them.
      writes: how often they are made for these.
    """
    n = program.sizes[placement]
    nbytes = sum(map(_nbytes, values))
    kept = nbytes * (writes + reads) / KEPT_RATE
    if emissions is None:
        return Remaking(nbytes, kept, None)
    cost = member_cost(MapPiece(placement, list(emissions), [], [], []), n)
    made = {var for emission in emissions for var in emission.eqn.outputs}
    given = {var for emission in emissions for var in _read(program, emission)} - made
    each = USUAL.seconds(cost) + cost.calls * USUAL.call / USUAL_SHARD
    again = n * each + sum(map(_nbytes, given)) / INPUT_RATE
    return Remaking(nbytes, kept, None if cost.guessed else reads * again)


def by_cost(
    program: PlacedProgram,
    block: FlatBlock,
    levels: Mapping[Eqn | Var, int],
    rule: set[Var],
    possible: set[Var],
    decisions: Decisions,
) -> set[Var]:
    """The values of a block that later passes make again.

    Args:
      program: that the block is part of.
      block: the block.
      levels: of its equations and values.
      rule: values that are made again unless it clearly takes longer than to keep them.
      possible: values that can be made again.
      decisions: of a saved plan, and where those of this program are noted.
    """
    makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
    chosen = set(rule)
    for var, readers in _crossing(program, block, levels, makers).items():
        placement, _ = program.readings[makers[var]]
        if var not in possible or is_unknown(program.sizes[placement]):
            continue
        chain = ancestors(program, [var], makers)
        if any(host_call(emission.eqn) for emission in chain):
            continue
        told = remaking(program, [var], chain, placement, readers)
        again = var in rule
        if told.is_clear(again=not again):
            again = not again
        if not decisions.decide(again):
            chosen.discard(var)
        elif var not in rule:
            chosen.update(v for emission in chain for v in emission.eqn.outputs)
    return chosen


def ancestors(
    program: PlacedProgram, values: Iterable[Var], makers: Mapping[Var, Eqn]
) -> list[Emission]:
    """The equations that make placed values from what they don't make, in order.

    Args:
      program: that they belong to.
      values: placed ones.
      makers: of values, in order.
    """
    wanted: set[Eqn] = set()
    agenda = [makers[var] for var in values if var in makers]
    while agenda:
        eqn = agenda.pop()
        if eqn in wanted or eqn not in program.readings:
            continue
        wanted.add(eqn)
        _, reading = program.readings[eqn]
        for atom, axis in zip(eqn.inputs, reading.in_axes, strict=True):
            if axis is not None and isinstance(atom, Var) and atom in makers:
                agenda.append(makers[atom])
    ordered = [eqn for eqn in dict.fromkeys(makers.values()) if eqn in wanted]
    return [Emission(eqn, program.readings[eqn][1]) for eqn in ordered]


def _crossing(
    program: PlacedProgram,
    block: FlatBlock,
    levels: Mapping[Eqn | Var, int],
    makers: Mapping[Var, Eqn],
) -> dict[Var, int]:
    """Values that later passes alone read of earlier ones, and how many of these passes there are.

    What leaves the block, or is read by a loop or a branch, is kept in any case.
    """
    readers: dict[Var, set[int]] = {}
    kept = {atom for atom in block.outputs if isinstance(atom, Var)}
    for eqn in block.eqns:
        if eqn not in levels:
            continue
        for atom, along in program.reads(eqn):
            if not isinstance(atom, Var) or program.place(atom) is None:
                continue
            if eqn.blocks or program.place(atom) != along or eqn not in program.readings:
                kept.add(atom)
            elif atom in makers and levels[eqn] > levels[atom]:
                readers.setdefault(atom, set()).add(levels[eqn])
    return {
        var: len(found)
        for var, found in readers.items()
        if var not in kept and makers[var] in program.readings and not makers[var].blocks
    }


# --- what is told


@dataclass(frozen=True)
class Crossing:
    """Values that a pass makes for later ones, or that a later one makes again.

    Attributes:
      step: name of the pass that makes them first.
      later: names of the passes that need them.
      is_kept: whether they are kept.
      told: what both ways take.
      is_elementwise: whether elementwise operations make them.
    """

    step: str
    later: tuple[str, ...]
    is_kept: bool
    told: Remaking
    is_elementwise: bool = False


def crossings(
    program: PlacedProgram, named: Iterable[tuple[str, MapPiece, float]]
) -> Iterator[Crossing]:
    """What crosses from one pass of a program to another.

    Args:
      program: that was cut.
      named: its passes with their names, and how often they are run.
    """
    passes = [p for p in named if not is_unknown(program.sizes[p[1].placement])]
    readers: dict[Var, list[tuple[str, float]]] = {}
    for name, piece, rounds in passes:
        for var, _ in piece.operands:
            readers.setdefault(var, []).append((name, rounds))
    kept = {var for _, piece, _ in passes for var in piece.results}
    first: dict[Eqn, tuple[str, float]] = {}
    for name, piece, rounds in passes:
        yield from _made_again(program, name, piece, rounds, first)
        values = [var for var in piece.results if var in readers]
        if values:
            makers = {var: e.eqn for e in piece.emissions for var in e.eqn.outputs}
            chain = ancestors(program, values, makers)
            made = {var for e in chain for var in e.eqn.outputs}
            given = {var for e in chain for var in _read(program, e)} - made
            possible = set(values) <= made and not given & kept
            possible = possible and not any(e.eqn.effects or host_call(e.eqn) for e in chain)
            later = dict(reader for var in values for reader in readers[var])
            told = remaking(
                program, values, chain if possible else None, piece.placement,
                sum(later.values()), rounds,
            )  # fmt: skip
            yield Crossing(name, tuple(later), True, told)
        first |= {
            e.eqn: (name, rounds)
            for e in piece.emissions
            if e.eqn not in first and e.eqn in program.readings
        }


def _made_again(
    program: PlacedProgram,
    name: str,
    piece: MapPiece,
    rounds: float,
    first: Mapping[Eqn, tuple[str, float]],
) -> Iterator[Crossing]:
    """What a pass makes again, by the pass that makes it first."""
    again = [e for e in piece.emissions if e.eqn in first and isinstance(e.reading, Local)]
    read = {var for e in piece.emissions if e.eqn not in first for var in _read(program, e)}
    for other, times in dict.fromkeys(first[e.eqn] for e in again):
        mine = [e for e in again if first[e.eqn] == (other, times)]
        front = [var for e in mine for var in e.eqn.outputs if var in read]
        makers = {var: e.eqn for e in again for var in e.eqn.outputs}
        if front:
            chain = ancestors(program, front, makers)
            told = remaking(program, front, chain, piece.placement, rounds, times)
            cheap = all(e.eqn.primitive.name in CHEAP for e in chain)
            yield Crossing(other, (name,), False, told, cheap)


def _read(program: PlacedProgram, emission: Emission) -> Iterator[Var]:
    """The placed values that an equation of a pass reads along the members."""
    for atom, axis in zip(emission.eqn.inputs, emission.reading.in_axes, strict=True):
        if axis is not None and isinstance(atom, Var) and program.place(atom) is not None:
            yield atom


def _nbytes(var: Var) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    if any(map(is_unknown, shape)):
        return 0
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0))
