"""Reads and writes of few members by their number, which is a server value.

A slice, or a gather, that takes at most half of the members is a reduction: each shard sends the
bits of the rows that it holds, and zeros for the others. Otherwise all members are gathered. A
scatter or an update of members is a map, in which each shard writes to its own members.
"""

# Indices may have any integer dtype. It may be too narrow for the number of members (int8, with 200
# members) or have a larger range than int32 (uint32, or int64 with x64 enabled). So indices are
# compared in a dtype of at least 32 bits, and converted to int32 once they are in bounds.
# `TracedShard.rows` then converts them to rows of a shard.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from beamjax.bodies.export import value_type
from beamjax.bodies.load import unwrap
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.sharding_rules import (
    OUTSIDE,
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    any_placed,
    bind,
    replaced,
    rule,
    shape_of,
    with_axes_of,
)
from beamjax.numerics.reducers import PICK
from beamjax.ops.placements import MAX_MEMBERS
from beamjax.plan.dropping import hole_of

MAX_SHARE = 0.5
"""Largest share of the members that is read in this way; for more, all members are gathered."""


def _wide(index: jax.Array) -> jax.Array:
    """Integers with at least 32 bits, which hold all indices of members."""
    return index if index.dtype.itemsize >= 4 else index.astype(np.int32)


def clamped(index: jax.Array, last: int) -> jax.Array:
    """`index` clamped to [0, last], as XLA does for starts of slices; int32 of the same shape."""
    return jnp.clip(_wide(index), 0, last).astype(np.int32)


def bounded(indices: jax.Array, lasts: Sequence[int], clamps: bool) -> jax.Array:
    """The indices of a gather or a scatter as int32: in bounds, or `OUTSIDE` if not clamped."""
    # They have the shape (..., k): a column for each indexed axis, with its last valid index.
    columns = []
    for i, last in enumerate(lasts):
        index = indices[..., i]
        column = clamped(index, last)
        if not clamps:
            wide = _wide(index)
            column = jnp.where((wide >= 0) & (wide <= last), column, OUTSIDE)
        columns.append(column)
    return jnp.stack(columns, axis=-1)


# --- reads


