"""Runs a plan as a transform inside of a user's own pipeline."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import jax
import numpy as np
from apache_beam import typehints
from apache_beam.pvalue import PBegin

from beamjax.bodies.load import unwrap
from beamjax.errors import SourceError, StagingError, StructureError
from beamjax.ops.placements import MAX_MEMBERS
from beamjax.options import Options
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.streaming import count_members
from beamjax.pipelines.run import stored_bodies
from beamjax.pipelines.runners.connect import Connection, connection_of
from beamjax.pipelines.values.elements import Element, block_of, whole
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.run_stores import new_store, remove_store
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.pipelines.worker_inputs import source_specs, stream_specs
from beamjax.plan.steps import Loop, Output, Plan, walk
from beamjax.runtime.inputs import Inputs
from beamjax.storage import temporary
from beamjax.storage.arrays import decode_arrays, encode_arrays


@dataclass(frozen=True)
class Leaf:
    """One leaf of the members of a PCollection: its name in the plan, shape, dtype, path."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    path: str


class PlanTransform(beam.PTransform):
    """Runs a plan over a PCollection of `(index, member)`, or over sources only."""

    def __init__(
        self, plan: Plan, inputs: Inputs, out_tree: Any, groups: Sequence[Any], options: Options
    ):
        super().__init__(label=f"beamjax {plan.name}")
        _refuse_rounds(plan)
        self.plan = plan
        # Abstract inputs (`jax.ShapeDtypeStruct`) are leaves of the members; `groups` are the trees
        # of these arguments.
        self.run_inputs = inputs
        self.out_tree = out_tree
        self.groups = list(groups)
        self.options = options
        self._check_streams()
        self.abstract = [i for i, v in enumerate(inputs.values) if _is_abstract(v)]
        if len(self.abstract) != sum(group.num_leaves for group in self.groups):
            raise StagingError(
                "transform: an argument mixes jax.ShapeDtypeStruct with arrays; give each "
                "argument either as values or as the types of what the PCollection holds"
            )

    def expand(self, input_or_inputs: Any) -> Any:
        """See `beamjax.transform`."""
        self._check_input(input_or_inputs)
        pipeline = input_or_inputs.pipeline
        connection = connection_of(pipeline, self.options)
        shared = connection.shared
        store = _store(pipeline, connection)
        sources = source_specs(self.run_inputs, store, shared)
        weakref.finalize(pipeline, sources.release)
        static = {name: store.put([a], name) for name, a in self.run_inputs.server().items()}
        bound = build.GraphInputs(static, sources)
        if self.abstract:
            self._form_blocks(input_or_inputs, bound, store)
        streams = self.run_inputs.streams()
        if streams is not None:
            bound.streams = stream_specs(streams, shared)
            weakref.finalize(pipeline, bound.streams.release)
        bodies = stored_bodies(self.plan, store, shared)
        graph = build.Graph(pipeline, self.plan, bound, store, connection, bodies)
        graph.build()
        leaves = [self._output(graph, i, output) for i, output in enumerate(self.plan.outputs)]
        return jax.tree_util.tree_unflatten(self.out_tree, leaves)

    def _check_input(self, pvalue: Any) -> None:
        if not self.abstract:
            if not isinstance(pvalue, PBegin):
                raise StagingError(
                    f"transform: applied to a {type(pvalue).__name__}, but no argument is a "
                    "jax.ShapeDtypeStruct that says what it holds; apply it to the pipeline itself"
                )
            return
        if not isinstance(pvalue, beam.PCollection):
            raise StagingError(
                f"transform: applied to a {type(pvalue).__name__}, expected one PCollection of "
                "(index, member): an argument is a jax.ShapeDtypeStruct"
            )
        if not pvalue.is_bounded:
            raise StagingError(
                "transform: found an unbounded PCollection, which has no last member; expected a "
                "bounded one: a program reduces over all members at once"
            )
        if not pvalue.windowing.is_default():
            window = type(pvalue.windowing.windowfn).__name__
            raise StagingError(
                f"transform: the members are in {window}, expected the global window and the "
                "default trigger: a program reduces over all members at once; put beam.WindowInto"
                "(beam.window.GlobalWindows()) before it"
            )

    def _check_streams(self) -> None:
        """Raises StagingError for sources of unknown length that one pipeline can't read."""
        if self.run_inputs.streams() is None:
            return
        if len(self.plan.open_placements) != 1 or any(map(_is_abstract, self.run_inputs.values)):
            raise StagingError(
                "transform: found a source of unknown length, expected all such sources to belong "
                "to one placement, of which the PCollection has no members; use beamjax.run, which "
                "counts members first where it has to"
            )

    def _form_blocks(
        self, members: beam.PCollection, bound: build.GraphInputs, store: Store
    ) -> None:
        placement = self._placement_of_members()
        n, size = self.plan.sizes[placement], self.plan.shard_sizes[placement]
        leaves = tuple(self._leaf(i) for i in self.abstract)
        names = tuple(leaf.name for leaf in leaves if leaf.name is not None)
        bound.carried[placement] = names
        keyed = members | "Key by shard" >> beam.ParDo(KeyByShard(leaves, self.groups, n, size))
        if n is not None:
            # One element for every shard, so that shards without members are noticed.
            expected = (
                members.pipeline
                | "Impulse" >> beam.Impulse()
                | "All shards" >> beam.ParDo(Expected(len(self.plan.shards(placement))))
            )
            keyed = (keyed, expected) | "Flatten" >> beam.Flatten()
        bound.blocks[placement] = blocks = (
            keyed
            | "Group into shards" >> beam.GroupByKey()
            | "Form blocks" >> beam.ParDo(FormBlocks(store, names, n, size))
        )
        if n is None:
            bound.sizes[placement] = count_members(blocks, store, placement)

    def _placement_of_members(self) -> str:
        """The placement of the members of the PCollection."""
        specs = [self.plan.inputs[i] for i in self.abstract]
        for spec in specs:
            if spec.views:
                raise StagingError(
                    f"{spec.path}: the program cuts it into groups of {spec.views[0].rows} "
                    "elements, expected an element for each member; group the elements of the "
                    "PCollection, and give an abstract argument of the shape of all groups"
                )
        placements = {self.plan.values[s.placed].placement for s in specs if s.placed}
        if not placements:  # Only the number of the members is read.
            placements = {key for key, n in self.plan.sizes.items() if n is None}
        if len(placements) != 1:
            raise StagingError(
                f"transform: the abstract arguments belong to the placements {placements}, "
                "expected exactly one; use one transform for each placement"
            )
        placement = placements.pop() or ""
        for other, n in self.plan.sizes.items():
            if n is None and other != placement:
                raise StagingError(
                    f"transform: the number of members of placement {other!r} is unknown, and the "
                    "PCollection has none of them; give it in the decorator of the program"
                )
        return placement

    def _leaf(self, index: int) -> Leaf:
        spec, aval = self.plan.inputs[index], self.run_inputs.values[index]
        if not aval.shape:
            raise StagingError(
                f"{spec.path}: found a scalar jax.ShapeDtypeStruct, expected one of shape (n, ...)"
            )
        raw = jax.eval_shape(unwrap, aval)
        return Leaf(spec.placed, raw.shape[1:], np.dtype(raw.dtype).name, spec.path)

    def _output(self, graph: build.Graph, index: int, output: Output) -> beam.PCollection:
        label = f"Result {index}"
        name = output.value
        if name is not None and self.plan.values[name].placement is not None:
            return graph.placed(name) | label >> beam.ParDo(EmitMembers(graph.store, name))
        if name in graph.served:
            return graph.served[name] | label >> beam.ParDo(Load(graph.store, name))
        if name is None:
            static = graph.store.put([self._known(output)], label)
        else:
            static = graph.inputs.static[name]
        begin = graph.root | f"{label}/Impulse" >> beam.Impulse()
        return begin | label >> beam.ParDo(Load(graph.store, static))

    def _known(self, output: Output) -> np.ndarray:
        """An output that no step computes: a constant, or an input."""
        if output.constant is not None:
            return output.constant
        assert output.input is not None
        if output.input in self.abstract:
            raise StagingError(
                f"transform: the result returns {self.plan.inputs[output.input].path} as it is; "
                "use the PCollection that you have"
            )
        return self.run_inputs.whole(output.input)


