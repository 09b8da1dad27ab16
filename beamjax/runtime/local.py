"""Runs a plan in this process, without Beam. All runners give the same results."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from beamjax.bodies.load import run_server
from beamjax.bodies.provenance import Provenance, provenance_here
from beamjax.bodies.xla_threads import compute_device
from beamjax.errors import OptionsError, WorkerError
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.plan.steps import (
    Gather,
    Map,
    Plan,
    Server,
    Step,
    walk,
)
from beamjax.runtime.driver import Checkpointer, Driver, Schedule, Turn, starts_anew
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import HANDED_BYTES, NOTHING, MaterializedOutputs
from beamjax.runtime.ordered_pool import (
    DaemonThreads,
    OrderedJobs,
    computing_threads,
)
from beamjax.runtime.passes import Done, Partials, ShardPass
from beamjax.runtime.shard_executor import LoadedPass, ShardExecutor
from beamjax.runtime.values import Reader, Ref, Values, ref_to, server
from beamjax.spans import timed
from beamjax.storage.buffers import file_array
from beamjax.storage.shared_cache import BLOCKS, block_budget
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    from beamjax.sources.arrays.placed import Placed


class LoadedPlan:
    """A plan as this process computes it, which all its runs share."""

    def __init__(self, plan: Plan, options: Options):
        self.plan = plan
        self.schedule = Schedule(plan)
        self.device = compute_device(options.xla_threads)
        self._options = options
        self._passes: dict[str, LoadedPass] = {}

    def pass_of(self, step: Map) -> LoadedPass:
        """A pass, whose bodies are loaded at its first run."""
        loaded = self._passes.get(step.name)
        if loaded is None:
            most = computing_threads(self._options.local_threads)
            self._passes[step.name] = loaded = LoadedPass(self.plan, step, self.device, most)
        return loaded

    @functools.cached_property
    def provenance(self) -> Provenance:
        """That of the values that this process computes."""
        return provenance_here(self._options.xla_threads)


def evaluate(
    plan: Plan,
    inputs: Inputs,
    options: Options,
    monitor: Monitor | None = None,
    checkpointer: Checkpointer | None = None,
    results: MaterializedOutputs = NOTHING,
    loaded: LoadedPlan | None = None,
) -> dict[str, np.ndarray | Placed]:
    """Runs a plan without Beam; returns its outputs by name, as raw arrays or handles to files."""
    monitor = monitor or Monitor(plan)
    loaded = loaded or LoadedPlan(plan, options)
    if inputs.has_sources:
        limit = options.memory_bytes
        BLOCKS.set_limit(None if limit is None else block_budget(limit))
    if options.dead_letters is not None:
        monitor.letters.begin(anew=starts_anew(checkpointer))
    threads = Threads(loaded, options, monitor, results)
    driver = Driver(loaded.schedule, inputs.refs, threads, monitor, checkpointer)
    if options.shard_timeout is None:
        outputs = driver.run()
    else:
        from beamjax.telemetry.watchdog import Watchdog, bounded  # most runs have no limit

        watchdog = monitor.spans.watch = Watchdog(walk(plan.steps), options.shard_timeout)
        outputs = bounded(driver.run, watchdog)
    return {name: threads.result(name, value) for name, value in outputs.items()}


def values_before(
    plan: Plan, inputs: Inputs, options: Options, step: str, rounds: int
) -> dict[str, np.ndarray]:
    """The raw arrays by name that a step and those after it need, when `rounds` rounds are over."""
    monitor, loaded = Monitor(plan), LoadedPlan(plan, options)
    given_refs = inputs.refs
    threads = Threads(loaded, options, monitor, NOTHING)
    run = _Until(loaded.schedule, given_refs, threads, monitor)
    run.target = step, rounds
    try:
        run.run()
    except _Reached:
        return {
            name: value.array()
            for name, value in run.values.items()
            if given_refs.get(name) is not value or value.n is None
        }
    raise OptionsError(f"the run does not reach the step {step!r} after {rounds} rounds")


class Threads:
    """Computes steps in this process; see `driver.Executor`."""

    def __init__(
        self, loaded: LoadedPlan, options: Options, monitor: Monitor, results: MaterializedOutputs
    ):
        self.loaded = loaded
        self.plan = loaded.plan
        self.options = options
        self.monitor = monitor
        # Copies on the device of the server values that passes have read.
        self.on_device: weakref.WeakKeyDictionary[Ref, jax.Array] = weakref.WeakKeyDictionary()
        # Keys of bodies that are known not to read padding.
        self.checked: set[str] = set()
        # The results whose array is a mapped file of `results`.
        self.mapped: dict[str, np.ndarray] = {}
        self.results = results
        self.spans = monitor.spans

    def run(self, step: Step, values: Values, needed: Collection[str]) -> Values:
        if self.monitor.provenance is not self.loaded.provenance:  # as in the first step of a run
            self.monitor.computed(self.loaded.provenance)
        match step:
            case Server():
                return self._server(step, values)
            case Map():
                return self._map(step, values)
            case Gather(operand=operand, result=result, axis=axis):
                return {result: server(np.moveaxis(values[operand].array(), 0, axis))}
        raise TypeError(step)

    def result(self, name: str, value: Ref) -> np.ndarray | Placed:
        """A result; the handle to its files if the options request files."""
        if name not in self.results.folders:
            return value.array()
        mapped = self.mapped.get(name)
        if mapped is None or value.data is not mapped:
            self.results.write(name, 0, value.array())
        return self.results.finish(self.results.find(self.plan, name))

    def room(self, name: str, n: int) -> np.ndarray:
        """The array for a placed result of a pass."""
        # It is a mapped file if the result is materialized, or if it is large and no output.
        value = self.plan.values[name]
        shape, dtype = (n, *value.shape), np.dtype(value.dtype)
        mapped = self.results.room(name, shape, dtype)
        if mapped is not None:
            self.mapped[name] = mapped
            return mapped
        if math.prod(shape) * dtype.itemsize > HANDED_BYTES and name not in self.plan.returned():
            return file_array(shape, dtype, self.options.scratch_folder)
        return np.empty(shape, dtype)

    def _server(self, step: Server, values: Values) -> Values:
        with timed(self.spans, step.name, "compute"):
            known = {name: value.array() for name, value in values.items()}
            outputs = run_server(self.plan, step, known, self.loaded.device)
        return {name: ref_to(array, self.plan.values[name]) for name, array in outputs.items()}

    def _map(self, step: Map, values: Values) -> Values:
        n = self.plan.sizes[step.placement]
        letters = None if step.guard is None else DeadLetters(self.options.drop_limit)
        with timed(self.spans, step.name, "transfer") as span:
            execute = self.executor(step, values)
            rooms = {name: self.room(name, n) for name in step.results}
            partials = Partials(
                step, self.options.reduction, execute.loaded.ranges, execute.trees()
            )
            reader = Reader.of({name: values[name] for name in step.operands}, self.plan.x64)
            work = ShardPass(self.plan, step, [execute], reader, partials, self.spans)
            for done in self._computed(work, execute.loaded, span):
                start = done.shard.start
                if letters is not None and done.computed.dropped:
                    self.add_dropped(letters, done.computed.dropped)
                for room, array in zip(rooms.values(), done.computed.results, strict=True):
                    room[start : start + len(array)] = array
            span.then("merge")
            reduced = partials.results(self.plan)
        if letters is not None:
            self.monitor.drop(letters.dropped, self.plan.sizes)
        types = self.plan.values
        refs = {name: ref_to(array, types[name]) for name, array in reduced.items()}
        return refs | {name: ref_to(room, types[name], n) for name, room in rooms.items()}

    def executor(self, step: Map, values: Values) -> ShardExecutor:
        """The executor of a pass; server values that are on the device are not copied again."""
        on_device, known = self.on_device, dict[str, np.ndarray | jax.Array]()
        for name in step.broadcasts:
            copy = on_device.get(values[name])
            known[name] = values[name].array() if copy is None else copy
        options, cached = self.options, None
        if options.cache is not None:
            from beamjax.runtime.cached_shards import cached_shards  # most runs have none

            cached = cached_shards(options.cache, self.plan, step, known, options.xla_threads)
        execute = ShardExecutor(self.loaded.pass_of(step), known, self.checked, cached)
        for name, copy in execute.broadcasts.items():
            on_device[values[name]] = copy
        return execute

    def _computed(self, work: ShardPass, loaded: LoadedPass, span: timed) -> Iterator[Done]:
        """The results of the shards of a pass, in order, when they are added to its partials."""
        shards = iter(loaded.shards)
        # Other threads would wait for the compilation, which does not count as their work.
        alone = shards if loaded.threads <= 1 else itertools.islice(shards, not loaded.is_compiled)
        for shard in alone:
            yield work.run(shard, span)
        if loaded.threads <= 1:
            return
        span.then("")  # What this thread does now has spans of its own, or is waiting.
        pool = DaemonThreads(loaded.threads)
        results: OrderedJobs[Done] = OrderedJobs([pool], self.check)
        try:
            # The calling thread iterates over the jobs, which reads the shards.
            for job in map(work.read, shards):
                yield from map(work.add, results.add(job))
            yield from map(work.add, results.rest())
        finally:
            results.cancel()
            pool.close()

    def check(self) -> None:
        """Raises an error if the job was cancelled, or if a shard takes too long."""
        self.monitor.tick()
        if self.spans.watch is not None:
            self.spans.watch.check()

    def add_dropped(self, letters: DeadLetters, dropped: Sequence[Dropped]) -> None:
        """Adds members that a pass drops; reports all of them if they exceed the limit."""
        try:
            letters.add(dropped, self.plan.sizes)
        except WorkerError:
            self.monitor.drop(letters.dropped, self.plan.sizes)
            raise


class _Reached(Exception):
    """Ends a run at the target of `_Until`."""


class _Until(Driver):
    """Runs the steps before `target`: the name of a step, and the number of finished rounds."""

    target: tuple[str, int]

    def step(self, turn: Turn) -> None:
        if (turn.step.name, self.monitor.progress().rounds) == self.target:
            raise _Reached
        super().step(turn)