@rule("slice")
def _slice(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    axis, p = axes[0], eqn.params
    if axis is None:
        return None
    stride = 1 if p["strides"] is None else p["strides"][axis]
    members = range(p["start_indices"][axis], p["limit_indices"][axis], stride)

    def rows(args: Sequence[Any], size: int) -> Any:
        starts, limits = (replaced(p[f"{end}_indices"], axis, k)
                          for end, k in (("start", 0), ("limit", size)))  # fmt: skip
        strides = p["strides"] and replaced(p["strides"], axis, 1)
        return bind(eqn, args, start_indices=starts, limit_indices=limits, strides=strides)[0]

    # An iota, which is computed where it is read; a constant would be as large as the slice.
    first, last, step = members.start, members.stop, members.step
    numbers = lambda args: jnp.arange(first, last, step, dtype="int32")
    return _read_rows(eqn, axis, n, rows, numbers)


@rule("dynamic_slice")
def _dynamic_slice(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    axis, sizes = axes[0], eqn.params["slice_sizes"]
    if axis is None or any_placed(axes[1:]):
        return None

    def rows(args: Sequence[Any], size: int) -> Any:
        return bind(eqn, args, slice_sizes=replaced(sizes, axis, size))[0]

    def members(args: Sequence[Any]) -> Any:
        return clamped(args[1 + axis], n - sizes[axis]) + jnp.arange(sizes[axis], dtype="int32")

    return _read_rows(eqn, axis, n, rows, members)


def _read_rows(
    eqn: Eqn,
    axis: int,
    n: Any,
    rows: Callable[[Sequence[Any], int], Any],
    members: Callable[[Sequence[Any]], Any],
) -> ReductionRule | None:
    """The rule of a slice or a dynamic slice of few members, None for one of many."""
    # `rows` takes the operands and the size of a shard to the slice along all other axes. `members`
    # takes the operands to the indices of the members: an int32 vector, all in bounds.
    if not _selects(eqn, shape_of(eqn.outputs[0])[axis], n):
        return None

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        row = shard.rows(members(args))
        taken = jnp.take(rows(args, shard.size), row, axis=axis, mode="clip")
        return _bits(taken, [axis], shard.has(row), shard.left_out(row))

    in_axes = (axis, *(None for _ in eqn.inputs[1:]))
    return ReductionRule(in_axes, PICK.name, partial, selects_members=True)


@rule("gather")
def _gather(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    """The rule of a gather that selects few members; placed indices are gathered before."""
    axis, d = axes[0], eqn.params["dimension_numbers"]
    if axis is None or axis not in d.start_index_map:
        return None
    out, sizes = shape_of(eqn.outputs[0]), eqn.params["slice_sizes"]
    batch = [k for k in range(len(out)) if k not in d.offset_dims]
    single = sizes[axis] == 1 and axis not in d.operand_batching_dims
    if not single or not _selects(eqn, math.prod(out[k] for k in batch), n):
        return None
    column = d.start_index_map.index(axis)
    lasts = [shape_of(eqn.inputs[0])[k] - sizes[k] for k in d.start_index_map]
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
        return _bits(rows, batch, own, shard.left_out(row))

    return ReductionRule((axis, None), PICK.name, partial, selects_members=True)


def _selects(eqn: Eqn, taken: Any, n: Any) -> bool:
    """Whether an equation that takes this many of n members is computed as a reduction."""
    dtype = value_type(aval_of(eqn.outputs[0])).dtype
    known = not is_unknown(n) and not is_unknown(taken)
    return known and PICK.takes(np.dtype(dtype)) and taken <= MAX_SHARE * n


def _bits(rows: Any, axes: Sequence[int], mask: Any, left_out: Any) -> Any:
    """The bits of rows, with zeros for the rows that `mask` says other shards hold."""
    # `axes` has the axis of `rows` for each axis of the masks. Rows that are `left_out` are dropped
    # members; they become NaN, or 0 if the dtype has none.
    front = range(len(axes))
    rows = jnp.moveaxis(unwrap(rows), axes, front)
    hole = np.array(hole_of(rows.dtype), rows.dtype)
    bits = PICK.partial(jnp.where(with_axes_of(left_out, rows), hole, rows), mask | left_out)
    return jnp.moveaxis(bits, front, axes)


# --- writes


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    axis = axes[0]
    # XLA clamps the start to n - count, so n must be known.
    if axis is None or any_placed(axes[1:]) or is_unknown(n):
        return None
    count = shape_of(eqn.inputs[1])[axis]

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        operand, update, *starts = args
        if count == 0:
            return [operand]
        # Each member looks up the row of the update that it is written to, if it is one.
        row = shard.indices() - clamped(starts[axis], n - count)
        rows = jnp.take(update, jnp.clip(row, 0, count - 1), axis=axis, mode="clip")
        first = replaced(starts, axis, jnp.zeros_like(starts[axis]))
        (written,) = bind(eqn, [operand, rows, *first])
        inside = lax.broadcast_in_dim((row >= 0) & (row < count), operand.shape, (axis,))
        return [jnp.where(inside, written, operand)]

    return MemberwiseRule((axis,) + (None,) * (len(eqn.inputs) - 1), (axis,), emit)


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
def _scatter(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    """The rule of a scatter whose indices are server values that select members."""
    dims, clamps = eqn.params["dimension_numbers"], eqn.params["mode"] == GatherScatterMode.CLIP
    axis, indexed = axes[0], dims.scatter_dims_to_operand_dims
    if axis is None or any_placed(axes[1:]) or axis not in indexed:
        return None
    column, window = indexed.index(axis), _window(eqn, axis)
    # For each indexed axis, the last index at which the whole window is in bounds.
    lasts = [shape_of(eqn.inputs[0])[d] - _width(eqn, d) for d in indexed]
    if is_unknown(n):
        if clamps or window is not None:
            return None
        # Any index is in bounds: rows after the last member are padding, and are ignored.
        lasts[column] = MAX_MEMBERS - 1

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        operand, indices, updates = args
        indices, numbers = bounded(indices, lasts, clamps), dims
        index = indices[..., column]
        if window is not None:
            # A window may begin in one shard and end in the next, so each of its rows gets an
            # index: `x.at[i : i + 2].set(u)` becomes `x.at[[i, i + 1]].set(u)`.
            width = updates.shape[window]
            offsets = lax.broadcasted_iota(index.dtype, (*index.shape, width), index.ndim)
            index = jnp.where(index[..., None] == OUTSIDE, OUTSIDE, index[..., None] + offsets)
            indices = jnp.repeat(indices[..., None, :], width, axis=-2)
            updates, numbers = _row_by_row(updates, dims, axis, window)
        # Indices of other shards' members are now `OUTSIDE`, which FILL_OR_DROP drops.
        indices = indices.at[..., column].set(shard.rows(index))
        changes = {"mode": GatherScatterMode.FILL_OR_DROP, "dimension_numbers": numbers}
        changes |= {"indices_are_sorted": False, "unique_indices": False}
        return bind(eqn, [operand, indices, updates], **changes)

    return MemberwiseRule((axis, None, None), (axis,), emit)


def _width(eqn: Eqn, axis: int) -> int:
    """The number of entries along `axis` of its operand that a scatter writes per index."""
    window = _window(eqn, axis)
    return 1 if window is None else shape_of(eqn.inputs[2])[window]


def _window(eqn: Eqn, axis: int) -> int | None:
    """The axis of a scatter's updates that is the window along `axis` of the operand, or None."""
    dims = eqn.params["dimension_numbers"]
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    if axis in gone:
        return None
    windows = [d for d in range(len(shape_of(eqn.inputs[0]))) if d not in gone]
    return dims.update_window_dims[windows.index(axis)]


def _row_by_row(updates: Any, dims: Any, axis: int, window: int) -> tuple[Any, Any]:
    """Updates and dimension numbers of an equal scatter with one index per row of the window."""
    batch = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    others = [d for d in dims.update_window_dims if d != window]
    updates = jnp.transpose(updates, (*batch, window, *others))
    inserted = tuple(sorted((*dims.inserted_window_dims, axis)))
    windows = tuple(range(len(batch) + 1, updates.ndim))
    return updates, dims._replace(update_window_dims=windows, inserted_window_dims=inserted)