class KeyByShard(StepFn):
    """From members `(index, tree)` to `(shard, bytes)`."""

    yields = typehints.KV[int, bytes]

    def __init__(self, leaves: Sequence[Leaf], groups: Sequence[Any], n: int | None, size: int):
        self.leaves = tuple(leaves)
        # Tree definitions can't be pickled; a tree of leaf numbers can.
        trees = [jax.tree_util.tree_unflatten(g, range(g.num_leaves)) for g in groups]
        self.template = trees[0] if len(trees) == 1 else tuple(trees)
        self.n = n
        self.size = size

    def process(self, element: Any) -> Iterator[Any]:
        index, member = self._indexed(element)
        expected: Any = jax.tree_util.tree_structure(self.template)
        structure: Any = jax.tree_util.tree_structure(member)
        if structure != expected:
            raise StructureError(
                f"transform: member {index} is the tree {structure}, expected {expected}"
            )
        arrays = []
        for leaf, value in zip(self.leaves, jax.tree_util.tree_leaves(member), strict=True):
            array = np.asarray(unwrap(value) if isinstance(value, jax.Array) else value)
            if array.shape != leaf.shape or array.dtype != np.dtype(leaf.dtype):
                raise StructureError(
                    f"transform: member {index} of {leaf.path} is {array.dtype}"
                    f"{list(array.shape)}, expected {leaf.dtype}{list(leaf.shape)}"
                )
            arrays += [array] if leaf.name is not None else []
        yield index // self.size, encode_arrays(arrays, {"index": index})

    def _indexed(self, element: Any) -> tuple[int, Any]:
        if isinstance(element, tuple) and len(element) == 2:
            index, member = element
            if isinstance(index, int | np.integer) and not isinstance(index, bool):
                if 0 <= index < (MAX_MEMBERS if self.n is None else self.n):
                    return int(index), member
                if self.n is None:
                    raise SourceError(
                        f"transform: found member {index}, expected 0 to {MAX_MEMBERS - 1} at most"
                    )
                raise SourceError(
                    f"transform: found member {index}, expected 0 to {self.n - 1}: the placement "
                    f"has {self.n} members"
                )
        shown = " ".join(repr(element).split())
        raise StructureError(
            f"transform: found the element {shown:.200}, expected (index, member) with the "
            "number of the member, from 0"
        )


