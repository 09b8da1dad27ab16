"""Segments of a plan on resident workers, in place of a pipeline for each."""

from __future__ import annotations

import collections
import functools
import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from beamjax.bodies.export import default_platform
from beamjax.numerics.provenance import UNKNOWN
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.results import find_placed, find_provenance
from beamjax.pipelines.graph.step_tasks import StepTasks
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.job import ResidentJob
from beamjax.pipelines.resident.messages import Output, Pass, Program
from beamjax.pipelines.values.elements import Environment
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.values import (
    PlacedValue,
    ServerValue,
    Value,
    members,
    placed,
    scattered,
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
from beamjax.pipelines.worker.merge_in_files import FinishSections
from beamjax.pipelines.worker.tasks import Sources, StepFn
from beamjax.plan.dropping import Dropped, decode_file, encode_file
from beamjax.plan.steps import Gather, Map, Plan, Scatter, Server
from beamjax.storage import files
from beamjax.telemetry.meters import collecting
from beamjax.telemetry.progress import step_name

WORKER_MERGE_BYTES = 8 << 20
"""Total bytes of the partials of a pass from which workers merge them, and not the launcher."""


@dataclass
class ResidentLauncher(Launcher):
    """Runs plans without control flow on the workers of one job.

    Attributes:
      job: with the workers.
      programs: those that the job has of this run, by what they do.
      lasting: names of the files in the store that outlive the run.
    """

    job: ResidentJob = field(kw_only=True)
    programs: dict[Any, Program] = field(default_factory=dict)
    lasting: frozenset[str] = frozenset()

    def files(self) -> set[str]:
        """See `Launcher.files`."""
        return super().files() | self.lasting

    def run(self, plan: Plan, inputs: build.GraphInputs, stem: str) -> dict[str, Value]:
        """See `Launcher.run`; workers report in their replies, and not in the folder of the job."""
        return self._run(plan, inputs, stem, self.store)

    def _run(
        self, plan: Plan, inputs: build.GraphInputs, stem: str, store: Store
    ) -> dict[str, Value]:
        if not any(isinstance(step, Map | Gather) for step in plan.steps):
            return super()._run(plan, inputs, stem, store)
        names = [step.name for step in plan.steps]
        lost = functools.partial(lost_workers.lost_worker, store, plan.steps)
        shared = self.connection.shared
        with own_errors(store, type(self.connection.runner).__name__, names, shared, lost):
            segment = _Segment(self, plan, inputs, stem, store)
            for step in plan.steps:
                segment.step(step)
        return segment.outputs()


class _Segment:
    """The steps of a plan without control flow, one after the other.

    Args:
      launcher: of the run.
      plan: the steps, and as outputs the values that are requested.
      inputs: what the steps read.
      stem: first part of the names of files with placed values.
      store: where values are.
    """

    def __init__(
        self,
        launcher: ResidentLauncher,
        plan: Plan,
        inputs: build.GraphInputs,
        stem: str,
        store: Store,
    ):
        self._launcher = launcher
        self._plan = plan
        self._stem = stem
        self._store = store
        self._options = launcher.connection.options
        self._refs: dict[str, Ref] = dict(inputs.static)
        self._placed: dict[str, PlacedValue] = {
            name: placed(inputs.sources.specs[source], leaf)
            for name, (source, leaf) in inputs.sources.where.items()
        }
        nothing = Sources((), {}, plan.x64)
        self._tasks = StepTasks(
            plan, {}, nothing, launcher.program, store, launcher.connection, launcher.bodies
        )
        self._look = lost_workers.Look(store, plan.steps, keeps=False)
        self._dropped: list[Dropped] = []

    def step(self, step: Any) -> None:
        """Runs a step."""
        self._launcher.monitor.tick()
        match step:
            case Server():
                self._server(step)
            case Map():
                self._map(step)
            case Gather():
                self._gather(step)
            case Scatter():
                operand = ServerValue(self._store, ref=self._refs[step.operand])
                self._placed[step.result] = scattered(operand, step.name, step.axis, self._store)

    def outputs(self) -> dict[str, Value]:
        """The outputs of the plan, by name."""
        monitor = self._launcher.monitor
        monitor.drop(self._dropped, self._plan.sizes)
        found: dict[str, Value] = {}
        for name in dict.fromkeys(out.value for out in self._plan.outputs):
            if name in self._refs:
                found[name] = ServerValue(self._store, ref=self._refs[name])
            elif name is not None:
                found[name] = self._placed[name]
        return found

    # ------------------------------------------------------------------------------- steps

    def _server(self, step: Server) -> None:
        fn = functools.partial(
            self._program, step, lambda plain: RunServer(self._server_task(plain))
        )
        element = self._environment(step.inputs)
        here = default_platform() in self._plan.bodies[step.body].artefacts
        run = self._here if here else self._there
        for _, environment in run(fn(), step, [element]):
            self._take(environment)

    def _server_task(self, step: Server) -> Any:
        return self._tasks.task(step, step.inputs)

    def _map(self, step: Map) -> None:
        written = self._needed(step)
        served = self._environment(step.broadcasts)
        nothing = Sources((), {}, self._plan.x64)

        def make(plain: Map) -> StepFn:
            limit = self._options.drop_limit
            task = self._tasks.task(plain, step.broadcasts)
            return MapShards(task, nothing, {}, (), self._options.reduction, limit, whole=False)

        program = self._program(step, make, written)
        elements = self._ranges(step.placement)
        outputs = self._there(program, step, elements, served, self._sources(step.operands))
        by_tag: dict[str | None, list[Any]] = collections.defaultdict(list)
        for tag, element in outputs:
            by_tag[tag].append(element)
        if by_tag[DROPPED]:
            lines = b"".join(sorted(by_tag[DROPPED]))
            self._dropped += decode_file(encode_file(lines), step.name)
        self._find_written(step, written)
        if step.buffers:
            self._reduce(step, by_tag[PARTIALS])
        for number, _ in enumerate(step.combines):
            self._combine(step, number, by_tag[combined(number)])

    def _reduce(self, step: Map, partials: Iterable[tuple[str, bytes]]) -> None:
        """Merges the partials of each piece, and makes results of what is merged."""
        pieces: dict[str, list[bytes]] = collections.defaultdict(list)
        for key, data in partials:
            pieces[key].append(data)
        fan = self._tasks.fan_out(step)
        many = fan.nbytes * max(map(len, pieces.values()), default=0) > WORKER_MERGE_BYTES
        run = self._there if many and not self._launcher.connection.shared else self._here
        elements: list[Any] = list(pieces.items())
        if fan.in_files:
            finish = self._program(
                step,
                lambda plain: FinishSections(self._tasks.task(plain), self._options.reduction),
                use="finish",
            )
        else:
            # The keys of groups end in their number.
            groups = [(f"{key}|0", parts) for key, parts in elements]
            merge = self._program(step, self._merging, use="merge")
            elements = [element for _, element in run(merge, step, groups)]
            finish = self._program(
                step, lambda plain: FinishPieces(self._tasks.task(plain)), use="finish"
            )
        made = [environment for _, environment in run(finish, step, elements)]
        if finish.fn.whole:  # type: ignore[attr-defined]
            for environment in made:
                self._take(environment)
            return
        results = [r.result for buffer in step.buffers for r in buffer.reductions]
        self._assemble(step, made, results)

    def _merging(self, step: Map) -> StepFn:
        merge = MergeGroup(MergeAccumulators(step.name, self._store.reports, self._store))
        merge.store = self._store  # type: ignore[attr-defined]
        return merge

    def _combine(self, step: Map, number: int, partials: Sequence[Environment]) -> None:
        inputs = step.combines[number].inputs
        served = self._environment(inputs)
        program = self._program(
            step, lambda plain: FinishCombine(self._tasks.task(plain, inputs), number),
            use=combined(number),
        )  # fmt: skip
        for _, environment in self._here(program, step, [(b"", partials)], served):
            self._take(environment)

    def _gather(self, step: Gather) -> None:
        placement = self._plan.values[step.operand].placement or ""
        n, size = self._plan.sizes[placement], self._plan.shard_sizes[placement]
        assert n is not None
        nothing = Sources((), {}, self._plan.x64)

        def make(plain: Gather) -> StepFn:
            return PartsOfSource(self._store, nothing, plain, n, size)

        elements, sources = self._ranges(placement), self._sources([step.operand])
        outputs = self._there(self._program(step, make), step, elements, None, sources)
        parts = [environment for _, environment in outputs]
        self._assemble(step, parts, [step.result], {step.result: step.axis})

    def _ranges(self, placement: str) -> list[tuple[int, int]]:
        """Ranges of shards, as a pass in a pipeline starts from them."""
        count = self._plan.shards(placement)
        return list(Ranges(count, -(-count // build.MAX_RANGES)).process(None))

    def _assemble(
        self,
        step: Map | Gather,
        parts: list[Environment],
        names: Iterable[str],
        axes: dict[str, int] | None = None,
    ) -> None:
        types = {name: self._plan.values[name] for name in names}
        for environment in Assemble(self._store, types, axes or {}).process((b"", parts)):
            self._take(environment)

    # ------------------------------------------------------------------------------ programs

    def _program(
        self,
        step: Any,
        make: Callable[[Any], StepFn],
        written: Sequence[str] = (),
        use: str = "",
    ) -> Program:
        """The program of a step, which is the same in each round but for the step's name."""
        plain = replace(step, name=step_name(step.name))
        key = plain, tuple(written), use
        programs = self._launcher.programs
        if key not in programs:
            name = uuid.uuid4().hex
            results = self._launcher.results
            programs[key] = Program(name, make(plain), tuple(written), results)
        return programs[key]

    def _there(
        self,
        program: Program,
        step: Any,
        elements: Sequence[Any],
        served: Environment | None = None,
        sources: Sources | None = None,
    ) -> list[Output]:
        """Runs a program on the workers."""

        def current(number: int) -> Pass:
            stem = f"{self._stem}-{number}"
            self._stem_of_pass = stem
            return Pass(number, program.name, step.name, stem, served, sources)

        launcher = self._launcher
        outputs = launcher.job.pool.run(program, current, elements, self._check, launcher.monitor)
        self._launcher.job.progressed()
        return outputs

    def _here(
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
        self._launcher.monitor.reported("launcher", done.spent)
        return [(None, element) for element in found]

    def _check(self) -> None:
        self._launcher.monitor.tick()
        error = self._look()
        if error is not None:
            raise error

    # -------------------------------------------------------------------------------- values

    def _environment(self, names: Iterable[str]) -> Environment | None:
        refs = {name: self._refs[name] for name in names}
        return Environment(refs) if refs else None

    def _take(self, environment: Environment) -> None:
        """Server values that a step has computed."""
        self._refs |= environment.values
        self._launcher.monitor.computed(environment.provenance)

    def _sources(self, names: Iterable[str]) -> Sources:
        """The specs of placed values."""
        specs: list[dict[str, Any]] = []
        where = {}
        for name in names:
            if name in self._placed:
                found = self._placed[name]
                if found.spec not in specs:
                    specs.append(found.spec)
                where[name] = specs.index(found.spec), found.leaf
        return Sources(tuple(specs), where, self._plan.x64)

    def _needed(self, step: Map) -> list[str]:
        """The placed results of a pass that anything reads after it."""
        requested = {out.value for out in self._plan.outputs}
        later = itertools.dropwhile(lambda other: other is not step, self._plan.steps)
        for other in itertools.islice(later, 1, None):
            requested |= set(other.operands) if isinstance(other, Map) else set()
            requested |= {other.operand} if isinstance(other, Gather) else set()
        return [name for name in step.results if name in requested]

    def _find_written(self, step: Map, names: Sequence[str]) -> None:
        """The placed values that workers have written in the pass that was run last."""
        if not names:
            return
        store, results, listed = self._store, self._launcher.results, files.names(self._store.root)
        provenance = UNKNOWN
        for number, name in enumerate(names):
            stem = f"{self._stem_of_pass}-placed-{number}"
            provenance |= find_provenance(store, stem, listed)
            if name in results.folders:
                self._placed[name] = PlacedValue(results.find(self._plan, name).to_spec())
            else:
                self._placed[name] = members(find_placed(store, self._plan, name, stem, listed))
        self._launcher.monitor.computed(provenance)
