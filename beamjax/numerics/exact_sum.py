"""Exact sums of float vectors: the bits of the result do not depend on the order of the terms.

`ExactSum` cuts a vector into blocks, holds a long fixed-point number for each coordinate
(`superaccumulator`), and rounds once at the end (`rounding`). No addition rounds, so the result is
the correctly rounded sum or mean, in whatever order shards are added, bundled and merged.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from beamjax.errors import WorkerError
from beamjax.numerics.accumulators import Accumulator, in_parts
from beamjax.numerics.exact_add import Vectors
from beamjax.numerics.rounding import (
    DIVISOR_LIMIT,
    Pair,
    divide,
    divide_to_float32,
    round_pair,
    total_of,
)
from beamjax.numerics.superaccumulator import BLOCK, LOWEST, Digits, pack, unpack
from beamjax.storage.arrays import Joined

if TYPE_CHECKING:
    from beamjax.numerics.reducers import Reducer

MAX_ROWS = 254
"""Largest number of partials of which a small accumulator holds copies, to add them all at once.
Digits can take so many without a carry (`superaccumulator.CAPACITY`)."""

MAX_COPIED = 1 << 15
"""Largest number of values of all these copies, so that they stay in the second-level cache."""

MAX_WAITING = 4
"""Number of read-only partials that a large accumulator holds, to add them all at once. Its sums
are then read from memory and written back once for all of them."""

SHARED = 4
"""Number of blocks whose memory is allocated at once: 4 MiB. From this size on, NumPy asks for
pages of 2 MiB, which are first touched in a tenth of the time of small pages."""


def check_subnormals() -> None:
    """Checks that this thread computes with subnormal numbers."""
    if _flushes_subnormals():
        raise WorkerError(
            "exact sums: found that 1e-40 + 0 is 0 in float32 on this thread, expected 1e-40. A "
            "library in this process, probably one built with -ffast-math, has switched the "
            "processor to flush subnormal numbers to zero. Do not load it in workers, or choose "
            'reduction="fast".'
        )


def with_subnormals() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread, and those that it starts, have subnormal numbers."""
    # XLA flushes them to zero on its threads, on which a callback of the user may run a program.
    return _usual_rounding() if _flushes_subnormals() else contextlib.nullcontext()


@contextlib.contextmanager
def _usual_rounding() -> Iterator[None]:
    """A context in which this thread has the usual floating-point environment."""
    try:
        libm = ctypes.CDLL("libm.so.6")
    except OSError:  # not glibc: `check_subnormals` reports it
        yield
        return
    before = ctypes.create_string_buffer(64)  # glibc's fenv_t has at most 32 bytes
    libm.fegetenv(before)
    libm.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        libm.fesetenv(before)


def _flushes_subnormals() -> bool:
    return not _SUBNORMAL + _ZERO > _ZERO


_SUBNORMAL = np.array([71362], np.int32).view(np.float32)[0]  # 1e-40, also if that is flushed here
_ZERO = np.float32(0)