class Expected(StepFn):
    """From one element to `(shard, b"")` for every shard."""

    yields = typehints.KV[int, bytes]

    def __init__(self, count: int):
        self.count = count

    def process(self, element: Any) -> Iterator[tuple[int, bytes]]:
        for index in range(self.count):
            yield index, b""


class FormBlocks(StepFn):
    """From the members of one shard to one block, in order of their index."""

    yields = Element

    def __init__(self, store: Store, names: tuple[str, ...], n: int | None, size: int):
        self.store = store
        self.names = names
        self.n = n
        self.size = size

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[Element]:
        shard, encoded = element
        start = shard * self.size
        members: dict[int, list[np.ndarray]] = {}
        for data in encoded:
            if not data:
                continue
            arrays, meta = decode_arrays(data)
            if meta["index"] in members:
                raise SourceError(f"transform: member {meta['index']} is in the PCollection twice")
            members[meta["index"]] = arrays
        # Without a number of members, a block ends with the last member found, and `CountMembers`
        # checks that no members are missing between blocks.
        last = max(members) if self.n is None else self.n - 1
        count = min(self.size, last + 1 - start)
        missing = sorted(set(range(start, start + count)) - set(members))
        if missing:
            raise SourceError(
                f"transform: {len(missing)} members of shard {shard} are missing in the "
                f"PCollection, the first one is member {missing[0]}; expected 0 to {last}"
            )
        columns = zip(*(members[i] for i in range(start, start + count)), strict=True)
        values = dict(zip(self.names, map(np.stack, columns), strict=True))
        yield whole(block_of(start, count, values), self.store)


class EmitMembers(StepFn):
    """From blocks to the `(index, member)` of one placed value."""

    yields = typehints.Tuple[int, np.ndarray]

    def __init__(self, store: Store, name: str):
        self.store = store
        self.name = name

    def process(self, block: Element) -> Iterator[tuple[int, np.ndarray]]:
        yield from enumerate(block.array(self.name, self.store), block.range[0])


class Load(StepFn):
    """From an element to a server value."""

    yields = np.ndarray

    def __init__(self, store: Store, value: str | StoreRef):
        self.store = store
        # The name of the value in the element; or a reference, which does not depend on the
        # element.
        self.value = value

    def process(self, element: Any) -> Iterator[np.ndarray]:
        ref = self.value if isinstance(self.value, StoreRef) else element.refs()[self.value]
        yield self.store.array(ref)


def _store(pipeline: beam.Pipeline, connection: Connection) -> Store:
    """A store that lasts as long as the pipeline may run."""
    folder = connection.options.work_folder
    store = new_store(folder)
    if connection.shared:
        weakref.finalize(pipeline, remove_store, store)
    elif folder is None:
        atexit.register(remove_store, store)
    else:
        # Never removed: the pipeline may still run when this process ends.
        temporary.release(store.root)
    return store


def _refuse_rounds(plan: Plan) -> None:
    """Raises StagingError for a loop. Loops with a known number of rounds are unrolled before."""
    for step in walk(plan.steps):
        if isinstance(step, Loop):
            raise StagingError(
                f"{step.line}: found the rounds of a loop around placed operators, which can't be "
                "part of your own pipeline: a Beam graph is fixed before it runs, and here values "
                "decide what runs next. Use beamjax.run, or write a known number of rounds as a "
                "Python loop"
            )


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)
