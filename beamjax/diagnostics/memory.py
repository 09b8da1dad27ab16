"""How much memory a run takes: an upper bound for each process, from the plan alone.

Memory here is what a process has for itself (anonymous), not what it maps from files. The bound
does not depend on the number of members, but where the program does: values that are gathered, and
placed results that are wanted as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from beamjax.diagnostics.topology import Workers
from beamjax.options import Options
from beamjax.plan import buffer_ranges
from beamjax.plan.merging import accumulator_bytes, is_in_files
from beamjax.plan.steps import Branch, Gather, Loop, Map, Plan, Scatter, Server, Step, walk
from beamjax.runtime.large_reductions import MAX_ROWS
from beamjax.runtime.ordered_pool import most_jobs
from beamjax.runtime.placed_results import HANDED_BYTES
from beamjax.sources.source_base import Source
from beamjax.storage.block_cache import LASTING_BYTES, PASSING_BYTES, block_budget, store_budget

BASE_BYTES = 272 << 20
"""Of a process with Python, JAX and Beam, in which XLA compiles and calls its libraries: 155 MiB
were measured with small bodies, up to 100 MiB more with others."""
BASE_BYTES_LOCAL = 224 << 20
"""Without Beam: 110 MiB, and likewise."""
SLACK = 1.25
"""What allocators keep of what was freed, over what is in use."""
FILES_BYTES = 4 << 22
"""Of results on their way to files: those of a file, together, encoded."""
MAX_EXECUTORS = 8
PIECE_BYTES = 1 << 25
"""Of an accumulator that is merged, about."""


@dataclass(frozen=True)
class Part:
    """What takes memory, and how much."""

    what: str
    nbytes: int


@dataclass(frozen=True)
class StepMemory:
    """A step, the user's line, and what it takes besides what its process has in any case."""

    step: str
    line: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Estimate:
    """The peak memory of the processes of a run, at most.

    Attributes:
      kept: what a worker has whatever step it is at.
      steps: what each takes besides.
      launcher: of the launching process.
      shared: whether that is the worker too.
    """

    kept: tuple[Part, ...]
    steps: tuple[StepMemory, ...]
    launcher: tuple[Part, ...]
    shared: bool

    @property
    def worker_bytes(self) -> int:
        """Of a worker process, which is the launching one if that is shared."""
        return sum(p.nbytes for p in self.kept) + max((s.nbytes for s in self.steps), default=0)

    @property
    def launcher_bytes(self) -> int:
        """Of the launching process."""
        return self.worker_bytes if self.shared else sum(part.nbytes for part in self.launcher)


