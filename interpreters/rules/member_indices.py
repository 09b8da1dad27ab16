"""Converts indices of any integer dtype to int32 indices of members, with XLA's semantics.

The dtype of an index may be too narrow for the number of members (int8, with 200 members) or wider
than int32 (uint32, or int64 with x64 enabled). So indices are compared in a dtype that holds both,
and converted to int32 once they are in bounds. `Shard.rows` converts them to rows of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

OUTSIDE = -1
"""The index that stands for out-of-bounds members and rows: gathers fill it, scatters drop it."""


def clamped(index: jax.Array, last: int) -> jax.Array:
    """`index` clamped to [0, last], as XLA does for starts of slices; int32 of the same shape."""
    return jnp.clip(_widened(index), 0, last).astype(np.int32)


def bounded(indices: jax.Array, lasts: Sequence[int], clamps: bool) -> jax.Array:
    """The indices of a gather or a scatter, all in bounds or `OUTSIDE`.

    Args:
      indices: integers of shape (..., k), one column for each indexed axis.
      lasts: the largest valid index of each column.
      clamps: whether to clamp indices that are out of bounds; else they become `OUTSIDE`.

    Returns:
      An int32 array of the same shape.
    """
    columns = []
    for i, last in enumerate(lasts):
        index = _widened(indices[..., i])
        found = clamped(index, last)
        if not clamps:
            found = jnp.where((index >= 0) & (index <= last), found, OUTSIDE)
        columns.append(found)
    return jnp.stack(columns, axis=-1)


def _widened(index: jax.Array) -> jax.Array:
    """`index` with at least 32 bits, enough for the number of members."""
    return index if index.dtype.itemsize >= 4 else index.astype(np.int32)
