"""The digits of exact sums: vectors of long fixed-point numbers, to which floats are added exactly.

A vector is held in blocks of `BLOCK` values. A block holds, for each digit k that some value in it
needs, a float64 vector of whole numbers, and stands for the sum over k of digit[k] · 2^(unit(k)),
with unit(k) = WIDTH·k + lowest, where 2^lowest is the smallest subnormal of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.numerics.exact_add import Vectors, add_exactly
from beamjax.numerics.rounding import total_of
from beamjax.storage.arrays import Joined

# The idea: a float is a whole number times a power of two. So a sum of floats is a sum of whole
# numbers, of about 2,100 bits for float64, which is exact in any order. It is written with digits
# of `WIDTH` bits. A digit of a sum may grow beyond `WIDTH` bits before it is carried to the next
# one, as long as it is a double without rounding. The invariant is |digit| <= bound · 2^(WIDTH-1) <
# 2^53: under it, every operation on digits is exact, and the block holds the exact sum, in whatever
# order vectors are added, merged and carried. Infinities and NaN are added separately, as
# floats: the sum of infinities is one of them, or NaN, in any order.
#
# The long number is the "complete register" of U. Kulisch ("Computer Arithmetic and Validity", 2nd
# ed. 2013, chapter 8), with delayed carries as in R. M. Neal, "Fast exact summation using small and
# large superaccumulators", arXiv:1505.05571, section 3. Numbers are split into digits by the
# error-free splitting of Rump, Ogita and Oishi, "Accurate floating-point summation part I: faithful
# rounding", SIAM J. Sci. Comput. 31(1), 2008, section 3.
#
# Float32 vectors mostly need no digits: float64 has 29 bits more, so as long as no addition rounds
# (`exact_add` notices it), one float64 vector, `held`, has their exact sum. Vectors that do not fit
# there are added to the digits.

BLOCK = 1 << 17
"""Number of values in a block: large enough that threads which add to different blocks seldom wait
for the GIL between calls of NumPy, and small enough that two float64 vectors fit in a cache."""

WIDTH = 44
"""Bits of a digit: two digits hold most float32 vectors, and 255 additions need no carry."""

CAPACITY = (1 << (53 - WIDTH)) - 2
"""The largest bound of digits, which leaves one bit for the carries themselves."""

LOWEST = {np.dtype(np.float32): -149, np.dtype(np.float64): -1074}
"""Exponent of the smallest subnormal of each dtype."""


class Digits:
    """The digits of one block: an exact fixed-point number per coordinate."""

    __slots__ = ("bound", "buffer", "held", "lowest", "missed", "size", "special", "vectors")

    def __init__(self, size: int, lowest: int) -> None:
        # The number of coordinates.
        self.size = size
        # The exponent of the unit of digit 0: -149 (float32) or -1074 (float64).
        self.lowest = lowest
        # By the index of the digit, float64 vectors (size,) of whole numbers; missing ones are
        # zero.
        self.vectors: dict[int, np.ndarray] = {}
        # |digit| <= bound · 2^(WIDTH-1).
        self.bound = 0
        # float32 (size,): the sums of infinities and NaN that were added; 0 where there are none.
        self.special: np.ndarray | None = None
        # float64 (size,): a part of the sum besides the digits. It may be read-only, and infinities
        # and NaN may be in it as well as in `special`.
        self.held: np.ndarray | None = None
        # Whether the last addition did not fit in `held`.
        self.missed = False
        # The memory for the next `held`, a float64 vector (size,) with any content.
        self.buffer: np.ndarray | None = None

    @property
    def needs_buffer(self) -> bool:
        """Whether the next addition begins a new `held`."""
        return self.held is None and self.lowest == LOWEST[np.dtype(np.float32)]

    @property
    def nbytes(self) -> int:
        vectors = [*self.vectors.values(), self.special, self.held]
        return sum(vector.nbytes for vector in vectors if vector is not None)

    def unit(self, key: int) -> int:
        """Exponent of the unit of a digit."""
        return key * WIDTH + self.lowest

    def add(self, rows: Vectors) -> None:
        """Adds vectors (size,), or an array (terms, size) of at most `CAPACITY` // 2 of them."""
        # No reference to the vectors remains.
        if self.lowest == LOWEST[np.dtype(np.float32)]:
            added = self._add_held(rows)
            self.missed = self.missed and not added
            if added == len(rows):
                return
            rows = rows[added:]
        if isinstance(rows, np.ndarray):
            self._add_digits(rows)
        elif len(rows) == 1:
            self._add_digits(rows[0][None])
        else:
            for row in rows:
                self.add([row])

    def _add_held(self, rows: Vectors) -> int:
        """Adds vectors to `held`, as long as that is exact; returns how many it added."""
        if self.held is None:
            self.held = np.empty(self.size) if self.buffer is None else self.buffer
            self.buffer = None
            self.held.fill(0)
        elif not self.held.flags.writeable:
            self.held = self.held.copy()
        return add_exactly(self.held, rows)

    def _add_digits(self, rows: np.ndarray) -> None:
        """Adds vectors (terms, size) to the digits."""
        if self.missed:  # Two misses in a row: it is `held` itself that leaves no bits.
            self._release()
        self.missed = not self.missed
        top = max(float(rows.max()), -float(rows.min()))
        if not top < math.inf:
            rows, top = self._take_special(rows)
        self._split(rows, top)

    def _release(self) -> None:
        """Moves `held` to the digits."""
        self.split_special()
        held, self.held = self.held, None
        if held is not None:
            self._split(held[None], max(float(held.max()), -float(held.min())))

    def split_special(self) -> None:
        """Moves infinities and NaN that were added to `held` to `special`."""
        # Finite numbers in `held` are below 2^192, so their sum is finite.
        if self.held is not None and not math.isfinite(np.add.reduce(self.held)):
            rows, _ = self._take_special(self.held[None])
            self.held = rows[0]

    def _split(self, rows: np.ndarray, top: float) -> None:
        """Adds rows of finite numbers, |rows| <= top, to the digits."""
        # The highest digit has at most WIDTH - 1 bits, and those below it WIDTH: a bound of 2.
        if self.bound + 2 * len(rows) > CAPACITY:
            self._carry()
        self.bound += 2 * len(rows)
        for key, digit in split(rows, top, self.lowest):
            self._deposit(key, digit)

    def _take_special(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        """Moves infinities and NaN to `special`; returns the other rows and their largest size."""
        finite = np.isfinite(rows)
        self._add_special(np.where(finite, 0, rows).astype(np.float32).sum(axis=0))
        rows = np.where(finite, rows, rows.dtype.type(0))
        return rows, float(np.abs(rows).max())

    def _add_special(self, special: np.ndarray) -> None:
        self.special = special.copy() if self.special is None else self.special + special

    def _deposit(self, key: int, digit: np.ndarray) -> None:
        """Adds whole numbers (terms, size) to a digit."""
        vector = self.vectors.get(key)
        if vector is not None:
            np.add(vector, digit[0] if len(digit) == 1 else digit.sum(axis=0), out=vector)
        elif digit.any():
            self.vectors[key] = digit.sum(axis=0)

    def carry(self) -> None:
        """Brings every digit to [-2^(WIDTH-1), 2^(WIDTH-1)); drops zeros and `held`."""
        # A number has only one form with such digits, so they depend on the number alone.
        self._release()
        self._carry()

    def settle(self) -> None:
        """Brings the state to one that depends on the numbers alone."""
        # If all sums of float32 vectors are doubles, they are in `held`, and there are no digits.
        # Zeros are in neither.
        self.split_special()
        if self.special is not None:
            self._settle_special(self.special)
        if self.held is not None and not self.vectors:
            # `any` is slow for floats, and a few of them mostly decide.
            some = self.held[:64].any() or self.held.any()
            self.held = self.held if some else None
            return
        self.carry()
        if self.lowest != LOWEST[np.dtype(np.float32)]:
            return
        head, tail = total_of(self.terms(0, self.size), self.size)
        if self.vectors and tail is None and np.isfinite(head).all():
            self.vectors, self.bound = {}, 0
            self.held = head

    def _settle_special(self, special: np.ndarray) -> None:
        """Gives all NaN the same bits, and zeros to the numbers beside them and infinities."""
        # Before, they depend on the order: an infinity in `held` absorbs what is added to it.
        is_special = special != 0
        self.special = np.where(np.isnan(special), np.float32(np.nan), special)
        if self.held is not None:
            self.held = np.where(is_special, 0.0, self.held)
        self.vectors = {key: np.where(is_special, 0.0, x) for key, x in self.vectors.items()}

    def _carry(self) -> None:
        """Like `carry`, without `held`."""
        base = 2.0**WIDTH
        key = min(self.vectors, default=0)
        while key <= max(self.vectors, default=-1):
            vector = self.vectors.get(key)
            if vector is not None:
                # The nearest multiple of 2^WIDTH moves up, and the rest is in the range of a digit.
                carried = np.floor(vector * (1 / base) + 0.5)
                if carried.any():
                    above = self.vectors.get(key + 1)
                    self.vectors[key + 1] = carried if above is None else above + carried
                    carried = carried * base
                    np.subtract(vector, carried, out=vector)
            key += 1
        self.vectors = {key: vector for key, vector in self.vectors.items() if vector.any()}
        self.bound = 1  # An upper bound: it is 0 if no vector is left.

    def merge(self, other: Digits) -> None:
        """Adds the number that `other` holds, and leaves `other` as it is."""
        if other.held is not None:
            if self.held is None:
                self.held = other.held.copy()
            elif not self._add_held([other.held]):
                other = other.copy()
                other._release()
        if self.bound + other.bound > CAPACITY:
            self._carry()
        if self.bound + other.bound > CAPACITY:
            other = other.copy()
            other._carry()
        for key, vector in other.vectors.items():
            mine = self.vectors.get(key)
            if mine is None:
                self.vectors[key] = vector.copy()
            else:
                np.add(mine, vector, out=mine)
        self.bound += other.bound
        if other.special is not None:
            self._add_special(other.special)

    def copy(self) -> Digits:
        """A copy that shares no memory with this block."""
        same = Digits(self.size, self.lowest)
        same.vectors = {key: vector.copy() for key, vector in self.vectors.items()}
        same.bound = self.bound
        same.special = None if self.special is None else self.special.copy()
        same.held = None if self.held is None else self.held.copy()
        same.missed = self.missed
        return same

    def terms(self, lo: int, hi: int) -> Iterator[np.ndarray]:
        """The digits of the coordinates [lo, hi) as float64 numbers, from the highest down."""
        # Each is exact, or infinite if it is past the range of float64.
        self.split_special()
        if self.held is not None and not self.vectors:
            yield self.held[lo:hi]
            return
        self._release()
        for key in sorted(self.vectors, reverse=True):
            yield _scale(self.vectors[key][lo:hi], self.unit(key))

    def integer(self, position: int) -> int:
        """The number at one coordinate, in units of 2^lowest."""
        self._release()
        return sum(int(vector[position]) << (key * WIDTH) for key, vector in self.vectors.items())


def split(
    rows: np.ndarray, top: float, lowest: int = LOWEST[np.dtype(np.float64)]
) -> Iterator[tuple[int, np.ndarray]]:
    """The digits of finite numbers, |rows| <= top, from the highest down, in the same memory."""
    if top == 0.0:
        return
    exponent = math.frexp(top)[1]
    key = max(0, -((WIDTH - 1 + lowest - exponent) // WIDTH))
    rest = rows.astype(np.float64)
    digit = np.empty_like(rest)
    while True:
        # digit = trunc(rest / 2^unit), and rest -= digit · 2^unit, both exactly. Truncated, because
        # rounding to nearest could give 2^1024, which is no double. `rest` itself is not scaled,
        # because that could underflow.
        unit = key * WIDTH + lowest
        _scale(rest, -unit, digit)
        np.trunc(digit, out=digit)
        yield key, digit
        if key == 0:
            return
        _scale(digit, unit, digit)
        np.subtract(rest, digit, out=rest)
        if not rest.any():
            return
        key -= 1


def _scale(values: np.ndarray, exponent: int, out: np.ndarray | None = None) -> np.ndarray:
    """values · 2^exponent, in two steps if the power of two is no normal double."""
    if abs(exponent) <= 1000:
        return np.multiply(values, 2.0**exponent, out=out)
    half = exponent // 2
    return np.multiply(np.multiply(values, 2.0**half, out=out), 2.0 ** (exponent - half), out=out)


# --- as flat arrays, and back with all checks

# `pack` returns three arrays:
#
# * `index`, int32 (rows, 2), has a row (block, key) for each vector, in ascending order.
# * `data`, float64, is the concatenation of these vectors. A vector of key -1 is `Digits.held`.
# * `special`, int64 (n, 2), has the coordinates of infinities and NaN, and their bits in float32.

MAX_EXPONENT = 1024 + 64
"""Bound of the exponent of a sum: fewer than 2^64 terms below 2^1024 are added."""

MAX_HELD = 128 + 64
"""Bound of the exponent of a sum of float32."""

HELD = -1
"""The key of `Digits.held`, which is no digit."""

_NO_SIGN = np.uint64((1 << 63) - 1)


def pack(blocks: dict[int, Digits]) -> list[np.ndarray | Joined]:
    """The arrays of blocks, by number, whose digits are carried."""
    index, data, special = [], [], []
    for number in sorted(blocks):
        block = blocks[number]
        if block.held is not None:
            index.append((number, HELD))
            data.append(np.ascontiguousarray(block.held))
        for key in sorted(block.vectors):
            index.append((number, key))
            data.append(block.vectors[key])
        if block.special is not None:
            places = np.flatnonzero(block.special)
            bits = block.special[places].view(np.int32)
            special.append(np.stack([places + number * BLOCK, bits], axis=1))
    return [
        np.array(index, np.int32).reshape(-1, 2),
        Joined(data, np.dtype(np.float64)),
        np.concatenate([np.empty((0, 2), np.int64), *special]),
    ]


def unpack(arrays: list[np.ndarray], length: int, lowest: int) -> dict[int, Digits]:
    """The blocks, by number, that `pack` was given for a vector of this length."""
    # The bytes may come from anywhere: whatever `index` claims, the blocks need no more memory than
    # `data` and four bytes for each coordinate of the blocks in `special`.
    expected = [("int32", 2, (2,)), ("float64", 1, ()), ("int64", 2, (2,))]
    types = [(array.dtype.name, array.ndim, array.shape[1:]) for array in arrays]
    if types != expected:
        _fail(f"arrays {types}", f"{expected}")
    index, data, special = arrays
    blocks: dict[int, Digits] = {}
    before, end = (-1, HELD), 0
    for number, key in index.tolist():
        limit = (MAX_EXPONENT - lowest) // WIDTH + 2
        least = HELD if lowest == LOWEST[np.dtype(np.float32)] else 0
        if not (before < (number, key) and 0 <= number * BLOCK < length and least <= key < limit):
            _fail(f"digit {key} of block {number} after {before}", "ascending digits in range")
        size = min(BLOCK, length - number * BLOCK)
        start, end = end, end + size
        if end > len(data):
            _fail(f"{len(data)} digits", f"at least {end}")
        block = blocks.setdefault(number, Digits(size, lowest))
        if key == HELD:
            block.held = _checked_held(data[start:end])
        else:
            block.vectors[key] = _checked_digits(data[start:end])
            block.bound = 1
        before = (number, key)
    if end != len(data):
        _fail(f"{len(data)} digits", f"{end}")
    _unpack_special(blocks, special, length, lowest)
    return blocks


def _unpack_special(
    blocks: dict[int, Digits], special: np.ndarray, length: int, lowest: int
) -> None:
    places, bits = special[:, 0], special[:, 1].astype(np.int32)
    values = bits.view(np.float32)
    in_order = (np.diff(places) > 0).all() and (places >= 0).all() and (places < length).all()
    if not in_order or (bits != special[:, 1]).any() or np.isfinite(values).any():
        _fail("other infinities and NaN", "one at each of ascending coordinates in range")
    numbers = places // BLOCK
    for number in np.unique(numbers).tolist():
        here = numbers == number
        size = min(BLOCK, length - number * BLOCK)
        block = blocks.setdefault(number, Digits(size, lowest))
        block.special = np.zeros(size, np.float32)
        block.special[places[here] - number * BLOCK] = values[here]


def _checked_held(held: np.ndarray) -> np.ndarray:
    """The numbers of a block, which are sums of float32; read-only."""
    sizes = held.view("<u8") & _NO_SIGN
    highest = int(sizes.max())
    # Zeros wrap around to the largest number, so that they do not count for the minimum below.
    np.subtract(sizes, np.uint64(1), out=sizes)
    if highest >= _bits(2.0**MAX_HELD) or int(sizes.min()) + 1 < _bits(2.0**-149):
        _fail("other numbers", f"sums of float32, below 2^{MAX_HELD}")
    return held


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.uint64))


def _checked_digits(digits: np.ndarray) -> np.ndarray:
    """A copy of a digit vector, which must be carried."""
    half = 2.0 ** (WIDTH - 1)
    # False for NaN, too.
    in_range = (digits >= -half).all() and (digits < half).all()
    if not in_range or (np.trunc(digits) != digits).any():
        _fail("a digit outside", f"whole numbers from {-half:.0f} to {half - 1:.0f}")
    return digits.copy()


def _fail(content: str, expected: str) -> NoReturn:
    raise ArrayFormatError(f"digits of an exact sum: found {content}, expected {expected}.")
