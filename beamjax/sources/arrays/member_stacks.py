"""Checks single members, which are trees of arrays and numbers, and stacks them leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.source_base import LeafSpec, PyTreeDef
from beamjax.storage.dtypes import dtype_from_name, dtype_name

_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}
"""The types of Python's numbers, and the kinds of dtypes that hold them."""


class MemberStack:
    """Arrays that are filled member by member."""

    def __init__(
        self, leaves: Sequence[LeafSpec], treedef: PyTreeDef | None, count: int, caller: str
    ) -> None:
        self._arrays: list[np.ndarray] = []
        self._leaves = leaves
        self._count = count
        self._treedef = treedef  # None if only the paths of the leaves are known
        self._caller = caller

    def put(self, place: int, member: Any, index: int) -> None:
        """Copies a member to its place."""
        import jax

        values, treedef = jax.tree_util.tree_flatten(member)
        if self._treedef is None or treedef != self._treedef:
            self._adopt_tree(member, treedef, index)
        where = f"{self._caller}, member {index}"
        fitting = [_fitting(v, leaf, where) for v, leaf in zip(values, self._leaves, strict=True)]
        # Allocated only after the first member was checked: a damaged spec can't cause a large
        # allocation.
        if not self._arrays:
            self._arrays = self.arrays()
        for array, value in zip(self._arrays, fitting, strict=True):
            array[place] = value

    def arrays(self) -> list[np.ndarray]:
        """An array of shape (count, *leaf.shape) for each leaf."""
        shapes = [((self._count, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        return self._arrays or [np.empty(shape, dtype) for shape, dtype in shapes]

    def _adopt_tree(self, member: Any, treedef: PyTreeDef, index: int) -> None:
        """Makes the tree of this member that of all, if only the paths of the leaves are known."""
        import jax

        found = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(member)]
        expected = [leaf.path for leaf in self._leaves]
        if self._treedef is not None or found != expected:
            raise SourceError(
                f"{self._caller}, member {index}: found a tree with the leaves {found}, expected "
                f"{expected}; every member has the tree of the first one."
            )
        self._treedef = treedef


def as_arrays(member: Any, where: str) -> Any:
    """Converts the leaves of a member to arrays."""
    import jax

    def array(path: Any, value: Any) -> Any:
        name = jax.tree_util.keystr(path)
        try:
            if type(value) in _KINDS:
                return np.asarray(value, jax.eval_shape(jax.numpy.asarray, value).dtype)
            if isinstance(value, jax.Array):
                return value
            found = _array(value)
            if found is not None:
                return found.astype(dtype_from_name(dtype_name(found.dtype)), copy=False)
        except (OverflowError, TypeError, ValueError) as error:
            raise StructureError(f"{where}{name}: {error}") from error
        raise StructureError(
            f"{where}{name}: found {_described(value)}, expected a NumPy or JAX array or a number."
        )

    return jax.tree_util.tree_map_with_path(array, member)


def _fitting(value: Any, leaf: LeafSpec, where: str) -> Any:
    """Checks a leaf of a member. Typed keys are returned as their data."""
    import jax

    found = value
    impl = None
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        found, impl = jax.random.key_data(value), str(jax.random.key_impl(value))
    if impl != leaf.key_impl:
        raise _unlike(value, leaf, where)
    if type(value) in _KINDS:
        if leaf.shape or not _holds(leaf.dtype, value):
            raise _unlike(value, leaf, where)
        return value
    array = _array(found)
    if array is None or array.shape != leaf.shape or array.dtype.newbyteorder("=") != leaf.dtype:
        raise _unlike(value, leaf, where)
    return array


def _array(value: Any) -> np.ndarray | None:
    """A value that converts itself to an array; None for any other value."""
    if isinstance(value, np.ma.MaskedArray) or not hasattr(value, "__array__"):
        return None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _holds(dtype: np.dtype, value: Any) -> bool:
    """Whether a dtype can hold a number of Python."""
    if dtype.kind not in _KINDS[type(value)]:
        return False
    return dtype.kind not in "iu" or bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


def _unlike(value: Any, leaf: LeafSpec, where: str) -> SourceError:
    name = f", leaf {leaf.path}" if leaf.path else ""
    return SourceError(
        f"{where}{name}: found {_described(value)}, expected {leaf} as in the first member."
    )


def _described(value: Any) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
