"""Looks up the sharding rule of an equation.

If the operands of an equation have their members along these axes, can it be computed a shard at a
time? The table (`sharding_rules.TABLE`) answers for most primitives by the axes alone, and by a
rule of their own for the others.
"""

# The answer is one of
#
# * `MemberwiseRule`: yes, it acts on each member. The rule gives the axis of the members in each
#   operand and result, and how to emit the equation for a shard.
# * `ReductionRule`: it reduces over the members. Each shard gives a partial; partials are merged.
# * `None`: it mixes members, or the primitive has no rule. Its operands are gathered.
#
# `None` is always correct but slower. A rule must be correct for every number of members. That
# shards can create the results of an equation, `invert` answers.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from beamjax.interpreters.program import Eqn

# These modules register their rules when they are imported.
from beamjax.interpreters.rules import (  # noqa: F401
    by_rows,
    creations,
    function_reductions,
    indexing,
    neighbour_rules,
    operator_rules,
    ordered,
    reduction_rules,
    scans,
)
from beamjax.interpreters.rules.factors import backward, forward
from beamjax.interpreters.rules.sharding_rules import (
    TABLE,
    Axes,
    MemberwiseRule,
    ReductionRule,
    answers_of,
    replaced,
    shape_of,
)
from beamjax.ops.primitives import OPERATORS


def classify(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    """The rule for `eqn`, whose operands have their n members along `axes`; None to gather them."""
    sharding_rule, rule = forward(eqn, axes, n), answers_of(eqn).rule
    if sharding_rule is None and rule is not None:
        sharding_rule = rule(eqn, axes, n)
    return _checked(eqn, sharding_rule, n)


def axes_of_operator(eqn: Eqn) -> Axes | None:
    """The axes of the operands along which a placed operator needs members; None for the server."""
    nowhere = [None] * len(eqn.inputs)
    if answers_of(eqn).expansion:
        return [0] * len(eqn.inputs)
    sharding_rule = classify(eqn, nowhere, None)
    return None if sharding_rule is None else sharding_rule.in_axes


def check_operators(names: Iterable[str]) -> None:
    """Raises a TypeError if one of these placed operators has neither a rule nor an expansion."""
    known = {name for name, answers in TABLE.items() if answers.rule or answers.expansion}
    missing = [name for name in names if name not in known]
    if missing:
        raise TypeError(
            f"found no rule of the placed operators {missing}, expected one in rules.rule_table: "
            "decorate a function with @rule or @expansion"
        )


def _checked(
    eqn: Eqn, sharding_rule: MemberwiseRule | ReductionRule | None, n: Any
) -> MemberwiseRule | ReductionRule | None:
    """The rule if it fits, with axes of type `int`: parameters of JAX may be NumPy integers."""
    if sharding_rule is None or not _fits(eqn, sharding_rule, n):
        return None
    in_axes = _ints(sharding_rule.in_axes)
    if isinstance(sharding_rule, MemberwiseRule):
        return replace(sharding_rule, in_axes=in_axes, out_axes=_ints(sharding_rule.out_axes))
    return replace(sharding_rule, in_axes=in_axes)


def _ints(axes: Axes) -> tuple[int | None, ...]:
    return tuple(None if axis is None else int(axis) for axis in axes)


def _fits(eqn: Eqn, sharding_rule: MemberwiseRule | ReductionRule, n: Any) -> bool:
    """Whether all axes of the members in a rule have length n; always, for n = None."""
    # They may not, if one operand is broadcast against another or written into a larger one.
    pairs = list(zip(eqn.inputs, sharding_rule.in_axes, strict=True))
    if isinstance(sharding_rule, MemberwiseRule):
        pairs += zip(eqn.outputs, sharding_rule.out_axes, strict=True)
    return n is None or all(axis is None or shape_of(atom)[axis] == n for atom, axis in pairs)


def invert(eqn: Eqn, out: int, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule by which result number `out` of `eqn` gets its members along `axis`, or None."""
    answers = answers_of(eqn)
    candidates: list[MemberwiseRule | ReductionRule | None] = []
    if answers.creation:
        candidates.append(answers.creation(eqn, axis, n))
    candidates.append(_checked(eqn, backward(eqn, out, axis, n), n))
    if answers.rule:
        candidates += (classify(eqn, axes, n) for axes in _axes_of_members(eqn, n))
    for candidate in candidates:
        if isinstance(candidate, MemberwiseRule) and candidate.out_axes[out] == axis:
            return candidate
    return None


def _axes_of_members(eqn: Eqn, n: Any) -> Iterator[Axes]:
    """The axes with n members of the operands of an equation, one at a time."""
    for i, atom in enumerate(eqn.inputs):
        for k, dim in enumerate(shape_of(atom)):
            if dim == n:
                yield replaced([None] * len(eqn.inputs), i, k)


# The number of members is a server value, which no pass computes.
check_operators(OPERATORS - {"bj_size"})
