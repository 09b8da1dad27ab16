"""Members as users have them, trees of arrays, numbers and texts, as arrays of the leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.errors import StructureError
from beamjax.sources.source_base import LeafSpec
from beamjax.storage.arrays import dtype_from_name, dtype_name

_NUMBERS = (bool, int, float, complex)
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
            return [leaf_array(v, leaf) for v, leaf in zip(values, self.leaves, strict=True)]
        except StructureError as error:
            raise StructureError(
                f"{self.caller}: {error}; the element is {shown(member)}"
            ) from None


def shown(element: Any) -> str:
    """The beginning of an element, in one line."""
    return f"{' '.join(repr(element).split()):.200}"


def leaf_array(value: Any, leaf: LeafSpec) -> np.ndarray:
    """A leaf of a member as a plain array; StructureError if it is another value."""
    # Arrays must have the expected dtype; Python numbers, and lists of them, are converted to it.
    # Texts become the bytes of an expected uint8[width], with zeros at their end.
    kind = leaf.key_impl, leaf.shape, leaf.dtype
    if type(value) is np.ndarray and (None, value.shape, value.dtype) == kind:
        return value
    if type(value) in _NUMBERS and not leaf.shape:
        return _number(value, leaf)
    if isinstance(value, str | bytes) and leaf.dtype == np.uint8 and len(leaf.shape) == 1:
        return _text(value, leaf)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _numbers(value, leaf)
    stored = _stored(value)
    if stored is None:
        raise _refused(_described(value), leaf)
    if (_key_impl(value), stored.shape, stored.dtype.newbyteorder("=")) != kind:
        raise _refused(_described(value), leaf)
    return stored.astype(leaf.dtype, copy=False)


def _key_impl(value: Any) -> str | None:
    """The implementation of typed keys; None for other values."""
    import jax

    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return str(jax.random.key_impl(value)) if is_key else None


def _stored(value: Any) -> np.ndarray | None:
    """A value that converts itself to an array, keys to their data; None for any other value."""
    if isinstance(value, np.ma.MaskedArray) or not hasattr(value, "__array__"):
        return None
    from beamjax.bodies.load import unwrap

    try:
        return np.asarray(value if _key_impl(value) is None else unwrap(value))
    except (TypeError, ValueError, RuntimeError):
        return None


def _number(value: Any, leaf: LeafSpec) -> np.ndarray:
    if leaf.dtype.kind in _WIDER.get(np.asarray(value).dtype.kind, ""):
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            return np.asarray(value, leaf.dtype)
    raise _refused(_described(value), leaf)


def _text(value: str | bytes, leaf: LeafSpec) -> np.ndarray:
    data = value.encode() if isinstance(value, str) else value
    if len(data) > leaf.shape[0]:
        raise _refused(f"a text of {len(data)} bytes", leaf)
    return np.frombuffer(data.ljust(leaf.shape[0], b"\0"), np.uint8)


def _numbers(values: Sequence[Any], leaf: LeafSpec) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise _refused(f"lists of unequal lengths {shown(values)}", leaf) from None
    # NumPy makes an empty list float64, whatever it is meant to hold.
    known = not array.size or leaf.dtype.kind in _WIDER.get(array.dtype.kind, "")
    if array.shape != leaf.shape or not known:
        raise _refused(f"{array.dtype}{list(array.shape)}", leaf)
    with np.errstate(over="ignore"):
        cast = array.astype(leaf.dtype)
    if leaf.dtype.kind in "iu" and (cast != array).any():
        raise _refused(f"{shown(values)}, which {leaf.dtype} can't hold,", leaf)
    return cast


def _refused(description: str, leaf: LeafSpec) -> StructureError:
    where = f"leaf {leaf.path}" if leaf.path else "a member"
    return StructureError(f"found {description} as {where}, expected {leaf}")


def _described(value: Any) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {shown(value):.60}"


def as_arrays(member: Any, where: str) -> Any:
    """The leaves of a member as arrays, to take its type from."""
    import jax

    def array(path: Any, value: Any) -> Any:
        name = jax.tree_util.keystr(path)
        try:
            if type(value) in _NUMBERS:
                return np.asarray(value, jax.eval_shape(jax.numpy.asarray, value).dtype)
            if isinstance(value, jax.Array):
                return value
            stored = _stored(value)
            if stored is not None:
                return stored.astype(dtype_from_name(dtype_name(stored.dtype)), copy=False)
        except (OverflowError, TypeError, ValueError) as error:
            raise StructureError(f"{where}{name}: {error}") from error
        raise StructureError(
            f"{where}{name}: found {_described(value)}, expected a NumPy or JAX array or a number."
        )

    return jax.tree_util.tree_map_with_path(array, member)
