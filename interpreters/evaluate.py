"""The plan run in this process, a shard at a time: the reference for every runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from beamjax.bodies import run_server
from beamjax.inputs import Inputs
from beamjax.options import Options
from beamjax.plan import Gather, Map, Plan, Scatter, Server
from beamjax.shards import (
    ShardExecutor,
    finish_lane,
    finish_tree,
    new_accumulators,
    shard_errors,
    shards,
)


def evaluate(plan: Plan, inputs: Inputs, options: Options) -> dict[str, np.ndarray]:
    """Runs a plan without Beam.

    Args:
      plan: what to run.
      inputs: its inputs.
      options: `reduction` is the only one that matters here.

    Returns:
      The raw array of each output that is a value of the plan, by name; placed values have their
      members along axis 0.

    Raises:
      WorkerError: a body failed; the message names step and shard.
    """
    run = _Evaluation(plan, inputs, options)
    for step in plan.steps:
        run.step(step)
    wanted = {out.value for out in plan.outputs if out.value is not None}
    return {name: array for name, array in (run.served | run.placed).items() if name in wanted}


class _Evaluation:
    def __init__(self, plan: Plan, inputs: Inputs, options: Options):
        self.plan = plan
        self.options = options
        self.served = inputs.server()
        self.placed: dict[str, np.ndarray] = {}
        self.reader = inputs.reader()

    def step(self, step: Any) -> None:
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
