"""Placed inputs in which each member is its own index, for programs without data."""

from __future__ import annotations

import operator

import numpy as np

from beamjax.errors import PlacementError, StructureError
from beamjax.ops.placements import MAX_MEMBERS
from beamjax.sources.source_base import (
    ByIndex,
    Count,
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    Which,
)


class RangeSource(HoldsLeaves, ByIndex):
    """Member i is the number i; see `from_range`."""

    def __init__(self, size: Count, leaf: LeafSpec, treedef: PyTreeDef | None = None) -> None:
        """Use `from_range`, which checks."""
        super().__init__([leaf], treedef)
        self._size = size
        self._leaf = leaf
        if leaf.shape or leaf.dtype.kind != "i" or leaf.key_impl is not None:
            raise TypeError(f"found the leaf {leaf}, expected a scalar of integers")
        if size - 1 > np.iinfo(leaf.dtype).max:
            raise ValueError(f"found {size} members of {leaf}")

    def __len__(self) -> int:
        return self._size

    def _at(self, which: Which) -> list[np.ndarray]:
        numbers = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        return [numbers.astype(self._leaves[0].dtype)]


def from_range(n: int) -> RangeSource:
    """A placed input whose member i is the number i, for simulations and bootstraps.

        @bj.program(placements={"draws": None})
        def estimate(key, i):
            return bj.reduce_mean(bj.map_fn(lambda i: draw(jax.random.fold_in(key, i)), i))

        bj.run(estimate, jax.random.key(0), bj.from_range(10**8))

    It equals `jnp.arange(n)`, with the same dtype, but needs no memory: workers make their part.

    Args:
      n: the number of members.

    Returns:
      A `Source` of n scalars with the dtype of `jnp.arange(n)`.

    Raises:
      StructureError: `n` is no integer.
      PlacementError: `n` is less than 0, or more than 2**31 - 1, the limit of a placement.
    """
    import jax

    try:
        size = operator.index(n)
    except TypeError:
        raise StructureError(
            f"from_range: found {n!r:.80}, expected the number of members, an integer."
        ) from None
    if not 0 <= size <= MAX_MEMBERS:
        raise PlacementError(
            f"from_range: found {size} members, expected 0 to {MAX_MEMBERS}; for more draws, let "
            "each member make several: jax.vmap(draw)(100 * i + jnp.arange(100)) inside of map_fn."
        )
    dtype = jax.eval_shape(lambda: jax.numpy.arange(size)).dtype
    leaf = LeafSpec((), np.dtype(dtype))
    return RangeSource(size, leaf, jax.tree_util.tree_structure(0))
