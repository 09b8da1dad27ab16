"""Memory of arrays: aligned, so that JAX on CPUs uses it without a copy, read-only, or in files."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from typing import Any

import numpy as np

from beamjax.errors import SourceError

ALIGNMENT = 64
"""The alignment in bytes that JAX needs to share the memory of a NumPy array on a CPU."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of `posix_fallocate` on file systems that do not support it."""
_ZEROS = bytes(1 << 20)


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
    """The array, or a read-only copy if its memory is writable."""
    if is_immutable(array):
        return array
    # Along axes of stride 0, as of `np.broadcast_to`, one entry is enough.
    pairs = zip(array.strides, array.shape, strict=True)
    once = array[tuple(slice(1 if step == 0 and size else None) for step, size in pairs)]
    copied = np.array(once, subok=False)
    copied.flags.writeable = False
    return np.broadcast_to(copied, array.shape) if once.shape != array.shape else copied


def file_array(shape: tuple[int, ...], dtype: np.dtype, folder: str | None = None) -> np.ndarray:
    """An array of zeros in a temporary file, which is removed with the array."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            allocate(file.fileno(), 0, nbytes)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        raise SourceError(
            f"{folder or tempfile.gettempdir()}: cannot write {nbytes} bytes of placed values "
            f"({error}); set the option work_folder, or TMPDIR, to a folder with more space"
        ) from error


def allocate(file: int, offset: int, nbytes: int) -> None:
    """Reserves space on the disk for a range of a file that holds no data yet."""
    # A file that is extended without being written has no blocks on the disk. If the disk is full
    # when a memory map of it is written, SIGBUS ends the process. Reserving the blocks first raises
    # an error instead.
    try:
        os.posix_fallocate(file, offset, nbytes)
    except AttributeError:  # macOS
        _write_zeros(file, offset, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _write_zeros(file, offset, nbytes)


def _write_zeros(file: int, offset: int, nbytes: int) -> None:
    end = offset + nbytes
    while offset < end:
        offset += os.pwrite(file, memoryview(_ZEROS)[: end - offset], offset)
