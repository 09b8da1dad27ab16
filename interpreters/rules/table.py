"""Looks up the sharding rule of an equation.

The function that is registered for a primitive is asked: if the operands have their members along
these axes, can the equation be computed a shard at a time? It returns one of

* `MemberwiseRule`: yes, it acts on each member. The rule gives the axis of the members in each
  operand and result, and how to emit the equation for a shard.
* `ReductionRule`: it reduces over the members. Each shard gives a partial, and partials are merged.
* `None`: it mixes members, or the primitive has no rule. Its operands are gathered.

`None` is always correct but slower. A rule must be correct for every number of members.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beamjax.interpreters.program import Eqn

# These modules register their rules when they are imported.
from beamjax.interpreters.rules import (  # noqa: F401
    function_reductions,
    indexing,
    memberwise,
    ordered,
    reductions,
    scans,
)
from beamjax.interpreters.rules.creations import CREATE
from beamjax.interpreters.rules.memberwise import ELEMENTWISE
from beamjax.interpreters.rules.sharding_rules import (
    EXPANSIONS,
    ORDERED_EXPANSIONS,
    RULES,
    Axes,
    FunctionReductionRule,
    Members,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
    shape_of,
)

__all__ = [
    "ELEMENTWISE",
    "EXPANSIONS",
    "ORDERED_EXPANSIONS",
    "RULES",
    "Axes",
    "FunctionReductionRule",
    "Members",
    "MemberwiseRule",
    "ReductionRule",
    "TracedShard",
    "bind",
    "classify",
    "create",
    "invert",
]  # fmt: skip


def classify(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    """The rule for `eqn`, whose operands have their n members along `axes`; None to gather them."""
    found = RULES.get(eqn.primitive.name)
    sharding_rule = found(eqn, axes, n) if found else None
    if sharding_rule is None or not _fits(eqn, sharding_rule, n):
        return None
    if isinstance(sharding_rule, MemberwiseRule):
        return _plain_local(sharding_rule)
    return replace(sharding_rule, in_axes=_ints(sharding_rule.in_axes))


def _plain_local(sharding_rule: MemberwiseRule) -> MemberwiseRule:
    """The rule with axes of type `int`: parameters of JAX equations may be NumPy integers."""
    return replace(
        sharding_rule, in_axes=_ints(sharding_rule.in_axes), out_axes=_ints(sharding_rule.out_axes)
    )


def _ints(axes: Axes) -> tuple[int | None, ...]:
    return tuple(None if axis is None else int(axis) for axis in axes)


def _fits(eqn: Eqn, sharding_rule: MemberwiseRule | ReductionRule, n: Any) -> bool:
    """Whether all axes of the members in a rule have length n; always, for n = None.

    They may not if one operand is broadcast against another or written into a larger one.
    """
    pairs = list(zip(eqn.inputs, sharding_rule.in_axes, strict=True))
    if isinstance(sharding_rule, MemberwiseRule):
        pairs += zip(eqn.outputs, sharding_rule.out_axes, strict=True)
    return n is None or all(axis is None or shape_of(atom)[axis] == n for atom, axis in pairs)


def create(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule by which `eqn` computes members along `axis` from server values alone, or None."""
    found = CREATE.get(eqn.primitive.name)
    sharding_rule = found(eqn, axis, n) if found else None
    return None if sharding_rule is None else _plain_local(sharding_rule)


def invert(eqn: Eqn, out: int, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule by which result number `out` of `eqn` gets its members along `axis`, or None."""
    created = create(eqn, axis, n)
    if created is not None:
        return created
    for i, atom in enumerate(eqn.inputs):
        for k, dim in enumerate(shape_of(atom)):
            if dim == n:
                axes: list[int | None] = [None] * len(eqn.inputs)
                axes[i] = k
                found = classify(eqn, axes, n)
                if isinstance(found, MemberwiseRule) and found.out_axes[out] == axis:
                    return found
    return None
