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
import json
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.bodies.load import default_platform, run_server
from beamjax.bodies.provenance import provenance_here
from beamjax.bodies.xla_threads import compute_device
from beamjax.pipelines.graph.step_tasks import StepTasks
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.resident_job import ResidentJob
from beamjax.pipelines.resident.task_messages import Pass, Piece, Program, Result
from beamjax.pipelines.values.elements import ref_of
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import Here, StoreRef
from beamjax.pipelines.values.store import fixed
from beamjax.pipelines.values.stored_values import (
    SourceLeaf,
    Stored,
    files_of_data,
    leaf_spec,
    members,
    stored,
)
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker.map_shards import ranges as ranges_of
from beamjax.pipelines.worker.merge import assembled, combined_nodes, receive
from beamjax.pipelines.worker.worker_errors import own_errors
from beamjax.plan.dropping import decode_lines
from beamjax.plan.merging import range_width
from beamjax.plan.steps import Gather, Map, Plan, Server, Step, ValueRange, accumulator_ranges
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.passes import Partials
from beamjax.runtime.shard_executor import join_shards
from beamjax.runtime.values import Data, Leaf, Part, Ref, Values, server
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.source_base import spec_of
from beamjax.spans import timed
from beamjax.telemetry.watchdog import Watchdog, bounded

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
        self._tasks = StepTasks(plan, launcher.connection, self.store, launcher.bodies)
        # Values in this process that workers have needed, as they are in the store.
        self._sent: weakref.WeakKeyDictionary[Ref, Ref] = weakref.WeakKeyDictionary()
        # What is in files of the store, as long as any value refers to it.
        self._in_files: weakref.WeakSet[Stored | Leaf] = weakref.WeakSet()
        # The specs of sources that workers have read, as values of the store.
        self._specs: weakref.WeakKeyDictionary[Leaf, StoreRef] = weakref.WeakKeyDictionary()

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

    def _served(self, names: Iterable[str], values: Values) -> dict[str, Any]:
        """References of workers to server values; the first one writes a value to the store."""
        refs = {}
        for name in names:
            data = self._in_store(name, values[name]).data
            assert isinstance(data, Stored), name
            refs[name] = data.ref
        return refs

    def _operands(self, names: Iterable[str], values: Values) -> dict[str, Ref]:
        """The placed values that workers read, as messages have them."""
        return {
            name: self._in_store(name, values[name]).with_data(self._in_message) for name in names
        }

    def _in_store(self, name: str, value: Ref) -> Ref:
        """A value with the parts in this process written to the store, once."""
        if not any(isinstance(part.data, np.ndarray) for part in value.parts):
            return value
        if value not in self._sent:
            self._sent[value] = written = value.with_data(lambda data: self._put(name, data))
            self._note(written)
        return self._sent[value]

    def _put(self, name: str, data: Data) -> Data:
        if not isinstance(data, np.ndarray):
            return data
        ref = Here(fixed(data)) if self._is_here else self.store.put([data], name)
        return Stored(self.store, ref)

    def _in_message(self, data: Data) -> Any:
        if self._is_here:
            # A copy: workers hold the values of their last pass, whose files may go.
            return copy.copy(data)
        if isinstance(data, Stored):
            return data.ref
        assert isinstance(data, Leaf)
        if data not in self._specs:
            spec = json.dumps(spec_of(data.source)).encode()
            self._specs[data] = self.store.put([np.frombuffer(spec, np.uint8)], "source")
        return SourceLeaf(self._specs[data], data.leaf)

    def _taken(self, refs: Mapping[str, StoreRef]) -> dict[str, Ref]:
        """The server values that a step has computed."""
        taken = {
            name: stored(self.store, ref, self.plan.values[name]) for name, ref in refs.items()
        }
        for value in taken.values():
            self._note(value)
        return taken

    def _note(self, value: Ref) -> None:
        for part in value.parts:
            if isinstance(part.data, Stored | Leaf) and files_of_data(part.data):
                self._in_files.add(part.data)

    def _sweep(self) -> None:
        """Removes the files of earlier passes from the store that no value needs."""
        held = [files_of_data(data) for data in self._in_files]
        held += [files_of_data(Stored(self.store, ref)) for ref in self._specs.values()]
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
        outs = self._run_server(step, known)
        return {name: server(out) for name, out in outs.items()}

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
        program = self._program("server", step)
        current = self._pass(program, self._served(step.inputs, values))
        (result,) = self._run_on_workers(program, current, [(0, 1)])
        return self._taken({name: ref_of(part) for name, part in result.values})

    def _map(self, step: Map, values: Values, needed: Collection[str]) -> Values:
        """Runs a pass; workers write the placed results that a later step reads."""
        written = [name for name in step.results if name in needed]
        program = self._program("map", step, written)
        served = self._served(step.broadcasts, values)
        current = self._pass(program, served, self._operands(step.operands, values))
        results = self._run_on_workers(program, current, self._ranges(step.placement))
        if lines := b"".join(sorted(result.dropped for result in results)):
            self.monitor.drop(decode_lines(lines, step.name), self.plan.sizes)
        reduced = self._find_written(program, current, results)
        if step.buffers:
            pieces = [piece for result in results for piece in result.partials]
            reduced |= self._reduce(step, pieces)
        for number, _ in enumerate(step.combines):
            nodes = [node for result in results for node in result.combined[number]]
            reduced |= self._combine(step, number, nodes, values)
        return reduced

    def _merged_on_workers(self, step: Map) -> bool:
        """Whether the partials of a pass, one a worker, are too large to pass through here."""
        # Messages would bring them to this process, and then to the workers that merge them.
        workers = min(self._tasks.workers or 1, len(self.plan.shards(step.placement)))
        return self._tasks.fan_out(step).nbytes * workers > WORKER_MERGE_BYTES

    def _reduce(self, step: Map, pieces: Sequence[Piece]) -> dict[str, Ref]:
        """Merges the partials of each range of values, and rounds them to results."""
        # Small partials are merged here, which saves a pass over the workers.
        nbytes = self._tasks.fan_out(step).nbytes * len(pieces) / len(accumulator_ranges(step))
        if nbytes > WORKER_MERGE_BYTES and not self._is_here:
            return self._reduce_on_workers(step, pieces)
        merged = Partials(step, self._options.reduction, accumulator_ranges(step))
        with timed(self.monitor.spans, step.name, "merge"):
            for piece in pieces:
                for data in piece.partials:
                    accumulator = receive(self.store, data) if isinstance(data, bytes) else data
                    merged.merge(piece.values, accumulator)
            arrays = merged.of_buffers(self.plan)
        return {name: server(array) for name, array in arrays.items()}

    def _reduce_on_workers(self, step: Map, pieces: Iterable[Piece]) -> dict[str, Ref]:
        together = _together(pieces)
        groups = self._tasks.fan_out(step).groups
        if groups > 1:
            parts = [
                Piece(piece.values, piece.partials[i::groups])
                for piece in together
                for i in range(min(groups, len(piece.partials)))
            ]
            program = self._program("merge", step)
            results = self._run_on_workers(program, self._pass(program), parts)
            together = _together(piece for result in results for piece in result.partials)
        program = self._program("finish", step)
        results = self._run_on_workers(program, self._pass(program), together)
        if len(together) == 1:
            return self._taken({name: ref_of(part) for name, part in results[0].values})
        names = [r.result for buffer in step.buffers for r in buffer.reductions]
        return self._assemble(results, names)

    def _combine(
        self, step: Map, number: int, nodes: Sequence[Part], values: Values
    ) -> dict[str, Ref]:
        combine = step.combines[number]
        device = compute_device(self._options.xla_threads)
        self.monitor.computed(provenance_here(self._options.xla_threads))
        with timed(self.monitor.spans, step.name, "merge"):
            known = {name: values[name].array() for name in combine.inputs}
            join = join_shards(self.plan, step, combine, known, device)
            arrays = combined_nodes(combine, join, nodes, self.store)
        return {name: server(array) for name, array in arrays.items()}

    def _gather(self, step: Gather, values: Values) -> Values:
        program = self._program("gather", step)
        current = self._pass(program, operands=self._operands([step.operand], values))
        ranges = self._ranges(self.plan.values[step.operand].placement or "")
        results = self._run_on_workers(program, current, ranges)
        return self._assemble(results, [step.result], {step.result: step.axis})

    def _write(self, name: str, value: Ref) -> None:
        """Lets workers write a result to its files."""
        step = Gather(f"write {name}", name, name, 0, "", "")
        program = self._program("write", step, [name])
        operands = self._operands([name], {name: value})
        current = replace(self._pass(program, operands=operands), results=self.results)
        with self._errors_of(step):
            ranges = self._ranges(self.plan.values[name].placement or "")
            self._run_on_workers(program, current, ranges)

    def _ranges(self, placement: str) -> list[tuple[int, int]]:
        """The ranges of shards of a pass, as in a pipeline."""
        count = len(self.plan.shards(placement))
        return list(ranges_of(count, range_width(count, self._tasks.workers)))

    def _assemble(
        self, results: Sequence[Result], names: Iterable[str], axes: dict[str, int] | None = None
    ) -> dict[str, Ref]:
        types = {name: self.plan.values[name] for name in names}
        parts = (part for result in results for part in result.values)
        return self._taken(assembled(self.store, types, axes or {}, parts))

    # ------------------------------------------------------------------------------ programs

    def _program(self, kind: str, step: Any, written: Sequence[str] = ()) -> Program:
        """The program of a step, which is the same in each round."""
        key = kind, step, tuple(written)
        programs = self.launcher.programs
        if key not in programs:
            computes = kind in ("map", "server")
            programs[key] = Program(
                uuid.uuid4().hex,
                kind,
                self._tasks.task(step, {} if computes else None),
                tuple(written),
                as_files=kind == "map" and self._merged_on_workers(step),
            )
        return programs[key]

    def _pass(
        self,
        program: Program,
        served: Mapping[str, Any] | None = None,
        operands: Mapping[str, Ref] | None = None,
    ) -> Pass:
        """A new run of a program."""
        # The folders of results are part of the pass, not of the program: in a session, another
        # call may run the same program with others.
        results = self.launcher.results if program.written else NOTHING
        stem = f"pass-{uuid.uuid4().hex}"
        return Pass(program.name, stem, served or {}, operands or {}, results)

    def _run_on_workers(
        self, program: Program, current: Pass, elements: Sequence[Any]
    ) -> list[Result]:
        results = self.job.run(program, current, elements, self._check, self.monitor)
        for result in results:
            self.monitor.computed(result.provenance)
        return results

    def _check(self) -> None:
        self.monitor.tick()
        error = self._look()
        if error is not None:
            raise error

    def _find_written(
        self, program: Program, current: Pass, results: Sequence[Result]
    ) -> dict[str, Ref]:
        """The placed values that workers have written in a pass."""
        plan, placed = self.plan, dict[str, Ref]()
        for number, name in enumerate(program.written):
            if name in current.results.folders:
                placed[name] = members(current.results.find(plan, name), plan, name)
                continue
            # Only files of replies that counted: another worker may still write a late copy.
            parts = [part for result in results for part in result.written[name]]
            value, stem = plan.values[name], f"{current.stem}-placed-{number}"
            n = plan.sizes[value.placement or ""]
            source = MembersSource(self.store.root, stem, parts, leaf_spec(value), n)
            source.check_complete(f"result {name}")
            placed[name] = members(source, plan, name)
            self._note(placed[name])
        return placed


def _together(pieces: Iterable[Piece]) -> list[Piece]:
    """The partials of each range of values together."""
    partials_of: dict[ValueRange, list[Any]] = collections.defaultdict(list)
    for piece in pieces:
        partials_of[piece.values] += piece.partials
    return [Piece(values, tuple(partials)) for values, partials in partials_of.items()]
