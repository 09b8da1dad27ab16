"""The part of a pipeline that shuffles rows: from blocks in files to files of parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints

from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.shuffle.sorted_blocks import Block, Shuffle
from beamjax.storage.arrays import decode_arrays, encode_arrays

LIST, WRITE = "List blocks", "Write parts"


class WriteParts(beam.PTransform):
    """Elements that `saved` gives, all of one key, to files."""

    def __init__(self, store: Store, shuffle: Shuffle):
        super().__init__()
        self.store = store
        self.shuffle = shuffle

    def expand(self, input_or_inputs: Any) -> Any:
        """Beam's name for what a transform does."""
        return (
            input_or_inputs
            | "All blocks together" >> beam.GroupByKey()
            | LIST >> beam.ParDo(ListBlocks(self.store, self.shuffle))
            | "Distribute parts" >> beam.Reshuffle()
            | WRITE >> beam.ParDo(WritePart(self.store, self.shuffle))
        )


class ShuffleFn(StepFn):
    """A step that knows what is shuffled."""

    def __init__(self, store: Store, shuffle: Shuffle):
        self.store = store
        self.shuffle = shuffle


class ListBlocks(ShuffleFn):
    """All blocks to the numbers of the parts that are made of them."""

    yields = int

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[int]:
        notes = [decode_arrays(data)[1] for data in element[1]]
        blocks = sorted((note["name"], note["rows"]) for note in notes if "name" in note)
        dropped = sorted(note["dropped"] for note in notes if "dropped" in note)
        yield from range(self.shuffle.list_blocks(blocks, dropped))


class WritePart(ShuffleFn):
    """Numbers of parts to files."""

    yields = typehints.Any

    def process(self, element: int) -> None:
        self.shuffle.write(element)


def saved(shuffle: Shuffle, block: Block) -> bytes:
    """Writes a block, and returns the element that says where it is."""
    name, rows = shuffle.save(block)
    return encode_arrays([], {"name": name, "rows": rows})


def dropped(message: str) -> bytes:
    """The element for a row that is left out."""
    return encode_arrays([], {"dropped": message})