def estimate(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> Estimate:
    """The peak memory of the processes that run a plan.

    Args:
      plan: to be run.
      sources: the sources among its inputs, by the number of the input.
      options: of the run.
      workers: where.
    """
    return _Estimation(plan, sources, options, workers).estimate()


class _Estimation:
    def __init__(
        self, plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
    ):
        self.plan = plan
        self.options = options
        self.workers = workers
        self.sources = sources
        self.limit = options.memory_bytes
        self.in_loops = steps_in_loops(plan)
        self.steps = list(walk(plan.steps))

    def estimate(self) -> Estimate:
        base = BASE_BYTES if self.workers.beam else BASE_BYTES_LOCAL
        first = Part("Python, JAX and Beam" if self.workers.beam else "Python and JAX", base)
        mine = [first, *some(self.launching())]
        kept = [*(mine if self.workers.shared else [first]), *some(self.keeping())]
        steps = [
            StepMemory(step.name, _line(self.plan, step), tuple(some(self.step(step))))
            for step in self.steps
            if not isinstance(step, Loop | Branch)
        ]
        return Estimate(tuple(kept), tuple(steps), tuple(mine), self.workers.shared)

    def launching(self) -> Iterator[tuple[str, float]]:
        """What the launching process has."""
        plan = self.plan
        arrays = [i for i in range(len(plan.inputs)) if i not in self.sources]
        whole = {name for i in arrays for name in _names(plan.inputs[i])}
        live = {id(s): s for s in self.sources.values() if s.is_live}.values()
        served = {spec.server for spec in plan.inputs if spec.server is not None}
        given = self.members(whole | served) + self.members(served) + sum(s.nbytes for s in live)
        yield "inputs in memory", given
        outputs = {out.value for out in plan.outputs if out.value is not None}
        kept = self.options.keep == "placed"
        wanted = {x for x in outputs if plan.values[x].placement is None or not kept}
        yield "results", 2 * SLACK * self.members(wanted)
        made = {name for step in self.steps if isinstance(step, Server) for name in step.outputs}
        yield "server values", SLACK * self.members(made - wanted)
        between = {x for s in self.steps if isinstance(s, Map) for x in s.results} - outputs
        handed = sum(min(self.members([x]), HANDED_BYTES) for x in between)
        yield "placed values between passes", (2 if self.workers.beam else 1) * handed
        maps = [step for step in self.steps if isinstance(step, Map)]
        sums = [sums_bytes(step, self.options.reduction) for step in maps]
        yield "sums of workers", SLACK * 2 * self.workers.handing * max(sums, default=0)

    def keeping(self) -> Iterator[tuple[str, float]]:
        """What a worker has whatever step it is at."""
        limit = self.limit
        passing = min(PASSING_BYTES, block_budget(limit) // 2)
        used = {id(source): source for source in self.sources.values()}.values()
        blocks = sum(source.block_bytes for source in used)
        if blocks:
            # The blocks of each thread stay whatever the limit, and one more is decoded.
            held = self.workers.threads * 2 * blocks
            yield "decoded blocks of sources", SLACK * (passing + held)
        if blocks and self.in_loops:
            total = sum(source.nbytes for source in used if source.block_bytes)
            yield "blocks for further rounds", min(total, LASTING_BYTES, block_budget(limit) // 2)
        maps = [step for step in self.steps if isinstance(step, Map)]
        if not self.workers.beam:
            yield "broadcasts on the device", self.members({x for s in maps for x in s.broadcasts})
        if self.workers.beam:
            sums = [self.members(s.broadcasts) for s in maps for _ in range(self.times(s))]
            served = {x for s in maps for x in s.broadcasts}
            yield "broadcasts on devices", sum(sorted(sums)[-MAX_EXECUTORS:])
            again = MAX_EXECUTORS if self.in_loops else 1
            yield "broadcasts", min(again * self.members(served), store_budget(limit))
            if self.workers.shared:
                servers = {x for s in self.steps if isinstance(s, Server) for x in s.outputs}
                reduced = {r.result for s in maps for lane in s.lanes for r in lane.reductions}
                handed = again * (self.members(servers) + 2 * self.members(reduced))
                yield "server values handed on", min(handed, store_budget(limit))

    def step(self, step: Step) -> Iterator[tuple[str, float]]:
        """What a worker takes for a step besides."""
        plan, bundles, computing = self.plan, self.workers.threads, self.workers.computing
        match step:
            case Map():
                for what, nbytes in self.shard(step):
                    once = what in ("sums", "reduced shards")
                    yield what, nbytes * (bundles if once else bundles * computing)
                # What a shard is reduced to is a part of computing it, until that is over.
                waiting = bundles * (most_jobs(computing) - computing)
                yield "reduced shards that wait", SLACK * waiting * step.partial_bytes
                if self.workers.beam:
                    more = merging_bytes(step, self.options.reduction, bundles)
                    yield "sums that are merged", SLACK * more
            case Server():
                moved = 2 * self.members(step.inputs) + 2 * self.members(step.outputs)
                yield "values of the server", SLACK * moved
                yield "computing", SLACK * plan.bodies[step.body].working
            case Gather():
                yield "gathered members", SLACK * 2 * self.members([step.operand])
            case Scatter():
                yield "scattered members", SLACK * self.members([step.operand])

    def shard(self, step: Map) -> Iterator[tuple[str, float]]:
        """What a thread takes for the shards of a pass."""
        plan = self.plan
        size = plan.shard_sizes[step.placement]
        # A device has one that it computes, and one that waits.
        devices = self.options.local_devices or 1
        ahead = 1 if devices == 1 else 2 * devices
        each = {name: size * plan.values[name].nbytes for name in (*step.operands, *step.results)}
        yield "members of a shard", SLACK * (ahead + 1) * sum(each[x] for x in step.operands)
        working = max(plan.bodies[body].working for body in step.all_bodies)
        yield "computing", SLACK * devices * working
        results = sum(each[x] for x in step.results)
        if results:
            files = FILES_BYTES if self.workers.beam else 0
            yield "placed results", SLACK * ((ahead + 1) * results + files)
        yield "sums", SLACK * sums_bytes(step, self.options.reduction)
        shards = 1 << 20 if plan.sizes[step.placement] is None else plan.shards(step.placement)
        leaves = sum(leaf.nbytes for combine in step.combines for leaf in combine.leaves)
        yield "reduced shards", SLACK * leaves * (max(shards, 1).bit_length() + 2)

    def members(self, names: Iterable[str]) -> int:
        """Bytes of values, all members included; of unknown numbers of members none."""
        values = ((name, self.plan.values[name].placement) for name in names)
        known = [name for name, placement in values if not placement or self.plan.sizes[placement]]
        return sum(map(self.plan.nbytes, known))

    def times(self, step: Map) -> int:
        """How often the broadcasts of a step are on a device with other values."""
        return MAX_EXECUTORS if step.name in self.in_loops else 1


def sums_bytes(step: Map, mode: str) -> int:
    """Bytes of memory of the accumulators of a pass; those that wait in files take none."""
    if is_in_files(step, mode):
        return (MAX_ROWS + 2) * buffer_ranges.SECTION_BYTES + 2 * PIECE_BYTES
    return sum(accumulator_bytes(lane, mode, most=True) for lane in step.lanes)


def merging_bytes(step: Map, mode: str, bundles: int) -> int:
    """Bytes of the accumulators of a pass on their way from its bundles to the result.

    Those of each bundle are encoded, in half of their memory, and merged in pieces.
    """
    whole = sums_bytes(step, mode)
    return bundles * whole // 2 + 4 * min(whole, PIECE_BYTES)


def some(parts: Iterable[tuple[str, float]]) -> list[Part]:
    """Those of them that take any."""
    return [Part(what, math.ceil(nbytes)) for what, nbytes in parts if nbytes]


def _names(spec: Any) -> list[str]:
    """A name of an input, if any step reads it."""
    names = [spec.server, spec.placed, *(view.placed for view in spec.views)]
    return [name for name in names if name is not None][:1]


def _line(plan: Plan, step: Step) -> str:
    if isinstance(step, Map | Server):
        return next(iter(plan.bodies[step.body].lines), "")
    return step.line


def steps_in_loops(plan: Plan) -> set[str]:
    """The names of the steps in the blocks of all loops."""
    loops = [step for step in walk(plan.steps) if isinstance(step, Loop)]
    return {inner.name for loop in loops for inner in walk(loop.block.steps)}
