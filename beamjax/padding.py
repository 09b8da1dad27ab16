"""Members of unequal length, padded; and whether a body keeps its hands off the padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from beamjax.errors import StructureError

FAR = 0.05
"""The share of the largest value by which results may differ: more than sums of other order do."""


def padded_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Members of fewer rows with zeros up to this shape of one."""
    if array.shape[1:] == shape:
        return array
    longer = np.zeros((len(array), *shape), array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def check_padding(
    shapes: Sequence[tuple[int, ...]], short: Sequence[np.ndarray], long: Sequence[np.ndarray]
) -> None:
    """Compares what a body gives for the same members with less and with more padding.

    Args:
      shapes: of a member of each operand, with less padding.
      short: what the body gave for it.
      long: what it gave with more.

    Raises:
      StructureError: they have nothing to do with each other.
    """
    for left, right in zip(short, long, strict=True):
        if _far(left, right):
            raise StructureError(
                f"for members of shapes {', '.join(str(list(shape)) for shape in shapes)}, found "
                f"{_some(left)}, but {_some(right)} when they are padded to the longest; expected "
                "a body whose results do not depend on padding. Leave out the rows whose mask is "
                "False (jnp.sum(x, where=mask), or weights of 0), and count mask.sum() rows rather "
                "than x.shape[0]; or, where it has to depend on the length, as with permutations "
                "of all rows, make the source with one bucket."
            )


def _far(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return True
    kind = np.complex128 if np.issubdtype(left.dtype, np.complexfloating) else np.float64
    a, b = left.astype(kind), right.astype(kind)
    known = np.isfinite(a) & np.isfinite(b)
    if (np.isfinite(a) != np.isfinite(b)).any():
        return True
    largest = max(np.abs(b[known]).max(initial=0), np.abs(a[known]).max(initial=0))
    return bool(np.abs(a[known] - b[known]).max(initial=0) > FAR * largest)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=4, separator=", ")
