"""Merges partials of shards to server values, by ranges of bounded size and in any order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints
from apache_beam.coders import Coder
from apache_beam.typehints.decorators import IOTypeHints

from beamjax.errors import SourceError
from beamjax.numerics.accumulators import Accumulator
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.provenance import merged
from beamjax.numerics.reducers import decode_accumulator
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.elements import Environment, MemberBlock, NodeKey, PartKey
from beamjax.pipelines.values.refs import StoreRef, file_name, unique_key
from beamjax.pipelines.values.store import Store, memory_store_of
from beamjax.pipelines.worker.metrics import WorkerSpans
from beamjax.pipelines.worker.tasks import StepFn, Task
from beamjax.plan.buffer_ranges import ValueRange, accumulator_ranges
from beamjax.plan.steps import Combine, Gather, Map, Plan, ValueType, size_name
from beamjax.runtime import passes
from beamjax.runtime.shard_executor import finish_buffer, finish_tree, join_shards
from beamjax.spans import Spans, timed, transferring
from beamjax.storage import buffers, files
from beamjax.storage.arrays import decode_arrays, encode_arrays

RANGE = typehints.Tuple[int, int, int]
GROUP = typehints.Tuple[int, int, int, int]
"""The keys of partials: a `ValueRange`, and one with the number of a group."""


class AccumulatorCoder(Coder):
    """Coder of the accumulators of `MergeAccumulators`: None, an `Accumulator`, or bytes."""

    def __init__(self, store: Store):
        # Large accumulators are written to it, so that no element is large.
        self.store = store

    def encode(self, value: Any) -> bytes:
        return b"" if value is None else _encoded(value, self.store)

    def decode(self, encoded: bytes) -> bytes | None:
        return encoded or None

    def is_deterministic(self) -> bool:
        return True

    def estimate_size(self, value: Any) -> int:
        return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


class MergeAccumulators(beam.CombineFn):
    """Merges encoded accumulators of one range of a buffer."""

    def __init__(self, step: str, store: Store):
        super().__init__()
        self.store = store
        self.step = step
        self.spans = WorkerSpans(store.reports)

    def default_type_hints(self) -> IOTypeHints:
        return IOTypeHints.empty().with_input_types(bytes).with_output_types(bytes)

    def get_accumulator_coder(self) -> Coder:
        return AccumulatorCoder(self.store)

    def create_accumulator(self) -> Any:
        # Then an `Accumulator` or its bytes. A single input stays bytes, so it is not decoded and
        # encoded for nothing.
        return None

    def add_input(self, accumulator: Any, element: bytes) -> Any:
        return self._merge(accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        merged = None
        for accumulator in accumulators:
            merged = self._merge(merged, accumulator)
        return merged

    def compact(self, accumulator: Any) -> Any:
        return accumulator if accumulator is None else self._reported(accumulator)

    def extract_output(self, accumulator: Any) -> bytes:
        return self._reported(accumulator)

    def _reported(self, accumulator: Any) -> bytes:
        """The bytes of an accumulator. Reports the measured seconds to Beam."""
        if isinstance(accumulator, bytes):
            encoded = accumulator
        else:
            with timed(self.spans, self.step, "transfer"):
                encoded = _encoded(accumulator, self.store)
        self.spans.report()
        return encoded

    def _merge(self, accumulator: Any, other: Any) -> Any:
        if other is None:
            return accumulator
        if accumulator is None:
            return other
        with timed(self.spans, self.step, "merge"):
            left, right = (_decoded(side, self.store) for side in (accumulator, other))
            return passes.merged(left, right)


class AssignGroups(StepFn):
    """Assigns the partials of each range to groups, which have keys with a group as well."""

    # This is the first half of `with_hot_key_fanout`. Beam's own has no coder for the accumulators
    # between its two merges, and pickles them whole, whatever their size.
    yields = typehints.KV[GROUP, bytes]

    def __init__(self, groups: int):
        self.groups = groups

    def start_bundle(self) -> None:
        """Chooses a random first group, since most bundles have one partial of each key."""
        self.next = int(np.random.default_rng().integers(self.groups))

    def process(self, element: tuple[ValueRange, bytes]) -> Iterator[tuple[Any, bytes]]:
        key, data = element
        yield (*key, self.next), data
        self.next = (self.next + 1) % self.groups


class MergeGroup(StepFn):
    """From the accumulators of a group to one, for the last merge of the key."""

    yields = typehints.KV[RANGE, bytes]

    def __init__(self, merging: MergeAccumulators):
        self.merging = merging

    def process(self, element: tuple[Any, Iterable[bytes]]) -> Iterator[tuple[Any, bytes]]:
        *key, _ = element[0]
        merged = self.merging.merge_accumulators(element[1])
        yield tuple(key), self.merging.extract_output(merged)


def _decoded(accumulator: Accumulator | bytes, store: Store) -> Accumulator:
    if not isinstance(accumulator, bytes):
        return accumulator
    with transferring():
        return receive(store, accumulator)


def finished(
    plan: Plan, step: Map, piece: ValueRange, accumulator: Accumulator, store: Store
) -> dict[PartKey, StoreRef]:
    """The values of the reductions in a range, rounded."""
    # If the buffers of the step are one range, it has whole results.
    is_whole = len(accumulator_ranges(step)) == 1
    buffer, where = step.buffers[piece.buffer], (piece.start, piece.stop)
    refs = {}
    for name, offset, part in finish_buffer(plan, step, buffer, accumulator, where):
        if is_whole:
            ref = store.hold([part.reshape(plan.values[name].shape)], name, own=True)
        else:
            ref = store.hold([part], name, own=True, inline=False, hashed=False)
        refs[PartKey(name, offset)] = ref
    return refs


def finish_pieces(
    task: Task[Map], element: tuple[Any, bytes], served: tuple[Environment, ...], spans: Spans
) -> Environment:
    """From merged accumulators to the values of the reductions, or to parts of them."""
    plan, step, store = plan_with_size(task, served), task.step, task.store
    with timed(spans, step.name, "merge"):
        accumulator = receive(store, element[1])
        provenance = accumulator.provenance
        parts: Any = finished(plan, step, ValueRange(*element[0]), accumulator, store)
    if len(accumulator_ranges(step)) == 1:
        parts = {key.name: ref for key, ref in parts.items()}
    return Environment(parts, provenance)


def plan_with_size(task: Task[Map], served: tuple[Environment, ...]) -> Plan:
    """The plan of a pass, with the number of its members, which the pipeline may have counted."""
    plan, placement = task.plan, task.step.placement
    if plan.sizes[placement] is not None:
        return plan
    (n,) = task.arrays(task.refs([size_name(placement)], served)).values()
    return replace(plan, sizes={**plan.sizes, placement: int(n)})


def nodes_of(tree: DyadicTree[list[np.ndarray]], store: Store) -> dict[NodeKey, StoreRef]:
    """The partials of a bundle for a combine."""
    nodes = tree.in_order()
    return {NodeKey(level, i): store.put(arrays, "partial") for level, i, arrays in nodes}


def combined_nodes(
    combine: Combine,
    join: Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]],
    bundles: Iterable[Mapping[NodeKey, StoreRef]],
    store: Store,
) -> dict[str, np.ndarray]:
    """The results of a combine, by name, from the nodes of all bundles, in any order."""
    tree = DyadicTree(join)
    for nodes in bundles:
        for node, ref in nodes.items():
            tree.add(store.get(ref, cache=False), node.number, node.level)
    return dict(finish_tree(combine, tree))


def finish_combine(
    number: int,
    task: Task[Map],
    element: tuple[Any, Iterable[Environment]],
    served: tuple[Environment, ...],
    spans: Spans,
) -> Environment:
    """From the partials of all bundles to the results of a combine, that of this number."""
    combine, bundles = task.step.combines[number], list(element[1])
    with timed(spans, task.step.name, "merge"):
        known = task.arrays(task.refs(combine.inputs, served))
        join = join_shards(task.with_bodies(), task.step, combine, known, task.device)
        nodes = [bundle.values for bundle in bundles]
        values = combined_nodes(combine, join, nodes, task.store)
        refs = {name: task.store.put([array], name) for name, array in values.items()}
    return Environment(refs, task.provenance((*served, *bundles)))


def assembled(
    store: Store,
    types: Mapping[str, ValueType],
    axes: Mapping[str, int],
    bundles: Iterable[Mapping[PartKey, StoreRef]],
) -> dict[str, StoreRef]:
    """From parts of values to whole server values."""
    # `axes` has the axis of a whole value that is the first axis of its parts. Values that are not
    # listed have flat parts.
    parts: dict[str, dict[int, StoreRef]] = collections.defaultdict(dict)
    for refs in bundles:
        for key, ref in refs.items():
            # If a bundle was retried, a part may be there twice; either is used, they are equal.
            parts[key.name][key.offset] = ref
    whole = {}
    for name, by_offset in parts.items():
        value = types[name]
        in_order = [by_offset[offset] for offset in sorted(by_offset)]
        # Parts in files need not be read: a reference to all files stands for the whole value.
        held = any(map(store.is_held, in_order))
        if not axes.get(name) and not held and all(r.kind == "file" for r in in_order):
            whole[name] = store.joined(in_order, value.shape, np.dtype(value.dtype))
            continue
        arrays = [store.array(ref, cache=False) for ref in in_order]
        array = _joined(arrays) if len(arrays) > 1 else arrays[0]
        if name in axes:
            array = np.moveaxis(array, 0, axes[name])
        array = array.reshape(value.shape).astype(value.dtype, copy=False)
        whole[name] = store.hold([array], name, own=True)
        store.release(in_order)
    return whole


def assemble(
    task: Task[Any], element: tuple[Any, Iterable[Environment]], served: Any, spans: Spans
) -> Environment:
    """From parts of values to whole server values; see `assembled`."""
    parts, step = list(element[1]), task.step
    axes = {step.result: step.axis} if isinstance(step, Gather) else {}
    whole = assembled(task.store, task.plan.values, axes, [part.values for part in parts])
    return Environment(whole, merged(part.provenance for part in parts))


def part_of_block(task: Task[Gather], block: MemberBlock, served: Any, spans: Spans) -> Environment:
    """From a block to a part of the result of a `Gather`, for `assemble`."""
    step, store = task.step, task.store
    with timed(spans, step.name, "transfer"):
        ref = store.put([block.array(step.operand, store)], step.result)
    return Environment({PartKey(step.result, block.start): ref}, block.provenance)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays along their first axis, with an alignment that JAX needs no copy for."""
    first = arrays[0]
    room = buffers.empty((sum(map(len, arrays)), *first.shape[1:]), first.dtype)
    return np.concatenate(arrays, out=room)


