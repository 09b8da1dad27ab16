"""One shuffle of the rows of a table by a hash of their keys, on the workers of a runner.

The rows themselves are in files; what Beam shuffles are their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import typehints

from beamjax.options import Options
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.shuffle.dealt_rows import DealtRows
from beamjax.shuffle.folding import Folding
from beamjax.sources.live_sources import live_spec, register, release
from beamjax.sources.source_base import Source, open_spec

DEAL, LIST, WRITE = "Deal rows", "List files", "Write groups"


def shuffle(
    rows: Source, grouping: Folding, dealt: DealtRows, runner: Any, options: Options
) -> None:
    """Has workers read the rows of a table, deal them to parts, and write each part.

    Args:
      rows: of the table.
      grouping: of them.
      dealt: where they are on their way.
      runner: of Beam.
      options: of the run.

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
                    | DEAL >> beam.ParDo(DealRows(store, spec, grouping, dealt))
                    | "Together" >> beam.GroupByKey()
                    | LIST >> beam.ParDo(ListFiles(store, dealt))
                    | "Deal parts" >> beam.Reshuffle()
                    | WRITE >> beam.ParDo(WriteGroups(store, grouping, dealt))
                )
                run_steps(pipeline, connection, store, [DEAL, LIST, WRITE])
        finally:
            release(token)


class DealRows(StepFn):
    """Ranges of rows to names of files that have them, dealt to parts.

    Args:
      store: for errors.
      spec: of the table.
      grouping: of its rows.
      dealt: where they are written.
    """

    yields = typehints.KV[bytes, str]

    def __init__(self, store: Store, spec: dict[str, Any], grouping: Folding, dealt: DealtRows):
        self.store = store
        self.spec = spec
        self.grouping = grouping
        self.dealt = dealt

    def setup(self) -> None:
        """Opens the table."""
        self.source = open_spec(self.spec)

    def process(self, element: tuple[int, int]) -> Iterator[tuple[bytes, str]]:
        yield b"", self.dealt.write(self.grouping.deal(self.source, *element))


class ListFiles(StepFn):
    """The names of all files to a list of them, and to the numbers of the parts."""

    yields = int

    def __init__(self, store: Store, dealt: DealtRows):
        self.store = store
        self.dealt = dealt

    def process(self, element: tuple[bytes, Iterable[str]]) -> Iterator[int]:
        _, names = element
        self.dealt.list(names)
        yield from range(self.dealt.parts)


class WriteGroups(StepFn):
    """The number of a part to files with its groups."""

    yields = typehints.Any

    def __init__(self, store: Store, grouping: Folding, dealt: DealtRows):
        self.store = store
        self.grouping = grouping
        self.dealt = dealt

    def process(self, element: int) -> None:
        if blocks := self.dealt.blocks(element):
            self.grouping.write(element, blocks)
