"""What workers compute: a pass over shards, in bundles, and a step on the server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beamjax.bodies.jax_settings import with_settings
from beamjax.bodies.load import run_server
from beamjax.pipelines.values.elements import Element, block_of, cut, stored_part, whole
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.worker.merge import nodes_of, send
from beamjax.pipelines.worker.reporting import WorkerSpans
from beamjax.pipelines.worker.tasks import SourceSpecs, StepFn, Task, TaskFn, executors
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Server
from beamjax.runtime.ordered_pool import DaemonThreads, OrderedJobs, device_threads
from beamjax.runtime.passes import Done, Partials, ShardPass
from beamjax.runtime.values import Reader
from beamjax.spans import Spans, timed

if TYPE_CHECKING:
    from beamjax.plan.dropping import DeadLetters

PARTIALS = "partials"
DROPPED = "dropped"


def combined(number: int) -> str:
    """The output tag of the partials of a combine."""
    return f"combined_{number}"


def ranges(count: int, width: int) -> Iterator[tuple[int, int]]:
    """All ranges [first, last) of `count` shard numbers, of `width` shards each."""
    for first in range(0, count, width):
        yield first, min(first + width, count)


class Ranges(StepFn):
    """From one element to ranges of shard numbers; see `ranges`."""

    yields = typehints.Tuple[int, int]

    def __init__(self, count: int, width: int):
        self.count = count
        self.width = width

    def process(self, element: Any) -> Iterator[tuple[int, int]]:
        yield from ranges(self.count, self.width)


def letters_of(task: Task[Any]) -> DeadLetters | None:
    """Counts the members that this worker drops from a pass; None for a step that drops none."""
    step = task.step
    if not isinstance(step, Map) or step.guard is None:
        return None
    from beamjax.plan.dropping import DeadLetters  # few passes drop members

    return DeadLetters(task.settings.drop_limit)


class Bundle:
    """The shards of a pass that a worker computes and reduces together, on all of its devices."""

    def __init__(
        self,
        task: Task[Map],
        reader: Reader,
        refs: Mapping[str, StoreRef],
        letters: DeadLetters | None,
        spans: WorkerSpans,
    ):
        with timed(spans, task.step.name, "transfer"):
            executed = executors(task, refs)
        self.task = task
        self.spans = spans
        self.letters = letters  # see `letters_of`
        first, reduction = executed[0], task.settings.reduction
        self.partials = Partials(task.step, reduction, first.loaded.ranges, first.trees())
        self._pass = ShardPass(task.plan, task.step, executed, reader, self.partials, spans)
        self._jobs: OrderedJobs[Done] = OrderedJobs()

    def add(self, shard: Shard, known: Mapping[str, np.ndarray] | None = None) -> Iterator[Done]:
        """Adds a shard, of which the operands `known` need not be read; yields the oldest ones."""
        if not self._jobs.pools:  # so no job is left in it
            self._jobs = self._new_jobs()
        job = functools.partial(self._compute, self._pass.read(shard, known))
        # In the order of the shards, however many devices compute them.
        yield from map(self._added, self._jobs.add(job))

    def rest(self) -> Iterator[Done]:
        """The results of all shards that are left."""
        yield from map(self._added, self._jobs.rest())

    def cancel(self) -> None:
        """Cancels the shards that no device has begun."""
        self._jobs.cancel()

    def _added(self, done: Done) -> Done:
        self._pass.add(done)
        self.spans.tick()
        if self.letters is not None and done.computed.dropped:
            self.letters.add(done.computed.dropped, self.task.plan.sizes)
        return done

    def _new_jobs(self) -> OrderedJobs[Done]:
        """Where the next shards are computed: in the threads of devices, or in this one."""
        devices = [execute.loaded for execute in self._pass.executors]
        first = devices[0]
        if len(devices) > 1 or (first.copies and not first.calls_back):
            return OrderedJobs([device_threads(loaded.device) for loaded in devices])
        # Other threads would wait for the compilation, which does not count as their work.
        if not first.threads or not first.is_compiled:
            return OrderedJobs()
        return OrderedJobs([DaemonThreads(first.threads)])

    def _compute(self, compute: Callable[[int], Done], device: int) -> Done:
        with with_settings(self.task.settings.debugging):
            return compute(device)


class MapShards(TaskFn):
    """A pass over shards: reads and computes shards, and reduces the results within each bundle."""

    yields = Element

    def __init__(
        self,
        task: Task[Map],
        sources: SourceSpecs,
        scattered: Mapping[str, tuple[str, int]],
        carried: tuple[str, ...],
        whole: bool = True,
    ):
        super().__init__(task)
        # The placed inputs that are read here.
        self.sources = sources
        # Server values that are read by shards: the name of the server value and the axis of its
        # members, by the name of the placed value.
        self.scattered = dict(scattered)
        # Operands that later passes need too, which are added to the blocks.
        self.carried = carried
        # Whether a block must hold a whole shard, since a later pass computes on blocks.
        self.whole = whole
        self.shards = task.plan.shards(task.step.placement)
        self.bundle: Bundle | None = None

    def setup(self) -> None:
        """Starts JAX and opens the sources."""
        super().setup()
        self.reader = self.sources.open()
        self.letters = letters_of(self.task)

    def start_bundle(self) -> None:
        """Resets the state of a bundle, also after a bundle that failed."""
        if self.bundle is not None:
            self.bundle.cancel()
        self.bundle = None
        self.cut: dict[str, np.ndarray] = {}

    def process(self, element: tuple[int, int] | Element, *served: Element) -> Iterator[Element]:
        # Elements are ranges [first, last) of shard numbers, or blocks with placed values of
        # earlier passes. The main output has blocks with the placed results; partials, combines and
        # dropped members have tags of their own.
        if self.bundle is None:
            self.bundle = self._begin(served)
        for shard, live in self._shards(element):
            # Operands that need not be read: from blocks, and from scattered server values.
            known = live | {name: x[shard.start :][: shard.count] for name, x in self.cut.items()}
            for done in self.bundle.add(shard, known):
                yield from self._finish(done)

    def finish_bundle(self) -> Iterator[Any]:
        """Emits the last blocks and the partials of the bundle."""
        if self.bundle is not None:
            for done in self.bundle.rest():
                for output in self._finish(done):
                    if isinstance(output, beam.pvalue.TaggedOutput):
                        yield beam.pvalue.TaggedOutput(output.tag, _windowed(output.value))
                    else:
                        yield _windowed(output)
            yield from self._partials(self.bundle.partials)
        self.bundle = None
        self.spans.report()

    def _moving(self) -> timed:
        return timed(self.spans, self.task.step.name, "transfer")

    def _partials(self, partials: Partials) -> Iterator[Any]:
        for piece, accumulator in partials.accumulators.items():
            with self._moving():
                partial = piece, send(self.task.store, accumulator)
            yield beam.pvalue.TaggedOutput(PARTIALS, _windowed(partial))
        for number, tree in enumerate(partials.trees):
            with self._moving():
                nodes = nodes_of(tree, self.task.store)
            # Also if all members of the bundle were dropped, so that the combine says so.
            element = Element({str(i): node for i, node in enumerate(nodes)})
            yield beam.pvalue.TaggedOutput(combined(number), _windowed(element))

    def _finish(self, done: Done) -> Iterator[Any]:
        values = {name: done.operands[name] for name in self.carried}
        values |= dict(zip(self.task.step.results, done.computed.results, strict=True))
        if done.computed.dropped:
            from beamjax.plan.dropping import encode_lines  # few passes drop members

            yield beam.pvalue.TaggedOutput(DROPPED, encode_lines(done.computed.dropped))
        if values:
            block = block_of(done.shard.start, done.shard.count, values)
            with self._moving():
                blocks = [whole(block, self.task.store)] if self.whole else None
            yield from blocks or cut(block, self.task.store)

    def _begin(self, served: tuple[Element, ...]) -> Bundle:
        task = self.task
        names = [*task.step.broadcasts, *(name for name, _ in self.scattered.values())]
        refs = task.refs(names, served)
        with self._moving():
            self.cut = {
                placed: np.moveaxis(task.store.array(refs[name]), axis, 0)
                for placed, (name, axis) in self.scattered.items()
            }
        return Bundle(task, self.reader, refs, self.letters, self.spans)

    def _shards(self, element: Any) -> Iterator[tuple[Shard, dict[str, np.ndarray]]]:
        if isinstance(element, Element):
            with self._moving():
                live = element.arrays(self.task.store)
            start, count = element.range
            yield Shard(self.shards.index_at(start), start, count), live
            return
        for shard in self.shards.between(*element):
            yield shard, {}


def _windowed(value: Any) -> WindowedValue:
    window = GlobalWindow()
    return WindowedValue(value, window.max_timestamp(), (window,))


def compute_server(
    task: Task[Server], element: Any, served: tuple[Element, ...], spans: Spans
) -> Element:
    """Runs a `Server` step, once."""
    step, store = task.step, task.store
    # If the step needs no values, its element has no meaning.
    known = (element, *served) if isinstance(element, Element) else served
    with timed(spans, step.name, "compute"):
        arrays = task.arrays(task.refs(step.inputs, known))
        plan = task.with_bodies()
        with with_settings(task.settings.debugging):
            outs = run_server(plan, step, arrays, task.device)
        refs = {name: store.hold([out], name, own=True) for name, out in outs.items()}
    return Element({name: stored_part(ref) for name, ref in refs.items()})
