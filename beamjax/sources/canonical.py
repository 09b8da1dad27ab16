"""64-bit values that JAX changes while it computes with 32 bits.

While `jax_enable_x64` is off, `jax.jit` wraps integers and rounds floats without a warning. beamjax
refuses integers of sources that would wrap, and reports all other changes in one warning per call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.source_base import (
    Source,
    StreamSource,
    row_text,
)
from beamjax.sources.source_kinds import FileSource, FileStream, innermost, member_text

NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        ("int64", "int32"), ("uint64", "uint32"),
        ("float64", "float32"), ("complex128", "complex64"),
    )
}  # fmt: skip
"""The dtypes that JAX uses instead of 64-bit ones while `jax_enable_x64` is off."""

SMALL = 2**24
"""float32 represents all whole numbers up to this one."""
LARGE = 2.0**63
"""Whole numbers from this one on count as measurements, in which the last digits do not matter."""

ENABLE_X64 = 'jax.config.update("jax_enable_x64", True)'


def check_members(source: Source, leaf: int, array: np.ndarray, start: int, x64: bool) -> None:
    """Refuses integers that a source has read and that would wrap in 32 bits."""
    index = _first_outside(array, x64)
    if index is not None and not may_wrap(source, leaf):
        raise _misfit(array, index, where(source, leaf, (start + index[0], *index[1:])))


def may_wrap(source: Source, leaf: int) -> bool:
    """Whether 64-bit integers of a leaf may wrap while JAX computes with 32 bits."""
    stored, _, _ = innermost(source, leaf)
    return getattr(stored, "wraps", False)


def where(source: Source, leaf: int, index: tuple[int, ...]) -> str:
    """The place of a value as text: its file, column and row, as far as they are known."""
    stored, number, at = innermost(source, leaf, index)
    if isinstance(stored, FileSource):
        return stored.where(number, at)
    return member_text(stored, number, at)


def check_chunk(
    source: StreamSource, piece: int, leaf: int, array: np.ndarray, start: int, x64: bool
) -> None:
    """As `check_members`, for consecutive rows of a piece of a stream, from row `start` on."""
    index = _first_outside(array, x64)
    if index is not None:
        at = start + index[0], *index[1:]
        if isinstance(source, FileStream):
            raise _misfit(array, index, source.where_in(piece, leaf, at))
        path, part = source.leaves[leaf].path, f"piece {piece}, " if source.pieces > 1 else ""
        text = f"{source}, {part}{f'leaf {path}, ' if path else ''}{row_text(at)}"
        raise _misfit(array, index, text)


def _first_outside(array: np.ndarray, x64: bool) -> tuple[int, ...] | None:
    """The index of the first integer of a block that would wrap, if any would."""
    if x64 or array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return None
    outside = _outside(array)
    if outside is None:
        return None
    return tuple(map(int, np.unravel_index(int(np.argmax(outside)), array.shape)))


def _outside(array: np.ndarray) -> np.ndarray | None:
    """A mask of the 64-bit integers of an array, not empty, that would wrap in 32 bits, if any."""
    limits = np.iinfo(NARROW[array.dtype.newbyteorder("=")])
    # Usually nothing would wrap. Finding the extremes allocates no array of this size.
    if limits.min <= array.min() and array.max() <= limits.max:
        return None
    return (array < limits.min) | (array > limits.max)


def _misfit(array: np.ndarray, index: tuple[int, ...], where: str) -> SourceError:
    wide = array.dtype.newbyteorder("=")
    narrow, limits = NARROW[wide], np.iinfo(NARROW[wide])
    return SourceError(
        f"{where}: found {array[index]}, which would wrap to {array[index].astype(narrow)}, "
        f"expected {limits.min} to {limits.max}: jax_enable_x64 is off, so JAX reads {wide} as "
        f"{narrow}. Run {ENABLE_X64} before you make the source, or renumber the values."
    )


def warn_of_changes(arguments: Iterable[Any], x64: bool, stacklevel: int) -> None:
    """Warns once of values that JAX will change because `jax_enable_x64` is off."""
    if x64:
        return
    changes = [text for argument in arguments if (text := _change(argument))]
    if changes:
        warnings.warn(
            f"jax_enable_x64 is off, so JAX computes with 32 bits. {'; '.join(changes)}. "
            f"{ENABLE_X64} keeps the values; 32-bit arrays and files avoid this warning.",
            stacklevel=stacklevel + 1,
        )


def _change(argument: Any) -> str:
    """What happens to the values of an argument; "" if nothing worth a warning does."""
    from beamjax.sources.array_source import ArraySource  # workers warn of nothing

    value, leaf = argument.value, argument.leaf
    if isinstance(value, Source):
        value, leaf, _ = innermost(value, leaf)
    if isinstance(value, ArraySource):
        value = value.arrays[leaf]
    if isinstance(value, Source):
        spec = value.leaves[leaf]
        if spec.dtype.kind not in "fc" or spec.dtype not in NARROW:
            return ""
        per_member = int(np.prod(spec.shape, dtype=np.int64))
        count = "All" if isinstance(value, StreamSource) else f"{len(value) * per_member:,}"
        narrow = NARROW[spec.dtype]
        return f"{argument.path}: {count} {spec.dtype} values {_of(value)} are read as {narrow}"
    if not isinstance(value, np.ndarray | np.generic):
        return ""
    array = np.asarray(value)
    changed = _changed(array)
    if not changed:
        return ""
    narrow = NARROW[array.dtype.newbyteorder("=")]
    how = "wrap" if array.dtype.kind in "iu" else "are whole numbers that change"
    return f"{argument.path}: {changed:,} of {array.size:,} {array.dtype} values {how} as {narrow}"


def _of(source: Source) -> str:
    """Where the values of a source are stored."""
    return str(source).rpartition(") ")[2]


def _changed(array: np.ndarray) -> int:
    """The number of values of an array in memory that change by more than rounding."""
    kind = array.dtype.kind
    if array.dtype.newbyteorder("=") not in NARROW or kind == "c" or not array.size:
        return 0
    if kind in "iu":
        outside = _outside(array)
        return 0 if outside is None else int(np.count_nonzero(outside))
    # fmax and fmin ignore NaN.
    if np.fmin.reduce(array, axis=None) >= -SMALL and np.fmax.reduce(array, axis=None) <= SMALL:
        return 0
    with np.errstate(over="ignore"):
        rounded = array.astype(NARROW[array.dtype.newbyteorder("=")])
    matters = ((np.abs(array) < LARGE) & (array == np.rint(array))) | np.isinf(rounded)
    return int(np.count_nonzero((rounded != array) & matters))
