"""The pipeline that reduces members by key, for keys that are not known in advance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints
from apache_beam.coders import Coder
from apache_beam.typehints.decorators import IOTypeHints

from beamjax.numerics.by_key import ByKey, Rows
from beamjax.options import Options
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.runtime.keyed_reduction import KeyedReduction
from beamjax.sources.source_base import (
    Source,
    live_spec,
    open_spec,
    register,
    release,
    spec_of,
)
from beamjax.sources.streams.spool import spilled

REDUCE, WRITE = "Reduce blocks", "Write parts"


def reduce_by_key(source: Source, reduction: KeyedReduction, runner: Any, options: Options) -> None:
    """Runs a pipeline that reduces the members of each key into files."""
    connection = connect(runner, options)
    with temporary_store(connection.options) as store:
        token = register(source)
        try:
            folder = f"{store.root}/rows"
            spec = live_spec(token) if connection.shared else spec_of(spilled(source, folder))
            with new_pipeline(connection) as pipeline:
                (
                    pipeline
                    | "Blocks" >> beam.Create(list(reduction.blocks()))
                    | "Distribute blocks" >> beam.Reshuffle()
                    | REDUCE >> beam.ParDo(ReduceBlocks(store, reduction, spec))
                    # A key of Beam stands for many keys of the user, the rows of which are merged
                    # at once: all those with the same hash modulo the number of parts.
                    | "Merge rows" >> beam.CombinePerKey(MergeRows(reduction.by_key))
                    | WRITE >> beam.ParDo(WriteParts(store, reduction))
                )
                run_steps(pipeline, connection, store, [REDUCE, WRITE])
        finally:
            release(token)


class ReduceBlocks(StepFn):
    """From ranges of members to the rows of their keys, by part."""

    yields = typehints.KV[int, bytes]

    def __init__(self, store: Store, reduction: KeyedReduction, spec: dict[str, Any]):
        self.store = store
        self.reduction = reduction
        self.spec = spec

    def setup(self) -> None:
        """Opens the source."""
        self.source = open_spec(self.spec)

    def process(self, element: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
        for part, rows in self.reduction.rows(self.source, *element):
            yield part, rows.encode()


class MergeRows(beam.CombineFn):
    """Merges encoded rows. Its accumulator is a list of `Rows` that wait to be merged."""

    def __init__(self, by_key: ByKey):
        super().__init__()
        self.by_key = by_key

    def default_type_hints(self) -> IOTypeHints:
        return IOTypeHints.empty().with_input_types(bytes).with_output_types(bytes)

    def get_accumulator_coder(self) -> Coder:
        return RowsCoder(self.by_key)

    def create_accumulator(self) -> list[Rows]:
        return []

    def add_input(self, accumulator: list[Rows], element: bytes) -> list[Rows]:
        return self.by_key.added(accumulator, [Rows.decode(element)])

    def merge_accumulators(self, accumulators: Iterable[list[Rows]]) -> list[Rows]:
        merged: list[Rows] = []
        for accumulator in accumulators:
            merged = self.by_key.added(merged, accumulator)
        return merged

    def extract_output(self, accumulator: list[Rows]) -> bytes:
        return self.by_key.merged(accumulator).encode()


class RowsCoder(Coder):
    """Coder of the accumulators of `MergeRows`."""

    def __init__(self, by_key: ByKey):
        self.by_key = by_key

    def encode(self, value: list[Rows]) -> bytes:
        return self.by_key.merged(value).encode() if value else b""

    def decode(self, encoded: bytes) -> list[Rows]:
        return [Rows.decode(encoded)] if encoded else []

    def is_deterministic(self) -> bool:
        return True

    def estimate_size(self, value: list[Rows]) -> int:
        return sum(rows.nbytes for rows in value)


class WriteParts(StepFn):
    """Writes the results of the keys of each part."""

    yields = typehints.Any

    def __init__(self, store: Store, reduction: KeyedReduction):
        self.store = store
        self.reduction = reduction

    def process(self, element: tuple[int, bytes]) -> None:
        part, data = element
        self.reduction.write(part, [Rows.decode(data)])
