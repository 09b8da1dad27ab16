"""Reads of rows by index from a source or a stored value, which read no other members.

A gather or a dynamic slice becomes three parts: the numbers of the members, which the server
computes; `take_rows`, which reads these members; and what is left to do with the rows, such as the
fill for indices out of bounds.
"""

# y = gather x i          ->   m = clamp i; r = take_rows x m; y = r
# y = gather[fill] x i    ->   m = max i 0; r = take_rows x m; y = bj_map[fill] r i
# y = dynamic_slice x i   ->   m = add i iota; r = take_rows x m; y = r
#
# The driver runs `take_rows`: if an operator takes the rows along its members, they are a view of
# the source that workers read; else the launching process reads them.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from beamjax import _compat
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.indexing import MAX_SHARE, bounded, clamped
from beamjax.interpreters.rules.sharding_rules import (
    OUTSIDE,
    bind,
    replaced,
    shape_of,
)
from beamjax.ops import primitives

Function = Callable[..., Sequence[Any]]
Wanted = tuple[str, str] | None
"""The key and the name of the placement along whose members an operator takes the rows."""

take_rows_p = _compat.Primitive("take_rows")
"""Takes an array and int32[k], all in bounds, to the k rows; `key` as in `Wanted`, or None."""


@take_rows_p.def_abstract_eval
def _take_rows(x: Any, numbers: Any, *, key: str | None) -> Any:
    return jax.core.ShapedArray((*numbers.shape, *x.shape[1:]), x.dtype)


def rows_by_index(eqn: Eqn, wanted: Wanted) -> Function | None:
    """Computes an equation that reads members along axis 0 by `take_rows`; None for others."""
    # `wanted` is the placement that needs the result along axis 0. Literal indices are
    # left to `indexing`, which selects in a pass.
    x = shape_of(eqn.inputs[0]) if eqn.inputs else ()
    match eqn.primitive.name:
        case "gather":
            return _gather(eqn, x, wanted)
        case "dynamic_slice":
            return _dynamic_slice(eqn, x, wanted)
    return None


def _dynamic_slice(eqn: Eqn, x: Sequence[int], wanted: Wanted) -> Function | None:
    sizes = eqn.params["slice_sizes"]
    if isinstance(eqn.inputs[1], _compat.Literal) or not _pays(sizes[0], x[0], wanted):
        return None

    def function(operand: Any, *starts: Any) -> Sequence[Any]:
        first = clamped(starts[0], x[0] - sizes[0])
        rows = _taken(operand, first + lax.iota(np.dtype("int32"), sizes[0]), wanted)
        if tuple(sizes[1:]) == tuple(x[1:]):
            return [rows]
        return bind(eqn, [rows, *replaced(starts, 0, jnp.zeros_like(starts[0]))])

    return function


def _gather(eqn: Eqn, x: Sequence[int], wanted: Wanted) -> Function | None:
    d, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if isinstance(eqn.inputs[1], _compat.Literal) or 0 not in d.start_index_map or sizes[0] != 1:
        return None
    out = shape_of(eqn.outputs[0])
    batch = [k for k in range(len(out)) if k not in d.offset_dims]
    # A plain gather is `jnp.take(x, indices, axis=0)` with a vector of indices: whole rows.
    plain = batch == [0] and d.collapsed_slice_dims == (0,) and d.start_index_map == (0,)
    plain &= tuple(sizes[1:]) == tuple(x[1:])
    count = math.prod(out[k] for k in batch)
    if d.operand_batching_dims or not (plain or count):
        return None
    if not _pays(count, x[0], wanted if plain else None):
        return None
    column = d.start_index_map.index(0)
    lasts = [x[k] - sizes[k] for k in d.start_index_map]
    fills = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP

    def function(operand: Any, indices: Any) -> Sequence[Any]:
        if fills:  # As in `indexing`.
            indices = indices.astype(np.int32)
        indices = bounded(indices, lasts, clamps=not fills)
        members = indices[..., column]
        numbers = jnp.maximum(members, 0).reshape(-1)
        if not plain:
            # The same gather, of the rows that were read: index i becomes the number of its row.
            rows = _taken(operand, numbers, None)
            own = lax.iota(np.dtype("int32"), count).reshape(members.shape)
            own = jnp.where(members == OUTSIDE, OUTSIDE, own)
            return bind(eqn, [rows, indices.at[..., column].set(own)], indices_are_sorted=False)
        rows = _taken(operand, numbers, wanted)
        return [_filled(eqn, rows, members, wanted) if fills else rows]

    return function


def _pays(taken: int, n: int, wanted: Wanted) -> bool:
    """Whether to read the rows by index: workers read them, or they are few of the members."""
    return wanted is not None or taken <= MAX_SHARE * n


def _taken(operand: Any, numbers: Any, wanted: Wanted) -> Any:
    return take_rows_p.bind(operand, numbers, key=wanted and wanted[0])


def _filled(eqn: Eqn, rows: Any, members: Any, wanted: Wanted) -> Any:
    """The rows with the fill value of a gather for indices out of bounds."""

    def fill(row: Any, member: Any) -> list[Any]:
        # The gather itself gives the fill value of its dtype.
        first = jnp.where(member == OUTSIDE, OUTSIDE, jnp.zeros_like(member))
        (filled,) = bind(eqn, [row[None], first[None, None]], indices_are_sorted=False)
        return [filled[0]]

    if wanted is None:
        return jax.vmap(fill)(rows, members)[0]
    (filled,) = primitives.map_members(
        fill, [], [rows, members], placement=wanted[1], n=len(members), name="fill", mesh=None
    )
    return filled
