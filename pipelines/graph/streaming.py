"""Sources of unknown length in a pipeline. They are read once, from start to end, as blocks.

One worker reads them. It passes blocks to other workers through files of the store, since some
runners hold all elements in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints
from apache_beam.transforms.window import GlobalWindows

from beamjax.errors import SourceError
from beamjax.pipelines.values.elements import Element, block_of, stored_part, whole
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import SourceSpecs, StepFn
from beamjax.plan.steps import size_name
from beamjax.sources.source_base import StreamSource
from beamjax.sources.streams.chunks import Streams

WRITE_BYTES = 1 << 22
"""Bytes of the blocks that are written together, and go to a worker as one element."""


class ReadStreams(StepFn):
    """Reads all members of the sources of a placement: from one element to blocks."""

    yields = Element

    def __init__(self, sources: SourceSpecs, size: int, store: Store):
        self.store = store
        self.sources = sources
        self.size = size

    def process(self, element: Any) -> Iterator[Element]:
        reader = self.sources.open()
        streams = tuple(source for source in reader.sources if isinstance(source, StreamSource))
        for block in Streams(streams, reader.where, reader.x64).blocks(self.size):
            yield whole(block_of(block.start, block.count, block.values), self.store)


class WriteMemberBlocks(StepFn):
    """Writes consecutive blocks to the store: from blocks to larger ones, in files."""

    yields = Element

    def __init__(self, store: Store, names: tuple[str, ...]):
        self.store = store
        self.names = names

    def start_bundle(self) -> None:
        self.start = 0
        self.blocks: list[dict[str, np.ndarray]] = []
        self.nbytes = 0

    def process(self, block: Element) -> Iterator[Element]:
        if not self.blocks:
            self.start, _ = block.range
        self.blocks.append(block.arrays(self.store))
        self.nbytes += block.nbytes
        if self.nbytes >= WRITE_BYTES:
            yield self._written()

    def finish_bundle(self) -> Iterator[Any]:
        """Writes the remaining blocks."""
        if self.blocks:
            yield GlobalWindows.windowed_value(self._written())

    def _written(self) -> Element:
        written = Element()
        for name in self.names:
            column = np.concatenate([block[name] for block in self.blocks])
            ref = self.store.put([column], "stream")
            written[name] = stored_part(ref, self.start, len(column))
        self.start_bundle()
        return written


class LoadBlocks(StepFn):
    """Loads the blocks that `WriteMemberBlocks` wrote, each with the members of a shard."""

    yields = Element

    def __init__(self, store: Store, size: int):
        self.store = store
        self.size = size

    def process(self, written: Element) -> Iterator[Element]:
        (start, count), columns = written.range, written.arrays(self.store)
        for first in range(0, count, self.size):
            values = {name: x[first : first + self.size] for name, x in columns.items()}
            block = block_of(start + first, min(self.size, count - first), values)
            yield whole(block, self.store)


Range = tuple[int, int]
"""Members [start, stop)."""


def count_members(blocks: beam.PCollection, store: Store, placement: str) -> beam.PCollection:
    """The number of members in blocks; fails the pipeline if one is missing."""
    return (
        blocks
        | "Ranges of blocks" >> beam.ParDo(RangeOfBlock())
        | "All ranges" >> beam.combiners.ToList()
        | "Count members" >> beam.ParDo(CountMembers(store, placement))
    )


class RangeOfBlock(StepFn):
    """From a block to the range of its members."""

    yields = typehints.Tuple[int, int]

    def process(self, block: Element) -> Iterator[Range]:
        start, count = block.range
        yield start, start + count


class CountMembers(StepFn):
    """From the ranges of all blocks to the number of members, under its name in the plan."""

    yields = Element

    def __init__(self, store: Store, placement: str):
        self.store = store
        self.placement = placement

    def process(self, ranges: list[Any]) -> Iterator[Element]:
        if not ranges:
            raise SourceError(
                f"transform: the PCollection is empty, expected the members 0, 1, ... of placement "
                f"{self.placement!r}, at least one: without any, a mean or a maximum has no value"
            )
        n = max(stop for _, stop in ranges)
        missing = n - sum(stop - start for start, stop in ranges)
        if missing:
            first = 0
            for start, stop in sorted(ranges):
                if start > first:
                    break
                first = stop
            raise SourceError(
                f"transform: {missing} members are missing in the PCollection, the first one is "
                f"member {first}; the last one found is member {n - 1}, expected each from 0 to it"
            )
        size = self.store.put([np.asarray(n, np.int32)], size_name(self.placement))
        yield Element({size_name(self.placement): stored_part(size)})
