"""The plan run in this process, a shard at a time: the reference for every runner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from beamjax.bodies import run_server
from beamjax.inputs import Inputs
from beamjax.liveness import Position, step_index
from beamjax.options import Options
from beamjax.plan import Block, Branch, Gather, Loop, Map, Plan, Scatter, Server, Step
from beamjax.progress import Keeper, Progress
from beamjax.shards import (
    ShardExecutor,
    finish_lane,
    finish_tree,
    new_accumulators,
    shard_errors,
    shards,
)


def evaluate(
    plan: Plan, inputs: Inputs, options: Options, keeper: Keeper | None = None
) -> dict[str, np.ndarray]:
    """Runs a plan without Beam.

    Args:
      plan: what to run.
      inputs: its inputs.
      options: `reduction` is the only one that matters here.
      keeper: of checkpoints, if there are to be any.

    Returns:
      The raw array of each output that is a value of the plan, by name; placed values have their
      members along axis 0.

    Raises:
      WorkerError: a body failed; the message names step and shard.
    """
    run = _Evaluation(plan, inputs, options, keeper)
    wanted = {out.value for out in plan.outputs if out.value is not None}
    if keeper is None or not keeper.finished:
        run.steps(plan.steps, keeper.position if keeper else ())
        if keeper is not None:
            keeper.finish({name: run.value(name) for name in sorted(wanted)})
    return {name: array for name, array in (run.served | run.placed).items() if name in wanted}


class _Evaluation:
    def __init__(self, plan: Plan, inputs: Inputs, options: Options, keeper: Keeper | None):
        self.plan = plan
        self.options = options
        self.served = inputs.server()
        self.placed: dict[str, np.ndarray] = {}
        # Entries of the stacked results of loops that are under way.
        self.stacks: dict[str, list[np.ndarray]] = {}
        self.reader = inputs.reader()
        self.progress = Progress(keeper)
        if keeper is not None:
            self.bind(keeper.values)
            self.stacks.update(keeper.stacks)

    def steps(self, steps: Sequence[Step], at: Position = ()) -> None:
        """Runs steps; from a position on, if one is given."""
        first = step_index(steps, at[0][0]) if at else 0
        for step in steps[first:]:
            self.step(step, at)
            at = ()

    def step(self, step: Step, at: Position) -> None:
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
                self.loop(step, at)
            case Branch():
                self.branch(step, at)

    def loop(self, step: Loop, at: Position) -> None:
        params = [carried.param for carried in step.carried]
        first = 0
        if at:
            first = at[0][1]
        else:
            inits = [self.value(carried.init) for carried in step.carried]
            self.bind(dict(zip(params, inits, strict=True)))
            self.stacks |= {name: [] for name in step.stacked}
        wholes = {sliced.param: self.value(sliced.operand) for sliced in step.sliced}
        for number in itertools.count(first) if step.rounds is None else range(first, step.rounds):
            inner = at[1:] if number == first else ()
            if not inner and not self.goes_on(step):
                break
            entry = step.rounds - 1 - number if step.reverse and step.rounds else number
            for name, whole in wholes.items():
                self.bind({name: whole[entry] if self.is_served(name) else whole[:, entry]})
            with self.progress.within(step.name, number):
                outputs = self.block(step.block, inner)
            self.bind(dict(zip(params, outputs, strict=False)))
            for name, array in zip(step.stacked, outputs[len(params) :], strict=True):
                self.stacks[name].append(array)
            values = self.served | self.placed
            self.progress.passed(1, (step.name, number + 1), values, self.stacks)
        for carried in step.carried:
            self.bind({carried.result: self.value(carried.param)})
        for name in step.stacked:
            stack = self.stacks.pop(name)
            self.bind({name: self.stacked(name, stack[::-1] if step.reverse else stack)})

    def goes_on(self, step: Loop) -> bool:
        """Whether a loop has another round, as far as its condition says so."""
        if step.condition is None:
            return True
        with self.progress.deciding():
            return bool(self.block(step.condition)[0])

    def stacked(self, name: str, entries: list[np.ndarray]) -> np.ndarray:
        """The entries of all rounds as one array."""
        if entries:
            return np.stack(entries, axis=0 if self.is_served(name) else 1)
        value = self.plan.values[name]
        members = () if value.placement is None else (self.plan.sizes[value.placement],)
        return np.empty((*members, *value.shape), np.dtype(value.dtype))

    def branch(self, step: Branch, at: Position) -> None:
        if at:
            index = at[0][1]
        else:
            index = int(np.clip(int(self.served[step.index]), 0, len(step.blocks) - 1))
        with self.progress.within(step.name, index):
            outputs = self.block(step.blocks[index], at[1:])
        self.bind(dict(zip(step.results, outputs, strict=True)))

    def block(self, block: Block, at: Position = ()) -> list[np.ndarray]:
        """Runs a block, from a position on if one is given, and gives its outputs."""
        self.steps(block.steps, at)
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
            self.placed[name] = np.empty((n, *value.shape), np.dtype(value.dtype))
        accumulators = new_accumulators(step, self.options.reduction)
        trees = execute.trees()
        read = [name for name in step.operands if name not in self.placed]
        for shard in shards(n, self.plan.shard_sizes[step.placement]):
            stop = shard.start + shard.count
            with shard_errors(step, shard):
                fresh = self.reader.read(read, shard.start, stop)
            operands = [
                fresh[name] if name in fresh else self.placed[name][shard.start : stop]
                for name in step.operands
            ]
            results, partials = execute(shard, operands)
            for name, array in zip(step.results, results, strict=True):
                self.placed[name][shard.start : stop] = array
            for accumulator, partial in zip([*accumulators, *trees], partials, strict=True):
                accumulator.add(partial, shard.index)
        for lane, accumulator in zip(step.lanes, accumulators, strict=True):
            for name, _, values in finish_lane(self.plan, step, lane, accumulator, (0, lane.size)):
                self.served[name] = values.reshape(self.plan.values[name].shape)
        for combine, tree in zip(step.combines, trees, strict=True):
            self.served.update(finish_tree(combine, tree))
