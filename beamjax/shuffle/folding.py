"""The members of each key reduced, by a shuffle of what blocks of them gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from beamjax.ops.keyed import finished, folded, widened
from beamjax.shuffle.dealt_rows import Blocks
from beamjax.shuffle.table_parts import Grouping, hashed
from beamjax.sources.arrays.npy_source import storable
from beamjax.sources.source_base import Source
from beamjax.storage.arrays import decode_arrays, encode_arrays


@dataclass(frozen=True)
class Folding(Grouping):
    """What is reduced by key, and where the results go; see `Grouping`.

    Attributes:
      op: of `reduce_by_key`.
      dtypes: the names of those of the results.
    """

    op: str = "sum"
    dtypes: tuple[str, ...] = ()

    def deal(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Reads members, and gives what they are together, key by key, to each part."""
        keys, *leaves = source.read(start, stop)
        order = np.argsort(keys, kind="stable")
        names, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
        totals = [
            folded(self.op, widened(self.op, leaf, np.dtype(name))[order], first)
            for leaf, name in zip(leaves, self.dtypes, strict=True)
        ]
        part = hashed(names) % np.uint64(self.parts)
        for number in np.unique(part).tolist():
            mine = part == number
            numbers = np.full(mine.sum(), start)
            rows = [numbers, names[mine], counts[mine], *(total[mine] for total in totals)]
            yield number, encode_arrays(rows)

    def write(self, part: int, blocks: Blocks) -> None:
        """Writes the results of a part, in the order of the keys."""
        read = [decode_arrays(block)[0] for block in blocks]
        starts, keys, counts, *totals = (
            np.concatenate(arrays) for arrays in zip(*read, strict=True)
        )
        order = np.lexsort((starts, keys))
        names, first = np.unique(keys[order], return_index=True)
        counts = np.add.reduceat(counts[order], first)
        self.save(part, "keys", names)
        for number, (total, name) in enumerate(zip(totals, self.dtypes, strict=True)):
            found = finished(self.op, folded(self.op, total[order], first), counts, np.dtype(name))
            self.save(part, f"leaf-{number:03d}", storable(found))
        self.save(part, "counts", counts.astype(np.int64))
