"""Sources of unknown length in a pipeline: read once, from their beginning to their end, as blocks.

One worker reads. Where there are several, blocks go to the others through files of the store, since
some runners hold elements in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from apache_beam.transforms.window import GlobalWindows

from beamjax.pipelines.values.elements import Environment, MemberBlock
from beamjax.pipelines.values.large_blocks import whole
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import Sources, StepFn
from beamjax.sources.source_base import StreamSource
from beamjax.sources.streams.chunks import Streams

DEAL_BYTES = 1 << 22
"""Bytes of the blocks that go to a worker as one element."""


class ReadStreams(StepFn):
    """One element to the blocks of all members of sources that belong together.

    Args:
      sources: of unknown length.
      size: members in a shard.
      store: for errors.
    """

    yields = MemberBlock

    def __init__(self, sources: Sources, size: int, store: Store):
        self.store = store
        self.sources = sources
        self.size = size

    def process(self, element: Any) -> Iterator[MemberBlock]:
        reader = self.sources.open()
        streams = tuple(source for source in reader.sources if isinstance(source, StreamSource))
        for block in Streams(streams, reader.where, reader.x64).blocks(self.size):
            yield whole(MemberBlock(block.start, block.count, self.size, block.values), self.store)


class WriteMemberBlocks(StepFn):
    """Consecutive blocks to references to them in the store by their first member, many in each.

    Args:
      store: where to write.
      names: of the values in the blocks.
    """

    yields = Environment

    def __init__(self, store: Store, names: tuple[str, ...]):
        self.store = store
        self.names = names

    def start_bundle(self) -> None:
        self.start = 0
        self.blocks: list[dict[str, np.ndarray]] = []
        self.nbytes = 0

    def process(self, block: MemberBlock) -> Iterator[Environment]:
        if not self.blocks:
            self.start = block.start
        self.blocks.append(block.arrays(self.store))
        self.nbytes += block.nbytes
        if self.nbytes >= DEAL_BYTES:
            yield self._written()

    def finish_bundle(self) -> Iterator[Any]:
        """Writes what is left."""
        if self.blocks:
            yield GlobalWindows.windowed_value(self._written())

    def _written(self) -> Environment:
        start = self.start
        columns = [np.concatenate([block[x] for block in self.blocks]) for x in self.names]
        self.start_bundle()
        return Environment({str(start): self.store.put(columns, "stream")})


class LoadBlocks(StepFn):
    """Files of the store to the blocks in them, as `WriteMemberBlocks` wrote them.

    Args:
      store: where to read.
      names: of the values in the blocks.
      size: members in a shard.
    """

    yields = MemberBlock

    def __init__(self, store: Store, names: tuple[str, ...], size: int):
        self.store = store
        self.names = names
        self.size = size

    def process(self, element: Environment) -> Iterator[MemberBlock]:
        ((start, ref),) = element.values.items()
        columns = self.store.get(ref, cache=False)
        for first in range(0, len(columns[0]), self.size):
            values = {
                name: column[first : first + self.size]
                for name, column in zip(self.names, columns, strict=True)
            }
            count = len(values[self.names[0]])
            yield whole(MemberBlock(int(start) + first, count, self.size, values), self.store)
