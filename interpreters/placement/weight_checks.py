"""Refuses what would count each member once in a function with weights (`ops.weights`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from beamjax.errors import StagingError
from beamjax.interpreters.placement.places import MemberAxis, PlacedProgram
from beamjax.interpreters.program import Eqn, FlatProgram, Var, aval_of
from beamjax.interpreters.rules.ordered import SCANS

_ORDERED = frozenset([*SCANS, "cumlogsumexp", "sort"])
"""Primitives whose result has a row for each member, which depends on other members."""
_SELECTING = frozenset("dynamic_slice gather slice".split())


def refuse_unweighted(flat: FlatProgram, placed: PlacedProgram) -> None:
    """Refuses equations of JAX that reduce members in a function with weights."""
    if not flat.unweighted:
        return
    # The axis of the members in each value that has them, on workers or on the server.
    members: dict[Any, MemberAxis] = dict(placed.places)
    # An input that would be gathered has no place, but as many rows as there are members.
    for var in flat.arguments:
        for placement, n in placed.sizes.items():
            if var.aval.shape[:1] == (n,):
                members.setdefault(var, MemberAxis(placement, 0))
    for eqn in flat.walk():
        names = flat.unweighted.get(eqn.outputs[0], set()) if eqn.outputs else set()
        for atom in eqn.inputs if names else ():
            along = members.get(atom) if isinstance(atom, Var) else None
            if along is None or not names & {"", along.placement}:
                continue
            with_members = _members_of_results(eqn, along, placed)
            if _mixes(eqn, along, with_members) and not _is_member(eqn, atom, along):
                raise StagingError(
                    f"{eqn.line or 'in the program'}: {eqn.primitive.name} takes several members "
                    f"of {along.placement!r} together in a function with weights (of reweight, "
                    "standard_error or influence), and would count each of them once; use "
                    "beamjax.reduce_sum and its like, or pass the result as an argument if it "
                    "does not depend on the weights"
                )
            for var, axis in with_members.items():
                members.setdefault(var, axis)


def _members_of_results(
    eqn: Eqn, along: MemberAxis, placed: PlacedProgram
) -> Mapping[Var, MemberAxis]:
    """The results of an equation that have members, with their axis."""
    n, with_members = placed.sizes[along.placement], dict[Var, MemberAxis]()
    for var in eqn.outputs:
        place = placed.place(var)
        axes = [k for k, size in enumerate(var.aval.shape) if size is n or size == n]
        if place is not None or axes:
            with_members[var] = place or MemberAxis(along.placement, axes[0])
    return with_members


def _mixes(eqn: Eqn, along: MemberAxis, with_members: Mapping[Var, MemberAxis]) -> bool:
    """Whether a result depends on several members."""
    axis = eqn.params.get("axis", eqn.params.get("dimension"))
    ordered = eqn.primitive.name in _ORDERED and axis == along.axis
    return ordered or any(var not in with_members for var in eqn.outputs)


def _is_member(eqn: Eqn, atom: Any, along: MemberAxis) -> bool:
    """Whether a result is a single member, such as `x[0]`, which no weight changes."""
    shape = list(aval_of(atom).shape)
    shape.pop(along.axis)
    size = math.prod(eqn.outputs[0].aval.shape)
    return eqn.primitive.name in _SELECTING and size <= math.prod(shape)
