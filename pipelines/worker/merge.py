"""Merges partials of shards to server values, by ranges of bounded size and in any order."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.numerics.reducers import decode_accumulator
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.elements import Environment, MemberBlock
from beamjax.pipelines.values.refs import Ref, file_name, unique_key
from beamjax.pipelines.values.store import Store, memory_store_of
from beamjax.pipelines.worker.metrics import WorkerSpans
from beamjax.pipelines.worker.tasks import ComputeFn, SourceSpecs, StepFn, Task
from beamjax.plan.buffer_ranges import ValueRange, accumulator_ranges
from beamjax.plan.shard import Shards
from beamjax.plan.steps import Gather, Map, Plan, ValueType, size_name
from beamjax.runtime.shard_executor import finish_buffer, finish_tree, join_shards
from beamjax.spans import timed, transferring
from beamjax.storage import buffers, files
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.telemetry.worker_records import Reports


class AccumulatorCoder(Coder):
    """Coder of the accumulators of `MergeAccumulators`: None, an `Accumulator`, or bytes."""

    def __init__(self, store: Store | None = None):
        # Large accumulators are written to it, so that no element is large. None encodes all of
        # them as elements.
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

    def __init__(
        self,
        step: str,
        reports: Reports | None = None,
        store: Store | None = None,
        as_files: bool = False,
    ):
        super().__init__()
        self.as_files = as_files
        self.store = store
        self.step = step
        self.spans = WorkerSpans(reports)

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
                encoded = _encoded(accumulator, self.store, self.as_files)
        self.spans.report()
        return encoded

    def _merge(self, accumulator: Any, other: Any) -> Any:
        if other is None:
            return accumulator
        if accumulator is None:
            return other
        with timed(self.spans, self.step, "merge"):
            merged = _decoded(accumulator, self.store)
            merged.merge(_decoded(other, self.store))
        return merged


class AssignGroups(StepFn):
    """Assigns the partials of each key to groups, which have the keys `key|group`."""

    # This is the first half of `with_hot_key_fanout`. Beam's own has no coder for the accumulators
    # between its two merges, and pickles them whole, whatever their size.
    yields = typehints.KV[str, bytes]

    def __init__(self, groups: int):
        self.groups = groups

    def start_bundle(self) -> None:
        """Chooses a random first group, since most bundles have one partial of each key."""
        self.next = int(np.random.default_rng().integers(self.groups))

    def process(self, element: tuple[str, bytes]) -> Iterator[tuple[str, bytes]]:
        key, data = element
        yield f"{key}|{self.next}", data
        self.next = (self.next + 1) % self.groups


class MergeGroup(StepFn):
    """From the accumulators of a group to one, for the last merge of the key."""

    yields = typehints.KV[str, bytes]

    def __init__(self, merging: MergeAccumulators):
        self.merging = merging

    def process(self, element: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, bytes]]:
        key, _, _ = element[0].rpartition("|")
        merged = self.merging.merge_accumulators(element[1])
        yield key, self.merging.extract_output(merged)


def _decoded(accumulator: Any, store: Store | None) -> Any:
    if not isinstance(accumulator, bytes):
        return accumulator
    with transferring():
        return decode_accumulator(accumulator) if store is None else receive(store, accumulator)


class FinishPieces(StepFn):
    """From merged accumulators to the values of the reductions."""

    yields = Environment

    def __init__(self, task: Task[Map]):
        self.task = task
        self.spans = WorkerSpans(task.store.reports)
        # If the buffers of the step are one range, the outputs are whole results; otherwise parts,
        # named `name|offset`.
        self.whole = len(accumulator_ranges(task.step)) == 1

    def process(self, element: tuple[str, bytes], *served: Environment) -> Iterator[Environment]:
        key, data = element
        piece = ValueRange.from_key(key)
        plan, step = plan_with_size(self.task, served), self.task.step
        buffer, where = step.buffers[piece.buffer], (piece.start, piece.stop)
        with timed(self.spans, step.name, "merge"):
            accumulator = _decoded(data, self.task.store)
            provenance = accumulator.provenance
            found = finish_buffer(plan, step, buffer, accumulator, where)
            values = {}
            for name, offset, part in found:
                hold = self.task.store.hold
                if self.whole:
                    values[name] = hold([part.reshape(plan.values[name].shape)], name, own=True)
                else:
                    ref = hold([part], name, own=True, inline=False, hashed=False)
                    values[f"{name}|{offset}"] = ref
        yield Environment(values, provenance)

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()


def plan_with_size(task: Task[Map], served: tuple[Environment, ...]) -> Plan:
    """The plan of a pass, with the number of its members, which the pipeline may have counted."""
    plan, placement = task.plan, task.step.placement
    if plan.sizes[placement] is not None:
        return plan
    (n,) = task.arrays(task.refs([size_name(placement)], served)).values()
    return replace(plan, sizes={**plan.sizes, placement: int(n)})


class FinishCombine(ComputeFn):
    """From the partials of all bundles, in any order, to the results of a combine."""

    yields = Environment

    def __init__(self, task: Task[Map], number: int):
        super().__init__(task)
        self.number = number  # the index of the combine in its pass

    def process(
        self, element: tuple[Any, Iterable[Environment]], *served: Environment
    ) -> Iterator[Environment]:
        task, combine = self.task, self.task.step.combines[self.number]
        with timed(self.spans, task.step.name, "merge"):
            known = task.arrays(task.refs(combine.inputs, served))
            plan, device = task.with_bodies(), task.device
            tree = DyadicTree(join_shards(plan, task.step, combine, known, device))
            provenance = task.provenance(served)
            for environment in element[1]:
                provenance |= environment.provenance
                for name, ref in environment.values.items():
                    level, index = map(int, name.split("|"))
                    arrays = task.store.get(ref, cache=False)
                    tree.add(arrays, index, level)
            values = dict(finish_tree(combine, tree))
            refs = {name: task.store.put([array], name) for name, array in values.items()}
        yield Environment(refs, provenance)

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()


def partials_of_tree(
    tree: DyadicTree[list[np.ndarray]], store: Store, provenance: Provenance
) -> Environment:
    """The partials of a bundle for a combine: nodes of its tree, named `level|index`."""
    nodes = tree.in_order()
    refs = {f"{level}|{i}": store.put(arrays, "partial") for level, i, arrays in nodes}
    return Environment(refs, provenance)


class Assemble(StepFn):
    """From parts of values, named `name|offset`, to whole server values."""

    yields = Environment

    def __init__(self, store: Store, types: Mapping[str, ValueType], axes: Mapping[str, int]):
        self.store = store
        self.types = dict(types)
        # The axis of the whole value that is the first axis of its parts, by name. Values that are
        # not listed have flat parts.
        self.axes = dict(axes)

    def process(self, element: tuple[Any, Iterable[Environment]]) -> Iterator[Environment]:
        parts: dict[str, dict[int, Ref]] = collections.defaultdict(dict)
        provenance = UNKNOWN
        for environment in element[1]:
            provenance |= environment.provenance
            for key, ref in environment.values.items():
                name, _, offset = key.rpartition("|")
                # If a bundle was retried, a part may be there twice; either is used, as they are
                # equal.
                parts[name][int(offset)] = ref
        whole = {}
        for name, refs in parts.items():
            value = self.types[name]
            in_order = [refs[offset] for offset in sorted(refs)]
            # Parts in files need not be read: a reference to all files stands for the whole value.
            held = any(map(self.store.is_held, in_order))
            if not self.axes.get(name) and not held and all(r.kind == "file" for r in in_order):
                whole[name] = self.store.joined(in_order, value.shape, np.dtype(value.dtype))
                continue
            arrays = [self.store.array(ref, cache=False) for ref in in_order]
            array = _joined(arrays) if len(arrays) > 1 else arrays[0]
            if name in self.axes:
                array = np.moveaxis(array, 0, self.axes[name])
            array = array.reshape(value.shape).astype(value.dtype, copy=False)
            whole[name] = self.store.hold([array], name, own=True)
            self.store.release(in_order)
        yield Environment(whole, provenance)


class PartsOfBlocks(StepFn):
    """From blocks to parts of the result of a `Gather`, for `Assemble`."""

    yields = Environment

    def __init__(self, store: Store, step: Gather):
        self.store = store
        self.step = step
        self.spans = WorkerSpans(store.reports)

    def process(self, block: MemberBlock) -> Iterator[Environment]:
        with timed(self.spans, self.step.name, "transfer"):
            members = block.array(self.step.operand, self.store)
            ref = self.store.put([members], self.step.result)
        yield Environment({f"{self.step.result}|{block.start}": ref}, block.provenance)

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()


class PartsOfSource(StepFn):
    """From ranges of shards to parts of the result of a `Gather` of an input, for `Assemble`."""

    yields = Environment

    def __init__(self, store: Store, sources: SourceSpecs, step: Gather, shards: Shards):
        self.store = store
        self.sources = sources
        self.step = step
        self.shards = shards
        self.spans = WorkerSpans(store.reports)

    def setup(self) -> None:
        """Opens the source."""
        self.reader = self.sources.open()

    def process(self, element: tuple[int, int]) -> Iterator[Environment]:
        step = self.step
        for shard in self.shards.between(*element):
            with timed(self.spans, step.name, "read", shard) as span:
                values = self.reader.read([step.operand], shard.start, shard.start + shard.count)
                span.nbytes = values[step.operand].nbytes
                ref = self.store.put([values[step.operand]], step.result)
            yield Environment({f"{step.result}|{shard.start}": ref})

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays along their first axis, with an alignment that JAX needs no copy for."""
    first = arrays[0]
    room = buffers.empty((sum(map(len, arrays)), *first.shape[1:]), first.dtype)
    return np.concatenate(arrays, out=room)


def _encoded(accumulator: Any, store: Store | None = None, as_file: bool = False) -> bytes:
    if isinstance(accumulator, bytes):
        return accumulator
    encoded: bytes = accumulator.encode() if store is None else send(store, accumulator, as_file)
    return encoded


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
    return decode_accumulator(store.array(Ref.from_json(meta["spilled"]), cache=False).data)


def _taken(store: Store, name: str) -> Accumulator:
    memory = memory_store_of(store.root)
    found: Accumulator | None = None if memory is None else memory.take(name)
    if found is None:
        raise SourceError(
            f"{store.root}: the partial result {name} is not in this process, or was merged "
            "before; each is merged once, in the process that computed it."
        )
    return found
