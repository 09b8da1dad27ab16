"""Equations on rows of which each member has several, such as those of `x.ravel()`."""

# x has members of b rows, so its shape is (n, b, ...), and that of v = reshape x is (n * b, ...):
#
#     t = op v          ->   u = by_rows[op] x; t = reshape u
#     m = reduce_max v  ->   m = by_rows[reduce_max] x
#
# A shard of x holds consecutive rows of v. So it is computed by the rule that `op` has for n * b
# members: as a shard of these.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from beamjax import _compat
from beamjax.interpreters.program import Eqn, Var
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
    creation,
    rule,
)

by_rows_p = _compat.Primitive("by_rows")
"""Applies `equation`, whose rule for rows is `rule`, to members of `rows` rows each."""
by_rows_p.multiple_results = True


def operation_of(eqn: Eqn) -> Eqn:
    """The equation that is applied to rows; other equations are returned as they are."""
    return eqn.params["equation"] if eqn.primitive is by_rows_p else eqn


def merged(x: jax.Array, axis: int | None) -> jax.Array:
    """Members of rows (..., n, b, ...) along an axis as rows (..., n * b, ...)."""
    if axis is None:
        return x
    shape = x.shape
    return lax.reshape(x, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))


def split_shape(shape: Sequence[int], axis: int, rows: int) -> tuple[int, ...]:
    """The shape of members of rows, from that of the rows."""
    return (*shape[:axis], shape[axis] // rows, rows, *shape[axis + 1 :])


def _split(x: jax.Array, axis: int | None, rows: int) -> jax.Array:
    return x if axis is None else lax.reshape(x, split_shape(x.shape, axis, rows))


@rule("by_rows")
def _by_rows(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule:
    inner, rows = eqn.params["equation"], eqn.params["rows"]
    of_rows: MemberwiseRule | ReductionRule = eqn.params["rule"]

    def operands(args: Sequence[Any]) -> list[Any]:
        return list(map(merged, args, of_rows.in_axes))

    if isinstance(of_rows, ReductionRule):
        partial_of_rows = of_rows.partial

        def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
            return partial_of_rows(inner, operands(args), shard.by_rows(rows))

        return replace(of_rows, partial=partial)
    out_axes, emit_rows = of_rows.out_axes, of_rows.emit

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        outs = emit_rows(inner, operands(args), shard.by_rows(rows))
        return [_split(x, axis, rows) for x, axis in zip(outs, out_axes, strict=True)]

    return replace(of_rows, emit=emit)


@creation("by_rows")
def _create(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule of rows that a shard creates, such as those of `jnp.arange(n * b)`."""
    sharding_rule = _by_rows(eqn, (), n)
    return sharding_rule if isinstance(sharding_rule, MemberwiseRule) else None


# --- on the server


def results_of(eqn: Eqn, rule: MemberwiseRule | ReductionRule) -> list[tuple[Var, int | None]]:
    """The results of an equation, with the axes of their rows."""
    axes = rule.out_axes if isinstance(rule, MemberwiseRule) else [None] * len(eqn.outputs)
    return list(zip(eqn.outputs, axes, strict=True))


def _at_once(*operands: Any, equation: Eqn, rule: Any, rows: int) -> list[jax.Array]:
    outs = bind(equation, list(map(merged, operands, rule.in_axes)))
    pairs = zip(outs, results_of(equation, rule), strict=True)
    return [_split(x, axis, rows) for x, (_, axis) in pairs]


def _abstract_eval(*avals: Any, equation: Eqn, rule: Any, rows: int) -> list[Any]:
    return [
        var.aval if axis is None else var.aval.update(shape=split_shape(var.aval.shape, axis, rows))
        for var, axis in results_of(equation, rule)
    ]


by_rows_p.def_impl(_at_once)
by_rows_p.def_abstract_eval(_abstract_eval)
_compat.register_lowering(by_rows_p, _at_once)
