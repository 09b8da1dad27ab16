"""Checks that the accumulators share: of partials, of what they merge with, of decoded fields."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.storage.dtypes import dtype_from_name, dtype_name

MAX_SIZE = 1 << 60


def check_partial(accumulator: Any, partial: np.ndarray) -> None:
    """Checks the shape and dtype of a partial.

    Raises:
        StructureError: unless it is (size,) in the accumulator's dtype.
    """
    if partial.shape != (accumulator.size,) or partial.dtype != accumulator.dtype:
        raise StructureError(
            f"accumulator {accumulator.name!r}: found a partial {partial.dtype}"
            f"{list(partial.shape)}, expected {accumulator.dtype}[{accumulator.size}]."
        )


def check_same(accumulator: Any, other: Any) -> None:
    """Checks that two accumulators hold the same kind of number.

    Raises:
        StructureError: if kind, reduction, dtype or size differ.
    """
    mine, theirs = (
        (type(each), getattr(each, "reduction", None), each.dtype, each.size)
        for each in (accumulator, other)
    )
    if mine != theirs:
        raise StructureError(
            f"accumulator {accumulator.name!r}: found {theirs} to merge with, expected {mine}."
        )


def real_parts(vector: np.ndarray) -> np.ndarray:
    """A vector (size,) as (1, size), or as (2, size), real and imaginary, if it is complex."""
    if vector.dtype.kind != "c":
        return vector[None]
    parts = np.ascontiguousarray(vector).view(f"f{vector.dtype.itemsize // 2}")
    return parts.reshape(-1, 2).T


def from_real_parts(parts: np.ndarray) -> np.ndarray:
    """The vector of which `real_parts` are these."""
    if len(parts) == 1:
        return parts[0]
    pairs = np.ascontiguousarray(parts.T)
    return pairs.reshape(-1).view(f"c{2 * parts.dtype.itemsize}")


def describe(accumulator: Any, **more: Any) -> dict[str, Any]:
    """The fields that say what an encoded accumulator is: kind, dtype and size, and `more`."""
    name = dtype_name(accumulator.dtype)
    if accumulator.provenance:
        more["provenance"] = accumulator.provenance.to_json()
    return {"accumulator": accumulator.name, "dtype": name, "size": accumulator.size, **more}


def described(meta: dict[str, Any]) -> tuple[np.dtype, int]:
    """The dtype and size that `describe` wrote.

    Raises:
        ArrayFormatError: if one is missing or impossible.
    """
    size = meta.get("size")
    if type(size) is not int or not 0 <= size < MAX_SIZE:
        fail(f"size {size!r}", f"a number from 0 to {MAX_SIZE - 1}")
    return dtype_from_name(meta.get("dtype")), size


def left_out(meta: dict[str, Any]) -> int:
    """How many members an encoded accumulator leaves out.

    Raises:
        ArrayFormatError: if that is no number.
    """
    count = meta.get("left_out", 0)
    if type(count) is not int or not 0 <= count < MAX_SIZE:
        fail(f"{count!r} members left out", f"a number from 0 to {MAX_SIZE - 1}")
    return count


def only_array(
    arrays: list[np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray | None:
    """A copy of the one array, or None without arrays.

    Raises:
        ArrayFormatError: if there are several, or it has another shape or dtype.
    """
    if not arrays:
        return None
    array, *others = arrays
    if others or array.shape != shape or array.dtype != dtype:
        found = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        fail(f"the arrays {found}", f"one {dtype}{list(shape)}")
    return array.copy()


def fail(found: str, expected: str) -> NoReturn:
    """Raises the ArrayFormatError of an accumulator's bytes."""
    raise ArrayFormatError(f"bytes of an accumulator: found {found}, expected {expected}.")
