"""Pads members of unequal length, and checks that results do not depend on the padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from beamjax.errors import StructureError
from beamjax.plan.steps import FusedBuffer

MORE_PADDING = 2
"""The check pads members to this multiple of the longest one. A mean over the padding then halves,
which rounding can't explain."""

FAR = 0.05
"""Largest difference of results, as a share of the largest value, that the check accepts. Sums in
another order differ by less."""

NOISE = 16
"""Differences below this many units of rounding of the largest operand are accepted: a value that
should be zero, such as a gradient at the optimum, consists of rounding errors, which differ with
the length."""


def padded_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads the rows of members with zeros, so that a member has this shape."""
    if array.shape[1:] == shape:
        return array
    longer = np.zeros((len(array), *shape), array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def without_padding(arrays: Sequence[np.ndarray], ragged: Sequence[int]) -> list[np.ndarray] | None:
    """Replaces the padding of each member by repetitions of its own rows."""
    # The check then compares results without padding to results with padding. Padding in both
    # would hide some effects: the maximum of negative rows is 0 with any padding.
    if not len(arrays[ragged[0]]):
        return None
    # A row that is zero in all arrays, the mask included if the body reads it, is padding.
    has_row: np.ndarray = np.zeros(arrays[ragged[0]].shape[:2], np.bool_)
    for i in ragged:
        x = arrays[i]
        has_row |= (x != 0).any(axis=tuple(range(2, x.ndim)))
    counts = has_row.sum(axis=1)
    if not counts.any():
        return None
    # The rows of each member in order, before its padding. A member without rows gets those of the
    # first member that has some.
    order = np.argsort(~has_row, axis=1, kind="stable")
    member = np.where(counts > 0, np.arange(len(counts)), np.argmax(counts > 0))
    repeated = np.arange(has_row.shape[1]) % counts[member][:, None]
    rows = np.take_along_axis(order[member], repeated, axis=1)
    own = np.arange(has_row.shape[1])
    rows = np.where(has_row, own, rows)
    members = np.where(has_row, np.arange(len(counts))[:, None], member[:, None])
    return [a[members, rows] if i in ragged else a for i, a in enumerate(arrays)]


def check_padding(
    shapes: Sequence[tuple[int, ...]],
    pairs: Iterable[tuple[np.ndarray, np.ndarray]],
    operands: Iterable[np.ndarray] = (),
) -> None:
    """Compares the results of a body for the same members with less and with more padding."""
    largest = max(map(_largest, operands), default=0.0)
    for left, right in pairs:
        if _far(left, right, largest):
            raise StructureError(
                f"for members of shapes {', '.join(str(list(shape)) for shape in shapes)}, found "
                f"{_some(left)}, but {_some(right)} when they are padded further; expected a body "
                "whose results do not depend on padding. Leave out the rows whose mask is False "
                "(jnp.sum(x, where=mask), or weights of 0), and count mask.sum() rows rather than "
                "x.shape[0]; or, where it has to depend on the length, as with permutations of all "
                "rows, pad the members yourself and give arrays."
            )


def same_values(
    buffers: Sequence[tuple[FusedBuffer, FusedBuffer]],
    less: Sequence[np.ndarray],
    more: Sequence[np.ndarray],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs the results of a body with less padding with those with more, of equal shapes."""
    for (left, right), x, y in zip(buffers, less, more, strict=False):
        for a, b in zip(left.reductions, right.reductions, strict=True):
            if a.size == b.size:
                yield x[a.offset :][: a.size], y[b.offset :][: b.size]
    rest = zip(less[len(buffers) :], more[len(buffers) :], strict=True)
    yield from ((x, y) for x, y in rest if x.shape == y.shape)


def _largest(array: np.ndarray) -> float:
    """The largest finite magnitude in a float array; 0 for other arrays."""
    if array.dtype.kind in "biu" or not array.size:
        return 0.0
    try:
        magnitude = np.abs(array.astype(np.complex128))
    except (TypeError, ValueError):
        return 0.0
    return float(magnitude[np.isfinite(magnitude)].max(initial=0))


def _far(left: np.ndarray, right: np.ndarray, operand: float) -> bool:
    if left.shape != right.shape:
        return True
    is_complex = left.dtype.kind == "c"
    a, b = (x.astype(np.complex128 if is_complex else np.float64) for x in (left, right))
    known = np.isfinite(a) & np.isfinite(b)
    if (np.isfinite(a) != np.isfinite(b)).any():
        return True
    largest = max(np.abs(b[known]).max(initial=0), np.abs(a[known]).max(initial=0))
    # Not for 16-bit floats, of which `NOISE` units of rounding are a large difference.
    is_precise = left.dtype.kind in "fc" and left.dtype.itemsize >= 4
    noise = NOISE * operand * np.finfo(left.dtype).eps if is_precise else 0.0
    return bool(np.abs(a[known] - b[known]).max(initial=0) > FAR * largest + noise)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=4, separator=", ")
