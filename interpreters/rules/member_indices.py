"""Indices of members among all, of any integer dtype, as XLA reads them.

An index may be narrower than the number of members (int8, of 200 members) or wider than int32
(uint32, or int64 with x64 enabled), so it is compared in a dtype that holds both, and is an int32
only once it is in bounds. `Shard.rows` goes on from there to the rows of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

OUTSIDE = -1
"""The index of no member, and of no row; gathers fill, and scatters drop, what it stands for."""


def clamped(index: jax.Array, last: int) -> jax.Array:
    """`index` clamped to [0, last], as XLA clamps where a slice starts; int32, of its shape."""
    return jnp.clip(_widened(index), 0, last).astype(np.int32)


def bounded(indices: jax.Array, lasts: Sequence[int], clamps: bool) -> jax.Array:
    """The indices of a gather or a scatter, in bounds.

    Args:
      indices: integers of shape (..., k), a column for each axis that is indexed.
      lasts: of each column the largest index in bounds.
      clamps: whether those out of bounds are clamped; else they are `OUTSIDE`.

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
    """`index` with at least 32 bits, which hold the number of members."""
    return index if index.dtype.itemsize >= 4 else index.astype(np.int32)
