"""Computes the steps of a plan on the resident workers of one Beam job.

Workers find server values in the store, and read the shards of placed values from sources, most of
which are files that workers have written in an earlier pass. Steps on the server run in this
process.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.bodies.export import default_platform, run_server
from beamjax.bodies.xla_threads import compute_device
from beamjax.numerics.provenance import UNKNOWN
from beamjax.pipelines.graph.collect_results import ReadMembers, find_placed, find_provenance
from beamjax.pipelines.graph.step_tasks import StepTasks
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.resident_job import ResidentJob
from beamjax.pipelines.resident.task_messages import Output, Pass, Program
from beamjax.pipelines.values.elements import Environment
from beamjax.pipelines.values.refs import Here
from beamjax.pipelines.values.store import fixed
from beamjax.pipelines.values.stored_values import Operands, Stored, files_of_data, members, stored
from beamjax.pipelines.worker import lost_workers
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
    receive,
)
from beamjax.pipelines.worker.tasks import SourceSpecs, StepFn
from beamjax.pipelines.worker.worker_errors import own_errors
from beamjax.plan.buffer_ranges import ValueRange, accumulator_ranges
from beamjax.plan.dropping import decode_lines
from beamjax.plan.merging import range_width
from beamjax.plan.steps import Gather, Map, Plan, Server, Step
from beamjax.runtime.machine_provenance import provenance_here
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.passes import Partials
from beamjax.runtime.values import Leaf, Part, Ref, Values, server
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.source_base import Source
from beamjax.spans import timed
from beamjax.storage import files
from beamjax.telemetry.watchdog import Watchdog, bounded
from beamjax.telemetry.worker_records import collecting

WORKER_MERGE_BYTES = 8 << 20
"""Total bytes of the partials of a pass above which workers, not this process, merge them."""


class Resident:
    """Computes steps on resident workers; see `driver.Executor`."""

    def __init__(
        self, plan: Plan, launcher: Launcher, job: ResidentJob, results: MaterializedOutputs
    ):
        self.plan = plan
        self.results = results
        self.launcher = launcher
        self.monitor = launcher.monitor
        self.job = job
        self.store = launcher.store
        self._options = launcher.connection.options
        self._is_here = launcher.connection.shared
        self._no_sources = SourceSpecs((), {}, plan.x64)
        self._tasks = StepTasks(
            plan, {}, self._no_sources, launcher.program, self.store, launcher.connection,
            launcher.bodies,
        )  # fmt: skip
        # Values in this process that workers have needed, as they are in the store.
        self._sent: weakref.WeakKeyDictionary[Ref, Ref] = weakref.WeakKeyDictionary()
        # What is in files of the store, as long as any value refers to it.
        self._in_files: weakref.WeakSet[Stored | Leaf] = weakref.WeakSet()

    def run(self, step: Step, values: Values, needed: Collection[str]) -> Values:
        if isinstance(step, Server) and self._runs_here(step):
            return self._run_server_here(step, values)
        # Between steps no worker uses the store.
        for value in values.values():
            self._note(value)
        self._sweep()
        with self._errors_of(step):
            match step:
                case Server():
                    return self._run_server_on_workers(step, values)
                case Map():
                    return self._map(step, values, needed)
                case Gather():
                    return self._gather(step, values)
        raise TypeError(step)

    def result(self, name: str, value: Ref) -> np.ndarray | Placed:
        """A result; the handle to its files if the options request files."""
        if name not in self.results.folders:
            return value.array()
        source = value.leaf.source if value.leaf else None
        if not isinstance(source, Placed) or source.stem != self.results.stem:
            self._write(name, value)
        return self.results.finish(self.results.find(self.plan, name))

    # ------------------------------------------------------------------------------- values

    def _environment(self, names: Iterable[str], values: Values) -> Environment | None:
        """References of workers to server values; the first one writes a value to the store."""
        refs = {}
        for name in names:
            data = self._in_store(name, values[name]).data
            assert isinstance(data, Stored), name
            refs[name] = data.ref
        return Environment(refs) if refs else None

    def _operands(self, names: Iterable[str], values: Values) -> Operands:
        """The placed values that workers read."""
        # Copies: workers in this process hold the values of their last pass, whose files may go.
        refs = {name: _copied(self._in_store(name, values[name])) for name in names}
        return Operands(refs, self.plan.x64)

    def _in_store(self, name: str, value: Ref) -> Ref:
        """A value with the parts in this process written to the store, once."""
        if not any(isinstance(part.data, np.ndarray) for part in value.parts):
            return value
        if value not in self._sent:
            self._sent[value] = found = replace(
                value, parts=tuple(self._part_in_store(name, part) for part in value.parts)
            )
            self._note(found)
        return self._sent[value]

    def _part_in_store(self, name: str, part: Part) -> Part:
        array = part.data
        if not isinstance(array, np.ndarray):
            return part
        if self._is_here:
            return replace(part, data=Stored(self.store, Here(fixed(array))))
        return replace(part, data=Stored(self.store, self.store.put([array], name)))

    def _taken(self, environment: Environment) -> dict[str, Ref]:
        """The server values that a step has computed."""
        self.monitor.computed(environment.provenance)
        found = {
            name: stored(self.store, ref, self.plan.values[name])
            for name, ref in environment.values.items()
        }
        for value in found.values():
            self._note(value)
        return found

    def _note(self, value: Ref) -> None:
        for part in value.parts:
            if isinstance(part.data, Stored | Leaf) and files_of_data(part.data):
                self._in_files.add(part.data)

    def _sweep(self) -> None:
        """Removes the files of earlier passes from the store that no value needs."""
        held = [files_of_data(data) for data in self._in_files]
        self.store.sweep(self.launcher.files().union(*held))

    # -------------------------------------------------------------------------------- steps

    @contextlib.contextmanager
    def _errors_of(self, step: Step) -> Iterator[None]:
        """Replaces errors of the runner by the errors that workers have recorded in the store."""
        connection = self.launcher.connection
        self._look = lost_workers.Look(self.store, [step], keeps=False)
        lost = functools.partial(lost_workers.lost_worker, self.store, [step])
        name = type(connection.runner).__name__
        with own_errors(self.store, name, [step.name], connection.shared, lost):
            yield

    def _runs_here(self, step: Server) -> bool:
        return default_platform() in self.plan.bodies[step.body].artefacts

    def _run_server_here(self, step: Server, values: Values) -> Values:
        known = {name: value.array() for name, value in values.items()}
        found = self._run_server(step, known)
        return {name: server(out) for name, out in found.items()}

    def _run_server(self, step: Server, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a step in this process, within `shard_timeout`."""
        options = self._options
        self.monitor.computed(provenance_here(options.xla_threads))
        limit, device = options.shard_timeout, compute_device(options.xla_threads)

        def run() -> dict[str, np.ndarray]:
            with timed(self.monitor.spans, step.name, "compute"):
                return run_server(self.plan, step, known, device)

        if limit is None:
            return run()
        watchdog = self.monitor.spans.watch = Watchdog([step], limit)
        try:
            return bounded(run, watchdog)
        finally:
            self.monitor.spans.watch = None

    def _run_server_on_workers(self, step: Server, values: Values) -> Values:
        program = self._program(step, lambda: RunServer(self._tasks.task(step, step.inputs)))
        served = self._environment(step.inputs, values)
        ((_, environment),) = self._run_on_workers(program, step, [served])
        return self._taken(environment)

    def _map(self, step: Map, values: Values, needed: Collection[str]) -> Values:
        """Runs a pass; workers write the placed results that a later step reads."""
        written = [name for name in step.results if name in needed]

        def make() -> StepFn:
            limit = self._options.drop_limit
            task = self._tasks.task(step, step.broadcasts)
            mode = self._options.reduction
            return MapShards(
                task, self._no_sources, {}, (), mode, limit, whole=False,
                as_files=self._merged_on_workers(step),
            )  # fmt: skip

        program = self._program(step, make, written)
        served = self._environment(step.broadcasts, values)
        operands = self._operands(step.operands, values)
        by_tag: dict[str | None, list[Any]] = collections.defaultdict(list)
        ranges = self._ranges(step.placement)
        outputs = self._run_on_workers(program, step, ranges, served, operands, written)
        for tag, element in outputs:
            by_tag[tag].append(element)
        if by_tag[DROPPED]:
            lines = b"".join(sorted(by_tag[DROPPED]))
            self.monitor.drop(decode_lines(lines, step.name), self.plan.sizes)
        found = self._find_written(written)
        if step.buffers:
            found |= self._reduce(step, by_tag[PARTIALS])
        for number, _ in enumerate(step.combines):
            found |= self._combine(step, number, by_tag[combined(number)], values)
        return found

    def _merged_on_workers(self, step: Map) -> bool:
        """Whether the partials of a pass, one for each worker, are too large to pass through here.

        Messages would bring them to this process, and then to the workers that merge them.
        """
        workers = min(self._tasks.workers or 1, len(self.plan.shards(step.placement)))
        return self._tasks.fan_out(step).nbytes * workers > WORKER_MERGE_BYTES

    def _reduce(self, step: Map, partials: Sequence[tuple[str, Any]]) -> dict[str, Ref]:
        """Merges the partials of each range of values, and rounds them to results."""
        # Small partials are merged here, which saves a pass over the workers.
        nbytes = self._tasks.fan_out(step).nbytes * len(partials) / len(accumulator_ranges(step))
        if nbytes > WORKER_MERGE_BYTES and not self._is_here:
            return self._reduce_on_workers(step, partials)
        merged = Partials(step, self._options.reduction, accumulator_ranges(step))
        with timed(self.monitor.spans, step.name, "merge"):
            for key, data in partials:
                accumulator = receive(self.store, data) if isinstance(data, bytes) else data
                self.monitor.computed(accumulator.provenance)
                merged.merge(ValueRange.from_key(key), accumulator)
            found = merged.of_buffers(self.plan)
        return {name: server(array) for name, array in found.items()}

    def _reduce_on_workers(
        self, step: Map, partials: Iterable[tuple[str, bytes]]
    ) -> dict[str, Ref]:
        pieces: dict[str, list[bytes]] = collections.defaultdict(list)
        for key, data in partials:
            pieces[key].append(data)
        fan = self._tasks.fan_out(step)
        # `MergeGroup` expects keys that end in the number of a group.
        merge = self._program(step, lambda: self._merging(step), use="merge")
        for groups in (fan.groups, 1) if fan.groups > 1 else (1,):
            grouped = [
                (f"{key}|{i}", parts[i::groups])
                for key, parts in pieces.items()
                for i in range(min(groups, len(parts)))
            ]
            pieces = collections.defaultdict(list)
            for _, (key, data) in self._run_on_workers(merge, step, grouped):
                pieces[key].append(data)
        elements = [(key, data) for key, (data,) in pieces.items()]
        finish = self._program(step, lambda: FinishPieces(self._tasks.task(step)), use="finish")
        made = [environment for _, environment in self._run_on_workers(finish, step, elements)]
        if finish.fn.whole:  # type: ignore[attr-defined]
            return {k: v for environment in made for k, v in self._taken(environment).items()}
        results = [r.result for buffer in step.buffers for r in buffer.reductions]
        return self._assemble(made, results)

    def _merging(self, step: Map) -> StepFn:
        merging = MergeAccumulators(step.name, self.store.reports, self.store, as_files=True)
        merge = MergeGroup(merging)
        merge.store = self.store  # type: ignore[attr-defined]
        return merge

    def _combine(
        self, step: Map, number: int, partials: Sequence[Environment], values: Values
    ) -> dict[str, Ref]:
        inputs = step.combines[number].inputs
        program = self._program(
            step, lambda: FinishCombine(self._tasks.task(step, inputs), number),
            use=combined(number),
        )  # fmt: skip
        served = self._environment(inputs, values)
        ((_, environment),) = self._run_here(program, step, [(b"", partials)], served)
        return self._taken(environment)

    def _gather(self, step: Gather, values: Values) -> Values:
        placement = self.plan.values[step.operand].placement or ""
        shards = self.plan.shards(placement)
        program = self._program(
            step, lambda: PartsOfSource(self.store, self._no_sources, step, shards)
        )
        operands = self._operands([step.operand], values)
        outputs = self._run_on_workers(program, step, self._ranges(placement), None, operands)
        parts = [environment for _, environment in outputs]
        return self._assemble(parts, [step.result], {step.result: step.axis})

    def _write(self, name: str, value: Ref) -> None:
        """Lets workers write a result to its files."""
        step = Gather(f"write {name}", name, name, 0, "", "")
        placement = self.plan.values[name].placement or ""
        shards = self.plan.shards(placement)
        program = self._program(
            step, lambda: ReadMembers(self._no_sources, name, shards, self.store), [name]
        )
        operands, ranges = self._operands([name], {name: value}), self._ranges(placement)
        with self._errors_of(step):
            self._run_on_workers(program, step, ranges, None, operands, [name], self.results)

    def _ranges(self, placement: str) -> list[tuple[int, int]]:
        """The ranges of shards of a pass, as in a pipeline."""
        count = len(self.plan.shards(placement))
        return list(Ranges(count, range_width(count, self._tasks.workers)).process(None))

    def _assemble(
        self, parts: list[Environment], names: Iterable[str], axes: dict[str, int] | None = None
    ) -> dict[str, Ref]:
        types = {name: self.plan.values[name] for name in names}
        assemble = Assemble(self.store, types, axes or {})
        (environment,) = assemble.process((b"", parts))
        return self._taken(environment)

    # ------------------------------------------------------------------------------ programs

    def _program(
        self,
        step: Any,
        make: Callable[[], StepFn],
        written: Sequence[str] = (),
        use: str = "",
    ) -> Program:
        """The program of a step, which is the same in each round."""
        key = step, tuple(written), use
        programs = self.launcher.programs
        if key not in programs:
            programs[key] = Program(uuid.uuid4().hex, make(), tuple(written))
        return programs[key]

    def _run_on_workers(
        self,
        program: Program,
        step: Any,
        elements: Sequence[Any],
        served: Environment | None = None,
        operands: Operands | None = None,
        written: Sequence[str] = (),
        results: MaterializedOutputs | None = None,
    ) -> list[Output]:
        """Runs a program on the workers."""
        # Part of the pass, not of the program: in a session, another call may run the same program
        # with other folders of results.
        found = (results or self.launcher.results) if written else NOTHING

        def current(number: int) -> Pass:
            self._stem = f"pass-{number}-{uuid.uuid4().hex}"
            return Pass(number, program.name, self._stem, served, operands, found)

        return self.job.run(program, current, elements, self._check, self.monitor)

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
        self.monitor.reported("launcher", done.take())
        return [(None, element) for element in found]

    def _check(self) -> None:
        self.monitor.tick()
        error = self._look()
        if error is not None:
            raise error

    def _find_written(self, names: Sequence[str]) -> dict[str, Ref]:
        """The placed values that workers have written in the last pass."""
        if not names:
            return {}
        store, results, listed = self.store, self.launcher.results, files.names(self.store.root)
        provenance, found = UNKNOWN, {}
        for number, name in enumerate(names):
            own = f"{self._stem}-placed-{number}"
            provenance |= find_provenance(store, own, listed)
            source: Source = (
                results.find(self.plan, name)
                if name in results.folders
                else find_placed(store, self.plan, name, own, listed)
            )
            found[name] = members(source, self.plan, name)
            self._note(found[name])
        self.monitor.computed(provenance)
        return found


def _copied(value: Ref) -> Ref:
    return replace(value, parts=tuple(replace(p, data=copy.copy(p.data)) for p in value.parts))
