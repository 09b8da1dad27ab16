"""Decides which placed values are stored for later passes, and which are rematerialized.

A value that one pass computes and a later pass reads is either written and read, or computed anew
from the inputs of the program. The estimated times of both depend only on counted costs and fixed
rates, so that a program is cut in the same way on all machines and for all runners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from beamjax.interpreters.cutting.cost import member_cost
from beamjax.interpreters.cutting.stages import Emission, MapStage
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Eqn, FlatBlock, Var
from beamjax.interpreters.rules.factors import ELEMENTWISE
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
"""Factor by which the other way must be faster than the default. Estimates are rough, and a
small difference must not change which passes a program has."""
WORTH_SECONDS = 1.0
"""Estimated seconds that the other way must also save."""


def _seconds(
    program: PlacedProgram, var: Var, chain: Sequence[Emission], placement: str, readers: int
) -> tuple[float, float]:
    """Estimated seconds to store a value for later passes, and to rematerialize it in each.

    Args:
      program: the program.
      var: the value; its size must be known.
      chain: equations that compute it from inputs of the program.
      placement: its placement.
      readers: how many later passes read it.
    """
    n = program.sizes[placement]
    stored = _nbytes(var) * (1 + readers) / STORE_RATE
    cost = member_cost(MapStage(placement, list(chain), [], [], []), n)
    made = {var for emission in chain for var in emission.eqn.outputs}
    given = {var for emission in chain for var in _read(program, emission)} - made
    each = USUAL.seconds(cost) + cost.calls * USUAL.call / USUAL_SHARD
    once = n * each + sum(map(_nbytes, given)) / INPUT_RATE
    # The rounds of a loop that depend on data can't be estimated.
    return stored, math.inf if cost.guessed else readers * once


def _is_clear(less: float, more: float) -> bool:
    return more - less >= WORTH_SECONDS and more >= CLEARLY * less


def by_cost(
    program: PlacedProgram,
    block: FlatBlock,
    levels: Mapping[Eqn | Var, int],
    default: set[Var],
    possible: set[Var],
) -> set[Var]:
    """The values of a block that later passes rematerialize.

    Args:
      program: the program of the block.
      block: the block.
      levels: levels of its equations and values.
      default: values that are rematerialized by default.
      possible: values that can be rematerialized.
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
        stored, recomputed = _seconds(program, var, chain, placement, readers)
        if var in default:
            if math.isinf(recomputed) or _is_clear(stored, recomputed):
                chosen.discard(var)
        elif _is_clear(recomputed, stored):
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
