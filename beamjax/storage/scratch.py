"""Temporary arrays on disk, and disk space for files that are written through memory maps."""

from __future__ import annotations

import collections
import errno
import math
import os
import tempfile
import weakref
from dataclasses import dataclass

import numpy as np

from beamjax.errors import SourceError

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of `posix_fallocate` on file systems that do not support it."""
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class Slot:
    """The place of a flat array in a `Scratch`."""

    offset: int
    nbytes: int
    dtype: np.dtype


def file_array(shape: tuple[int, ...], dtype: np.dtype, folder: str | None = None) -> np.ndarray:
    """An array of zeros in a temporary file, which is removed with the array.

    Args:
      shape: the shape of the array, without a 0.
      dtype: the dtype of the array.
      folder: the folder of the file; None for the default of `tempfile`.

    Raises:
      SourceError: the file can't be made, or there is no space for it.
    """
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


class Scratch:
    """Flat arrays in one temporary file, which is removed with this object or the process.

    It is for one thread at a time.

    Args:
      folder: the folder of the file; None for the default of `tempfile`.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder or tempfile.gettempdir()
        self._file: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = collections.defaultdict(list)

    def write(self, array: np.ndarray) -> Slot:
        """Writes an array.

        Raises:
          SourceError: there is no space, or the folder can't be written.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        free = self._free[flat.nbytes]
        slot = Slot(free.pop() if free else self._end, flat.nbytes, flat.dtype)
        data = flat.view(np.uint8).data if flat.nbytes else memoryview(b"")
        try:
            file, done = self._opened(), 0
            while done < slot.nbytes:  # Linux writes at most 2 GiB in a call.
                done += os.pwrite(file, data[done:], slot.offset + done)
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot write {slot.nbytes} bytes of a large reduction ({error}); "
                "partial results of shards are stored there; set the option work_folder, or "
                "TMPDIR, to a folder with more space"
            ) from error
        self._end = max(self._end, slot.offset + slot.nbytes)
        return slot

    def read(self, slot: Slot) -> np.ndarray:
        """The array, in memory.

        Raises:
          SourceError: the file can't be read.
        """
        found = np.empty(slot.nbytes, np.uint8)
        file, done = self._opened(), 0
        while done < slot.nbytes:
            count = os.preadv(file, [found[done:].data], slot.offset + done)
            if not count:
                raise SourceError(f"{self.folder}: a file of a large reduction ended too early")
            done += count
        return found.view(slot.dtype)

    def free(self, slot: Slot) -> None:
        """Frees the place of an array for another one of the same number of bytes."""
        self._free[slot.nbytes].append(slot.offset)

    def _opened(self) -> int:
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="beamjax-", dir=self.folder)
            weakref.finalize(self, os.close, self._file)
            # The file has no name from here on; its space is freed when it is closed.
            os.unlink(path)
        return self._file


def allocate(file: int, offset: int, nbytes: int) -> None:
    """Reserves space on the disk for a range of a file that holds no data yet.

    A file that is extended without being written has no blocks on the disk. If the disk is full
    when a memory map of it is written, SIGBUS ends the process. Reserving the blocks first raises
    an error instead.

    Args:
      file: descriptor of a file that is open for writing.
      offset: start of the range, in bytes.
      nbytes: length of the range.

    Raises:
      OSError: there is no space for it, or the file can't be written.
    """
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
