"""Arrays as flat chunks for files of bounded size, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.storage import aligned

CHUNK_OVERHEAD = 256
"""Bytes of a chunk in its file besides its values, at most: header and alignment."""


def pack(arrays: Sequence[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Cuts arrays to flat chunks and gathers these to lists that fit a file of `limit` bytes."""
    chunks: list[np.ndarray] = []
    used = CHUNK_OVERHEAD
    for array in arrays:
        flat = array.reshape(-1)
        step = (limit - 2 * CHUNK_OVERHEAD) // max(flat.itemsize, 1)
        for start in range(0, flat.size if flat.nbytes else 0, step):
            chunk = flat[start : start + step]
            cost = chunk.nbytes + CHUNK_OVERHEAD
            if chunks and used + cost > limit:
                yield chunks
                chunks, used = [], CHUNK_OVERHEAD
            chunks.append(chunk)
            used += cost
    if chunks:
        yield chunks


def assemble(
    dtype: np.dtype, shape: tuple[int, ...], chunks: Iterator[np.ndarray], where: str
) -> np.ndarray:
    """One array from the flat chunks that come next; without a copy if there is only one."""
    size = math.prod(shape) if dtype.itemsize else 0
    whole, found = None, 0
    while found < size:
        chunk = next(chunks, None)
        if chunk is None or chunk.dtype != dtype or found + chunk.size > size:
            what = "nothing" if chunk is None else f"{chunk.dtype}[{chunk.size}]"
            raise ArrayFormatError(
                f"{where}: found {what} at element {found} of an array, expected {dtype}"
                f"{list(shape)}; another file took the place of this one."
            )
        if chunk.size == size:
            return chunk.reshape(shape)
        if whole is None:
            whole = aligned.empty((size,), dtype)
        whole[found : found + chunk.size] = chunk
        found += chunk.size
    whole = np.empty(shape, dtype) if whole is None else whole
    whole.flags.writeable = False
    return whole.reshape(shape)
