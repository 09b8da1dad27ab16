"""Makes the tasks of a plan's steps: the data that workers need, with bodies in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import AnyStep, RunSettings, StoredBodies, Task
from beamjax.plan.merging import FanOut, fan_out
from beamjax.plan.steps import Gather, Map, Plan, Server
from beamjax.runtime.worker_environment import Machine


class StepTasks:
    """Makes the tasks of a plan's steps."""

    def __init__(self, plan: Plan, connection: Connection, store: Store, bodies: StoredBodies):
        self.plan = plan
        self.store = store
        self.bodies = bodies
        self.workers = connection.workers
        options = connection.options
        self.settings = RunSettings(
            options.reduction, options.drop_limit, options.shard_timeout, connection.threads
        )
        custom_calls = {call for body in plan.bodies.values() for call in body.custom_calls}
        self.machine = replace(Machine.of(options), custom_calls=tuple(sorted(custom_calls)))

    def task(self, step: AnyStep, static: Mapping[str, StoreRef] | None = None) -> Task[AnyStep]:
        """The task of a step; one without `static`, which only merges or moves, has no bodies."""
        needed: tuple[str, ...] = ()
        match step:
            case Map() if static is not None:
                needed = step.all_bodies
            case Server():
                needed = (step.body,)
        bodies = {key: self.bodies.of(self.plan, key) for key in needed}
        values = {name: self.plan.values[name] for name in _typed(step)}
        costs = {name: cost for name, cost in self.plan.costs.items() if name == step.name}
        # A task is encoded with each transform, so it holds only what its step needs of the plan.
        plan = replace(
            self.plan, values=values, bodies={}, recipe=None, constants=(), outputs=(), inputs=(),
            steps=(), costs=costs, rules={}, size_reasons={},
        )  # fmt: skip
        return Task(plan, step, bodies, static or {}, self.store, self.machine, self.settings)

    def fan_out(self, step: Map) -> FanOut:
        """How the partials of a pass are merged."""
        shards = self.plan.shards(step.placement).count
        return fan_out(step, shards, self.workers, self.settings.reduction)


def _typed(step: Map | Server | Gather) -> list[str]:
    """The names of the values whose types a worker needs for a step."""
    match step:
        case Gather():
            return [step.operand, step.result]
        case Map():
            names = [r.result for buffer in step.buffers for r in buffer.reductions]
            if step.guard is not None:
                names += step.results
            if step.guard is not None or step.bucketed:
                names += step.operands
            return names
    return []
