"""Builds the Beam graph of a plan from the transforms of `pipelines.worker`.

Server values travel in elements or singleton side inputs, and placed values of earlier passes in
elements that are blocks of members. Labels are the names of the plan's steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam import typehints

from beamjax.bodies.provenance import Provenance
from beamjax.pipelines.graph.collect_results import (
    ReadMembers,
    WriteDropped,
    WritePlaced,
    WriteServed,
    find_dropped,
    find_placed,
    find_provenance,
    read_served,
)
from beamjax.pipelines.graph.step_tasks import StepTasks
from beamjax.pipelines.graph.streaming import (
    LoadBlocks,
    ReadStreams,
    WriteMemberBlocks,
    count_members,
)
from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.values.elements import Element
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import members, stored
from beamjax.pipelines.worker.map_shards import (
    DROPPED,
    PARTIALS,
    MapShards,
    Ranges,
    combined,
    compute_server,
)
from beamjax.pipelines.worker.merge import (
    RANGE,
    AssignGroups,
    MergeAccumulators,
    MergeGroup,
    assemble,
    finish_combine,
    finish_pieces,
    part_of_block,
)
from beamjax.pipelines.worker.tasks import ServerFn, SourceSpecs, StoredBodies
from beamjax.plan.dropping import Dropped
from beamjax.plan.merging import range_width
from beamjax.plan.steps import Gather, Map, Plan, Scatter, Server, size_name
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.values import Ref
from beamjax.storage import files


@dataclass
class GraphInputs:
    """The inputs of a plan in the form that a graph needs."""

    static: dict[str, StoreRef]  # server values, as references into the store
    sources: SourceSpecs  # placed inputs that workers read
    # Placed inputs that are PCollections of blocks, by placement.
    blocks: dict[str, beam.PCollection] = field(default_factory=dict)
    # The names of the values in these blocks, by placement.
    carried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # For each placement whose members are counted in the pipeline, their number.
    sizes: dict[str, beam.PCollection] = field(default_factory=dict)
    # The placed inputs of the open placement, which are read from start to end.
    streams: SourceSpecs | None = None


@dataclass(frozen=True)
class _Stream:
    """Blocks that hold these placed values."""

    blocks: beam.PCollection
    names: tuple[str, ...]


class Graph:
    """Adds the steps of a plan to a pipeline."""

    def __init__(
        self,
        root: Any,
        plan: Plan,
        inputs: GraphInputs,
        store: Store,
        connection: Connection,
        bodies: StoredBodies,
    ):
        self.root = root  # the pipeline, or its `PBegin`
        self.plan = plan
        self.inputs = inputs
        # For values that are too large for an element.
        self.store = store
        self.spread = connection.spread
        self.tasks = StepTasks(plan, connection, store, bodies)
        # The members that passes drop, one PCollection for each pass.
        self.dropped: list[beam.PCollection] = []
        # The values of the step that computes a server value, by the name of the value.
        self.served: dict[str, beam.PCollection] = {}
        # By placement, all blocks that passes emit.
        self.streams: dict[str, list[_Stream]] = {}
        # By placement, the blocks that hold all values of earlier passes that later passes need.
        self.live: dict[str, _Stream] = {}
        for placement, blocks in inputs.blocks.items():
            self.live[placement] = _Stream(blocks, inputs.carried[placement])
            self.streams[placement] = [self.live[placement]]
        for placement, size in inputs.sizes.items():
            self._serve(size, [size_name(placement)])
        if inputs.streams is not None:
            self._read_streams(inputs.streams)
        self.scattered: dict[str, tuple[str, int]] = {}
        # The blocks of placed inputs that steps gather, or that are results, by name.
        self._read: dict[str, beam.PCollection] = {}

    def build(self) -> None:
        """Adds all steps."""
        for number, step in enumerate(self.plan.steps):
            match step:
                case Server():
                    self.server(step)
                case Map():
                    self.map(step, self._operands_after(number))
                case Gather():
                    self.gather(step)
                case Scatter(operand=operand, result=result, axis=axis):
                    self.scattered[result] = (operand, axis)

    def server(self, step: Server) -> None:
        """Adds a step that runs once."""
        task = self.tasks.task(step, self._static(step.inputs))
        # The latest result is the main input, which a runner can fuse, unlike a side input.
        main, *others = self._results_with(step.inputs)[::-1] or [
            self.root | f"{step.name}/Impulse" >> beam.Impulse()
        ]
        values = main | step.name >> beam.ParDo(
            ServerFn(task, compute_server), *_side_inputs(others)
        )
        self._serve(values, step.outputs)

    def map(self, step: Map, needed: set[str]) -> None:
        """Adds a pass over shards; later passes read the placed values of the names `needed`."""
        stream = self._stream(step, needed)
        scattered = {n: self.scattered[n] for n in step.operands if n in self.scattered}
        served = [*step.broadcasts, *(name for name, _ in scattered.values())]
        lasting = bool(needed & set(step.results))
        carried = tuple(n for n in stream.names if n in needed) if stream and lasting else ()
        task = self.tasks.task(step, self._static(served))
        sources = self.inputs.sources.select(step.operands)
        fn = MapShards(task, sources, scattered, carried, whole=lasting)
        blocks = stream.blocks if stream else self._ranges(step.name, step.placement)
        known = _side_inputs(self._results_with(served))
        tags = [combined(number) for number in range(len(step.combines))]
        drops = [DROPPED] if step.guard is not None and step.guard.drops else []
        outputs = blocks | step.name >> beam.ParDo(fn, *known).with_outputs(
            PARTIALS, *tags, *drops, main="blocks"
        )
        for tag in drops:
            outputs[tag].element_type = bytes
            self.dropped.append(outputs[tag])
        outputs[PARTIALS].element_type = typehints.KV[RANGE, bytes]
        if step.results:
            computed = _Stream(outputs.blocks, (*carried, *step.results))
            self.streams.setdefault(step.placement, []).append(computed)
            if lasting:
                self.live[step.placement] = computed
        if step.buffers:
            self._reduce(step, outputs[PARTIALS])
        for number, tag in enumerate(tags):
            outputs[tag].element_type = Element
            self._combine(step, number, outputs[tag])

    def _reduce(self, step: Map, partials: beam.PCollection) -> None:
        fan = self.tasks.fan_out(step)
        sizes = _side_inputs(self._results_with(self._sizes_found(step)))
        label, task = step.name, self.tasks.task(step)
        merging = MergeAccumulators(step.name, self.store)
        if fan.groups > 1:
            partials = (
                partials
                | f"{label}/Groups" >> beam.ParDo(AssignGroups(fan.groups))
                | f"{label}/GroupsTogether" >> beam.GroupByKey()
                | f"{label}/MergeGroups" >> beam.ParDo(MergeGroup(merging))
            )
        merged = partials | f"{label}/Merge" >> beam.CombinePerKey(merging)
        parts = merged | f"{label}/Finish" >> beam.ParDo(ServerFn(task, finish_pieces), *sizes)
        if fan.pieces > 1:
            parts = self._together(label, parts) | f"{label}/Assemble" >> beam.ParDo(
                ServerFn(task, assemble)
            )
        self._serve(parts, [r.result for buffer in step.buffers for r in buffer.reductions])

    def _combine(self, step: Map, number: int, partials: beam.PCollection) -> None:
        combine, label = step.combines[number], f"{step.name}/Combine_{number}"
        task = self.tasks.task(step, self._static(combine.inputs))
        finish = ServerFn(task, functools.partial(finish_combine, number))
        needed = (*combine.inputs, *self._sizes_found(step))
        known = _side_inputs(self._results_with(needed))
        values = self._together(label, partials) | label >> beam.ParDo(finish, *known)
        self._serve(values, [name for name in combine.results if name is not None])

    def gather(self, step: Gather) -> None:
        """Adds a step that makes a placed value a server value."""
        task = self.tasks.task(step)
        parts = self.placed(step.operand) | f"{step.name}/Parts" >> beam.ParDo(
            ServerFn(task, part_of_block)
        )
        whole = self._together(step.name, parts) | step.name >> beam.ParDo(ServerFn(task, assemble))
        self._serve(whole, [step.result])

    def placed(self, name: str) -> beam.PCollection:
        """The blocks that hold a placed value, which a step computes or a source has."""
        placement = self.plan.values[name].placement or ""
        if name not in self.inputs.sources.where:
            return self._find(placement, name).blocks
        if name not in self._read:
            label, source = f"Read {name}", self.inputs.sources.select([name])
            read = ReadMembers(source, name, self.plan.shards(placement), self.store)
            self._read[name] = self._ranges(label, placement) | label >> beam.ParDo(read)
        return self._read[name]

    # ------------------------------------------------------------------------------- parts

    def _static(self, names: Iterable[str]) -> dict[str, StoreRef]:
        """Those of these server values that are in the store before the first step."""
        static = self.inputs.static
        return {name: static[name] for name in names if name in static}

    def _serve(self, values: beam.PCollection, names: Iterable[str]) -> None:
        self.served.update(dict.fromkeys(names, values))

    def _together(self, name: str, parts: beam.PCollection) -> beam.PCollection:
        keyed = parts | f"{name}/Key" >> beam.WithKeys(b"").with_output_types(
            typehints.KV[bytes, Element]
        )
        return keyed | f"{name}/Together" >> beam.GroupByKey()

    def _results_with(self, names: Iterable[str]) -> list[beam.PCollection]:
        """The results of steps that have these values, in the order in which they are computed."""
        needed = {self.served[name] for name in names if name in self.served}
        return [values for values in dict.fromkeys(self.served.values()) if values in needed]

    def _ranges(self, name: str, placement: str) -> beam.PCollection:
        count = len(self.plan.shards(placement))
        ranges = (
            self.root
            | f"{name}/Impulse" >> beam.Impulse()
            | f"{name}/Shards" >> beam.ParDo(Ranges(count, range_width(count, self.tasks.workers)))
        )
        if self.spread and count > 1:
            ranges |= f"{name}/Deal" >> beam.Reshuffle()
        return ranges

    def _read_streams(self, streams: SourceSpecs) -> None:
        """Reads the sources of unknown length, and counts their members."""
        (placement,) = self.plan.open_placements
        label, names = f"Read {placement}", tuple(streams.where)
        size = self.plan.shard_sizes[placement]
        begin = self.root | f"{label}/Impulse" >> beam.Impulse()
        blocks = begin | label >> beam.ParDo(ReadStreams(streams, size, self.store))
        self._serve(count_members(blocks, self.store, placement), [size_name(placement)])
        if self.spread and names:
            blocks = (
                blocks
                | f"{label}/Write" >> beam.ParDo(WriteMemberBlocks(self.store, names))
                | f"{label}/Deal" >> beam.Reshuffle()
                | f"{label}/Load" >> beam.ParDo(LoadBlocks(self.store, size))
            )
        self.live[placement] = _Stream(blocks, names)
        self.streams[placement] = [self.live[placement]]

    def _stream(self, step: Map, needed: set[str]) -> _Stream | None:
        """The blocks that a pass starts from, if any; otherwise it starts from ranges of shards."""
        live = self.live.get(step.placement)
        if live is None:
            return None
        if self.plan.sizes[step.placement] is None:
            return live
        # It starts from blocks if it reads values of earlier passes, or if later passes need such
        # values together with its own results.
        reads = set(step.operands) & set(live.names)
        joins = needed & set(step.results) and needed & set(live.names)
        return live if reads or joins else None

    def _sizes_found(self, step: Map) -> list[str]:
        """The name of the number of members of a pass, if they are counted in the pipeline."""
        # Reductions over them take it as a side input, and so wait for the check that no member is
        # missing.
        return [size_name(step.placement)] if self.plan.sizes[step.placement] is None else []

    def _find(self, placement: str, name: str) -> _Stream:
        return next(s for s in reversed(self.streams[placement]) if name in s.names)

    def _operands_after(self, number: int) -> set[str]:
        later = self.plan.steps[number + 1 :]
        return {name for step in later if isinstance(step, Map) for name in step.operands}


def _side_inputs(results: Iterable[beam.PCollection]) -> list[Any]:
    return [beam.pvalue.AsSingleton(values) for values in results]


class Outputs:
    """The outputs of a graph, in files of its store."""

    def __init__(self, graph: Graph, stem: str, results: MaterializedOutputs = NOTHING):
        self.graph = graph
        self.stem = stem  # the prefix of the names of the files
        self.results = results
        plan = graph.plan
        # The names of the server values, by the result that has them, and of placed values.
        self._served: dict[beam.PCollection, list[str]] = {}
        self._placed: list[str] = []
        for name in plan.returned():
            if plan.values[name].placement is not None:
                self._placed.append(name)
            elif name in graph.served:
                self._served.setdefault(graph.served[name], []).append(name)

    def write(self) -> None:
        """Adds the transforms that write the outputs."""
        graph, stem = self.graph, self.stem
        for number, (values, names) in enumerate(self._served.items()):
            label = f"Write {', '.join(names)}"
            write_served = WriteServed(graph.store, tuple(names), f"{stem}-served-{number}")
            values | label >> beam.ParDo(write_served)
        for number, name in enumerate(self._placed):
            write_placed = WritePlaced(graph.store, name, f"{stem}-placed-{number}", self.results)
            graph.placed(name) | f"Write {name}" >> beam.ParDo(write_placed)
        if graph.dropped:
            # Written by one step after a GroupByKey, so a bundle that failed and was retried does
            # not list its members twice.
            listed = graph.dropped | "Dropped" >> beam.Flatten()
            keyed = listed | "Dropped/Key" >> beam.WithKeys(b"").with_output_types(
                typehints.KV[bytes, bytes]
            )
            lines = keyed | "Dropped/Together" >> beam.GroupByKey()
            lines | "Write dropped" >> beam.ParDo(WriteDropped(graph.store, stem))

    def find(self) -> dict[str, Ref]:
        """The outputs, by name, after the pipeline has ended."""
        store, plan, outputs = self.graph.store, self.graph.plan, dict[str, Ref]()
        for number, _ in enumerate(self._served):
            refs = read_served(store, f"{self.stem}-served-{number}").refs()
            outputs |= {name: stored(store, ref, plan.values[name]) for name, ref in refs.items()}
        for number, name in enumerate(self._placed):
            stem = f"{self.stem}-placed-{number}"
            if name in self.results.folders:
                outputs[name] = members(self.results.find(plan, name), plan, name)
                continue
            outputs[name] = members(find_placed(store, plan, name, stem, self._files), plan, name)
        return outputs

    def provenance(self) -> Provenance:
        """The kinds of machine that have computed the graph, after the pipeline has ended."""
        return find_provenance(self.graph.store, self._files)

    def dropped(self) -> list[Dropped]:
        """The members that the graph has dropped, after the pipeline has ended."""
        return find_dropped(self.graph.store, self.stem, self._files)

    @functools.cached_property
    def _files(self) -> list[str]:
        """The names of the files of the store, after the pipeline has ended."""
        return files.names(self.graph.store.root)
