"""The part of a pipeline that shuffles rows: from blocks in files to files of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP
from apache_beam.utils.windowed_value import WindowedValue

from beamjax._beam_compat import unused_transform
from beamjax.errors import StructureError
from beamjax.options import Options
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.errors import transform_errors
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.shuffle.by_key import KeyShuffle
from beamjax.shuffle.elements import ElementShuffle
from beamjax.shuffle.sorted_blocks import Block, Shuffle, merged
from beamjax.sources.source_base import Source, live_spec, open_spec, register, release
from beamjax.sources.streams.one_member import shown
from beamjax.storage.arrays import decode_arrays, encode_arrays

LIST, WRITE = "List blocks", "Write parts"


class WriteParts(beam.PTransform):
    """Writes blocks as parts. Elements are what `saved` and `dropped` return, all with one key."""

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
    """A step that holds the description of the shuffle."""

    def __init__(self, store: Store, shuffle: Shuffle):
        self.store = store
        self.shuffle = shuffle


class ListBlocks(ShuffleFn):
    """Lists all blocks; emits the numbers of the parts to write."""

    yields = int

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[int]:
        notes = [decode_arrays(data)[1] for data in element[1]]
        blocks = sorted((note["name"], note["rows"]) for note in notes if "name" in note)
        dropped = sorted(note["dropped"] for note in notes if "dropped" in note)
        yield from range(self.shuffle.list_blocks(blocks, dropped))


class WritePart(ShuffleFn):
    """Writes the parts with these numbers."""

    yields = typehints.Any

    def process(self, element: int) -> None:
        self.shuffle.write(element)


def saved(shuffle: Shuffle, block: Block) -> bytes:
    """Writes a block, and returns an element with its name."""
    name, rows = shuffle.save(block)
    return encode_arrays([], {"name": name, "rows": rows})


def dropped(message: str) -> bytes:
    """The element for a row that is left out."""
    return encode_arrays([], {"dropped": message})


REDUCE = "Reduce blocks"


def reduce_by_key(source: Source, shuffle: KeyShuffle, runner: Any, options: Options) -> None:
    """Runs a pipeline that reduces the members of each key into files.

    Raises:
      OptionsError: the runner is unknown.
      SourceError, WorkerError: members can't be read, or files can't be written.
    """
    connection = connect(runner, options)
    with temporary_store(connection.options) as store:
        token = register(source)
        try:
            folder = f"{store.root}/rows"
            spec = live_spec(token) if connection.shared else source.spilled(folder).to_spec()
            with new_pipeline(connection) as pipeline:
                (
                    pipeline
                    | "Ranges" >> beam.Create(list(shuffle.ranges(source)))
                    | "Distribute ranges" >> beam.Reshuffle()
                    | REDUCE >> beam.ParDo(ReduceBlock(store, shuffle, spec))
                    | "Parts" >> WriteParts(store, shuffle)
                )
                run_steps(pipeline, connection, store, [REDUCE, LIST, WRITE])
        finally:
            release(token)


class ReduceBlock(ShuffleFn):
    """Writes ranges of members as blocks.

    Args:
      store: the store, for errors.
      shuffle: the shuffle.
      spec: the spec of the source of the keys and members.
    """

    yields = typehints.KV[int, bytes]
    shuffle: KeyShuffle

    def __init__(self, store: Store, shuffle: KeyShuffle, spec: dict[str, Any]):
        super().__init__(store, shuffle)
        self.spec = spec

    def setup(self) -> None:
        """Opens the source."""
        self.source = open_spec(self.spec)

    def process(self, element: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
        yield 0, saved(self.shuffle, self.shuffle.block(self.source, *element))


BLOCKS, MERGE = "Write blocks", "Merge blocks"
_OWN = "beamjax"
"""Prefix of the labels of these steps, in a pipeline that has others."""
_MERGERS = 16
"""Largest number of workers that merge small blocks."""

Index = Callable[[Any], int] | None


def collect(
    transform: Any, index: Index, shuffle: ElementShuffle, runner: Any, options: Options
) -> None:
    """Runs a pipeline and writes its elements as members.

    Raises:
      OptionsError: the runner is unknown.
      StructureError: the transform does not return a bounded PCollection of members.
      SourceError, WorkerError: elements can't be made or written.
    """
    connection = connect(runner, options)
    with temporary_store(connection.options) as store, new_pipeline(connection) as pipeline:
        elements = _applied(transform, pipeline)
        elements | _OWN >> _Collect(store, shuffle, index)
        errors = transform_errors("from_beam", f"{_OWN}/")
        run_steps(pipeline, connection, store, [BLOCKS, MERGE, LIST, WRITE], errors)


class _Collect(beam.PTransform):
    """Writes elements to files of members."""

    def __init__(self, store: Store, shuffle: ElementShuffle, index: Index):
        super().__init__()
        self.store = store
        self.shuffle = shuffle
        self.index = index

    def expand(self, input_or_inputs: Any) -> Any:
        """Beam's name for what a transform does."""
        store, shuffle = self.store, self.shuffle
        # A pipeline without elements would not run `ListBlocks`, which raises the error.
        begin = input_or_inputs.pipeline | "Impulse" >> beam.Impulse()
        blocks = (
            input_or_inputs
            | BLOCKS >> beam.ParDo(WriteElementBlocks(store, shuffle, self.index))
            | "Small blocks together" >> beam.GroupByKey()
            | MERGE >> beam.ParDo(MergeBlocks(store, shuffle))
        )
        return (
            (blocks, begin | "No block" >> beam.ParDo(NoBlock()))
            | "Flatten" >> beam.Flatten()
            | "Parts" >> WriteParts(store, shuffle)
        )


