"""Placed inputs that are decoded by blocks: row groups, record batches, chunks.

A process decodes a block that several shards share once, while the block stays in the cache.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.source_base import HoldsLeaves, LeafSpec, PyTreeDef
from beamjax.storage.block_cache import Arrays, BlockCache

BLOCKS = BlockCache()
"""Decoded blocks of this process."""


class SourceBlock(NamedTuple):
    """Members that are decoded together.

    Attributes:
        number: the number of the row group or the like within the source.
        start: the first row of the block in the row group; 0 unless it is one piece of several.
        first: the first member, numbered within the source.
        last: the end of the members (exclusive).
    """

    number: int
    start: int
    first: int
    last: int


class BlockSource(HoldsLeaves):
    """Members in blocks, each of which is decoded as a whole.

    Args:
        leaves: one member of each.
        counts: the number of members in each block; some may be 0.
        treedef: the tree that the leaves form; a tuple by default.
    """

    def __init__(
        self, leaves: Sequence[LeafSpec], counts: Sequence[int], treedef: PyTreeDef | None = None
    ) -> None:
        super().__init__(leaves, treedef)
        self._ends = ends_of(counts)

    @abc.abstractmethod
    def _key(self, block: SourceBlock) -> Hashable:
        """A key of the data of a block, unique in this process."""

    @abc.abstractmethod
    def _decode(self, block: SourceBlock) -> Arrays:
        """All members of a block: for each leaf an array, read-only.

        Raises:
            SourceError: the block can't be read.
        """

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> Arrays:
        self.check_range(start, stop)
        return read_blocks(self._leaves, self._blocks(start, stop), self._block, start, stop)

    def _blocks(self, start: int, stop: int) -> Iterator[SourceBlock]:
        """The blocks with members of a range, in order."""
        return blocks_of(self._ends, start, stop)

    def _block(self, block: SourceBlock) -> Arrays:
        key = self.kind, self._leaves, self._key(block)
        return BLOCKS.get(key, lambda: self._checked(block), self._reader)

    @functools.cached_property
    def _reader(self) -> Hashable:
        """A key of this source, for the cache: the last block of each source of a thread stays."""
        return self.kind, self._leaves, self._key(SourceBlock(0, 0, 0, 0))

    def _checked(self, block: SourceBlock) -> Arrays:
        """Decodes a block and checks its arrays against the leaves."""
        arrays, count = self._decode(block), block.last - block.first
        for array, leaf in zip(arrays, self._leaves, strict=True):
            if array.shape != (count, *leaf.shape) or array.dtype != leaf.dtype:
                raise SourceError(
                    f"{self!r}: found {array.dtype}{list(array.shape)} in block {block.number}, "
                    f"expected {leaf.dtype}{[count, *leaf.shape]} for leaf {leaf.path or 'itself'};"
                    " a file was changed after the source was made from it."
                )
        return arrays


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
    """Members start..stop-1: views of one block, or copies from several.

    Args:
        leaves: one member of each.
        blocks: the blocks with these members.
        load: returns all members of a block.
        start: the first member.
        stop: the end of the members (exclusive).
    """
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
