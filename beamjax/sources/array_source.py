"""Placed inputs from arrays in memory.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from beamjax.sources.leaf_checks import (
    check_sizes,
    checked_leaf,
    native_dtype,
    native_view,
    scalar_error,
)
from beamjax.sources.source_base import (
    ByIndex,
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    Which,
    describe_source,
)
from beamjax.storage.buffers import snapshot

if TYPE_CHECKING:
    from beamjax.sources.arrays.npy_source import NpySource


class ArraySource(HoldsLeaves, ByIndex):
    """Arrays in the memory of this process."""

    wraps = True  # see `FileSource`

    def __init__(
        self, arrays: Sequence[np.ndarray], leaves: Sequence[LeafSpec], treedef: PyTreeDef | None
    ) -> None:
        """Use `from_arrays`, which checks."""
        super().__init__(leaves, treedef)
        self._arrays: tuple[np.ndarray, ...] = tuple(arrays)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All members of each leaf, in any byte order. Typed keys are given as their data."""
        return self._arrays

    @property
    def local(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._arrays[0].shape[0]

    def _at(self, which: Which) -> list[np.ndarray]:
        return [native_view(array[which]) for array in self._arrays]

    def __str__(self) -> str:
        return describe_source(self, "in memory")

    def spec(self) -> None:
        return None

    def snapshot(self) -> ArraySource:
        arrays = list(map(snapshot, self._arrays))
        if all(new is old for new, old in zip(arrays, self._arrays, strict=True)):
            return self
        return ArraySource(arrays, self._leaves, self._treedef)

    def spill(self, folder: str | os.PathLike[str]) -> NpySource:
        """Writes the arrays as .npy files, from which any process can read them.

        Args:
            folder: created (mode 0700) if it does not exist. The files get unique names.

        Returns:
            The source of these files.

        Raises:
            SourceError: a file cannot be written.
        """
        # Only what writes arrays to files knows of these.
        from beamjax.sources.arrays.npy_writing import blocks_in_order, write_members

        return write_members(self, blocks_in_order(self), folder)


def from_arrays(tree: Any) -> ArraySource:
    """A placed input from arrays in memory.

    Args:
        tree: pytree of NumPy or JAX arrays of shape (n, ...), typed keys included. Only arrays on
            an accelerator are copied.

    Returns:
        A `Source` with n members and the tree of `tree`.

    Raises:
        StructureError: a leaf is no array, is a scalar, or has a dtype that JAX does not know.
        PlacementError: n is not the same for all leaves.
    """  # noqa: DOC501
    import jax

    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays, leaves, names = [], [], []
    for path, value in paths:
        name = jax.tree_util.keystr(path)
        impl = None
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            if value.ndim == 0:
                raise scalar_error(name, str(value.dtype))
            impl = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        array = checked_leaf(name, value)
        arrays.append(array)
        names.append(name)
        leaves.append(LeafSpec(array.shape[1:], native_dtype(array.dtype), impl, name))
    check_sizes(names, [array.shape[0] for array in arrays])
    return ArraySource(arrays, leaves, treedef)
