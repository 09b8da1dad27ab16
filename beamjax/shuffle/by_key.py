"""Reduces members by key if the keys are not known in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from beamjax.ops.keyed import finished, folded, widened
from beamjax.shuffle import sorted_blocks
from beamjax.shuffle.sorted_blocks import Block, Shuffle, hash_range, sorted_block
from beamjax.sources.source_base import LeafSpec, Source


@dataclass(frozen=True)
class KeyShuffle(Shuffle):
    """Members, sorted by a hash of their keys. A row is the reduction of some members of a key.

    The leaves of a row are the key, the number of members, and the reduction of each leaf.

    Attributes:
      op: the reduction of `reduce_by_key`.
      results: the types of the key and of each reduced leaf in the result.
    """

    op: str
    results: tuple[LeafSpec, ...]

    @classmethod
    def of(
        cls, source: Source, op: str, results: Sequence[LeafSpec], folder: str, scratch: str
    ) -> Self:
        """The shuffle of the members of a source. The first leaf of the source is the key."""
        key, *leaves = source.leaves
        totals = [
            LeafSpec(leaf.shape, widened(op, np.empty(0, leaf.dtype), result.dtype).dtype)
            for leaf, result in zip(leaves, results[1:], strict=True)
        ]
        return cls(
            folder,
            scratch,
            (key, LeafSpec((), np.dtype(np.int64)), *totals),
            sorted_blocks.BLOCK_BYTES,
            sorted_blocks.PART_BYTES,
            op,
            tuple(results),
        )

    def ranges(self, source: Source) -> Iterator[tuple[int, int]]:
        """The ranges of members that make blocks."""
        size = max(self.block_bytes // max(sum(leaf.nbytes for leaf in source.leaves), 1), 1)
        for start in range(0, len(source), size):
            yield start, min(start + size, len(source))

    def block(self, source: Source, start: int, stop: int) -> Block:
        """Reads members, and reduces those of each key."""
        keys, *leaves = source.read(start, stop)
        order = np.argsort(keys, kind="stable")
        names, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
        totals = [
            folded(self.op, widened(self.op, leaf, result.dtype)[order], first)
            for leaf, result in zip(leaves, self.results[1:], strict=True)
        ]
        # The second word of a key is the first member of the block, so that the rows of a key are
        # reduced in the order of their members.
        sorted_by = np.stack([hashed(names), np.full(len(names), start, np.uint64)], axis=1)
        return sorted_block(sorted_by, [names, counts.astype(np.int64), *totals])

    def write(self, part: int) -> None:
        """Writes the keys of a part and the reductions of their members."""
        listed = self.listed()
        rows = self.rows_between(*hash_range(part, listed["parts"]), listed)
        if not len(rows):
            return
        # A row begins a key if its hash differs from the one before; `prepend` differs from the
        # first hash. The hash is a bijection, so different keys have different hashes.
        first = np.flatnonzero(np.diff(rows.keys[:, 0], prepend=~rows.keys[:1, 0]))
        counts = np.add.reduceat(rows.read(1), first)
        self.write_leaf(part, 0, self.results[0], [rows.read(0)[first]])
        for number, leaf in enumerate(self.results[1:], 1):
            totals = folded(self.op, rows.read(number + 1), first)
            self.write_leaf(part, number, leaf, [finished(self.op, totals, counts, leaf.dtype)])


def hashed(keys: np.ndarray) -> np.ndarray:
    """Pseudorandom uint64[n]; different integers have different hashes.

    The finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, figure 16.
    """
    x = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64).view(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
