"""Passes that compute a shard as a whole, for results that depend on the order of the members.

`reduced_by_shard` fills a table, to which each shard adds the rows of its ranges; a range is a
fixed number of consecutive members. `mapped_by_shard` computes a shard with such a table.
"""

# Every shard holds whole ranges (`lowering.shard_size.with_whole_blocks` sees to that), so the
# index of its first member gives the number of its first range. If an equation of this module runs
# on the server, all members are one shard.

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from beamjax import _compat
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    all_members,
    rule,
    with_axes_of,
)
from beamjax.numerics.reducers import PICK, REDUCERS

MAX_ROWS = 1024
"""Largest number of rows that each shard sends, unless the user gives the shard size."""
MAX_TABLE_BYTES = 4 << 20
"""Largest size of all rows that a shard sends, in bytes."""
MAX_RANGE_BYTES = 16 << 20
"""Largest size of the members of a range, in bytes."""

reduce_p = _compat.Primitive("reduce_by_shard")
map_p = _compat.Primitive("map_by_shard")

Table = Callable[..., tuple[Any, Any]]
Result = Callable[..., Any]


def range_size(
    n: int, row: int, member: int, shard_size: int | None, *, fewest: int = 1
) -> int | None:
    """The number of members per range; None if the ranges or the table would be too large."""
    # `row` and `member` are the bytes of a row of the table and of a member. A range has 16 times
    # the `fewest` members that it needs, so that the table is small compared with the members.
    rows = max(1, min(MAX_ROWS, MAX_TABLE_BYTES // max(row, 1)))
    least = max(-(-n // rows), 16 * fewest)
    # A shard size that the user gives is the range, as a shard holds whole ranges.
    size = shard_size or 1 << (least - 1).bit_length()
    small = size * member <= MAX_RANGE_BYTES and -(-n // size) * row <= MAX_TABLE_BYTES
    return size if size >= fewest and small else None


def reduced_by_shard(
    function: Table,
    *operands: Any,
    block: int,
    members: int = 1,
    reducer: str = PICK.name,
    name: str = "",
) -> jax.Array:
    """Reduces the tables that `function(shard, *operands)` returns for all shards."""
    # The function returns a table, of one shape and dtype for all shards, and bools for its first
    # axes: which rows this shard fills. At most one shard fills a row that `PICK` reduces. The
    # first operands, as many as `members` says, are arrays of members (n, ...); the others are
    # server values. Each shard begins at a multiple of `block`, the members per range. `explain`
    # shows `name`, the operator of the program; it is "" for an operation of JAX.
    params = {"function": function, "block": block, "members": members, "reducer": reducer}
    return reduce_p.bind(*operands, **params, name=name)


def mapped_by_shard(
    function: Result, *operands: Any, block: int, members: int = 1, name: str = ""
) -> jax.Array:
    """The results of `function(shard, *operands)`, a row for each member of the shard."""
    return map_p.bind(*operands, function=function, block=block, members=members, name=name)


@rule("reduce_by_shard")
def _reduce_rule(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    function, name = eqn.params["function"], eqn.params["reducer"]

    # The partial of `PICK` is the bits of the rows, of which all but one shard send zeros.
    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        if name == PICK.name:
            return PICK.partial(*function(shard, *args))
        return _table(args, shard, function, name)

    in_axes = _in_axes(eqn, axes)
    return ReductionRule(in_axes, name, partial, by_shard=True) if in_axes else None


@rule("map_by_shard")
def _map_rule(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        return [eqn.params["function"](shard, *args)]

    in_axes = _in_axes(eqn, axes)
    return MemberwiseRule(in_axes, (0,), emit, by_shard=True) if in_axes else None


def _in_axes(eqn: Eqn, axes: Axes) -> tuple[int | None, ...] | None:
    """The axes of the members in the operands; None if the operands are placed otherwise."""
    members = eqn.params["members"]
    in_axes = (0,) * members + (None,) * (len(axes) - members)
    fits = all(axis in (None, k) for axis, k in zip(axes, in_axes, strict=True))
    return in_axes if fits and any(axis is not None for axis in axes) else None


def _table(operands: Sequence[Any], shard: TracedShard, function: Table, reducer: str) -> jax.Array:
    """The table of a shard, with the identity of the reduction in the rows of other shards."""
    values, own = function(shard, *operands)
    neutral = 0 if reducer == PICK.name else REDUCERS[reducer].identity(values.dtype)
    return jnp.where(with_axes_of(own, values), values, jnp.asarray(neutral, values.dtype))


# --- on the server


def _reduced(*operands: Any, function: Table, reducer: str, **_: Any) -> jax.Array:
    return _table(operands, all_members(operands[0].shape[0]), function, reducer)


def _mapped(*operands: Any, function: Result, **_: Any) -> jax.Array:
    return function(all_members(operands[0].shape[0]), *operands)


def _define(primitive: _compat.Primitive, function: Callable[..., jax.Array]) -> None:
    def abstract_eval(*avals: Any, **params: Any) -> Any:
        result = jax.eval_shape(functools.partial(function, **params), *avals)
        return avals[0].update(shape=result.shape, dtype=result.dtype, weak_type=False)

    primitive.def_impl(function)
    primitive.def_abstract_eval(abstract_eval)
    _compat.register_lowering(primitive, function)


_define(reduce_p, _reduced)
_define(map_p, _mapped)
