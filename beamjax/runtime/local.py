"""Runs a plan in this process, without Beam. All runners give the same results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from beamjax.bodies.export import run_server
from beamjax.bodies.xla_threads import compute_device
from beamjax.errors import OptionsError, WorkerError
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.plan.liveness import made, used
from beamjax.plan.shard import Shard, Shards, shard_errors
from beamjax.plan.steps import (
    Gather,
    Map,
    Plan,
    Scatter,
    Server,
    Step,
)
from beamjax.runtime.cached_shards import cached_shards
from beamjax.runtime.control_flow import Checkpointer, ControlFlow, starts_anew
from beamjax.runtime.failing_members import Computed
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.machine_provenance import provenance_here
from beamjax.runtime.materialized_outputs import HANDED_BYTES, NOTHING, MaterializedOutputs
from beamjax.runtime.ordered_pool import computing_threads
from beamjax.runtime.passes import Done, Sums, computed
from beamjax.runtime.shard_executor import ShardExecutor, read_shard
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.blocks import BLOCKS
from beamjax.storage.block_cache import block_budget
from beamjax.storage.scratch import file_array
from beamjax.telemetry.meters import Meter
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.watchdog import WorkTable, bounded


def evaluate(
    plan: Plan,
    inputs: Inputs,
    options: Options,
    monitor: Monitor | None = None,
    checkpointer: Checkpointer | None = None,
    results: MaterializedOutputs = NOTHING,
) -> dict[str, np.ndarray | Placed]:
    """Runs a plan without Beam.

    Args:
      plan: the plan to run.
      inputs: its inputs.
      options: the options of the run.
      monitor: the monitor of the job.
      checkpointer: saves checkpoints of the run; None saves none.
      results: the placed results that are written to files.

    Returns:
      The raw array of each output that is a value of the plan, by name, or the handle to its
      files; placed values have their members along axis 0.

    Raises:
      WorkerError: a body failed; the message names step and shard.
      JobCancelledError: the job was cancelled.
    """
    monitor = monitor or Monitor(plan)
    limit = options.memory_bytes
    BLOCKS.set_limit(None if limit is None else block_budget(limit))
    monitor.letters.begin(anew=starts_anew(checkpointer))
    run = _Evaluation(plan, inputs, options, monitor, checkpointer, results)
    if options.shard_timeout is None:
        return run.evaluated()
    return bounded(run.evaluated, run.table)


def values_before(
    plan: Plan, inputs: Inputs, options: Options, step: str, rounds: int
) -> dict[str, np.ndarray]:
    """The values that exist when a step starts.

    Args:
      plan: the plan of the step.
      inputs: the inputs of the plan.
      options: the options of the run.
      step: the name of the step.
      rounds: the number of rounds of loops that end before it starts.

    Returns:
      Raw arrays that were computed before, and that this or a later step needs, by name; placed
      ones have their members along axis 0.

    Raises:
      OptionsError: the run does not reach the step in this round.
      WorkerError: a body before it fails.
    """
    run = _Until(plan, inputs, options, Monitor(plan), None, NOTHING)
    run.target = step, rounds
    try:
        run.evaluated()
    except _Reached:
        return run.values
    raise OptionsError(f"the run does not reach the step {step!r} after {rounds} rounds")


Read = tuple[Shard, list[np.ndarray] | Computed, Mapping[int, str], Meter]
"""A shard; its operands, or its cached results; why members could not be read; and its meter."""


class _Evaluation(ControlFlow[np.ndarray]):
    """Runs a plan on arrays.

    Placed values have their members along axis 0. Placed inputs are read when a pass needs them.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        options: Options,
        monitor: Monitor,
        checkpointer: Checkpointer | None,
        results: MaterializedOutputs,
    ):
        super().__init__(plan, inputs.server(), monitor, checkpointer)
        self.options = options
        # Server values that passes have read, and their copies on the device.
        self.on_device: dict[str, tuple[np.ndarray, jax.Array]] = {}
        # Keys of bodies that are known not to read padding.
        self.checked: set[str] = set()
        # Names of the results whose array is a mapped file of `results`.
        self.mapped: set[str] = set()
        self.reader = inputs.reader()
        self.results = results
        self.table = WorkTable()
        self.device = compute_device(options.xla_threads)
        self.outputs = set(plan.returned())

    def evaluated(self) -> dict[str, np.ndarray | Placed]:
        """Runs all steps; returns the outputs that are values of the plan, by name."""
        return {name: self.materialized(name, array) for name, array in self.run().items()}

    # ------------------------------------------------------------------------------- values

    def is_served(self, name: str) -> bool:
        return self.plan.values[name].placement is None

    def value(self, name: str) -> np.ndarray:
        if name in self.values:
            return self.values[name]
        return self.members(name, 0, self.plan.sizes[self.plan.values[name].placement or ""])

    def members(self, name: str, start: int, stop: int) -> np.ndarray:
        """Members [start, stop) of a placed value."""
        if name in self.values:
            return self.values[name][start:stop]
        return self.reader.read([name], start, stop)[name]

    def array(self, value: np.ndarray) -> np.ndarray:
        return value

    def entry(self, name: str, whole: np.ndarray, index: int) -> np.ndarray:
        return whole[index] if self.is_served(name) else whole[:, index]

    def stacked(self, name: str, entries: Sequence[np.ndarray]) -> np.ndarray:
        if entries:
            return np.stack(entries, axis=0 if self.is_served(name) else 1)
        value = self.plan.values[name]
        members = () if value.placement is None else (self.plan.sizes[value.placement],)
        return np.empty((*members, *value.shape), np.dtype(value.dtype))

    def drop(self, names: Iterable[str]) -> None:
        names = set(names)
        super().drop(names)
        for name in names:
            self.on_device.pop(name, None)

    def materialized(self, name: str, array: np.ndarray) -> np.ndarray | Placed:
        """A result; the handle to its files if the options request files."""
        if name not in self.results.folders:
            return array
        if name not in self.mapped:
            self.results.write(name, 0, array)
        return self.results.finish(self.results.find(self.plan, name))

    def room(self, name: str, n: int) -> np.ndarray:
        """The array for a placed result of a pass.

        It is a mapped file if the result is materialized, or if it is large and no output.
        """
        value = self.plan.values[name]
        shape, dtype = (n, *value.shape), np.dtype(value.dtype)
        found = self.results.room(name, shape, dtype)
        if found is not None:
            self.mapped.add(name)
            return found
        if math.prod(shape) * dtype.itemsize > HANDED_BYTES and name not in self.outputs:
            return file_array(shape, dtype, self.options.scratch_folder)
        return np.empty(shape, dtype)

    def at_work(self, doing: str, step: Map | Server, shard: Shard | None = None) -> Any:
        """A context in which the work must end within `shard_timeout`."""
        return self.table.at(doing, step, shard, self.options.shard_timeout)

    # ----------------------------------------------------------------------------- segments

    def segment(self, steps: Sequence[Step], prefix: str, needed: set[str]) -> None:
        own: set[str] = set()
        for number, step in enumerate(steps):
            self.step(step)
            own.update(made(step))
            self.drop(own.difference(needed, *map(used, steps[number + 1 :])))

    def step(self, step: Step) -> None:
        self.monitor.tick()
        match step:
            case Server():
                self.server(step)
            case Map():
                self.map(step)
            case Gather(operand=operand, result=result, axis=axis):
                n = self.plan.sizes[self.plan.values[operand].placement or ""]
                self.values[result] = np.moveaxis(self.members(operand, 0, n), 0, axis)
            case Scatter(operand=operand, result=result, axis=axis):
                self.values[result] = np.moveaxis(self.values[operand], axis, 0)

    def computes(self) -> None:
        """Records that this process computes values of the run."""
        self.monitor.computed(provenance_here(self.options.xla_threads))

    def server(self, step: Server) -> None:
        self.computes()
        meter = Meter(step.name, self.monitor)
        with self.at_work("computing", step):
            self.values.update(run_server(self.plan, step, self.values, self.device))
        meter.lap("compute")
        meter.apart()

    def map(self, step: Map) -> None:
        self.computes()
        n = self.plan.sizes[step.placement]
        execute = self.executor(step)
        for name in step.results:
            self.values[name] = self.room(name, n)
        sums = Sums(self.plan, step, execute.trees(), self.options)
        letters = DeadLetters(self.options.drop_limit)
        for done in self.computed(step, execute):
            shard, meter = done.shard, done.meter
            meter.resume()
            if done.found.dropped:
                self.add_dropped(letters, done.found.dropped)
            for name, array in zip(step.results, done.found.results, strict=True):
                self.values[name][shard.start : shard.start + len(array)] = array
            with self.at_work("merging", step, shard):
                sums.add(shard, done.found)
            meter.lap("merge")
            meter.shard(shard)
        self.monitor.drop(letters.dropped, self.plan.sizes)
        meter = Meter(step.name, self.monitor)
        with self.at_work("merging", step):
            self.values.update(sums.results(self.plan))
        meter.lap("merge")
        meter.apart()

    def executor(self, step: Map) -> ShardExecutor:
        """The executor of a pass; server values that are on the device are not copied again."""
        meter = Meter(step.name, self.monitor)
        known: dict[str, np.ndarray | jax.Array] = dict(self.values)
        for name, (array, copy) in self.on_device.items():
            if known.get(name) is array:
                known[name] = copy
        options = self.options
        cached = cached_shards(options.cache, self.plan, step, known, options.xla_threads)
        execute = ShardExecutor(self.plan, step, known, self.device, self.checked, cached)
        self.on_device |= {n: (self.values[n], copy) for n, copy in execute.broadcasts.items()}
        meter.lap("transfer")
        meter.apart()
        return execute

    def computed(self, step: Map, execute: ShardExecutor) -> Iterator[Done]:
        """The results of the shards of a pass, in order."""
        shards = self.plan.shards(step.placement)

        def compute(
            shard: Shard,
            operands: list[np.ndarray] | Computed,
            lost: Mapping[int, str],
            meter: Meter,
        ) -> Done:
            if isinstance(operands, Computed):
                return Done(shard, operands, meter)
            meter.resume()
            with self.at_work("computing", step, shard):
                found = execute(shard, operands, lost)
            meter.lap("compute")
            return Done(shard, found, meter)

        jobs = (functools.partial(compute, *read) for read in self.read(step, execute, shards))
        alone = execute.calls_back or shards.count == 1
        threads = 1 if alone else computing_threads(self.options)
        return computed(jobs, shards.count, threads, step.body, self.check)

    def check(self) -> None:
        """Raises an error if the job was cancelled, or if a shard takes too long."""
        self.monitor.tick()
        self.table.check()

    def add_dropped(self, letters: DeadLetters, found: Sequence[Dropped]) -> None:
        """Adds members that a pass drops; reports all of them if they exceed the limit."""
        try:
            letters.add(found, self.plan.sizes)
        except WorkerError:
            self.monitor.drop(letters.dropped, self.plan.sizes)
            raise

    def meters(self, step: Map) -> Callable[[], Meter]:
        """A factory of meters for the shards of a pass."""
        sends = step.partial_bytes
        return functools.partial(Meter, step.name, self.monitor, sends)

    def read(self, step: Map, execute: ShardExecutor, shards: Shards) -> Iterator[Read]:
        """Reads the shards of a pass."""
        read = [name for name in step.operands if name not in self.values]
        new_meter = self.meters(step)
        for shard in shards:
            stop = shard.start + shard.count
            meter = new_meter()
            with self.at_work("reading", step, shard), shard_errors(step, shard):
                # The cache knows a shard by its files only if all operands are in files.
                whole = read == [*step.operands]
                found = execute.unread(shard, self.reader) if whole else None
                if found is None:
                    fresh, lost = read_shard(self.plan, step, self.reader, read, shard)
            if found is not None:
                meter.lap("read")
                yield shard, found, {}, meter
                continue
            operands = [
                fresh[name] if name in fresh else self.values[name][shard.start : stop]
                for name in step.operands
            ]
            meter.lap("read", sum(array.nbytes for array in fresh.values()))
            yield shard, operands, lost, meter


class _Reached(Exception):
    """Ends a run at the target of `_Until`."""


class _Until(_Evaluation):
    """Runs the steps before `target`: the name of a step, and the number of finished rounds."""

    target: tuple[str, int]

    def step(self, step: Step) -> None:
        if (step.name, self.monitor.progress().rounds) == self.target:
            raise _Reached
        super().step(step)
