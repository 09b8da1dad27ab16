"""Aligned memory for large arrays, which JAX uses on CPUs without a copy."""

from __future__ import annotations

import math

import numpy as np

ALIGNMENT = 64
"""The alignment in bytes that JAX needs to share the memory of a NumPy array on a CPU."""


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As `np.empty`, at an address that is a multiple of `ALIGNMENT`."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def copy(array: np.ndarray) -> np.ndarray:
    """A copy of an array in aligned memory, in C order."""
    copied = empty(array.shape, array.dtype)
    copied[...] = array
    return copied


def freeze(array: np.ndarray) -> None:
    """Makes an array of `empty` read-only, with the memory that it is a view of."""
    memory: np.ndarray | None = array
    while isinstance(memory, np.ndarray):
        memory.flags.writeable = False
        memory = memory.base