def _encoded(accumulator: Accumulator | bytes, store: Store) -> bytes:
    return accumulator if isinstance(accumulator, bytes) else send(store, accumulator)


_NAMES_BYTES = 1 << 13
"""Upper bound of the bytes of an element that refers to an accumulator. Larger elements are encoded
accumulators, so `receive` need not decode their header first."""


def send(store: Store, accumulator: Accumulator, as_file: bool = False) -> bytes:
    """The element for an accumulator: the accumulator itself, or a reference if it is large."""
    # The caller must not use the accumulator afterwards: where all is one process, it is handed
    # over.
    memory = memory_store_of(store.root)
    if memory is not None and accumulator.nbytes > stores.LOCAL_BYTES:
        name = file_name(unique_key(), "sums")
        memory.hand_over(name, accumulator)
        return encode_arrays([], {"here": name})
    data = accumulator.encode()
    limit = stores.REMOTE_BYTES if files.is_url(store.root) else stores.LOCAL_BYTES
    if len(data) <= (0 if as_file else limit):
        return data
    # With a unique name: two workers that send equal accumulators must not share a file.
    whole = np.frombuffer(data, np.uint8)
    ref = store.put([whole], "sums", inline=False, hashed=False)
    return encode_arrays([], {"spilled": ref.to_json()})


def receive(store: Store, element: bytes) -> Accumulator:
    """The accumulator of an element of `send`. One that is in memory can be received only once."""
    if len(element) > _NAMES_BYTES:
        return decode_accumulator(element)
    meta = decode_arrays(element)[1]
    if "here" in meta:
        return _taken(store, str(meta["here"]))
    if "spilled" not in meta:
        return decode_accumulator(element)
    return decode_accumulator(store.array(StoreRef.from_json(meta["spilled"]), cache=False).data)


def _taken(store: Store, name: str) -> Accumulator:
    memory = memory_store_of(store.root)
    accumulator: Accumulator | None = None if memory is None else memory.take(name)
    if accumulator is None:
        raise SourceError(
            f"{store.root}: the partial result {name} is not in this process, or was merged "
            "before; each is merged once, in the process that computed it."
        )
    return accumulator
