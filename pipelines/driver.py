"""The driver: runs a plan from the launching process, a segment at a time.

A segment is one pipeline, or one round of resident workers. Between segments server values are
references into the store, and placed values are sources, which the workers of the next segment read
by shards. A plan without control flow is one segment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.bodies.export import default_platform, run_server
from beamjax.bodies.xla_threads import compute_device
from beamjax.errors import BeamjaxError
from beamjax.pipelines.graph import build
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.values.values import ServerValue, Value, scattered, stacked
from beamjax.pipelines.worker.tasks import Sources
from beamjax.plan.liveness import made, used
from beamjax.plan.steps import (
    Map,
    Output,
    Plan,
    Scatter,
    Server,
    Step,
    is_straight,
)
from beamjax.runtime.control_flow import Checkpointer, ControlFlow
from beamjax.runtime.machine_provenance import provenance_here
from beamjax.runtime.materialized_outputs import HANDED_BYTES
from beamjax.telemetry.meters import Meter
from beamjax.telemetry.watchdog import WorkTable, bounded


class Driver(ControlFlow[Value]):
    """Runs a plan on Beam.

    Args:
      plan: what to run.
      values: its inputs, by name.
      launcher: of pipelines.
      checkpointer: saves the run as it goes on; None saves nothing.
    """

    def __init__(
        self,
        plan: Plan,
        values: dict[str, Value],
        launcher: Launcher,
        checkpointer: Checkpointer | None = None,
    ):
        super().__init__(plan, values, launcher.monitor, checkpointer)
        self.launcher = launcher
        self.store = launcher.store
        self.segments = itertools.count()
        self.straight = is_straight(plan.steps)

    def run(self) -> dict[str, Value]:
        """Runs all steps; see `ControlFlow.run`."""
        with _rounds_in_words():
            return super().run()

    # ------------------------------------------------------------------------------- values

    def array(self, value: Value) -> np.ndarray:
        assert isinstance(value, ServerValue)
        return value.array()

    def entry(self, name: str, whole: Value, index: int) -> Value:
        return whole.entry(index)

    def stacked(self, name: str, entries: Sequence[Value]) -> Value:
        return stacked(name, entries, self.plan, self.store)

    def served(self, name: str) -> ServerValue:
        """A server value that is known."""
        value = self.values[name]
        assert isinstance(value, ServerValue), name
        return value

    # ----------------------------------------------------------------------------- segments

    def segment(self, steps: Sequence[Step], prefix: str, needed: set[str]) -> None:
        if prefix:
            steps = [replace(step, name=prefix + step.name) for step in steps]
        parts = self._parts(steps)
        for number, part in enumerate(parts):
            later = (used(step) for others in parts[number + 1 :] for step in others)
            self._run(part, needed.union(*later))

    def _run(self, steps: Sequence[Step], needed: set[str]) -> None:
        cuts = {step.result: step for step in steps if isinstance(step, Scatter)}
        if not self._runs_here(steps):
            requested = {cuts[name].operand if name in cuts else name for name in needed}
            self._launch(steps, requested)
        for step in steps:
            if isinstance(step, Server) and self._runs_here(steps):
                known = {name: self.served(name).array() for name in step.inputs}
                meter = Meter(step.name, 1, self.launcher.monitor)
                found = self._run_server(step, known)
                meter.lap("compute")
                meter.apart()
                self.values |= {name: ServerValue(self.store, out) for name, out in found.items()}
            elif isinstance(step, Scatter) and step.result in needed:
                operand = self.served(step.operand)
                self.values[step.result] = scattered(operand, step.name, step.axis, self.store)

    def _parts(self, steps: Sequence[Step]) -> list[Sequence[Step]]:
        """Steps cut where a pass reads large values of another one, if Beam had them in memory."""
        if not self.launcher.connection.holds_elements:
            return [steps]
        parts: list[list[Step]] = [[]]
        large: set[str] = set()
        for step in steps:
            if isinstance(step, Map) and not large.isdisjoint(step.operands):
                parts.append([])
                large.clear()
            parts[-1].append(step)
            if isinstance(step, Map):
                values = [self.plan.values[name] for name in step.results]
                n = self.plan.sizes[step.placement]
                if n * sum(value.nbytes for value in values) > HANDED_BYTES:
                    large.update(step.results)
        return [*parts]

    def _run_server(self, step: Server, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a step in this process, in the time that a shard may take."""
        options = self.launcher.connection.options
        self.launcher.monitor.computed(provenance_here(options.xla_threads))
        limit, device = options.shard_timeout, compute_device(options.xla_threads)
        if limit is None:
            return run_server(self.plan, step, known, device)
        table = WorkTable()

        def run() -> dict[str, np.ndarray]:
            with table.at("computing", step, None, limit):
                return run_server(self.plan, step, known, device)

        return bounded(run, table)

    def _runs_here(self, steps: Sequence[Step]) -> bool:
        """Whether steps of a plan with control flow need no worker."""
        return all(
            isinstance(step, Scatter)
            or (
                isinstance(step, Server)
                and not self.straight
                and default_platform() in self.plan.bodies[step.body].artefacts
            )
            for step in steps
        )

    def _launch(self, steps: Sequence[Step], requested: set[str]) -> None:
        self._sweep()
        own = dict.fromkeys(name for step in steps for name in made(step))
        plan = replace(
            self.plan,
            inputs=(),
            steps=tuple(steps),
            outputs=tuple(Output(value=name) for name in own if name in requested),
            constants=(),
        )
        read = dict.fromkeys(name for step in steps for name in sorted(used(step)))
        inputs = self._inputs(name for name in read if name not in own)
        stem = f"segment-{next(self.segments)}"
        self.values |= self.launcher.run(plan, inputs, stem)

    def _inputs(self, names: Iterable[str]) -> build.GraphInputs:
        static = {}
        specs: dict[str, dict[str, Any]] = {}
        where = {}
        for name in names:
            value = self.values[name]
            if isinstance(value, ServerValue):
                static[name] = value.ref(name)
                continue
            key = json.dumps(value.spec, sort_keys=True)
            specs.setdefault(key, value.spec)
            where[name] = list(specs).index(key), value.leaf
        return build.GraphInputs(static, Sources(tuple(specs.values()), where, self.plan.x64))

    def _sweep(self) -> None:
        """Removes what earlier pipelines left in the store and no step needs."""
        held: list[Value] = [*self.values.values(), *itertools.chain(*self.stacks.values())]
        live = self.launcher.files().union(*(value.files for value in held))
        self.store.sweep(live)


_WHERE = re.compile(r"step '((?:[^\s'/]+[\[(]\d+[\])]/)+)")
_PART = re.compile(r"([^/]+)([\[(])(\d+)[\])]/")


@contextlib.contextmanager
def _rounds_in_words() -> Iterator[None]:
    """Says in words which rounds and blocks the name of a failing step stands for."""
    try:
        yield
    except BeamjaxError as error:
        found = _WHERE.search(str(error))
        if found is None:
            raise
        kinds = {"[": "round", "(": "block"}
        parts = [
            f"{name}, {kinds[kind]} {number}" for name, kind, number in _PART.findall(found[1])
        ]
        text = str(error).replace(found[0], "step '")
        located = type(error)(f"{', '.join(parts)}: {text}")
        located.failure = error.failure
        raise located from error
