"""Rules for updates that write server values to few members.

Each shard applies the part of the update that belongs to its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.member_indices import OUTSIDE, bounded, clamped
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    TracedShard,
    bind,
    replaced,
    shape_of,
)
from beamjax.plan.steps import MAX_MEMBERS


def write_rows(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule of a dynamic_update_slice that writes to some of the members.

    Args:
      eqn: the equation; only its first operand is placed.
      axis: the axis of the members.
      n: the number of members.
    """
    count = shape_of(eqn.inputs[1])[axis]
    if is_unknown(n):  # XLA clamps the start to n - count, which must be known.
        return None

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        operand, update, *starts = args
        if count == 0:
            return [operand]
        row = shard.indices() - clamped(starts[axis], n - count)
        rows = jnp.take(update, jnp.clip(row, 0, count - 1), axis=axis, mode="clip")
        first = replaced(starts, axis, jnp.zeros_like(starts[axis]))
        (written,) = bind(eqn, [operand, rows, *first])
        inside = lax.broadcast_in_dim((row >= 0) & (row < count), operand.shape, (axis,))
        return [jnp.where(inside, written, operand)]

    return MemberwiseRule((axis,) + (None,) * (len(eqn.inputs) - 1), (axis,), emit)


def write_scattered(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """The rule of a scatter whose indices are server values that select members.

    Args:
      eqn: the scatter; only its first operand is placed.
      axis: the axis of the members, one of the indexed axes.
      n: the number of members.
    """
    dims, clamps = eqn.params["dimension_numbers"], eqn.params["mode"] == GatherScatterMode.CLIP
    indexed = dims.scatter_dims_to_operand_dims
    column, window = indexed.index(axis), _window(eqn, axis)
    # For each indexed axis, the last index at which the whole window is in bounds.
    lasts = [shape_of(eqn.inputs[0])[d] - _width(eqn, d) for d in indexed]
    if is_unknown(n):
        if clamps or window is not None:
            return None
        lasts[column] = MAX_MEMBERS - 1  # Rows after the last member are padding.

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        operand, indices, updates = args
        indices, numbers = bounded(indices, lasts, clamps), dims
        index = indices[..., column]
        if window is not None:
            width = updates.shape[window]
            offsets = lax.broadcasted_iota(index.dtype, (*index.shape, width), index.ndim)
            index = jnp.where(index[..., None] == OUTSIDE, OUTSIDE, index[..., None] + offsets)
            indices = jnp.repeat(indices[..., None, :], width, axis=-2)
            updates, numbers = _row_by_row(updates, dims, axis, window)
        # FILL_OR_DROP drops updates for other shards.
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
