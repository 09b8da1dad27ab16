"""The DoFns that compute: `MapShards` for a pass over shards, `RunServer` for a server step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beamjax.bodies.export import run_server
from beamjax.bodies.python_bodies import with_settings
from beamjax.pipelines.values.elements import Environment, MemberBlock, cut, whole
from beamjax.pipelines.worker.merge import partials_of_tree, send
from beamjax.pipelines.worker.tasks import ComputeFn, SourceSpecs, StepFn, Task, executors
from beamjax.plan.buffer_ranges import key_of
from beamjax.plan.dropping import DeadLetters, encode_lines
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map
from beamjax.runtime.ordered_pool import (
    DaemonThreads,
    OrderedJobs,
    device_threads,
)
from beamjax.runtime.passes import Done, Partials, ShardPass
from beamjax.spans import timed

PARTIALS = "partials"
DROPPED = "dropped"


def combined(number: int) -> str:
    """The output tag of the partials of a combine."""
    return f"combined_{number}"


class Ranges(StepFn):
    """From one element to ranges [first, last) of shard numbers, of `width` shards each."""

    yields = typehints.Tuple[int, int]

    def __init__(self, count: int, width: int):
        self.count = count
        self.width = width

    def process(self, element: Any) -> Iterator[tuple[int, int]]:
        for first in range(0, self.count, self.width):
            yield first, min(first + self.width, self.count)


class MapShards(ComputeFn):
    """A pass over shards: reads and computes shards, and reduces the results within each bundle."""

    # Whether the caller takes the accumulators themselves, not their bytes.
    here = False

    yields = MemberBlock

    def __init__(
        self,
        task: Task[Map],
        sources: SourceSpecs,
        scattered: Mapping[str, tuple[str, int]],
        carried: tuple[str, ...],
        mode: Any,
        drop_limit: float = 1.0,
        whole: bool = True,
        as_files: bool = False,
    ):
        super().__init__(task)
        # The placed inputs that are read here.
        self.sources = sources
        # Server values that are read by shards: the name of the server value and the axis of its
        # members, by the name of the placed value.
        self.scattered = dict(scattered)
        # Operands that later passes need too, which are added to the blocks.
        self.carried = carried
        self.mode = mode
        self.drop_limit = drop_limit
        # Whether a block must hold a whole shard, since a later pass computes on blocks.
        self.whole = whole
        # Whether partials travel as files, as they are many bytes in all.
        self.as_files = as_files
        self.shards = task.plan.shards(task.step.placement)
        self.jobs: OrderedJobs[Done] | None = None

    def setup(self) -> None:
        """Starts JAX and opens the sources."""
        super().setup()
        self.reader = self.sources.open()
        self.letters = DeadLetters(self.drop_limit)

    def start_bundle(self) -> None:
        """Resets the state of a bundle, also after a bundle that failed."""
        if self.jobs is not None:
            self.jobs.cancel()
        self.jobs = None
        self.work: ShardPass
        self.cut: dict[str, np.ndarray] = {}

    def process(
        self, element: tuple[int, int] | MemberBlock, *served: Environment
    ) -> Iterator[MemberBlock]:
        # Elements are ranges [first, last) of shard numbers, or blocks with placed values of
        # earlier passes. The main output has blocks with the placed results; partials, combines and
        # dropped members have tags of their own.
        if self.jobs is None:
            with self._moving():
                self.work = self._prepare(served)
            self.provenance = self.task.provenance(served)
            self.jobs = OrderedJobs()
        if isinstance(element, MemberBlock):
            self.provenance |= element.provenance
        for shard, live in self._shards(element):
            if not self.jobs.pools:  # so no job is left in it
                self.jobs = self._jobs()
            # Operands that need not be read: from blocks, and from scattered server values.
            known = live | {name: x[shard.start :][: shard.count] for name, x in self.cut.items()}
            job = functools.partial(self._compute, self.work.read(shard, known))
            # In the order of the shards, however many devices compute them.
            for done in self.jobs.add(job):
                yield from self._finish(done)

    def finish_bundle(self) -> Iterator[Any]:
        """Emits the last blocks and the partials of the bundle."""
        if self.jobs is not None:
            for done in self.jobs.rest():
                for made in self._finish(done):
                    if isinstance(made, beam.pvalue.TaggedOutput):
                        yield beam.pvalue.TaggedOutput(made.tag, _windowed(made.value))
                    else:
                        yield _windowed(made)
            yield from self._partials(self.work.partials)
        self.jobs = None
        self.spans.report()

    def _moving(self) -> timed:
        return timed(self.spans, self.task.step.name, "transfer")

    def _partials(self, partials: Partials) -> Iterator[Any]:
        for piece, accumulator in partials.accumulators.items():
            accumulator.provenance = self.provenance
            with self._moving():
                data: Any = accumulator
                if not self.here:
                    data = send(self.task.store, accumulator, self.as_files)
                partial = key_of(piece), data
            yield beam.pvalue.TaggedOutput(PARTIALS, _windowed(partial))
        for number, tree in enumerate(partials.trees):
            with self._moving():
                environment = partials_of_tree(tree, self.task.store, self.provenance)
            yield beam.pvalue.TaggedOutput(combined(number), _windowed(environment))

    def _jobs(self) -> OrderedJobs[Done]:
        """Where the next shards are computed: in the threads of devices, or in this one."""
        devices = [execute.loaded for execute in self.work.executors]
        first = devices[0]
        if len(devices) > 1 or (first.copies and not first.calls_back):
            return OrderedJobs([device_threads(each.device) for each in devices])
        # Other threads would wait for the compilation, which does not count as their work.
        if not first.threads or not first.is_compiled:
            return OrderedJobs()
        return OrderedJobs([DaemonThreads(first.threads)])

    def _compute(self, compute: Callable[[int], Done], device: int) -> Done:
        with with_settings(self.task.debugging):
            return compute(device)

    def _finish(self, done: Done) -> Iterator[Any]:
        self.work.add(done)
        self.spans.tick()
        values = {name: done.operands[name] for name in self.carried}
        values |= dict(zip(self.task.step.results, done.found.results, strict=True))
        if done.found.dropped:
            self.letters.add(done.found.dropped, self.task.plan.sizes)
            yield beam.pvalue.TaggedOutput(DROPPED, encode_lines(done.found.dropped))
        if values:
            block = MemberBlock(
                done.shard.start, done.shard.count, self.work.executors[0].loaded.size, values,
                provenance=self.provenance,
            )  # fmt: skip
            with self._moving():
                made = [whole(block, self.task.store)] if self.whole else None
            yield from made or cut(block, self.task.store)

    def _prepare(self, served: tuple[Environment, ...]) -> ShardPass:
        task = self.task
        names = [*task.step.broadcasts, *(name for name, _ in self.scattered.values())]
        refs = task.refs(names, served)
        self.cut = {
            placed: np.moveaxis(task.store.array(refs[name]), axis, 0)
            for placed, (name, axis) in self.scattered.items()
        }
        found = executors(task, refs)
        partials = Partials(task.step, self.mode, found[0].loaded.ranges, found[0].trees())
        return ShardPass(task.plan, task.step, found, self.reader, partials, self.spans)

    def _shards(self, element: Any) -> Iterator[tuple[Shard, dict[str, np.ndarray]]]:
        if isinstance(element, MemberBlock):
            with self._moving():
                live = element.arrays(self.task.store)
            yield Shard(self.shards.index_at(element.start), element.start, element.count), live
            return
        for shard in self.shards.between(*element):
            yield shard, {}


def _windowed(value: Any) -> WindowedValue:
    window = GlobalWindow()
    return WindowedValue(value, window.max_timestamp(), (window,))


class RunServer(ComputeFn):
    """Runs a `Server` step, once: from the server values of earlier steps to its outputs."""

    yields = Environment

    def process(self, element: Any, *served: Environment) -> Iterator[Environment]:
        task, step = self.task, self.task.step
        # If the step needs no values, its element has no meaning.
        known = (element, *served) if isinstance(element, Environment) else served
        with timed(self.spans, step.name, "compute"):
            arrays = task.arrays(task.refs(step.inputs, known))
            plan = task.with_bodies()
            with with_settings(task.debugging):
                made = run_server(plan, step, arrays, task.device)
            refs = {name: task.store.hold([out], name, own=True) for name, out in made.items()}
        yield Environment(refs, task.provenance(known))

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()
