"""Converts a member of a user, a tree of arrays, numbers and lists, to arrays of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.errors import StructureError
from beamjax.sources.leaf_checks import native_dtype
from beamjax.sources.source_base import LeafSpec

_WIDER = {"b": "b", "i": "iufVc", "u": "iufVc", "f": "fVc", "c": "c"}
"""Kinds of dtypes to which plain numbers of a kind may be converted; V are dtypes of ml_dtypes."""


@dataclass(frozen=True)
class MemberType:
    """The expected type of each member."""

    caller: str  # for messages: "from_beam"
    template: Any  # a tree of the numbers of the leaves: a PyTreeDef can't be pickled
    leaves: tuple[LeafSpec, ...]

    def arrays(self, member: Any) -> list[np.ndarray]:
        """The leaves of a member."""
        import jax

        treedef: Any = jax.tree_util.tree_structure(self.template)
        tree = member
        if isinstance(self.template, dict) and not isinstance(member, dict):
            # Rows of Beam and named tuples count as dicts.
            as_dict = getattr(member, "_asdict", None)
            tree = as_dict() if callable(as_dict) else member
        try:
            values = treedef.flatten_up_to(tree)
        except (TypeError, ValueError) as error:
            raise StructureError(
                f"{self.caller}: found the element {shown(member)}, expected the tree of `like`, "
                f"{treedef}: {' '.join(str(error).split())}"
            ) from None
        try:
            return [_array(v, leaf) for v, leaf in zip(values, self.leaves, strict=True)]
        except StructureError as error:
            raise StructureError(
                f"{self.caller}: {error}; the element is {shown(member)}"
            ) from None


def shown(element: Any) -> str:
    """The beginning of an element, in one line."""
    return f"{' '.join(repr(element).split()):.200}"


def _array(value: Any, leaf: LeafSpec) -> np.ndarray:
    """A leaf of a member as a plain array."""
    # Arrays must have the expected dtype; Python numbers, and lists of them, are converted to it.
    # Texts become the bytes of an expected uint8[width], with zeros at their end.
    if type(value) is np.ndarray and (value.shape, value.dtype) == (leaf.shape, leaf.dtype):
        return value
    import jax

    from beamjax.bodies.export import unwrap

    if isinstance(value, jax.Array):
        value = np.asarray(unwrap(value))
    if isinstance(value, str | bytes) and leaf.dtype == np.uint8 and len(leaf.shape) == 1:
        data = value.encode() if isinstance(value, str) else value
        if len(data) > leaf.shape[0]:
            raise _refused(f"a text of {len(data)} bytes", leaf)
        return np.frombuffer(data.ljust(leaf.shape[0], b"\0"), np.uint8)
    plain = not isinstance(value, np.ndarray | np.generic)
    if isinstance(value, np.ma.MaskedArray) or (plain and not _is_number(value)):
        raise _refused(f"{type(value).__name__} {shown(value)}", leaf)
    try:
        array = np.asarray(value)
    except ValueError:
        raise _refused(f"lists of unequal lengths {shown(value)}", leaf) from None
    if array.shape != leaf.shape or array.dtype.kind not in "biufcV":
        raise _refused(f"{array.dtype}{list(array.shape)}", leaf)
    if not plain:
        if array.dtype.newbyteorder("=") != leaf.dtype:
            raise _refused(f"{array.dtype}{list(array.shape)}", leaf)
        return array.astype(native_dtype(leaf.dtype), copy=False)
    # NumPy makes an empty list float64, whatever it is meant to hold.
    if array.size and leaf.dtype.kind not in _WIDER.get(array.dtype.kind, ""):
        raise _refused(f"{array.dtype}{list(array.shape)}", leaf)
    with np.errstate(over="ignore"):
        cast = array.astype(leaf.dtype)
    if leaf.dtype.kind in "iu" and (cast != array).any():
        raise _refused(f"{shown(value)}, which {leaf.dtype} can't hold,", leaf)
    return cast


def _is_number(value: Any) -> bool:
    """Whether it is a Python number, or a list that may hold numbers."""
    return isinstance(value, bool | int | float | complex | Sequence) and not isinstance(
        value, str | bytes
    )


def _refused(found: str, leaf: LeafSpec) -> StructureError:
    where = f"leaf {leaf.path}" if leaf.path else "a member"
    return StructureError(f"found {found} as {where}, expected {leaf}")
