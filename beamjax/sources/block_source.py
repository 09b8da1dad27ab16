"""Placed inputs that are decoded by blocks: row groups, record batches, chunks.

A block that several shards share is decoded once a process, as long as there is room for it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from beamjax import shared_cache
from beamjax.errors import SourceError
from beamjax.sources.source_base import HoldsLeaves, LeafSpec, PyTreeDef

Arrays = list[np.ndarray]

BLOCKS: shared_cache.SharedCache[Arrays] = shared_cache.SharedCache(2**29, shared_cache.nbytes)
"""The blocks that this process has decoded and keeps: half a GiB of them."""


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
        self._ends = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    @abc.abstractmethod
    def _key(self, block: int) -> Hashable:
        """What tells the data of a block from all else in this process."""

    @abc.abstractmethod
    def _decode(self, block: int) -> Arrays:
        """All members of a block: for each leaf an array, read-only.

        Raises:
            SourceError: they can't be read.
        """

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> Arrays:
        self.check_range(start, stop)
        return read_blocks(self._leaves, self._ends, self._block, start, stop)

    def _block(self, block: int) -> Arrays:
        key = self.kind, self._leaves, self._key(block)
        return BLOCKS.get(key, lambda: self._checked(block))

    def _checked(self, block: int) -> Arrays:
        """A block that is what the spec says of it."""
        arrays, count = self._decode(block), int(self._ends[block + 1] - self._ends[block])
        for array, leaf in zip(arrays, self._leaves, strict=True):
            if array.shape != (count, *leaf.shape) or array.dtype != leaf.dtype:
                raise SourceError(
                    f"{self!r}: found {array.dtype}{list(array.shape)} in block {block}, expected "
                    f"{leaf.dtype}{[count, *leaf.shape]} for leaf {leaf.path or 'itself'}; a file "
                    "was changed after the source was made from it."
                )
        return arrays


def read_blocks(
    leaves: Sequence[LeafSpec],
    ends: np.ndarray,
    block: Callable[[int], Arrays],
    start: int,
    stop: int,
) -> Arrays:
    """Members start..stop-1: views of a block, or a copy of parts of several.

    Args:
        leaves: one member of each.
        ends: where the blocks end, after a 0.
        block: gives all members of a block.
        start: the first member.
        stop: the one after the last.
    """
    if start == stop:
        return [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
    first = int(np.searchsorted(ends, start, side="right")) - 1
    last = int(np.searchsorted(ends, stop, side="left")) - 1
    if first == last:
        return [array[start - ends[first] : stop - ends[first]] for array in block(first)]
    found: Arrays = []
    for number in range(first, last + 1):
        low, high = max(start, ends[number]), min(stop, ends[number + 1])
        if low == high:
            continue
        arrays = block(number)
        # Not before a block shows that members are as big as the spec says.
        found = found or [np.empty((stop - start, *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, part in zip(found, arrays, strict=True):
            whole[low - start : high - start] = part[low - ends[number] : high - ends[number]]
    for whole in found:
        whole.flags.writeable = False
    return found
