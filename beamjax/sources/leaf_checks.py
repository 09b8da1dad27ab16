"""Checks the leaves of placed inputs: arrays of numbers with one row per member."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import PlacementError, StructureError
from beamjax.sources.source_base import LeafSpec, PyTreeDef
from beamjax.storage.arrays import dtype_from_name, dtype_name


def leaf_name(name: str) -> str:
    """The name of a leaf in messages: a path in a tree, perhaps followed by ` (file)`."""
    if name.startswith((" ", "(")):  # The tree is a single leaf, named after its file.
        return f"placed input {name.strip()}"
    return f"placed input, leaf {name}" if name else "placed input"


def scalar_error(name: str, description: str) -> StructureError:
    """The error for a leaf without an axis of members."""
    return StructureError(
        f"{leaf_name(name)}: found {description}, which has no members; expected an array of shape "
        "(n, ...) with one row a member."
    )


def checked_leaf(name: str, value: Any, where: str = "") -> np.ndarray:
    """The leaf as a NumPy array; a view of `value` if possible."""
    if isinstance(value, bool | int | float | complex | np.generic):
        raise scalar_error(name, f"the scalar {value!r}{where}")
    if isinstance(value, np.ma.MaskedArray) or not hasattr(value, "__array__"):
        raise StructureError(
            f"{leaf_name(name)}: found {type(value).__name__}{where}, expected a NumPy or JAX "
            "array."
        )
    try:
        dtype_name(getattr(value, "dtype", None))
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StructureError(f"{leaf_name(name)}{where}: {error}") from None
    if array.ndim == 0:
        raise scalar_error(name, f"an array of shape (){where}")
    return array


def checked_dtype(name: str, shape: Sequence[int], dtype: Any, where: str) -> np.dtype:
    """The dtype, in native byte order, of a leaf that has not been read yet."""
    if not shape:
        raise scalar_error(name, f"an array of shape () in {where}")
    try:
        return native_dtype(dtype)
    except StructureError as error:
        raise StructureError(f"{leaf_name(name)} in {where}: {error}") from None


def check_sizes(names: list[str], sizes: list[int]) -> None:
    """Raises an error unless there is a leaf, and all leaves have the same number of members."""
    if not names:
        raise StructureError("placed input: found a tree without leaves, expected an array.")
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise PlacementError(
                f"{leaf_name(name)}: found {size} members, expected {sizes[0]} as in "
                f"{leaf_name(names[0])}; all leaves of a placed input have the same leading size."
            )


@functools.cache
def native_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in native byte order; StructureError for dtypes that are not raw data."""
    return dtype_from_name(dtype_name(dtype))


def native_view(array: np.ndarray) -> np.ndarray:
    """A read-only view in native byte order; a copy if the array has another byte order."""
    view = array.astype(native_dtype(array.dtype), copy=False).view()
    view.flags.writeable = False
    return view


def member_leaves(member: Any, caller: str) -> tuple[list[LeafSpec], PyTreeDef]:
    """The leaves of a member, from a tree of types or arrays."""
    import jax

    from beamjax.bodies.export import value_type

    listed, treedef = jax.tree_util.tree_flatten_with_path(member)
    leaves = []
    for path, leaf in listed:
        name = jax.tree_util.keystr(path)
        try:
            value = value_type(leaf)
            leaves.append(LeafSpec(value.shape, np.dtype(value.dtype), value.key_impl, name))
        except (AttributeError, TypeError) as error:
            raise StructureError(
                f"{caller}, member{name}: found {leaf!r:.80}, expected a jax.ShapeDtypeStruct "
                f"or an array ({error})."
            ) from error
    if not leaves:
        raise StructureError(f"{caller}, member: found a tree without leaves.")
    return leaves, treedef
