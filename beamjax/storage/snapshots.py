"""Copies of NumPy arrays that a caller can still write to."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_immutable(array: np.ndarray) -> bool:
    """Whether neither the array nor any memory that it is a view of is writable."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = memory.base
    try:
        with memoryview(memory) as view:
            return view.readonly
    except (TypeError, BufferError):  # None, or an object that shares no memory but through arrays
        return True


def snapshot(array: np.ndarray) -> np.ndarray:
    """The array, or a read-only copy if its memory is writable.

    Along axes of stride 0, as of `np.broadcast_to`, only one entry is copied.
    """
    if is_immutable(array):
        return array
    pairs = zip(array.strides, array.shape, strict=True)
    once = array[tuple(slice(1 if step == 0 and size else None) for step, size in pairs)]
    copy = np.array(once, subok=False)
    copy.flags.writeable = False
    return np.broadcast_to(copy, array.shape) if once.shape != array.shape else copy
