"""Merges partials of shards to server values, by ranges of bounded size and in any order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints
from apache_beam.coders import Coder
from apache_beam.typehints.decorators import IOTypeHints

from beamjax.errors import SourceError
from beamjax.numerics.accumulators import Accumulator
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.reducers import decode_accumulator
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.elements import Element, ref_of, stored_part
from beamjax.pipelines.values.refs import StoreRef, file_name, unique_key
from beamjax.pipelines.values.store import Store, memory_store_of
from beamjax.pipelines.worker.reporting import WorkerSpans
from beamjax.pipelines.worker.tasks import StepFn, Task
from beamjax.plan.steps import (
    Combine,
    Gather,
    Map,
    Plan,
    ValueRange,
    ValueType,
    accumulator_ranges,
    size_name,
)
from beamjax.runtime import passes
from beamjax.runtime.shard_executor import finish_buffer, finish_tree, join_shards
from beamjax.runtime.values import Part
from beamjax.spans import Spans, timed, transferring
from beamjax.storage import buffers, files
from beamjax.storage.arrays import decode_arrays, encode_arrays

RANGE = typehints.Tuple[int, int, int]
GROUP = typehints.Tuple[int, int, int, int]
"""The keys of partials: a `ValueRange`, and one with the number of a group."""


@dataclass(frozen=True)
class Accumulated:
    """The merged accumulators of a range of a buffer, so far; none at first."""

    # A single one stays as the element that it came in, so it is not decoded and encoded for
    # nothing.
    element: bytes = b""
    accumulator: Accumulator | None = None

    def encoded(self, store: Store) -> bytes:
        """As an element. A large accumulator is written to the store, so no element is large."""
        return self.element if self.accumulator is None else send(store, self.accumulator)

    def decoded(self, store: Store) -> Accumulator:
        """The accumulator, which must not be used twice."""
        if self.accumulator is not None:
            return self.accumulator
        with transferring():
            return receive(store, self.element)


EMPTY = Accumulated()


class AccumulatedCoder(Coder):
    """Coder of `Accumulated`."""

    def __init__(self, store: Store):
        self.store = store

    def encode(self, value: Accumulated) -> bytes:
        return value.encoded(self.store)

    def decode(self, encoded: bytes) -> Accumulated:
        return Accumulated(encoded)

    def is_deterministic(self) -> bool:
        return True

    def estimate_size(self, value: Accumulated) -> int:
        return len(value.element) if value.accumulator is None else value.accumulator.nbytes


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
        return AccumulatedCoder(self.store)

    def create_accumulator(self) -> Accumulated:
        return EMPTY

    def add_input(self, accumulator: Accumulated, element: bytes) -> Accumulated:
        return self.merge_accumulators([accumulator, Accumulated(element)])

    def merge_accumulators(self, accumulators: Iterable[Accumulated]) -> Accumulated:
        merged = EMPTY
        for other in accumulators:
            if merged == EMPTY:
                merged = other
            elif other != EMPTY:
                with timed(self.spans, self.step, "merge"):
                    both = passes.merged(merged.decoded(self.store), other.decoded(self.store))
                merged = Accumulated(accumulator=both)
        return merged

    def compact(self, accumulator: Accumulated) -> Accumulated:
        return Accumulated(self.extract_output(accumulator))

    def extract_output(self, accumulator: Accumulated) -> bytes:
        if accumulator.accumulator is not None:
            with timed(self.spans, self.step, "transfer"):
                accumulator = Accumulated(accumulator.encoded(self.store))
        self.spans.report()
        return accumulator.element


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
        merged = self.merging.merge_accumulators(map(Accumulated, element[1]))
        yield tuple(key), self.merging.extract_output(merged)


def finished(
    plan: Plan, step: Map, piece: ValueRange, accumulator: Accumulator, store: Store
) -> Element:
    """The values of the reductions in a range, rounded: whole ones, or parts of flat ones."""
    # If the buffers of the step are one range, it has whole results.
    is_whole = len(accumulator_ranges(step)) == 1
    buffer, where = step.buffers[piece.buffer], (piece.start, piece.stop)
    parts = Element()
    for name, offset, flat in finish_buffer(plan, step, buffer, accumulator, where):
        if is_whole:
            array = flat.reshape(plan.values[name].shape)
            parts[name] = stored_part(store.hold([array], name, own=True))
        else:
            ref = store.hold([flat], name, own=True, inline=False, hashed=False)
            parts[name] = stored_part(ref, offset, len(flat))
    return parts


def finish_pieces(
    task: Task[Map], element: tuple[Any, bytes], served: tuple[Element, ...], spans: Spans
) -> Element:
    """From merged accumulators to the values of the reductions, or to parts of them."""
    plan, step, store = plan_with_size(task, served), task.step, task.store
    with timed(spans, step.name, "merge"):
        accumulator = receive(store, element[1])
        return finished(plan, step, ValueRange(*element[0]), accumulator, store)


def plan_with_size(task: Task[Map], served: tuple[Element, ...]) -> Plan:
    """The plan of a pass, with the number of its members, which the pipeline may have counted."""
    plan, placement = task.plan, task.step.placement
    if plan.sizes[placement] is not None:
        return plan
    (n,) = task.arrays(task.refs([size_name(placement)], served)).values()
    return replace(plan, sizes={**plan.sizes, placement: int(n)})


def nodes_of(tree: DyadicTree[list[np.ndarray]], store: Store) -> tuple[Part, ...]:
    """The partials of a bundle for a combine, each with the range of its shards."""
    return tuple(
        stored_part(store.put(arrays, "partial"), number << level, 1 << level)
        for level, number, arrays in tree.in_order()
    )


def combined_nodes(
    combine: Combine,
    join: Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]],
    nodes: Iterable[Part],
    store: Store,
) -> dict[str, np.ndarray]:
    """The results of a combine, by name, from the partials of all bundles, in any order."""
    tree = DyadicTree(join)
    for node in nodes:
        level = node.count.bit_length() - 1
        tree.add(store.get(ref_of(node), cache=False), node.start >> level, level)
    return dict(finish_tree(combine, tree))


def finish_combine(
    number: int,
    task: Task[Map],
    element: tuple[Any, Iterable[Element]],
    served: tuple[Element, ...],
    spans: Spans,
) -> Element:
    """From the partials of all bundles to the results of a combine, that of this number."""
    combine = task.step.combines[number]
    with timed(spans, task.step.name, "merge"):
        known = task.arrays(task.refs(combine.inputs, served))
        join = join_shards(task.with_bodies(), task.step, combine, known, task.device)
        nodes = (node for parts in element[1] for node in parts.values())
        values = combined_nodes(combine, join, nodes, task.store)
        refs = {name: task.store.put([array], name) for name, array in values.items()}
    return Element({name: stored_part(ref) for name, ref in refs.items()})


def assembled(
    store: Store,
    types: Mapping[str, ValueType],
    axes: Mapping[str, int],
    parts: Iterable[tuple[str, Part]],
) -> dict[str, StoreRef]:
    """From parts of values to whole server values."""
    # `axes` has the axis of a whole value that is the first axis of its parts. Values that are not
    # listed have flat parts.
    starts: dict[str, dict[int, StoreRef]] = collections.defaultdict(dict)
    for name, part in parts:
        # If a bundle was retried, a part may be there twice; either is used, they are equal.
        starts[name][part.start] = ref_of(part)
    whole = {}
    for name, by_start in starts.items():
        value = types[name]
        in_order = [by_start[start] for start in sorted(by_start)]
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
    task: Task[Any], element: tuple[Any, Iterable[Element]], served: Any, spans: Spans
) -> Element:
    """From parts of values to whole server values; see `assembled`."""
    step, parts = task.step, (part for parts in element[1] for part in parts.items())
    axes = {step.result: step.axis} if isinstance(step, Gather) else {}
    whole = assembled(task.store, task.plan.values, axes, parts)
    return Element({name: stored_part(ref) for name, ref in whole.items()})


def part_of_block(task: Task[Gather], block: Element, served: Any, spans: Spans) -> Element:
    """From a block to a part of the result of a `Gather`, for `assemble`."""
    step, store = task.step, task.store
    with timed(spans, step.name, "transfer"):
        ref = store.put([block.array(step.operand, store)], step.result)
    return Element({step.result: stored_part(ref, *block.range)})


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays along their first axis, with an alignment that JAX needs no copy for."""
    first = arrays[0]
    room = buffers.empty((sum(map(len, arrays)), *first.shape[1:]), first.dtype)
    return np.concatenate(arrays, out=room)


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
