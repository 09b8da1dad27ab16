"""Additions of float64 vectors that report whether one of them has rounded.

A processor raises a flag, "inexact", if the result of an operation is rounded. One look at the flag
after NumPy has added whole vectors shows whether all additions were exact, at no cost per addition.
Where there is no such flag, nothing is added here, and the caller adds to its digits.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

# By IEEE 754-2019 (section 7.6), the flag stays raised until it is lowered, and each thread has its
# own flags. Code that runs in between can only raise it, since libraries do not lower it (C17,
# 7.6.2 and F.8.3). Then the caller takes the slow way without need, and its sum is the same.
FE_INEXACT = {"x86_64": 0x20, "aarch64": 0x10, "arm64": 0x10}
"""The flag in `fenv.h`, by machine."""

PROBED = 1 << 15
"""Length of the vectors on which NumPy's additions are tested."""

Vectors: TypeAlias = np.ndarray | Sequence[np.ndarray]
Adder: TypeAlias = Callable[[np.ndarray, Vectors, np.ndarray], bool]

_local = threading.local()


def add_exactly(total: np.ndarray, rows: Vectors) -> int:
    """Adds rows to `total` while each sum is a double; returns how many it added."""
    # Of an array, all rows are added or none. NumPy chooses the order of its additions, so the
    # number may depend on the order of the rows, but the sum does not. Infinities and NaN are
    # either added by the rules of IEEE 754 or not added. The caller handles NumPy's warnings
    # (`np.errstate`).
    buffer, adder = _buffer(len(total)), _adder()
    if adder is None:
        return 0
    # The sum is made in the buffer, so that `total` is unchanged if an addition rounds.
    if len(rows) == 1 or isinstance(rows, np.ndarray):
        if not adder(total, rows, buffer):
            return 0
        total[...] = buffer
        return len(rows)
    # Adding the last row moves the sum from the buffer to `total`, which saves a copy.
    if not adder(total, rows[:-1], buffer):
        return 0
    if not adder(buffer, rows[-1:], total):
        total[...] = buffer
        return len(rows) - 1
    return len(rows)


def _buffer(size: int) -> np.ndarray:
    """A float64 vector (size,) of this thread, which is reused and so stays in the cache."""
    buffer: np.ndarray | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = np.empty(max(size, PROBED))
    return buffer[:size]


@functools.cache
def _adder() -> Adder | None:
    """The function that adds and looks at the flag; None if the flag is not reliable here."""
    add = _with_flag()
    return add if add is not None and _notices_rounding(add) else None


def _with_flag() -> Adder | None:
    """A function that adds rows, and says whether no sum was rounded; None without flag."""
    flag = FE_INEXACT.get(platform.machine())
    try:
        library = ctypes.PyDLL(None)  # keeps the GIL, as the calls are very short
        lower, is_raised = library.feclearexcept, library.fetestexcept
    except (OSError, AttributeError, TypeError):
        return None
    if flag is None:
        return None

    def add(total: np.ndarray, rows: Vectors, out: np.ndarray) -> bool:
        lower(flag)
        if isinstance(rows, np.ndarray):
            np.add.reduce(rows, axis=0, dtype=np.float64, out=out)
            np.add(total, out, out=out)
        else:
            np.add(total, rows[0], out=out)
            for row in rows[1:]:
                np.add(out, row, out=out)
        return not is_raised(flag)

    return add


def _notices_rounding(add: Adder) -> bool:
    """Whether an adder reports a single rounded sum at any position, and reports nothing else."""
    # NumPy may add in other threads, whose flags are not seen here. Each has a long range.
    ones, out = np.ones(PROBED), np.empty(PROBED)
    for dtype, terms in itertools.product((np.float32, np.float64), (1, 2)):
        rows = np.ones((terms, PROBED), dtype)
        for position in range(0, PROBED, PROBED // 4 + 1):
            rows[0, position] = 2.0**-60  # 1 + 2^-60 rounds to 1.
            if add(ones, list(rows), out) or add(ones, rows, out):
                return False
            rows[0, position] = 1
            if not (add(ones, list(rows), out) and add(ones, rows, out)):
                return False
    return True
