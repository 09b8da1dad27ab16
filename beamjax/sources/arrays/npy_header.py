"""The header of an .npy array, read from an open file."""

from __future__ import annotations

import tokenize
from typing import BinaryIO

import numpy as np

HEADER_ERRORS = (OSError, ValueError, EOFError, tokenize.TokenError)
"""Errors from a file that is no .npy file: headers are Python, which Python parses."""
_HEADER_BYTES = 1 << 20


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is stored by columns (Fortran order), and dtype; leaves the file after it.

    Raises:
      one of HEADER_ERRORS: the file has no such header here.
    """
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0}
    return read.get(version, np.lib.format.read_array_header_2_0)(_Short(file))


class _Short:
    """A file at its beginning: a header that says that it is big is none."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def read(self, count: int = -1, /) -> bytes:
        if not 0 <= count <= _HEADER_BYTES:
            raise ValueError(f"a header of {count} bytes")
        return self.file.read(count)
