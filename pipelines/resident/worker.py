"""A resident worker: a DoFn that processes tasks within one bundle until the job ends."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.utils.windowed_value import WindowedValue

from beamjax.pipelines.graph.collect_results import WritePlaced
from beamjax.pipelines.resident.mailbox import WorkerEnd, join
from beamjax.pipelines.resident.task_messages import Output, Pass, Reply, WorkerTask
from beamjax.pipelines.values.elements import MemberBlock
from beamjax.telemetry.worker_records import collecting


class ServeTasks(beam.DoFn):
    """Processes the tasks of a mailbox. The values of its elements have no meaning."""

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
    """Runs tasks, and holds the DoFn of the current pass."""

    def __init__(self, end: WorkerEnd):
        self._end = end
        self._current: Pass | None = None
        self._fn: Any = None
        self._writers: list[WritePlaced] = []

    def run(self, task: WorkerTask) -> Reply:
        """Processes a task. Errors become part of the reply."""
        begun = time.perf_counter()
        number = task.current.number, task.number
        with collecting() as done:
            try:
                outputs = list(self._outputs(task))
            except Exception as error:
                self._current = None  # set the DoFn up again: it may be in the middle of a bundle
                text = f"{type(error).__name__}: {error}"
                found = Reply(*number, [], 0.0, error=text, cause=error)
            else:
                found = Reply(*number, outputs, 0.0)
            if self._end.is_here:  # else it would hold values of the launching process
                self._current = self._fn = None
        return replace(found, seconds=time.perf_counter() - begun, work=done.take())

    def _outputs(self, task: WorkerTask) -> Iterator[Output]:
        """Processes the elements of a task as one bundle."""
        current = task.current
        if self._current is None or current.number != self._current.number:
            self._prepare(current)
        fn = self._fn
        served = () if current.served is None else (current.served,)
        # A task is a whole bundle, so that a copy of it on another worker emits the same.
        for member in (fn, *self._writers):
            member.start_bundle()
        for element in task.elements:
            yield from self._sorted(fn.process(element, *served))
        yield from self._sorted(fn.finish_bundle())
        for writer in self._writers:
            writer.finish_bundle()

    def _sorted(self, emitted: Any) -> Iterator[Output]:
        """The elements that a DoFn emits, with their tags. Blocks are written to files instead."""
        for value in emitted or ():
            tag = None
            if isinstance(value, beam.pvalue.TaggedOutput):
                tag, value = value.tag, value.value
            if isinstance(value, WindowedValue):
                value = value.value
            if isinstance(value, MemberBlock):
                for writer in self._writers:
                    writer.process(value)
            else:
                yield tag, value

    def _prepare(self, current: Pass) -> None:
        """Sets up the DoFns for a pass."""
        program = self._end.program(current.program)
        fn: Any = copy.copy(program.fn)
        self._fn = fn
        task = getattr(fn, "task", None)
        if current.operands is not None:
            fn.sources = current.operands
        fn.here = self._end.is_here
        fn.setup()
        store = fn.store if task is None else task.store
        self._writers = [
            WritePlaced(store, name, f"{current.stem}-placed-{i}", current.results, cached=True)
            for i, name in enumerate(program.written)
        ]
        self._current = current
