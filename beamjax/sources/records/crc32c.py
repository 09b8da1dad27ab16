"""CRC-32C (Castagnoli) of many records at once: by `google_crc32c` if it is installed, or by NumPy.

In NumPy the bytes of all records are cut into lanes that are computed side by side. Registers are
linear over GF(2): zero bytes in front change nothing, and two lanes are one when the first is moved
on by as many zero bytes as the second has.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from beamjax.storage.arrays import Buffer

_POLYNOMIAL = 0x82F63B78  # reflected
_START = b"\x54\x64\x1f\x64"
"""What brings a register from 0 to all ones, from which the checksum starts."""
_LANES = 4096
_LANE_BYTES = 64
"""At least; shorter ones cost more to bring together than they save."""


def checksums(records: Sequence[Buffer]) -> np.ndarray:
    """The checksum of each record, as uint32."""
    fast = _library()
    if fast is not None:
        return np.fromiter(map(fast, records), np.uint32, len(records))
    found = np.empty(len(records), np.uint32)
    alike: dict[int, list[int]] = collections.defaultdict(list)
    for index, record in enumerate(records):
        alike[len(record).bit_length()].append(index)
    for indices in alike.values():
        for first in range(0, len(indices), _LANES):
            some = indices[first : first + _LANES]
            found[some] = _computed([records[i] for i in some])
    return found


def masked(checksum: np.ndarray) -> np.ndarray:
    """Checksums, uint32, as TFRecord stores them: turned, so that they may be data themselves."""
    return ((checksum >> 15) | (checksum << 17)) + np.uint32(0xA282EAD8)


def checksums_of_rows(rows: np.ndarray) -> np.ndarray:
    """The checksum of each row of bytes of the shape (rows, an even number)."""
    start = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    return ~_moved(start, np.ascontiguousarray(rows).view("<u2").T)


@functools.cache
def _library() -> Callable[[Any], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    if getattr(google_crc32c, "implementation", "") != "c":  # a byte at a time, in Python
        return None
    return lambda record: google_crc32c.value(bytes(record))


@functools.cache
def _table() -> np.ndarray:
    """What two bytes make of a register that is 0 but for them."""
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def _moved(registers: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Registers after the bytes of each, two at a time: one column for all of them."""
    table = _table()
    for column in columns:
        registers = table.take(registers.astype(np.uint16) ^ column) ^ (registers >> 16)
    return registers


def _computed(records: Sequence[Buffer]) -> np.ndarray:
    """The checksums of records of similar length."""
    longest = len(_START) + max(map(len, records))
    lanes = max(1, min(longest // _LANE_BYTES, _LANES // len(records)))
    lanes = 1 << (lanes.bit_length() - 1)
    width = 2 * -(-longest // (2 * lanes))
    rows = np.zeros((len(records), lanes * width), np.uint8)
    for row, record in zip(rows, records, strict=True):
        row[lanes * width - len(record) - len(_START) :] = np.frombuffer(
            b"".join([_START, record]), np.uint8
        )
    columns = np.ascontiguousarray(rows.view("<u2").reshape(-1, width // 2).T)
    registers = _moved(np.zeros(len(records) * lanes, np.uint32), columns)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    step = _moved(bits, np.zeros((width // 2, 1), np.uint16))
    while lanes > 1:
        pairs = registers.reshape(-1, 2)
        registers = _stepped(pairs[:, 0], step) ^ pairs[:, 1]
        step = _stepped(step, step)
        lanes //= 2
    return ~registers


def _stepped(registers: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Registers after so many zero bytes; `step` is what becomes of each bit."""
    bits = (registers[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return np.bitwise_xor.reduce(bits * step, axis=1)
