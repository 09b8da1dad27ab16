"""The digits of an exact sum as a few flat arrays, and back with every claim checked.

Three arrays describe the digits: `index`, int32 (rows, 3), one row (block, key, bytes) a digit
vector in ascending order; `data`, uint8, the vectors one after the other, each as little-endian
whole numbers of the fewest bytes that hold all of it, in planes (all lowest bytes, then all second
bytes, ...), or, of key -1, as the float64 numbers that stand for all digits; `flagged`, int64
(n, 2), a coordinate and the flags of infinities and NaN seen there.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.numerics.superaccumulator import BLOCK, LOWEST, WIDTH, Digits
from beamjax.storage.arrays import Joined

MAX_EXPONENT = 1024 + 64
"""2^1024 bounds what is added, and less than 2^64 terms are."""

MAX_HELD = 128 + 64
"""The same of float32."""

HELD = -1
"""Marks float64 numbers, in the place of the key of a digit."""

_NO_SIGN = np.uint64((1 << 63) - 1)


def pack(blocks: dict[int, Digits]) -> list[np.ndarray | Joined]:
    """The arrays `index`, `data` and `flagged` of blocks whose digits are carried.

    Args:
        blocks: block number -> digits.

    Returns:
        The three arrays, which depend on the digits alone.
    """
    index, data, flagged = [], [], []
    for number in sorted(blocks):
        block = blocks[number]
        if block.held is not None:
            index.append((number, HELD, 8))
            data.append(np.ascontiguousarray(block.held, "<f8").view(np.uint8))
        for key in sorted(block.vectors):
            planes = _to_planes(block.vectors[key])
            index.append((number, key, len(planes)))
            data.append(planes.reshape(-1))
        if block.flags is not None:
            places = np.flatnonzero(block.flags)
            flagged.append(np.stack([places + number * BLOCK, block.flags[places]], axis=1))
    return [
        np.array(index, np.int32).reshape(-1, 3),
        Joined(data, np.dtype(np.uint8)),
        np.concatenate([np.empty((0, 2), np.int64), *flagged]),
    ]


def unpack(arrays: list[np.ndarray], length: int, lowest: int) -> dict[int, Digits]:
    """The blocks that `pack` was given.

    Args:
        arrays: `index`, `data` and `flagged`.
        length: of the whole vector.
        lowest: as in `Digits`.

    Returns:
        Block number -> digits; no memory is taken that `data` does not pay for.

    Raises:
        ArrayFormatError: if the arrays are not what `pack` gives for some vector of this length.
    """
    expected = [("int32", 2, (3,)), ("uint8", 1, ()), ("int64", 2, (2,))]
    found = [(array.dtype.name, array.ndim, array.shape[1:]) for array in arrays]
    if found != expected:
        _fail(f"arrays {found}", f"{expected}")
    index, data, flagged = arrays
    blocks: dict[int, Digits] = {}
    before, end = (-1, HELD), 0
    for number, key, nbytes in index.tolist():
        limit = (MAX_EXPONENT - lowest) // WIDTH + 2
        least = HELD if lowest == LOWEST[np.dtype(np.float32)] else 0
        if not (before < (number, key) and 0 <= number * BLOCK < length and least <= key < limit):
            _fail(f"digit {key} of block {number} after {before}", "ascending digits in range")
        size = min(BLOCK, length - number * BLOCK)
        start, end = end, end + size * nbytes
        if not 1 <= nbytes <= 8 or end > len(data):
            _fail(f"{nbytes} bytes a number, {len(data)} in all", f"1 to 8, at least {end} in all")
        block = blocks.setdefault(number, Digits(size, lowest))
        if key == HELD:
            block.held = _checked(data[start:end], nbytes)
        else:
            block.vectors[key] = _from_planes(data[start:end].reshape(nbytes, size))
            block.bound = 1
        before = (number, key)
    if end != len(data):
        _fail(f"{len(data)} bytes of digits", f"{end}")
    _unpack_flags(blocks, flagged, length, lowest)
    return blocks


def _unpack_flags(blocks: dict[int, Digits], flagged: np.ndarray, length: int, lowest: int) -> None:
    places, flags = flagged[:, 0], flagged[:, 1]
    in_order = (np.diff(places) > 0).all() and (places >= 0).all() and (places < length).all()
    if not in_order or not ((flags >= 1) & (flags <= 7)).all():
        _fail("other flags of infinities", "ascending coordinates in range with flags 1 to 7")
    numbers = places // BLOCK
    for number in np.unique(numbers).tolist():
        here = numbers == number
        size = min(BLOCK, length - number * BLOCK)
        block = blocks.setdefault(number, Digits(size, lowest))
        block.flags = np.zeros(size, np.uint8)
        block.flags[places[here] - number * BLOCK] = flags[here]


def _to_planes(vector: np.ndarray) -> np.ndarray:
    """Whole numbers (size,) as uint8 (bytes, size), in two's complement."""
    whole = vector.astype("<i8")
    highest = max(int(whole.max()), ~int(whole.min()))
    nbytes = highest.bit_length() // 8 + 1
    return np.ascontiguousarray(whole.view(np.uint8).reshape(-1, 8)[:, :nbytes].T)


def _checked(data: np.ndarray, nbytes: int) -> np.ndarray:
    """The float64 numbers of a block, which are sums of float32; read-only."""
    if nbytes != 8:
        _fail(f"{nbytes} bytes a float64", "8")
    held = data.view("<f8")
    sizes = held.view("<u8") & _NO_SIGN
    highest = int(sizes.max())
    np.subtract(sizes, np.uint64(1), out=sizes)  # zeros become the largest, and do not count below
    if highest >= _bits(2.0**MAX_HELD) or int(sizes.min()) + 1 < _bits(2.0**-149):
        _fail("other numbers", f"sums of float32, below 2^{MAX_HELD}")
    return held


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.uint64))


def _from_planes(planes: np.ndarray) -> np.ndarray:
    """The float64 vector of which `_to_planes` gave the planes."""
    nbytes, size = planes.shape
    whole = np.zeros(size, "<i8")
    whole.view(np.uint8).reshape(size, 8)[:, 8 - nbytes :] = planes.T
    whole >>= 64 - 8 * nbytes  # the sign comes down with the shift
    half = 1 << (WIDTH - 1)
    if size == 0 or whole.min() < -half or whole.max() >= half:
        _fail("a digit outside", f"digits from {-half} to {half - 1}")
    return whole.astype(np.float64)


def _fail(found: str, expected: str) -> NoReturn:
    raise ArrayFormatError(f"digits of an exact sum: found {found}, expected {expected}.")
