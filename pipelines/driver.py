"""The driver: a plan with control flow, run from the launching process a pipeline at a time.

Steps in a row without control flow are a *segment*, which is one pipeline. Between segments server
values are references into the store, and placed values are sources, which the workers of the next
segment read by shards. A plan without control flow is one segment.
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
from beamjax.pipelines.values.values import Served, Value, scattered, stacked
from beamjax.pipelines.worker.tasks import Sources
from beamjax.plan.liveness import Position, made, used, used_by_rounds
from beamjax.plan.steps import (
    Block,
    Branch,
    Loop,
    Map,
    Output,
    Plan,
    Scatter,
    Server,
    Step,
    is_straight,
)
from beamjax.runtime.machine_provenance import provenance_here
from beamjax.runtime.placed_results import HANDED_BYTES
from beamjax.runtime.tracker import Checkpointer, Tracker
from beamjax.telemetry.meters import Meter
from beamjax.telemetry.watchdog import Table, bounded


class Driver:
    """Runs a plan.

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
        self.plan = plan
        self.values = dict(values)
        self.checkpointer = checkpointer
        self.tracker = Tracker(checkpointer, launcher.monitor)
        # Entries of the stacked results of loops that are under way.
        self.stacks: dict[str, list[Value]] = {}
        self.launcher = launcher
        self.store = launcher.store
        self.segments = itertools.count()
        self.straight = is_straight(plan.steps)
        if checkpointer is not None:
            self.values.update(checkpointer.values)
            self.stacks.update(checkpointer.stacks)

    def run(self) -> dict[str, Value]:
        """Runs all steps.

        Returns:
          Each output that is a value of the plan, by name.

        Raises:
          WorkerError: a body failed; the message names rounds, step and shard.
        """
        outputs = list(
            dict.fromkeys(out.value for out in self.plan.outputs if out.value is not None)
        )
        if self.checkpointer is not None and self.checkpointer.finished:
            found = [self.values[name] for name in outputs]
        else:
            at = self.checkpointer.position if self.checkpointer else ()
            with _rounds_told():
                whole = Block(self.plan.steps, tuple(outputs))
                found = self.block(whole, "", set(self.values), at)
            if self.checkpointer is not None:
                self.tracker.finish(dict(zip(outputs, found, strict=True)))
        return dict(zip(outputs, found, strict=True))

    def block(
        self, block: Block, prefix: str, own: Iterable[str] = (), at: Position = ()
    ) -> list[Value]:
        """Runs a block, and drops its values as soon as nobody needs them.

        Args:
          block: what to run.
          prefix: of the names of its steps.
          own: names of the values that it may drop, besides those that it makes.
          at: where to go on in it; empty to start at its beginning.

        Returns:
          The outputs.
        """
        own = set(own)
        groups = _segments(block.steps)
        for number, steps in enumerate(groups):
            if at and steps[0].name != at[0][0]:
                own.update(name for step in steps for name in made(step))
                continue
            later = set(block.outputs).union(
                *(used(step) for group in groups[number + 1 :] for step in group)
            )
            match steps:
                case [Loop() as loop]:
                    inits = {value.init for value in loop.carried} & own
                    self.loop(loop, prefix, inits - later - used_by_rounds(loop), at)
                case [Branch() as branch]:
                    self.branch(branch, prefix, at)
                case _:
                    self.segment([replace(step, name=prefix + step.name) for step in steps], later)
            at = ()
            own.update(name for step in steps for name in made(step))
            self.drop(own - later)
        outputs = [self.values[name] for name in block.outputs]
        self.drop(own)
        return outputs

    def drop(self, names: Iterable[str]) -> None:
        """Forgets values; what only they have in the store goes before the next pipeline."""
        for name in names:
            self.values.pop(name, None)

    # ------------------------------------------------------------------------- control flow

    def branch(self, branch: Branch, prefix: str, at: Position = ()) -> None:
        """Runs one of several blocks; from a position in it on, if one is given."""
        index = at[0][1] if at else int(self.served(branch.index).array())
        index = min(max(index, 0), len(branch.blocks) - 1)
        with self.tracker.within(branch.name, index):
            where = f"{prefix}{branch.name}({index})/"
            outputs = self.block(branch.blocks[index], where, (), at[1:])
        self.values.update(zip(branch.results, outputs, strict=True))

    def loop(self, loop: Loop, prefix: str, gone: Iterable[str], at: Position = ()) -> None:
        """Runs all rounds of a loop.

        Args:
          loop: what to run.
          prefix: of the names of its steps.
          gone: initial values that nobody needs once the loop has started.
          at: where to go on in it; empty to start with its first round.
        """
        first = at[0][1] if at else 0
        if not at:
            self._bind(loop, [self.values[value.init] for value in loop.carried])
            # A loop inside of another one starts anew in each round of that.
            self.stacks |= {name: [] for name in loop.stacked}
        self.drop(gone)
        at = at[1:]
        for number in itertools.count(first) if loop.rounds is None else range(first, loop.rounds):
            if not at and not self._goes_on(loop, f"{prefix}{loop.name}[{number}]/"):
                break
            self.round(loop, number, prefix, at)
            self.tracker.passed(1, (loop.name, number + 1), self.values, self.stacks)
            at = ()
        for value in loop.carried:
            self.values[value.result] = self.values.pop(value.param)
        for name in loop.stacked:
            entries = self.stacks.pop(name)
            entries = entries[::-1] if loop.reverse else entries
            self.values[name] = stacked(name, entries, self.plan, self.store)

    def round(self, loop: Loop, number: int, prefix: str, at: Position = ()) -> None:
        """Runs one round of a loop, whatever is in its block; or what is left of it."""
        index = loop.entry_index(number)
        params = [value.param for value in loop.sliced]
        for value in loop.sliced:
            self.values[value.param] = self.values[value.operand].entry(index)
        with self.tracker.within(loop.name, number):
            outputs = self.block(loop.block, f"{prefix}{loop.name}[{number}]/", params, at)
        self._bind(loop, outputs[: len(loop.carried)])
        for name, entry in zip(loop.stacked, outputs[len(loop.carried) :], strict=True):
            self.stacks[name].append(entry)
        self.launcher.monitor.rounds(1)

    def _bind(self, loop: Loop, carried: Sequence[Value]) -> None:
        params = (value.param for value in loop.carried)
        self.values.update(zip(params, carried, strict=True))

    def _goes_on(self, loop: Loop, prefix: str) -> bool:
        if loop.condition is None:
            return True
        with self.tracker.deciding():
            (value,) = self.block(loop.condition, prefix)
        assert isinstance(value, Served)
        return bool(value.array())

    # ----------------------------------------------------------------------------- segments

    def segment(self, steps: Sequence[Step], needed: set[str]) -> None:
        """Runs steps without control flow.

        Args:
          steps: in order.
          needed: names of the values that must be known afterwards.
        """
        parts = self._parts(steps)
        if len(parts) > 1:
            for number, part in enumerate(parts):
                later = (used(step) for others in parts[number + 1 :] for step in others)
                self.segment(part, needed.union(*later))
            return
        cuts = {step.result: step for step in steps if isinstance(step, Scatter)}
        if not self._runs_here(steps):
            wanted = {cuts[name].operand if name in cuts else name for name in needed}
            self._launch(steps, wanted)
        for step in steps:
            if isinstance(step, Server) and self._runs_here(steps):
                known = {name: self.served(name).array() for name in step.inputs}
                meter = Meter(step.name, 1, self.launcher.monitor)
                found = self._run_server(step, known)
                meter.lap("compute")
                meter.apart()
                self.values |= {name: Served(self.store, out) for name, out in found.items()}
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
        table = Table()

        def run() -> dict[str, np.ndarray]:
            with table.at("computing", step, None, limit):
                return run_server(self.plan, step, known, device)

        return bounded(run, table)

    def served(self, name: str) -> Served:
        """A server value that is known."""
        value = self.values[name]
        assert isinstance(value, Served), name
        return value

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

    def _launch(self, steps: Sequence[Step], wanted: set[str]) -> None:
        self._sweep()
        own = dict.fromkeys(name for step in steps for name in made(step))
        plan = replace(
            self.plan,
            inputs=(),
            steps=tuple(steps),
            outputs=tuple(Output(value=name) for name in own if name in wanted),
            constants=(),
        )
        read = dict.fromkeys(name for step in steps for name in sorted(used(step)))
        inputs = self._inputs(name for name in read if name not in own)
        stem = f"segment-{next(self.segments)}"
        self.values |= self.launcher.run(plan, inputs, stem)

    def _inputs(self, names: Iterable[str]) -> build.Inputs:
        static = {}
        specs: dict[str, dict[str, Any]] = {}
        where = {}
        for name in names:
            value = self.values[name]
            if isinstance(value, Served):
                static[name] = value.ref(name)
                continue
            key = json.dumps(value.spec, sort_keys=True)
            specs.setdefault(key, value.spec)
            where[name] = list(specs).index(key), value.leaf
        return build.Inputs(static, Sources(tuple(specs.values()), where, self.plan.x64))

    def _sweep(self) -> None:
        """Removes what earlier pipelines left in the store and nobody needs."""
        held: list[Value] = [*self.values.values(), *itertools.chain(*self.stacks.values())]
        live = self.launcher.files().union(*(value.files for value in held))
        self.store.sweep(live)


def _segments(steps: Iterable[Step]) -> list[list[Step]]:
    """Steps in a row without control flow together, loops and branches alone."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and is_straight([*groups[-1], step]):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


_WHERE = re.compile(r"step '((?:[^\s'/]+[\[(]\d+[\])]/)+)")
_PART = re.compile(r"([^/]+)([\[(])(\d+)[\])]/")


@contextlib.contextmanager
def _rounds_told() -> Iterator[None]:
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
        told = type(error)(f"{', '.join(parts)}: {text}")
        told.failure = error.failure
        raise told from error
