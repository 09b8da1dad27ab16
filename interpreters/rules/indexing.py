"""Rules for gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.member_reads import read_gathered
from beamjax.interpreters.rules.member_writes import write_scattered
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    as_is,
    resizing,
    rule,
    shape_of,
)
from beamjax.numerics.reducers import REDUCERS


def _remaining(rank: int, *gone: Sequence[int]) -> list[int]:
    return [d for d in range(rank) if not any(d in dims for dims in gone)]


@rule("gather")
def _gather(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    d = eqn.params["dimension_numbers"]
    operand, index = axes
    batching = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    # For each dimension of the indices but the last, its dimension in the result.
    positions = _remaining(len(shape_of(eqn.outputs[0])), d.offset_dims)
    if operand is None and index in batching.values():
        operand = next(a for a, b in batching.items() if b == index)
    if operand in batching:
        index = batching[operand] if index is None else index
        if batching[operand] != index or eqn.params["slice_sizes"][operand] != 1:
            return None
        return MemberwiseRule((operand, index), (positions[index],), as_is)
    if operand is None:
        if index is None or index == len(shape_of(eqn.inputs[1])) - 1:
            return None
        return MemberwiseRule((None, index), (positions[index],), as_is)
    rank = len(shape_of(eqn.inputs[0]))
    windows = _remaining(rank, d.collapsed_slice_dims, d.operand_batching_dims)
    whole = operand in windows and eqn.params["slice_sizes"][operand] == n
    if index is None and operand in d.start_index_map:
        return read_gathered(eqn, operand, n)
    if index is not None or not whole:
        return None
    out = d.offset_dims[windows.index(operand)]
    return MemberwiseRule((operand, None), (out,), resizing("slice_sizes", operand))


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
def _scatter(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    d = eqn.params["dimension_numbers"]
    operand, index, updates = axes
    if operand is not None and operand in d.scatter_dims_to_operand_dims:
        # The indices say to which members it writes.
        return write_scattered(eqn, operand, n) if (index, updates) == (None, None) else None
    batching = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
    rank = len(shape_of(eqn.inputs[0]))
    windows = _remaining(rank, d.inserted_window_dims, d.operand_batching_dims)
    # For each dimension of the indices but the last, its dimension in the updates.
    positions = _remaining(len(shape_of(eqn.inputs[2])), d.update_window_dims)
    if operand is None and index in batching.values():
        operand = next(a for a, b in batching.items() if b == index)
    if operand is None and updates in positions and positions.index(updates) in batching.values():
        operand = next(a for a, b in batching.items() if b == positions.index(updates))
    want: tuple[int | None, int | None, int | None]
    if operand in batching:
        want = (operand, batching[operand], positions[batching[operand]])
    elif operand in windows:
        want = (operand, None, d.update_window_dims[windows.index(operand)])
    elif operand is None and updates in d.update_window_dims:
        want = (windows[d.update_window_dims.index(updates)], None, updates)
    elif operand is None:
        return _scatter_fold(eqn, index, updates, positions)
    else:
        return None
    agrees = all(have in (None, axis) for have, axis in zip(axes, want, strict=True))
    out = want[0]
    if not agrees or out is None or out in d.scatter_dims_to_operand_dims:
        return None
    return MemberwiseRule(want, (out,), as_is)


# For each scatter of placed rows into a server table: its reduction, and the primitive for a shard.
_SCATTERS = {
    "scatter-add": ("sum", lax.scatter_add),
    "scatter-mul": ("prod", lax.scatter_mul),
    "scatter-max": ("max", lax.scatter_max),
    "scatter-min": ("min", lax.scatter_min),
}


def _scatter_fold(
    eqn: Eqn, index: int | None, updates: int | None, positions: list[int]
) -> ReductionRule | None:
    """A scatter of placed rows into a server table, as `jax.ops.segment_sum` does."""
    if eqn.primitive.name not in _SCATTERS:
        return None
    name, scatter = _SCATTERS[eqn.primitive.name]
    if name in ("max", "min") and aval_of(eqn.inputs[0]).dtype.kind == "c":
        return None  # In XLA, whether a complex NaN gets lost depends on its position.
    if index is None and updates in positions:
        index = positions.index(updates)
    if index is None or index == len(shape_of(eqn.inputs[1])) - 1:
        return None
    if updates not in (None, positions[index]):
        return None
    position, p, reducer = positions[index], eqn.params, REDUCERS[name]

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        table, where, rows = args
        dtype = reducer.partial_dtype(table.dtype)
        neutral = jnp.asarray(reducer.identity(dtype))
        # The initial table counts once: in the first shard.
        table = jnp.where(shard.start == 0, table.astype(dtype), neutral)
        return scatter(
            table,
            where,
            shard.masked(rows.astype(dtype), position, neutral),
            p["dimension_numbers"],
            # The copy of a member that stands for a dropped one is out of order.
            indices_are_sorted=p["indices_are_sorted"] and shard.members is None,
            unique_indices=False,  # Padding repeats an index.
            mode=p["mode"],
        )

    return ReductionRule((None, index, position), name, partial)
