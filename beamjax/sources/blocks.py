"""Members that are decoded by blocks: row groups, record batches, chunks.

A process decodes a block that several shards share once, while the block stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from beamjax.sources.source_base import LeafSpec, Which
from beamjax.storage.shared_cache import Arrays


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
    blocks: Callable[[int, int], Iterator[SourceBlock]],
    load: Callable[[SourceBlock], Arrays],
    which: Which,
) -> Arrays:
    """Members of blocks, each of which is loaded once; `blocks` are those of a range of members."""
    if not isinstance(which, slice):
        return _rows(leaves, blocks, load, which)
    start, stop = which.start, which.stop
    members: Arrays = []
    for block in blocks(start, stop):
        low, high = max(start, block.first), min(stop, block.last)
        parts = [array[low - block.first : high - block.first] for array in load(block)]
        if (low, high) == (start, stop):
            return parts
        # Allocated only after a block was read: a damaged spec can't cause a large allocation.
        members = members or [np.empty((stop - start, *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, part in zip(members, parts, strict=True):
            whole[low - start : high - start] = part
    members = members or [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
    for whole in members:
        whole.flags.writeable = False
    return members


def _rows(
    leaves: Sequence[LeafSpec],
    blocks: Callable[[int, int], Iterator[SourceBlock]],
    load: Callable[[SourceBlock], Arrays],
    numbers: np.ndarray,
) -> Arrays:
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    members: Arrays = []
    done = 0
    while done < len(numbers):
        first = int(ascending[done])
        block = next(blocks(first, first + 1))
        end = int(ascending.searchsorted(block.last))
        rows, places = ascending[done:end] - block.first, order[done:end]
        parts = load(block)
        members = members or [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, part in zip(members, parts, strict=True):
            whole[places] = part[rows]
        done = end
    return members or [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
