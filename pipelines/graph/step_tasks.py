"""Makes the tasks of a plan's steps: the data that workers need, with bodies in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import AnyStep, SourceSpecs, StoredBody, Task, store_body
from beamjax.plan.merging import FanOut, fan_out, workers_of
from beamjax.plan.steps import Map, Plan
from beamjax.runtime.worker_environment import Machine


class StepTasks:
    """Makes the tasks of a plan's steps."""

    def __init__(
        self,
        plan: Plan,
        static: Mapping[str, Ref],
        sources: SourceSpecs,
        program: Ref | None,
        store: Store,
        connection: Connection,
        bodies: dict[str, StoredBody],
    ):
        self.plan = plan
        self.static = static  # server values that are in the store before the first step
        self.sources = sources
        self.program = program  # the pickled program, for bodies that run as Python
        self.store = store
        self.options = connection.options
        self.threads = connection.threads
        self.workers = workers_of(connection.flags)
        self.bodies = bodies  # those in the store already; those of this plan are added
        custom_calls = {call for body in plan.bodies.values() for call in body.custom_calls}
        self.machine = replace(Machine.of(self.options), custom_calls=tuple(sorted(custom_calls)))

    def task(self, step: AnyStep, served: Iterable[str] | None = None) -> Task[AnyStep]:
        """The task of a step that reads the server values of the names `served`."""
        static = {name: self.static[name] for name in served or () if name in self.static}
        buffers = step.buffers if isinstance(step, Map) else ()
        needed = step.all_bodies if isinstance(step, Map) else (step.body,)
        # A task that only merges, for which `served` is None, needs no bodies.
        bodies = {key: self._body(key) for key in needed} if served is not None else {}
        needed_types = [r.result for buffer in buffers for r in buffer.reductions]
        if isinstance(step, Map) and step.guard is not None:
            needed_types += step.results
        if isinstance(step, Map) and (step.guard is not None or step.bucketed):
            needed_types += step.operands
        values = {name: self.plan.values[name] for name in needed_types}
        # The task is pickled for each transform, so it holds only what the step needs of the plan.
        plan = replace(
            self.plan, values=values, bodies={}, recipe=None, constants=(), outputs=(), inputs=(),
            steps=(),
        )  # fmt: skip
        limit = self.options.shard_timeout
        return Task(
            plan, step, bodies, static, self.store, self.machine, limit, threads=self.threads
        )

    def sources_of(self, names: Iterable[str]) -> SourceSpecs:
        """The specs of the placed inputs of these names; other names are left out."""
        where = {name: self.sources.where[name] for name in names if name in self.sources.where}
        used = sorted({source for source, _ in where.values()})
        specs = tuple(self.sources.specs[i] for i in used)
        numbers = {name: (used.index(i), leaf) for name, (i, leaf) in where.items()}
        return SourceSpecs(specs, numbers, self.plan.x64)

    def fan_out(self, step: Map) -> FanOut:
        """How the partials of a pass are merged."""
        shards = self.plan.shards(step.placement).count
        return fan_out(step, shards, self.workers, self.options.reduction)

    def _body(self, key: str) -> StoredBody:
        if key not in self.bodies:
            self.bodies[key] = store_body(self.plan.bodies[key], self.store, self.program)
        return self.bodies[key]
