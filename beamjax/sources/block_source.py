"""Placed inputs that are decoded by blocks: row groups, record batches, chunks.

A block that several shards share is decoded once a process, as long as there is room for it.
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
"""The blocks that this process has decoded and keeps."""


class SourceBlock(NamedTuple):
    """Members that are decoded together.

    Attributes:
        number: of the row group or the like among all of the source.
        start: their first row in it; 0 unless it is cut.
        first: member of the source.
        last: the one after the last.
    """

    number: int
    start: int
    first: int
    last: int


class BlockSource(HoldsLeaves):
    """Members in blocks, each of which is decoded whole.

    Args:
        leaves: one member of each.
        counts: the number of members in each block, 0 included.
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
            SourceError: they can't be read.
        """

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> Arrays:
        self.check_range(start, stop)
        return read_blocks(self._leaves, self._blocks(start, stop), self._block, start, stop)

    def _blocks(self, start: int, stop: int) -> Iterator[SourceBlock]:
        """The blocks that have members of a range, in their order."""
        return blocks_of(self._ends, start, stop)

    def _block(self, block: SourceBlock) -> Arrays:
        key = self.kind, self._leaves, self._key(block)
        return BLOCKS.get(key, lambda: self._checked(block), self._reader)

    @functools.cached_property
    def _reader(self) -> Hashable:
        """A key of this source among those that a thread reads."""
        return self.kind, self._leaves, self._key(SourceBlock(0, 0, 0, 0))

    def _checked(self, block: SourceBlock) -> Arrays:
        """A block whose arrays have the types of the spec."""
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
    """The ends of blocks with these numbers of members, after a 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])


def blocks_of(ends: np.ndarray, start: int, stop: int) -> Iterator[SourceBlock]:
    """The blocks that have members of a range, from where all blocks end."""
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
    """Members start..stop-1: views of a block, or a copy of parts of several.

    Args:
        leaves: one member of each.
        blocks: that have these members.
        load: gives all members of a block.
        start: the first member.
        stop: the one after the last.
    """
    found: Arrays = []
    for block in blocks:
        low, high = max(start, block.first), min(stop, block.last)
        parts = [array[low - block.first : high - block.first] for array in load(block)]
        if (low, high) == (start, stop):
            return parts
        # Not before a block shows that members are as big as the spec says.
        found = found or [np.empty((stop - start, *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, part in zip(found, parts, strict=True):
            whole[low - start : high - start] = part
    found = found or [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
    for whole in found:
        whole.flags.writeable = False
    return found
