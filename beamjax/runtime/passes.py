"""What a pass does with shards: reads and computes them, and reduces the results."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from beamjax._text import as_cause
from beamjax.numerics.accumulators import Accumulator
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.reducers import make_accumulator
from beamjax.plan.shard import Shard, shard_error
from beamjax.plan.steps import Map, Plan, ValueRange
from beamjax.runtime.shard_executor import (
    Computed,
    ShardExecutor,
    finish_buffer,
    finish_tree,
)
from beamjax.runtime.values import Reader
from beamjax.spans import Spans, timed


class Partials:
    """The reduction of some shards of a pass."""

    def __init__(
        self,
        step: Map,
        mode: Any,
        ranges: Sequence[ValueRange],
        trees: Sequence[DyadicTree[list[np.ndarray]]] = (),
    ):
        self.step = step
        self.mode = mode  # of the accumulators: "exact" or "fast"
        self.ranges = ranges  # `accumulator_ranges` of the step
        # An empty tree for each combine of the pass; none where only accumulators are merged.
        self.trees = trees
        self.accumulators: dict[ValueRange, Accumulator] = {}

    def _begin(self) -> None:
        buffers = self.step.buffers
        self.accumulators = {
            piece: make_accumulator(
                buffers[piece.buffer].kind,
                np.dtype(buffers[piece.buffer].dtype),
                piece.stop - piece.start,
                mode=self.mode,
            )
            for piece in self.ranges
        }

    def add(self, shard: Shard, computed: Computed) -> None:
        """Adds the results of a shard."""
        if not self.accumulators:
            self._begin()
        buffers = self.step.buffers
        for piece, accumulator in self.accumulators.items():
            accumulator.left_out += computed.left_out
            partial = computed.partials[piece.buffer]
            if partial is not None:
                accumulator.add(partial[piece.start : piece.stop], shard.index)
        for tree, arrays in zip(self.trees, computed.partials[len(buffers) :], strict=True):
            if arrays is not None:
                tree.add(arrays, shard.index)

    def merge(self, piece: ValueRange, accumulator: Accumulator) -> None:
        """Adds the accumulator of other shards for a range; the caller must not use it any more."""
        self.accumulators[piece] = merged(self.accumulators.get(piece), accumulator)

    def results(self, plan: Plan) -> dict[str, np.ndarray]:
        """The server values that the pass reduces to, by name, when all shards are added."""
        by_name = self.of_buffers(plan)
        for combine, tree in zip(self.step.combines, self.trees, strict=True):
            by_name.update(finish_tree(combine, tree))
        return by_name

    def of_buffers(self, plan: Plan) -> dict[str, np.ndarray]:
        """Those of `results` that are not from combines."""
        parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        if not self.accumulators:
            self._begin()
        for piece in self.ranges:
            buffer, where = self.step.buffers[piece.buffer], (piece.start, piece.stop)
            pieces = finish_buffer(plan, self.step, buffer, self.accumulators[piece], where)
            for name, _, values in pieces:
                parts[name].append(values)
        return {
            name: (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).reshape(
                plan.values[name].shape
            )
            for name, arrays in parts.items()
        }


def merged(left: Accumulator | None, right: Accumulator) -> Accumulator:
    """The accumulator of the shards of both; the caller must not use either any more."""
    if left is None:
        return right
    left.merge(right)
    return left


@dataclass(frozen=True, eq=False)
class Done:
    """A shard, its results, and its operands unless the results were cached."""

    shard: Shard
    computed: Computed
    operands: Mapping[str, np.ndarray] = field(default_factory=dict)


class ShardPass:
    """Reads, computes and reduces shards of a pass."""

    def __init__(
        self,
        plan: Plan,
        step: Map,
        executors: Sequence[ShardExecutor],
        reader: Reader,
        partials: Partials,
        spans: Spans,
    ):
        self.plan = plan
        self.step = step
        self.executors = executors  # one for each device
        self.reader = reader
        self.partials = partials
        self.spans = spans
        # The operands that are inputs of the run or in files: reading others moves nothing.
        self._counted = plan.placed_inputs | reader.where.keys() | reader.held

    def read(
        self, shard: Shard, known: Mapping[str, np.ndarray] | None = None
    ) -> Callable[[int], Done]:
        """Reads a shard; returns the function that computes it, in any thread, on a device."""
        # `known` are operands that an earlier pass of the same bundle has, so they are not read.
        with timed(self.spans, self.step.name, "read", shard) as span:
            compute = self._read(shard, known or {}, span)

        def computed(device: int) -> Done:
            with timed(self.spans, self.step.name, "compute", shard):
                return compute(device)

        return computed

    def run(self, shard: Shard, span: timed) -> Done:
        """Reads, computes and adds a shard in this thread, whose open span goes on with these."""
        span.then("read", shard)
        compute = self._read(shard, {}, span)
        span.then("compute", shard)
        done = compute(0)
        span.then("merge", shard, self.step.partial_bytes)
        self.partials.add(shard, done.computed)
        return done

    def _read(
        self, shard: Shard, known: Mapping[str, np.ndarray], span: timed
    ) -> Callable[[int], Done]:
        try:
            # The cache knows a shard by its files only if all operands are in files.
            cache = None if known else self.executors[0].cached
            if cache is not None and (cached := cache.unread(shard, self.reader)) is not None:
                done = Done(shard, cached)
                return lambda _: done
            read, lost = self._operands(shard, known)
        except Exception as error:
            raise shard_error(self.step, shard, error) from as_cause(error)
        sizes = [x.nbytes for name, x in read.items() if name in self._counted]
        span.nbytes = sum(sizes)
        return functools.partial(self._compute, shard, {**known, **read}, lost)

    def _operands(
        self, shard: Shard, known: Container[str]
    ) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """The operands that are read, and why members can't be read, by their positions."""
        guard, start = self.step.guard, shard.start
        names = [name for name in self.step.operands if name not in known]
        # Where the step must not drop members, errors are raised.
        if guard is None or guard.on_error != "drop" or not names:
            return self.reader.read(names, start, start + shard.count), {}
        from beamjax.runtime.failing_members import read_rest  # few steps drop members

        types = {name: self.plan.values[name] for name in names}
        read = functools.partial(self.reader.read, names)
        return read_rest(read, types, start, shard.count)

    def _compute(
        self,
        shard: Shard,
        operands: Mapping[str, np.ndarray],
        lost: Mapping[int, str],
        device: int = 0,
    ) -> Done:
        arrays = [operands[name] for name in self.step.operands]
        # All threads of a CPU share its one executor.
        computed = self.executors[device % len(self.executors)](shard, arrays, lost)
        return Done(shard, computed, operands)

    def add(self, done: Done) -> Done:
        """Adds the results of a shard to the partials, and to the work on the step."""
        step = self.step
        with timed(self.spans, step.name, "merge", done.shard, step.partial_bytes):
            self.partials.add(done.shard, done.computed)
        return done
