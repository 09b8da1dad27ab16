"""Members that are decoded by blocks: row groups, record batches, chunks.

A process decodes a block that several shards share once, while the block stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from beamjax.sources.source_base import LeafSpec
from beamjax.storage.shared_cache import Arrays, BlockCache

BLOCKS = BlockCache()
"""Decoded blocks of this process."""


class SourceBlock(NamedTuple):
    """Members that are decoded together."""

    number: int  # of the row group or the like within the source
    start: int  # the first row in the row group; 0 unless the block is one piece of several
    first: int  # the first member, numbered within the source
    last: int  # exclusive


def ends_of(counts: Sequence[int]) -> np.ndarray:
    """Cumulative sums: a 0, then the end of each block with these numbers of members."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])


def blocks_of(ends: np.ndarray, start: int, stop: int) -> Iterator[SourceBlock]:
    """The blocks with members of a range; `ends` is what `ends_of` returned."""
    if start == stop:
        return
    number = int(ends.searchsorted(start, "right")) - 1
    first = int(ends[number])
    while first < stop:
        last = int(ends[number + 1])
        if first < last:
            yield SourceBlock(number, 0, first, last)
        number, first = number + 1, last


def read_blocks(
    leaves: Sequence[LeafSpec],
    blocks: Iterable[SourceBlock],
    load: Callable[[SourceBlock], Arrays],
    start: int,
    stop: int,
) -> Arrays:
    """Members start..stop-1: views of one block, or copies from several."""
    found: Arrays = []
    for block in blocks:
        low, high = max(start, block.first), min(stop, block.last)
        parts = [array[low - block.first : high - block.first] for array in load(block)]
        if (low, high) == (start, stop):
            return parts
        # Allocated only after a block was read: a damaged spec can't cause a large allocation.
        found = found or [np.empty((stop - start, *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, part in zip(found, parts, strict=True):
            whole[low - start : high - start] = part
    found = found or [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
    for whole in found:
        whole.flags.writeable = False
    return found
