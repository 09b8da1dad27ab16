"""Converts the digits of an exact sum to flat arrays, and back with all checks.

* `index`, int32 (rows, 2), has a row (block, key) for each vector, in ascending order.
* `data`, float64, is the concatenation of these vectors. A vector of key -1 is `Digits.held`.
* `special`, int64 (n, 2), has the coordinates of infinities and NaN, and their bits in float32.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.numerics.superaccumulator import BLOCK, LOWEST, WIDTH, Digits
from beamjax.storage.arrays import Joined

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
