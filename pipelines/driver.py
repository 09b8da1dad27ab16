"""The driver: runs a plan with loops and branches on the resident workers of one Beam job.

Between passes, server values are references into the store, and placed values are sources from
which the workers of the next pass read their shards. Steps on the server run in this process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.bodies.export import default_platform, run_server
from beamjax.bodies.xla_threads import compute_device
from beamjax.errors import BeamjaxError
from beamjax.numerics.provenance import UNKNOWN
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.results import find_placed, find_provenance
from beamjax.pipelines.graph.step_tasks import StepTasks
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.job import ResidentJob
from beamjax.pipelines.resident.messages import Output, Pass, Program
from beamjax.pipelines.values.elements import Environment
from beamjax.pipelines.values.values import (
    PlacedValue,
    ServerValue,
    Value,
    members,
    scattered,
    stacked,
)
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker.errors import own_errors
from beamjax.pipelines.worker.map_shards import (
    DROPPED,
    PARTIALS,
    MapShards,
    Ranges,
    RunServer,
    combined,
)
from beamjax.pipelines.worker.merge import (
    Assemble,
    FinishCombine,
    FinishPieces,
    MergeAccumulators,
    MergeGroup,
    PartsOfSource,
)
from beamjax.pipelines.worker.tasks import Sources, StepFn
from beamjax.plan.dropping import decode_lines
from beamjax.plan.liveness import used
from beamjax.plan.steps import Gather, Map, Plan, Scatter, Server, Step
from beamjax.runtime.control_flow import Checkpointer, ControlFlow
from beamjax.runtime.machine_provenance import provenance_here
from beamjax.runtime.materialized_outputs import NOTHING
from beamjax.storage import files
from beamjax.telemetry.meters import Meter, collecting
from beamjax.telemetry.progress import step_name
from beamjax.telemetry.watchdog import WorkTable, bounded

WORKER_MERGE_BYTES = 8 << 20
"""Total bytes of the partials of a pass above which workers, not this process, merge them."""


class Driver(ControlFlow[Value]):
    """Runs a plan on resident workers.

    Args:
      plan: the plan to run.
      values: its inputs, by name.
      launcher: the connection, the store and the monitor of the run.
      job: the job of the workers. It starts with the first pass.
      checkpointer: saves checkpoints of the run; None saves none.
    """

    def __init__(
        self,
        plan: Plan,
        values: dict[str, Value],
        launcher: Launcher,
        job: ResidentJob,
        checkpointer: Checkpointer | None = None,
    ):
        super().__init__(plan, values, launcher.monitor, checkpointer)
        self.launcher = launcher
        self.job = job
        self.store = launcher.store
        self._options = launcher.connection.options
        self._no_sources = Sources((), {}, plan.x64)
        self._tasks = StepTasks(
            plan, {}, self._no_sources, launcher.program, self.store, launcher.connection,
            launcher.bodies,
        )  # fmt: skip

    def run(self) -> dict[str, Value]:
        """Runs all steps; see `ControlFlow.run`."""
        with _rounds_in_message():
            return super().run()

    # ------------------------------------------------------------------------------- values

    def array(self, value: Value) -> np.ndarray:
        assert isinstance(value, ServerValue)
        return value.array()

    def entry(self, name: str, whole: Value, index: int) -> Value:
        return whole.entry(index)

    def stacked(self, name: str, entries: Sequence[Value]) -> Value:
        return stacked(name, entries, self.plan, self.store)

    def _served(self, name: str) -> ServerValue:
        value = self.values[name]
        assert isinstance(value, ServerValue), name
        return value

    def _environment(self, names: Iterable[str]) -> Environment | None:
        refs = {name: self._served(name).ref(name) for name in names}
        return Environment(refs) if refs else None

    def _take(self, environment: Environment) -> None:
        """Adds the server values that a step has computed."""
        self.values |= {
            name: ServerValue(self.store, ref=ref) for name, ref in environment.values.items()
        }
        self.monitor.computed(environment.provenance)

    def _sources(self, names: Iterable[str]) -> Sources:
        """The specs of placed values."""
        specs: list[dict[str, Any]] = []
        where = {}
        for name in names:
            found = self.values[name]
            assert isinstance(found, PlacedValue), name
            if found.spec not in specs:
                specs.append(found.spec)
            where[name] = specs.index(found.spec), found.leaf
        return Sources(tuple(specs), where, self.plan.x64)

    def _sweep(self) -> None:
        """Removes the files of earlier passes from the store that no step needs."""
        held: list[Value] = [*self.values.values(), *itertools.chain(*self.stacks.values())]
        self.store.sweep(self.launcher.files().union(*(value.files for value in held)))

    # -------------------------------------------------------------------------------- steps

    def segment(self, steps: Sequence[Step], prefix: str, needed: set[str]) -> None:
        # Between segments no worker uses the store. Segments of server steps only write no files.
        if any(isinstance(step, Map | Gather) for step in steps):
            self._sweep()
        for number, step in enumerate(steps):
            self.monitor.tick()
            named = replace(step, name=prefix + step.name)
            match named:
                case Server() if self._runs_here(named):
                    self._run_server_here(named)
                case Server():
                    with self._errors_of(named):
                        self._run_server_on_workers(named)
                case Map():
                    later = needed.union(*map(used, steps[number + 1 :]))
                    with self._errors_of(named):
                        self._map(named, [name for name in named.results if name in later])
                case Gather():
                    with self._errors_of(named):
                        self._gather(named)
                case Scatter(operand=operand, result=result, axis=axis):
                    cut = scattered(self._served(operand), named.name, axis, self.store)
                    self.values[result] = cut

    @contextlib.contextmanager
    def _errors_of(self, step: Server | Map | Gather) -> Iterator[None]:
        """Replaces errors of the runner by the errors that workers have recorded in the store."""
        connection = self.launcher.connection
        self._look = lost_workers.Look(self.store, [step], keeps=False)
        lost = functools.partial(lost_workers.lost_worker, self.store, [step])
        name = type(connection.runner).__name__
        with own_errors(self.store, name, [step.name], connection.shared, lost):
            yield

    def _runs_here(self, step: Server) -> bool:
        return default_platform() in self.plan.bodies[step.body].artefacts

    def _run_server_here(self, step: Server) -> None:
        known = {name: self._served(name).array() for name in step.inputs}
        meter = Meter(step.name, self.monitor)
        found = self._run_server(step, known)
        meter.lap("compute")
        meter.apart()
        self.values |= {name: ServerValue(self.store, out) for name, out in found.items()}

    def _run_server(self, step: Server, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a step in this process, within `shard_timeout`."""
        options = self._options
        self.monitor.computed(provenance_here(options.xla_threads))
        limit, device = options.shard_timeout, compute_device(options.xla_threads)
        if limit is None:
            return run_server(self.plan, step, known, device)
        table = WorkTable()

        def run() -> dict[str, np.ndarray]:
            with table.at("computing", step, None, limit):
                return run_server(self.plan, step, known, device)

        return bounded(run, table)

    def _run_server_on_workers(self, step: Server) -> None:
        program = self._program(
            step, lambda plain: RunServer(self._tasks.task(plain, plain.inputs))
        )
        for _, environment in self._run_on_workers(program, step, [self._environment(step.inputs)]):
            self._take(environment)

    def _map(self, step: Map, written: Sequence[str]) -> None:
        """Runs a pass; workers write the placed results that a later step reads."""

        def make(plain: Map) -> StepFn:
            limit = self._options.drop_limit
            task = self._tasks.task(plain, step.broadcasts)
            mode = self._options.reduction
            return MapShards(task, self._no_sources, {}, (), mode, limit, whole=False)

        program = self._program(step, make, written)
        served, sources = self._environment(step.broadcasts), self._sources(step.operands)
        by_tag: dict[str | None, list[Any]] = collections.defaultdict(list)
        ranges = self._ranges(step.placement)
        for tag, element in self._run_on_workers(program, step, ranges, served, sources, written):
            by_tag[tag].append(element)
        if by_tag[DROPPED]:
            lines = b"".join(sorted(by_tag[DROPPED]))
            self.monitor.drop(decode_lines(lines, step.name), self.plan.sizes)
        if step.buffers:
            self._reduce(step, by_tag[PARTIALS])
        for number, _ in enumerate(step.combines):
            self._combine(step, number, by_tag[combined(number)])

    def _reduce(self, step: Map, partials: Iterable[tuple[str, bytes]]) -> None:
        """Merges the partials of each range of values, and rounds them to results."""
        pieces: dict[str, list[bytes]] = collections.defaultdict(list)
        for key, data in partials:
            pieces[key].append(data)
        fan = self._tasks.fan_out(step)
        # Small partials are merged here, which saves a pass over the workers.
        many = fan.nbytes * max(map(len, pieces.values()), default=0) > WORKER_MERGE_BYTES
        on_workers = many and not self.launcher.connection.shared
        run = self._run_on_workers if on_workers else self._run_here
        # `MergeGroup` expects keys that end in the number of a group.
        merge = self._program(step, self._merging, use="merge")
        for groups in (fan.groups, 1) if fan.groups > 1 and on_workers else (1,):
            grouped = [
                (f"{key}|{i}", parts[i::groups])
                for key, parts in pieces.items()
                for i in range(min(groups, len(parts)))
            ]
            pieces = collections.defaultdict(list)
            for _, (key, data) in run(merge, step, grouped):
                pieces[key].append(data)
        elements = [(key, data) for key, (data,) in pieces.items()]
        finish = self._program(
            step, lambda plain: FinishPieces(self._tasks.task(plain)), use="finish"
        )
        made = [environment for _, environment in run(finish, step, elements)]
        if finish.fn.whole:  # type: ignore[attr-defined]
            for environment in made:
                self._take(environment)
            return
        results = [r.result for buffer in step.buffers for r in buffer.reductions]
        self._assemble(made, results)

    def _merging(self, step: Map) -> StepFn:
        merge = MergeGroup(MergeAccumulators(step.name, self.store.reports, self.store))
        merge.store = self.store  # type: ignore[attr-defined]
        return merge

    def _combine(self, step: Map, number: int, partials: Sequence[Environment]) -> None:
        inputs = step.combines[number].inputs
        program = self._program(
            step, lambda plain: FinishCombine(self._tasks.task(plain, inputs), number),
            use=combined(number),
        )  # fmt: skip
        served = self._environment(inputs)
        for _, environment in self._run_here(program, step, [(b"", partials)], served):
            self._take(environment)

    def _gather(self, step: Gather) -> None:
        placement = self.plan.values[step.operand].placement or ""
        shards = self.plan.shards(placement)
        program = self._program(
            step, lambda plain: PartsOfSource(self.store, self._no_sources, plain, shards)
        )
        sources = self._sources([step.operand])
        outputs = self._run_on_workers(program, step, self._ranges(placement), None, sources)
        parts = [environment for _, environment in outputs]
        self._assemble(parts, [step.result], {step.result: step.axis})

    def _ranges(self, placement: str) -> list[tuple[int, int]]:
        """The ranges of shards of a pass, as in a pipeline."""
        count = len(self.plan.shards(placement))
        return list(Ranges(count, -(-count // build.MAX_RANGES)).process(None))

    def _assemble(
        self, parts: list[Environment], names: Iterable[str], axes: dict[str, int] | None = None
    ) -> None:
        types = {name: self.plan.values[name] for name in names}
        for environment in Assemble(self.store, types, axes or {}).process((b"", parts)):
            self._take(environment)

    # ------------------------------------------------------------------------------ programs

    def _program(
        self,
        step: Any,
        make: Callable[[Any], StepFn],
        written: Sequence[str] = (),
        use: str = "",
    ) -> Program:
        """The program of a step. It is the same in each round, apart from the name of the step."""
        plain = replace(step, name=step_name(step.name))
        key = plain, tuple(written), use
        programs = self.launcher.programs
        if key not in programs:
            programs[key] = Program(uuid.uuid4().hex, make(plain), tuple(written))
        return programs[key]

    def _run_on_workers(
        self,
        program: Program,
        step: Any,
        elements: Sequence[Any],
        served: Environment | None = None,
        sources: Sources | None = None,
        written: Sequence[str] = (),
    ) -> list[Output]:
        """Runs a program on the workers."""
        stem = ""
        # Part of the pass, not of the program: in a session, another call may run the same program
        # with other folders of results.
        results = self.launcher.results if written else NOTHING

        def current(number: int) -> Pass:
            nonlocal stem
            stem = f"pass-{number}-{uuid.uuid4().hex}"
            return Pass(number, program.name, step.name, stem, served, sources, results)

        outputs = self.job.run(program, current, elements, self._check, self.monitor)
        self._find_written(stem, written)
        return outputs

    def _run_here(
        self,
        program: Program,
        step: Any,
        elements: Iterable[Any],
        served: Environment | None = None,
    ) -> list[Output]:
        """Runs a program in this process."""
        fn: Any = program.fn
        arguments = () if served is None else (served,)
        with collecting() as done:
            fn.start_bundle()
            found = [out for element in elements for out in fn.process(element, *arguments)]
            fn.finish_bundle()
        self.monitor.reported("launcher", done.spent)
        return [(None, element) for element in found]

    def _check(self) -> None:
        self.monitor.tick()
        error = self._look()
        if error is not None:
            raise error

    def _find_written(self, stem: str, names: Sequence[str]) -> None:
        """Finds the placed values that workers have written in a pass."""
        if not names:
            return
        store, results, listed = self.store, self.launcher.results, files.names(self.store.root)
        provenance = UNKNOWN
        for number, name in enumerate(names):
            own = f"{stem}-placed-{number}"
            provenance |= find_provenance(store, own, listed)
            if name in results.folders:
                self.values[name] = PlacedValue(results.find(self.plan, name).to_spec())
            else:
                self.values[name] = members(find_placed(store, self.plan, name, own, listed))
        self.monitor.computed(provenance)


_WHERE = re.compile(r"step '((?:[^\s'/]+[\[(]\d+[\])]/)+)")
_PART = re.compile(r"([^/]+)([\[(])(\d+)[\])]/")


@contextlib.contextmanager
def _rounds_in_message() -> Iterator[None]:
    """Writes out the rounds and blocks in the name of a failing step, `loop[3]/cond(1)/step`."""
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
