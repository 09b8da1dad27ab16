"""A resident worker: a DoFn that runs the tasks of a mailbox until the job ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
import numpy as np

from beamjax.errors import JobCancelledError
from beamjax.pipelines.resident.mailbox import WorkerEnd, join
from beamjax.pipelines.resident.task_messages import Pass, Piece, Program, Reply, Result, WorkerTask
from beamjax.pipelines.values.elements import Element, stored_part
from beamjax.pipelines.values.stored_values import opened
from beamjax.pipelines.worker.map_shards import Bundle, compute_server, letters_of
from beamjax.pipelines.worker.merge import finished, nodes_of, receive, send
from beamjax.pipelines.worker.placed_files import PlacedFiles
from beamjax.pipelines.worker.reporting import WorkerSpans, record_error
from beamjax.pipelines.worker.tasks import begin
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Plan
from beamjax.runtime import passes
from beamjax.runtime.passes import Done
from beamjax.runtime.values import Part, Reader
from beamjax.sources.source_base import Source
from beamjax.spans import timed
from beamjax.telemetry.worker_records import collecting

MOST_SOURCES = 8
"""Sources that a worker holds open from earlier passes."""


class ServeTasks(beam.DoFn):
    """Runs the tasks of a mailbox. The values of its elements have no meaning."""

    def __init__(self, folder: str, secret: bytes):
        self.folder = folder
        self.secret = secret

    def process(self, element: Any) -> None:
        # A retry of this element, after its worker died, joins as a new worker.
        end = join(self.folder, self.secret)
        if end is None:  # the job has ended; the other elements of this worker come here
            return
        runner = _TaskRunner(end)
        for task in end.tasks():
            end.reply(runner.run(task))


class _TaskRunner:
    """Runs tasks, and holds what the current pass needs."""

    def __init__(self, end: WorkerEnd):
        self._end = end
        self._prepared: _PreparedPass | None = None
        # Each round reads those of the run, which may list very many files.
        self._sources: dict[str, Source] = {}

    def run(self, task: WorkerTask) -> Reply:
        """Runs a task. Errors become part of the reply."""
        begun = time.perf_counter()
        reply = Reply(task.current.number, task.number)
        with collecting() as done:
            try:
                reply = replace(reply, result=self._result(task))
            except Exception as error:
                self._prepared = None  # it may be in the middle of a task
                reply = replace(reply, error=f"{type(error).__name__}: {error}", cause=error)
            if self._end.is_here:  # else it would hold values of the launching process
                self._prepared = None
        return replace(reply, seconds=time.perf_counter() - begun, work=done.take())

    def _result(self, task: WorkerTask) -> Result:
        current = task.current
        program = self._end.program(current.program)
        try:
            if self._prepared is None or self._prepared.current.number != current.number:
                while len(self._sources) >= MOST_SOURCES:
                    del self._sources[next(iter(self._sources))]
                self._prepared = _PreparedPass(program, current, self._end.is_here, self._sources)
            return self._prepared.run(task.elements)
        except Exception as error:
            if not isinstance(error, JobCancelledError):
                record_error(program.task.store, error, program.task.step)
            raise


class _PreparedPass:
    """A program that is ready to run in a pass."""

    def __init__(self, program: Program, current: Pass, is_here: bool, sources: dict[str, Source]):
        self.program = program
        self.current = current
        self.is_here = is_here
        self.task: Any = program.task
        self.store = self.task.store
        self.spans = WorkerSpans(self.store.reports)
        if self.task.bodies:
            begin(self.task, self.spans)
        x64 = self.task.plan.x64
        self.reader = Reader.of(opened(current.operands, self.store, x64, sources), x64)
        self.letters = letters_of(self.task)

    def run(self, elements: Sequence[Any]) -> Result:
        """Computes the elements of a task."""
        try:
            match self.program.kind:
                case "map":
                    return self._map(elements)
                case "server":
                    refs = self.current.served.items()
                    served = Element({name: stored_part(ref) for name, ref in refs})
                    results = compute_server(self.task, served, (), self.spans)
                    return Result(tuple(results.items()), provenance=self.task.provenance)
                case "gather":
                    return self._gather(elements)
                case "write":
                    return self._write(elements)
                case "merge":
                    return Result(partials=tuple(map(self._merged, elements)))
                case "finish":
                    return self._finish(elements)
            raise ValueError(self.program.kind)
        finally:
            self.spans.report()

    def _map(self, elements: Iterable[tuple[int, int]]) -> Result:
        task = self.task
        bundle = Bundle(task, self.reader, self.current.served, self.letters, self.spans)
        written, dropped = self._files(), []
        try:
            for done in self._computed(bundle, elements):
                for name, members in zip(task.step.results, done.computed.results, strict=True):
                    if name in written:
                        written[name].add(done.shard.start, members, self.spans)
                if done.computed.dropped:
                    from beamjax.plan.dropping import encode_lines  # few passes drop members

                    dropped.append(encode_lines(done.computed.dropped))
        except BaseException:
            bundle.cancel()
            raise
        partials = []
        for piece, accumulator in bundle.partials.accumulators.items():
            with timed(self.spans, task.step.name, "transfer"):
                element: Any = accumulator
                if not self.is_here:
                    element = send(self.store, accumulator, self.program.as_files)
            partials.append(Piece(piece, (element,)))
        with timed(self.spans, task.step.name, "transfer"):
            trees = bundle.partials.trees
            combined = tuple(nodes_of(tree, self.store) for tree in trees)
        return Result(
            partials=tuple(partials),
            combined=combined,
            dropped=b"".join(dropped),
            written=self._parts(written),
            provenance=task.provenance,
        )

    def _computed(self, bundle: Bundle, elements: Iterable[tuple[int, int]]) -> Iterator[Done]:
        for shard in _shards(self.task.plan, self.task.step.placement, elements):
            yield from bundle.add(shard)
        yield from bundle.rest()

    def _gather(self, elements: Iterable[tuple[int, int]]) -> Result:
        name = self.task.step.result
        parts = [
            (name, stored_part(self.store.put([members], name), shard.start, shard.count))
            for shard, members in self._read(elements, self.task.step.operand)
        ]
        return Result(tuple(parts))

    def _write(self, elements: Iterable[tuple[int, int]]) -> Result:
        """Writes a value that is a result, as it is."""
        written = self._files()
        for shard, members in self._read(elements, self.task.step.operand):
            written[self.task.step.operand].add(shard.start, members, self.spans)
        return Result(written=self._parts(written))

    def _read(
        self, elements: Iterable[tuple[int, int]], operand: str
    ) -> Iterator[tuple[Shard, np.ndarray]]:
        plan = self.task.plan
        for shard in _shards(plan, plan.values[operand].placement or "", elements):
            with timed(self.spans, self.task.step.name, "read", shard) as span:
                members = self.reader.read([operand], shard.start, shard.start + shard.count)
                span.nbytes = members[operand].nbytes
            yield shard, members[operand]

    def _files(self) -> dict[str, PlacedFiles]:
        """The files of this task, by the name of the value."""
        stem, results = self.current.stem, self.current.results
        return {
            name: PlacedFiles(self.store, name, f"{stem}-placed-{i}", results, cached=True)
            for i, name in enumerate(self.program.written)
        }

    def _parts(self, written: dict[str, PlacedFiles]) -> dict[str, tuple[tuple[int, int], ...]]:
        for placed in written.values():
            placed.flush(self.spans)
        return {name: tuple(placed.parts) for name, placed in written.items()}

    def _merged(self, piece: Piece) -> Piece:
        if len(piece.partials) == 1:
            return piece  # neither decoded nor encoded for nothing
        element = send(self.store, self._accumulator(piece), as_file=True)
        return Piece(piece.values, (element,))

    def _accumulator(self, piece: Piece) -> Any:
        merged = None
        with timed(self.spans, self.task.step.name, "merge"):
            for element in piece.partials:
                merged = passes.merged(merged, receive(self.store, element))
        return merged

    def _finish(self, elements: Iterable[Piece]) -> Result:
        parts = list[tuple[str, Part]]()
        for piece in elements:
            accumulator = self._accumulator(piece)
            with timed(self.spans, self.task.step.name, "merge"):
                parts += finished(
                    self.task.plan, self.task.step, piece.values, accumulator, self.store
                ).items()
        return Result(tuple(parts))


def _shards(plan: Plan, placement: str, elements: Iterable[tuple[int, int]]) -> Iterator[Shard]:
    for first, last in elements:
        yield from plan.shards(placement).between(first, last)
