"""Packed integers of protocol buffers: seven bits a byte, the last byte of each below 128."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_BYTES = 10


def decode_varints(lists: Sequence[bytes], count: int) -> np.ndarray | None:
    """The numbers of many lists, one after the other, as int64.

    Args:
      lists: each of them packed.
      count: numbers that each has.

    Returns:
      None if one has another number of them, or is none.
    """
    data = np.frombuffer(b"".join(lists), np.uint8)
    last = data < 0x80
    stops = np.cumsum([len(each) for each in lists], dtype=np.int64)
    upto = np.concatenate([[0], np.cumsum(last)])
    if (np.diff(upto[stops], prepend=0) != count).any():
        return None
    if len(data) == len(lists) * count:
        return data.astype(np.int64)
    if not count or not last[stops - 1].all():
        return None
    ends = np.flatnonzero(last)
    begins = np.concatenate([[0], ends[:-1] + 1])
    widths = ends - begins + 1
    widest = int(widths.max())
    if widest > MAX_BYTES:
        return None
    found = np.zeros(len(ends), np.uint64)
    for byte in range(widest):
        having = np.flatnonzero(widths > byte)
        bits = (data[begins[having] + byte] & 0x7F).astype(np.uint64)
        found[having] |= bits << np.uint64(7 * byte)
    return found.view(np.int64)
