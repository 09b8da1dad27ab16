"""Blocks of files that are written through memory maps."""

from __future__ import annotations

import errno
import os

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_ZEROS = bytes(1 << 20)


def allocate(file: int, offset: int, nbytes: int) -> None:
    """Reserves space on the disk for a range of a file that holds no data yet.

    A file that is made longer without being written has no blocks. If the disk is full when a
    memory map of it is written, SIGBUS ends the process; here, it is an error.

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