class ExactSum(Accumulator):
    """The exact sum of vectors, one per shard."""

    name = "exact_sum"
    is_exact = True

    def __init__(self, reducer: Reducer, dtype: np.dtype, size: int) -> None:
        check_subnormals()
        super().__init__(reducer, dtype, size)
        # The real and the imaginary part of a complex number are separate coordinates.
        self._parts = 2 if self.dtype.kind == "c" else 1
        self._real = np.dtype(f"f{self.dtype.itemsize // self._parts}")
        self._length = size * self._parts
        self._blocks: dict[int, Digits] = {}
        # Partials to add: copies if the accumulator is small, else read-only arrays.
        self._waiting: list[np.ndarray] = []
        copied = min(MAX_ROWS, MAX_COPIED // max(self._length, 1))
        self._is_small = copied > 1
        self._max_waiting = copied if self._is_small else MAX_WAITING
        # Only sums of float32 mostly need no digits, and gain by adding several rows at once.
        if not self._is_small and self._real != np.float32:
            self._max_waiting = 1

    @staticmethod
    def exactness(dtype: np.dtype) -> str:
        return "exact over shards: rounded once, the same bits in any order"

    @staticmethod
    def bytes_each(dtype: np.dtype, most: bool) -> int:
        parts = 2 if dtype.kind == "c" else 1
        wide = dtype.itemsize // parts > 4
        # Numbers of like size have three digits in float64, and those of float32 are in `held`. A
        # million of them may need two or three digits more, and infinities.
        digits = 3 if wide else 1
        return parts * (8 * (digits + 2 + wide) + 1 if most else 8 * digits)

    @property
    def nbytes(self) -> int:
        waiting = sum(partial.nbytes for partial in self._waiting)
        return waiting + sum(block.nbytes for block in self._blocks.values())

    def _add(self, partial: np.ndarray, shard: int) -> None:
        if self._parts == 2:
            partial = np.ascontiguousarray(partial).view(self._real)
        self._waiting.append(partial.copy() if self._is_small else partial)
        # The caller may change a writeable array once this returns, so it is added now.
        may_change = partial.flags.writeable and not self._is_small
        if may_change or len(self._waiting) >= self._max_waiting:
            self._flush()

    def _merge(self, other: ExactSum) -> None:
        pairs = [(self._block(number), block) for number, block in other._blocks.items()]

        def merge(first: int, last: int) -> None:
            check_subnormals()
            with np.errstate(all="ignore"):
                for mine, block in pairs[first:last]:
                    mine.merge(block)

        in_parts(len(pairs), self._length, merge)
        if other._waiting:
            self._deposit(other._rows())

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The sums of the coordinates [lo, hi), correctly rounded."""
        return self._rounded(lo, hi, dtype, 1)

    def mean(self, lo: int, hi: int, count: int, dtype: np.dtype) -> np.ndarray:
        """The sums of the coordinates [lo, hi) over `count`, correctly rounded; NaN if it is 0."""
        count -= self.left_out
        if count == 0:
            return np.full(hi - lo, np.nan).astype(dtype)
        return self._rounded(lo, hi, dtype, count)

    def compact(self) -> None:
        """Brings the state to the canonical form, which depends on the sum alone."""
        self._flush()
        blocks = list(self._blocks.values())

        def settle(first: int, last: int) -> None:
            with np.errstate(all="ignore"):
                for block in blocks[first:last]:
                    block.settle()

        in_parts(len(blocks), self._length, settle)
        self._blocks = {
            number: block
            for number, block in sorted(self._blocks.items())
            if block.held is not None
            or block.vectors
            or (block.special is not None and block.special.any())
        }

    def _arrays(self) -> list[np.ndarray | Joined]:
        self.compact()
        return pack(self._blocks)

    def _restore(self, arrays: list[np.ndarray]) -> None:
        self._blocks = unpack(arrays, self._length, LOWEST[self._real])

    def _block(self, number: int) -> Digits:
        block = self._blocks.get(number)
        if block is None:
            size = min(BLOCK, self._length - number * BLOCK)
            block = self._blocks[number] = Digits(size, LOWEST[self._real])
        return block

    def _flush(self) -> None:
        if self._waiting:
            rows, self._waiting = self._rows(), []
            self._deposit(rows)

    def _rows(self) -> Vectors:
        """The partials that are not added yet, as real numbers."""
        if not self._is_small:
            return self._waiting
        return np.stack(self._waiting) if len(self._waiting) > 1 else self._waiting[0][None]

    def _deposit(self, rows: Vectors) -> None:
        """Adds rows (length,) of real numbers."""
        count = -(-self._length // BLOCK)
        blocks = [self._block(number) for number in range(count)]
        _allocate([block for block in blocks if block.needs_buffer])

        def add(first: int, last: int) -> None:
            check_subnormals()
            with np.errstate(all="ignore"):
                for number in range(first, last):
                    part = slice(number * BLOCK, (number + 1) * BLOCK)
                    if isinstance(rows, np.ndarray):
                        blocks[number].add(rows[:, part])
                    else:
                        blocks[number].add([row[part] for row in rows])

        in_parts(count, self._length, add)

    def _rounded(self, lo: int, hi: int, dtype: np.dtype, divisor: int) -> np.ndarray:
        if self._waiting:
            self._flush()
        dtype = np.dtype(dtype)
        real = dtype if self._parts == 1 else np.dtype(f"f{dtype.itemsize // 2}")
        lo, hi = lo * self._parts, hi * self._parts
        result = np.zeros(hi - lo, real)
        blocks = list(self._blocks.items())

        def put(first_block: int, last_block: int) -> None:
            with np.errstate(all="ignore"):
                for number, block in blocks[first_block:last_block]:
                    start = number * BLOCK
                    first, last = max(lo, start), min(hi, start + block.size)
                    if first < last:
                        part = _rounded_block(block, first - start, last - start, real, divisor)
                        result[first - lo : last - lo] = part

        in_parts(len(blocks), hi - lo, put)
        return result if self._parts == 1 else result.view(dtype)


def _allocate(blocks: list[Digits]) -> None:
    """Allocates the buffers of blocks, several at once."""
    for first in range(0, len(blocks), SHARED):
        some = blocks[first : first + SHARED]
        ends = list(itertools.accumulate([block.size for block in some]))
        shared = np.empty(ends[-1])
        for block, end in zip(some, ends, strict=True):
            block.buffer = shared[end - block.size : end]


def _rounded_block(block: Digits, lo: int, hi: int, dtype: np.dtype, divisor: int) -> np.ndarray:
    """The numbers of a block over `divisor`, rounded to `dtype`, with infinities and NaN."""
    block.split_special()
    held = None if block.vectors else block.held
    if held is not None and dtype == np.float32 and 1 < divisor < DIVISOR_LIMIT:
        result = divide_to_float32(held[lo:hi], divisor)
    else:
        head, tail = _pair(block, lo, hi) if held is None else (held[lo:hi], None)
        integer = lambda position: block.integer(lo + position)
        result = round_pair(*divided(head, tail, divisor, block.lowest, integer), dtype)
    return result if block.special is None else with_special(result, block.special[lo:hi])


def _pair(block: Digits, lo: int, hi: int) -> Pair:
    """The numbers of a block, each as a pair of doubles; see `rounding`."""
    if block.bound > 1 or block.held is not None:
        block.carry()
    return total_of(block.terms(lo, hi), hi - lo)


def divided(
    head: np.ndarray,
    tail: np.ndarray | None,
    divisor: int | np.ndarray,
    lowest: int,
    integer: Callable[[int], int],
) -> Pair:
    """Numbers over `divisor`; `integer` gives one of them in units of 2^lowest."""
    is_number = isinstance(divisor, int)
    if is_number and lowest == LOWEST[np.dtype(np.float32)] and divisor < DIVISOR_LIMIT:
        # Sums of float32 are 0 or in [2^-149, 2^192].
        return (head, tail) if divisor == 1 else divide(head, tail, divisor)
    if is_number and divisor == 1:
        outside = ~np.isfinite(head)
    else:
        size = np.abs(head)
        outside = ~((size >= 2.0**-700) & (size <= 2.0**990) | (size == 0))
        outside |= divisor >= DIVISOR_LIMIT
        head, tail = divide(head, tail, divisor)
    if outside.any():
        # Python's integers divide, which take about a microsecond each.
        head, tail = head.copy(), np.zeros(len(head)) if tail is None else tail
        divisors = np.broadcast_to(divisor, head.shape)
        for at in np.flatnonzero(outside).tolist():
            head[at], tail[at] = quotient(integer(at), int(divisors[at]) << -lowest)
    return head, tail


def with_special(values: np.ndarray, special: np.ndarray) -> np.ndarray:
    """Puts infinities and NaN, which have one pattern of bits, where `special` is not 0."""
    values = np.where(special == 0, values, special.astype(values.dtype))
    values[np.isnan(special)] = np.float32(np.nan).astype(values.dtype)
    return values


def quotient(numerator: int, denominator: int) -> tuple[float, float]:
    """The quotient rounded to nearest, and a number with the sign of what that left out."""
    try:
        head = numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf, 0.0
    # Near the ends of float64, a tail of 2^-1000 would count, so there is none.
    if not 2.0**-900 < abs(head) < 2.0**900:
        return head, math.copysign(0.0, head)  # -0 + 0 would be +0
    over, under = head.as_integer_ratio()
    left_out = numerator * under - over * denominator
    return head, ((left_out > 0) - (left_out < 0)) * 2.0**-1000
