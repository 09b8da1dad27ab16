"""Members reduced by key, on the workers of a runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints

from beamjax.options import Options
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.tables.shuffle import LIST, WRITE, ShuffleFn, WriteParts, saved
from beamjax.pipelines.values.store import Store
from beamjax.shuffle.by_key import KeyShuffle
from beamjax.sources.source_base import Source, live_spec, open_spec, register, release

REDUCE = "Reduce blocks"


def reduce_by_key(source: Source, shuffle: KeyShuffle, runner: Any, options: Options) -> None:
    """Has workers reduce the members of each key into files.

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
    """Ranges of members to blocks in files.

    Args:
      store: for errors.
      shuffle: by their keys.
      spec: of the members and their keys.
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
