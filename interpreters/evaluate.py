"""The plan run in this process, a shard at a time: the reference for every runner."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from beamjax.bodies import run_server
from beamjax.chunks import MemberBlock
from beamjax.inputs import Inputs
from beamjax.meters import Meter
from beamjax.monitor import Monitor
from beamjax.one_pass import open_placements, split
from beamjax.options import Options
from beamjax.plan import Block, Branch, Gather, Loop, Map, Plan, Scatter, Server, Step, size_name
from beamjax.shards import (
    Shard,
    ShardExecutor,
    finish_lane,
    finish_tree,
    new_accumulators,
    shard_errors,
    shards,
)


def evaluate(
    plan: Plan, inputs: Inputs, options: Options, monitor: Monitor | None = None
) -> dict[str, np.ndarray]:
    """Runs a plan without Beam.

    Args:
      plan: what to run.
      inputs: its inputs.
      options: `reduction` is the only one that matters here.
      monitor: of the job.

    Returns:
      The raw array of each output that is a value of the plan, by name; placed values have their
      members along axis 0.

    Raises:
      WorkerError: a body failed; the message names step and shard.
      JobCancelledError: the job was cancelled.
    """
    run = _Evaluation(plan, inputs, options, monitor or Monitor(plan))
    if open_placements(plan):
        run.one_pass()
    else:
        run.steps(plan.steps)
    wanted = {out.value for out in plan.outputs if out.value is not None}
    return {name: array for name, array in (run.served | run.placed).items() if name in wanted}


class _Evaluation:
    def __init__(self, plan: Plan, inputs: Inputs, options: Options, monitor: Monitor):
        self.plan = plan
        self.options = options
        self.monitor = monitor
        self.served = inputs.server()
        self.placed: dict[str, np.ndarray] = {}
        self.reader = inputs.reader()
        self.streams = inputs.streams()

    def one_pass(self) -> None:
        """Runs all steps of a plan whose members are counted as they are read."""
        before, after = split(self.plan)
        self.steps(before)
        if open_placements(self.plan):  # No step reads members: they are counted all the same.
            (placement,) = open_placements(self.plan)
            collections.deque(self.streamed(self.plan.shard_sizes[placement]), maxlen=0)
        self.steps(after)

    def streamed(self, size: int) -> Iterator[MemberBlock]:
        """The blocks of the members of unknown number, which is known at the end."""
        assert self.streams is not None
        n = 0
        for block in self.streams.blocks(size):
            n += block.count
            yield block
        (placement,) = open_placements(self.plan)
        self.plan = replace(self.plan, sizes={**self.plan.sizes, placement: n})
        self.served[size_name(placement)] = np.asarray(n, np.int32)

    def steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.step(step)

    def step(self, step: Step) -> None:
        self.monitor.tick()
        match step:
            case Server():
                self.server(step)
            case Map():
                self.map(step)
            case Gather(operand=operand, result=result, axis=axis):
                n = self.plan.sizes[self.plan.values[operand].placement or ""]
                self.served[result] = np.moveaxis(self.members(operand, 0, n), 0, axis)
            case Scatter(operand=operand, result=result, axis=axis):
                self.placed[result] = np.moveaxis(self.served[operand], axis, 0)
            case Loop():
                self.loop(step)
            case Branch():
                self.branch(step)

    def loop(self, step: Loop) -> None:
        values = {carried.param: self.value(carried.init) for carried in step.carried}
        wholes = {sliced.param: self.value(sliced.operand) for sliced in step.sliced}
        stacks: list[list[np.ndarray]] = [[] for _ in step.stacked]
        for number in itertools.count() if step.rounds is None else range(step.rounds):
            self.bind(values)
            if step.condition is not None and not self.block(step.condition)[0]:
                break
            entry = step.rounds - 1 - number if step.reverse and step.rounds else number
            for name, whole in wholes.items():
                self.bind({name: whole[entry] if self.is_served(name) else whole[:, entry]})
            outputs = self.block(step.block)
            values = dict(zip(values, outputs, strict=False))
            for stack, array in zip(stacks, outputs[len(values) :], strict=True):
                stack.append(array)
            self.monitor.rounds()
        for carried in step.carried:
            self.bind({carried.result: values[carried.param]})
        for name, stack in zip(step.stacked, stacks, strict=True):
            self.bind({name: self.stacked(name, stack[::-1] if step.reverse else stack)})

    def stacked(self, name: str, entries: list[np.ndarray]) -> np.ndarray:
        """The entries of all rounds as one array."""
        if entries:
            return np.stack(entries, axis=0 if self.is_served(name) else 1)
        value = self.plan.values[name]
        members = () if value.placement is None else (self.plan.sizes[value.placement],)
        return np.empty((*members, *value.shape), np.dtype(value.dtype))

    def branch(self, step: Branch) -> None:
        index = int(np.clip(int(self.served[step.index]), 0, len(step.blocks) - 1))
        self.bind(dict(zip(step.results, self.block(step.blocks[index]), strict=True)))

    def block(self, block: Block) -> list[np.ndarray]:
        """Runs a block and gives its outputs."""
        self.steps(block.steps)
        return [self.value(name) for name in block.outputs]

    def is_served(self, name: str) -> bool:
        return self.plan.values[name].placement is None

    def value(self, name: str) -> np.ndarray:
        """A whole value, members along axis 0."""
        if self.is_served(name):
            return self.served[name]
        return self.members(name, 0, self.plan.sizes[self.plan.values[name].placement or ""])

    def bind(self, values: Mapping[str, np.ndarray]) -> None:
        """Gives values their names."""
        for name, array in values.items():
            (self.served if self.is_served(name) else self.placed)[name] = array

    def members(self, name: str, start: int, stop: int) -> np.ndarray:
        if name in self.placed:
            return self.placed[name][start:stop]
        return self.reader.read([name], start, stop)[name]

    def server(self, step: Server) -> None:
        self.served.update(run_server(self.plan, step, self.served))

    def map(self, step: Map) -> None:
        n = self.plan.sizes[step.placement]
        execute = ShardExecutor(self.plan, step, self.served)
        for name in step.results:
            value = self.plan.values[name]
            self.placed[name] = np.empty((n or 0, *value.shape), np.dtype(value.dtype))
        accumulators = new_accumulators(step, self.options.reduction)
        trees = execute.trees()
        meter = Meter(step.name, self.plan.shard_sizes[step.placement], self.monitor)
        meter.start()
        for shard, operands, nbytes in (
            self.read(step) if n is not None else self.read_streams(step)
        ):
            meter.lap("read", nbytes)
            results, partials = execute(shard, operands)
            meter.lap("compute")
            for name, array in zip(step.results, results, strict=True):
                self.placed[name] = _put(self.placed[name], shard.start, array)
            for accumulator, partial in zip([*accumulators, *trees], partials, strict=True):
                accumulator.add(partial, shard.index)
            meter.lap("merge")
            meter.shard(shard.start, shard.count)
            meter.start()
        for name in step.results:
            self.placed[name] = self.placed[name][: self.plan.sizes[step.placement]]
        for lane, accumulator in zip(step.lanes, accumulators, strict=True):
            for name, _, values in finish_lane(self.plan, step, lane, accumulator, (0, lane.size)):
                self.served[name] = values.reshape(self.plan.values[name].shape)
        for combine, tree in zip(step.combines, trees, strict=True):
            self.served.update(finish_tree(combine, tree))

    def read(self, step: Map) -> Iterator[tuple[Shard, list[np.ndarray], int]]:
        """The shards of a pass, their operands, and how many bytes were read."""
        read = [name for name in step.operands if name not in self.placed]
        n, size = self.plan.sizes[step.placement], self.plan.shard_sizes[step.placement]
        for shard in shards(n, size):
            stop = shard.start + shard.count
            with shard_errors(step, shard):
                fresh = self.reader.read(read, shard.start, stop)
            operands = [
                fresh[name] if name in fresh else self.placed[name][shard.start : stop]
                for name in step.operands
            ]
            yield shard, operands, sum(array.nbytes for array in fresh.values())

    def read_streams(self, step: Map) -> Iterator[tuple[Shard, list[np.ndarray], int]]:
        """The same of members that are counted as they are read."""
        size = self.plan.shard_sizes[step.placement]
        for block in self.streamed(size):
            shard = Shard(block.start // size, block.start, block.count)
            nbytes = sum(array.nbytes for array in block.values.values())
            yield shard, [block.values[name] for name in step.operands], nbytes


def _put(room: np.ndarray, start: int, array: np.ndarray) -> np.ndarray:
    """Copies members to where they belong, in a larger array if there is no room for them."""
    stop = start + len(array)
    if stop > len(room):
        larger = np.empty((max(stop, 2 * len(room)), *room.shape[1:]), room.dtype)
        larger[:start] = room[:start]
        room = larger
    room[start:stop] = array
    return room
