"""One shuffle of the rows of a table by a hash of their keys, on the workers of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints

from beamjax.grouping import Grouping
from beamjax.options import Options
from beamjax.pipelines import waiting
from beamjax.pipelines.connections import connect
from beamjax.pipelines.failures import own_errors
from beamjax.pipelines.launch import new_pipeline
from beamjax.pipelines.loopback import loopback_only
from beamjax.pipelines.runners import temporary_store
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import StepFn
from beamjax.sources.source_base import Source, live_spec, open_spec, register, release

DEAL, WRITE = "Deal rows", "Write groups"


def shuffle(rows: Source, grouping: Grouping, runner: Any, options: Options) -> None:
    """Has workers read the rows of a table, deal them to parts, and write each part.

    Raises:
      OptionsError: the runner is unknown.
      SourceError, WorkerError: rows can't be read, or groups can't be written.
    """
    connection = connect(runner, options)
    with temporary_store(connection.options) as store:
        token = register(rows)
        try:
            shared = connection.shared
            folder = f"{store.root}/rows"
            spec = live_spec(token) if shared else rows.spilled(folder).to_spec()
            with new_pipeline(connection) as pipeline:
                (
                    pipeline
                    | "Ranges" >> beam.Create(list(grouping.blocks(rows)))
                    | "Deal ranges" >> beam.Reshuffle()
                    | DEAL >> beam.ParDo(DealRows(store, spec, grouping))
                    | "Together" >> beam.GroupByKey()
                    | WRITE >> beam.ParDo(WriteGroups(store, grouping))
                )
                name = type(connection.runner).__name__
                with own_errors(store, name, [DEAL, WRITE], shared), loopback_only():
                    waiting.run(pipeline, connection.flags)
        finally:
            release(token)


class DealRows(StepFn):
    """Ranges of rows to (part, rows of it).

    Args:
      store: for errors.
      spec: of the table.
      grouping: of its rows.
    """

    yields = typehints.KV[int, bytes]

    def __init__(self, store: Store, spec: dict[str, Any], grouping: Grouping):
        self.store = store
        self.spec = spec
        self.grouping = grouping

    def setup(self) -> None:
        """Opens the table."""
        self.source = open_spec(self.spec)

    def process(self, element: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
        yield from self.grouping.deal(self.source, *element)


class WriteGroups(StepFn):
    """(part, its rows) to files."""

    yields = typehints.Any

    def __init__(self, store: Store, grouping: Grouping):
        self.store = store
        self.grouping = grouping

    def process(self, element: tuple[int, Iterable[bytes]]) -> None:
        self.grouping.write(*element)
