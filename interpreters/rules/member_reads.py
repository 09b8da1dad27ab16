"""Rules for slices and gathers that read few members on the server.

If a slice, or an indexing by server values, takes at most half of the members, it is computed as a
reduction: each shard sends the bits of the rows that it holds, and zeros for the others. Otherwise
all members are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from beamjax.bodies.export import unwrap, value_type
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.member_indices import OUTSIDE, bounded
from beamjax.interpreters.rules.sharding_rules import (
    ReductionRule,
    TracedShard,
    bind,
    replaced,
    shape_of,
)
from beamjax.numerics.reducers import PICK
from beamjax.plan.dropping import hole_of

MAX_SHARE = 0.5
"""Largest share of the members that is read in this way; for more, all members are gathered."""


def read_rows(
    eqn: Eqn, axis: int, n: Any, indices: Callable[[Sequence[Any]], Any]
) -> ReductionRule | None:
    """The rule of a slice or a dynamic slice that reads few members, None for one that reads many.

    Args:
      eqn: the slice.
      axis: the axis of the members in its first operand.
      n: the number of members.
      indices: maps the operands to the indices of the members: an int32 vector, all in bounds.
    """
    taken = shape_of(eqn.outputs[0])[axis]
    if not _is_worth(eqn, taken, n):
        return None

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        put = lambda param, value: replaced(eqn.params[param], axis, value)
        if eqn.primitive.name == "slice":
            changes = {"start_indices": put("start_indices", 0)}
            changes["limit_indices"] = put("limit_indices", shard.size)
            changes["strides"] = eqn.params["strides"] and put("strides", 1)
        else:
            changes = {"slice_sizes": put("slice_sizes", shard.size)}
        (rows,) = bind(eqn, args, **changes)
        taken_rows = shard.rows(indices(args))
        rows = jnp.moveaxis(jnp.take(rows, taken_rows, axis=axis, mode="clip"), axis, 0)
        bits = _bits(rows, shard.has(taken_rows), shard.left_out(taken_rows))
        return jnp.moveaxis(bits, 0, axis)

    return ReductionRule(
        (axis, *(None for _ in eqn.inputs[1:])), PICK.name, partial, selects_members=True
    )


def read_gathered(eqn: Eqn, axis: int, n: Any) -> ReductionRule | None:
    """The rule of a gather whose indices are server values that select few members.

    Args:
      eqn: the gather; it reads one member for each index.
      axis: the axis of the members in its operand, one of the indexed axes.
      n: the number of members.
    """
    d = eqn.params["dimension_numbers"]
    out = shape_of(eqn.outputs[0])
    batch = [k for k in range(len(out)) if k not in d.offset_dims]
    taken = math.prod(out[k] for k in batch)
    single = eqn.params["slice_sizes"][axis] == 1
    if not single or axis in d.operand_batching_dims or not _is_worth(eqn, taken, n):
        return None
    column = d.start_index_map.index(axis)
    shape, sizes = shape_of(eqn.inputs[0]), eqn.params["slice_sizes"]
    lasts = [shape[k] - sizes[k] for k in d.start_index_map]
    fills = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        operand, indices = args
        if fills:  # JAX casts indices of this mode to int32 before it checks bounds, even int64.
            indices = indices.astype(np.int32)
        indices = bounded(indices, lasts, clamps=not fills)
        member = indices[..., column]
        row = shard.rows(member)
        (rows,) = bind(eqn, [operand, indices.at[..., column].set(row)])
        # The first shard sends the fill value for indices out of bounds.
        own = shard.has(row) | ((member == OUTSIDE) & (shard.start == 0))
        rows = jnp.moveaxis(rows, batch, range(len(batch)))
        bits = _bits(rows, own, shard.left_out(row))
        return jnp.moveaxis(bits, range(len(batch)), batch)

    return ReductionRule((axis, None), PICK.name, partial, selects_members=True)


def _is_worth(eqn: Eqn, taken: Any, n: Any) -> bool:
    dtype = value_type(aval_of(eqn.outputs[0])).dtype
    known = not is_unknown(n) and not is_unknown(taken)
    return known and PICK.takes(np.dtype(dtype)) and taken <= MAX_SHARE * n


def _bits(rows: Any, mask: Any, left_out: Any) -> Any:
    """The bits of rows, with zeros for rows of other shards.

    Args:
      rows: the rows; their first axes are those of the masks.
      mask: bools, which rows this shard holds.
      left_out: bools, which rows are dropped members; these become NaN, or 0 without NaN.
    """
    rows = unwrap(rows)
    hole = np.array(hole_of(rows.dtype), rows.dtype)
    missing = jnp.reshape(left_out, left_out.shape + (1,) * (rows.ndim - left_out.ndim))
    return PICK.partial(jnp.where(missing, hole, rows), mask | left_out)