def _applied(transform: Any, pipeline: beam.Pipeline) -> beam.PCollection:
    """The PCollection of a user.

    Raises:
      StructureError: it is no PCollection, is unbounded, or is windowed.
    """
    if isinstance(transform, beam.PCollection):
        raise StructureError(
            "from_beam: found a PCollection, which is part of a pipeline of your own; expected the "
            "PTransform that makes it, or a function of the pipeline: from_beam(lambda p: p | ...)."
            " Inside your own pipeline, apply beamjax.transform to it."
        )
    if isinstance(transform, beam.PTransform):
        found = pipeline | "Elements" >> unused_transform(transform)
    elif callable(transform):
        found = transform(pipeline)
    else:
        raise StructureError(
            f"from_beam: found a {type(transform).__name__}, expected a PTransform or a function "
            "of a pipeline."
        )
    if not isinstance(found, beam.PCollection) or found.pipeline is not pipeline:
        raise StructureError(
            f"from_beam: the transform returns {shown(found)}, expected a PCollection of the "
            "pipeline that it is applied to."
        )
    if not found.is_bounded:
        raise StructureError(
            "from_beam: found an unbounded PCollection, which has no last member; expected a "
            "bounded one, as of ReadFromKafka(..., max_num_records=n)."
        )
    if not found.windowing.is_default():
        raise StructureError(
            f"from_beam: the elements are in {type(found.windowing.windowfn).__name__}, expected "
            "the global window and the default trigger: a program reduces over all members at "
            "once. Put beam.WindowInto(beam.window.GlobalWindows()) at the end."
        )
    return found


class WriteElementBlocks(ShuffleFn):
    """Collects elements in blocks; emits (merger, block), or the name of a large block in files.

    Args:
      store: the store, for errors.
      shuffle: the shuffle of the elements.
      index: returns the number of an element.
    """

    yields = typehints.KV[int, bytes]
    shuffle: ElementShuffle

    def __init__(self, store: Store, shuffle: ElementShuffle, index: Index):
        super().__init__(store, shuffle)
        self.index = index

    def start_bundle(self) -> None:
        """Begins a block."""
        self.keys: list[bytes] = []
        self.members: list[list[bytes]] = []

    def process(self, element: Any) -> Iterator[tuple[int, bytes]]:
        shuffle = self.shuffle
        try:
            data = [array.tobytes() for array in shuffle.member.arrays(element)]
            number = self.index(element) if self.index is not None else None
            key = shuffle.key(data, number)
        except Exception as error:
            if not shuffle.drop:
                raise
            message = f"{type(error).__name__}: {error}"
            if not isinstance(error, StructureError):
                message = f"{message}; the element is {shown(element)}"
            yield 0, dropped(message)
            return
        self.keys.append(key)
        self.members.append(data)
        if len(self.keys) * shuffle.row_bytes >= shuffle.block_bytes:
            yield self._block()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        """Ends the last block."""
        if self.keys:
            yield WindowedValue(self._block(), MIN_TIMESTAMP, (GlobalWindow(),))

    def _block(self) -> tuple[int, bytes]:
        shuffle = self.shuffle
        keys, leaves = block = shuffle.block(self.keys, self.members)
        # Any even division among the mergers will do: the last byte of the number or of a word of
        # the hash.
        merger = self.keys[0][7] % _MERGERS
        small = len(keys) * shuffle.row_bytes <= shuffle.inline_bytes
        self.start_bundle()
        return merger, encode_arrays([keys, *leaves]) if small else saved(shuffle, block)


class MergeBlocks(ShuffleFn):
    """Merges the small blocks of a merger; emits the names of the larger ones in files."""

    yields = typehints.KV[int, bytes]

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[tuple[int, bytes]]:
        others: list[bytes] = []
        for block in merged(_small(element[1], others), self.shuffle.block_bytes):
            yield 0, saved(self.shuffle, block)
        for other in others:
            yield 0, other


class NoBlock(StepFn):
    """Emits an element that is no block, so that `ListBlocks` runs even if there is no block."""

    yields = typehints.KV[int, bytes]

    def process(self, element: bytes) -> Iterator[tuple[int, bytes]]:
        yield 0, encode_arrays([])


def _small(elements: Iterable[bytes], others: list[bytes]) -> Iterator[Block]:
    """The blocks that elements hold; elements without a block are appended to `others`."""
    for data in elements:
        arrays, _ = decode_arrays(data)
        if arrays:
            yield arrays[0], arrays[1:]
        else:
            others.append(data)
