"""Reduces the members of a source by key into parts of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from beamjax.numerics.by_key import ByKey, Rows
from beamjax.sources.arrays.part_files import write_part
from beamjax.sources.source_base import Source


@dataclass(frozen=True)
class KeyedReduction:
    """A reduction of members by key into the parts of a folder."""

    folder: str  # all workers see it
    by_key: ByKey
    count: int  # the number of members
    parts: int  # their number, see `number_of_parts`

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The ranges of members that are reduced at once."""
        return self.by_key.blocks(self.count)

    def rows(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, Rows]]:
        """Reads a block of members, and divides its rows among the parts."""
        keys, *leaves = source.read(start, stop)
        rows = self.by_key.of_block(keys, leaves, start)
        return self.by_key.divided(rows, self.parts)

    def write(self, part: int, rows: Sequence[Rows]) -> None:
        """Writes the results of the keys of a part."""
        write_part(self.folder, part, self.by_key.finished(rows))
