"""What a launcher that waits wants of a graph: its outputs, and the members that it dropped.

With `build` the only file that composes transforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import apache_beam as beam
from apache_beam import typehints

from beamjax.numerics.provenance import UNKNOWN
from beamjax.pipelines.graph.build import Graph
from beamjax.pipelines.graph.results import (
    WriteDropped,
    WritePlaced,
    WriteServed,
    find_dropped,
    find_placed,
    find_provenance,
    read_served,
)
from beamjax.pipelines.values.values import PlacedValue, ServerValue, members
from beamjax.plan.dropping import Dropped
from beamjax.plan.one_pass import open_placements
from beamjax.plan.steps import size_name
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.storage import files


class Outputs:
    """The outputs of a graph, in files of its store.

    Args:
      graph: with all its steps.
      stem: of the files' names.
      results: placed values that go where the results of the run are kept.
    """

    def __init__(self, graph: Graph, stem: str, results: MaterializedOutputs = NOTHING):
        self.graph = graph
        self.stem = stem
        self.results = results
        plan = graph.plan
        # Of all outputs, once they are found.
        self.provenance = UNKNOWN
        # Server values by environment, and placed ones.
        self._served: dict[beam.PCollection, list[str]] = {}
        self._placed: list[str] = []
        for name in dict.fromkeys(out.value for out in plan.outputs if out.value is not None):
            if plan.values[name].placement is not None:
                self._placed.append(name)
            elif name in graph.served:
                self._served.setdefault(graph.served[name], []).append(name)

    def write(self) -> None:
        """Adds the transforms that write them."""
        graph, stem = self.graph, self.stem
        for number, (environment, names) in enumerate(self._served.items()):
            label = f"Write {', '.join(names)}"
            write_served = WriteServed(graph.store, tuple(names), f"{stem}-served-{number}")
            environment | label >> beam.ParDo(write_served)
        for number, name in enumerate(self._placed):
            write_placed = WritePlaced(graph.store, name, f"{stem}-placed-{number}", self.results)
            graph.placed(name) | f"Write {name}" >> beam.ParDo(write_placed)
        if graph.dropped:
            # Together, so that only what bundles that count have dropped is written.
            listed = graph.dropped | "Dropped" >> beam.Flatten()
            keyed = listed | "Dropped/Key" >> beam.WithKeys(b"").with_output_types(
                typehints.KV[bytes, bytes]
            )
            lines = keyed | "Dropped/Together" >> beam.GroupByKey()
            lines | "Write dropped" >> beam.ParDo(WriteDropped(graph.store, stem))

    def find(self) -> dict[str, ServerValue | PlacedValue]:
        """What was written, by name, once the pipeline is through.

        Raises:
          WorkerError: something is missing.
        """
        store, found = self.graph.store, dict[str, ServerValue | PlacedValue]()
        for number, _ in enumerate(self._served):
            environment = read_served(store, f"{self.stem}-served-{number}")
            self.provenance |= environment.provenance
            found |= {name: ServerValue(store, ref=ref) for name, ref in environment.values.items()}
        written = files.names(store.root) if self._placed else []
        plan = replace(self.graph.plan, sizes=self.sizes(found))
        for number, name in enumerate(self._placed):
            stem = f"{self.stem}-placed-{number}"
            self.provenance |= find_provenance(store, stem, written)
            if name in self.results.folders:
                found[name] = PlacedValue(self.results.find(plan, name).to_spec())
                continue
            found[name] = members(find_placed(store, plan, name, stem, written))
        return found

    def dropped(self) -> list[Dropped]:
        """The members that the graph has dropped, once the pipeline is through."""
        return find_dropped(self.graph.store, self.stem) if self.graph.dropped else []

    def sizes(self, found: Mapping[str, ServerValue | PlacedValue]) -> dict[str, int]:
        """The numbers of members, those that were found in the pipeline included."""
        plan = self.graph.plan
        sizes = dict(plan.sizes)
        for placement in open_placements(plan):
            n = found[size_name(placement)]
            assert isinstance(n, ServerValue)
            sizes[placement] = int(n.array())
        return sizes
