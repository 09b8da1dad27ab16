"""The memory of a run: a bound for each process, an estimate for each accelerator, and the limit.

Both follow from the plan alone. The memory of a process is its private (anonymous) memory, without
mapped files. Only gathered values, and placed results that are returned as arrays, grow with n.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import export

from beamjax._text import human_bytes
from beamjax.bodies.load import default_platform, with_x64
from beamjax.diagnostics.topology import Workers
from beamjax.errors import StagingError
from beamjax.options import Options
from beamjax.plan.merging import accumulator_bytes
from beamjax.plan.steps import (
    Body,
    Branch,
    Gather,
    Loop,
    Map,
    Plan,
    Rows,
    Scatter,
    Server,
    Step,
    walk,
)
from beamjax.runtime.materialized_outputs import HANDED_BYTES
from beamjax.runtime.ordered_pool import most_jobs
from beamjax.sources.source_base import (
    Source,
    members_bytes,
)
from beamjax.sources.source_kinds import block_bytes_of
from beamjax.storage.shared_cache import (
    LASTING_BYTES,
    PASSING_BYTES,
    SharedCache,
    block_budget,
    store_budget,
)

# A process with Python, JAX and Beam: 155 MiB were measured with small bodies, and up to 100 MiB
# more with larger ones. Without Beam it was 110 MiB, and up to 100 MiB more.
BASE_BYTES = 272 << 20
BASE_BYTES_LOCAL = 224 << 20
# The ratio of the memory that allocators hold to the memory in use.
SLACK = 1.25
# Placed results that are written to files: those of one file, as arrays and encoded.
FILES_BYTES = 4 << 22
# Largest number of shard executors in a worker, each with its broadcasts on devices.
MAX_EXECUTORS = 8
# Approximate bytes of an accumulator that are merged at a time.
PIECE_BYTES = 1 << 25
# Shards on an accelerator: one that it computes, and one on its way there or back.
COPIES = 2

Parts = Mapping[str, int]
"""Bytes by what takes them."""


@dataclass(frozen=True)
class DeviceEstimate:
    """The estimated peak memory of an accelerator of a worker, in bytes."""

    platform: str  # "cuda", "rocm" or "tpu"
    kept: Parts  # in use during all steps
    steps: Mapping[str, Parts]  # of each step in addition
    nbytes: int  # the total, with the largest step
    made_from: str  # in words, where the bytes of the bodies come from


@dataclass(frozen=True)
class MemoryEstimate:
    """An upper bound of the memory of the processes of a run, in bytes."""

    kept: Parts  # of a worker, in use during all steps
    steps: Mapping[str, Parts]  # of each step in addition
    worker_bytes: int  # the total of a worker process, with the largest step
    launcher: Parts
    launcher_bytes: int  # the total of `launcher`, or `worker_bytes` if `shared`
    shared: bool  # the launching process is the worker


def parts(sizes: Iterable[tuple[str, float]]) -> dict[str, int]:
    """Returns the parts that take memory, in whole bytes."""
    return {what: math.ceil(nbytes) for what, nbytes in sizes if nbytes}


def peak(kept: Parts, steps: Mapping[str, Parts]) -> int:
    """Returns the bytes during the step that takes the most."""
    totals = (sum(step.values()) for step in steps.values())
    return sum(kept.values()) + max(totals, default=0)


# --- processes


def estimate(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> MemoryEstimate:
    """Returns an upper bound of the peak memory of the processes that run a plan."""
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

    def estimate(self) -> MemoryEstimate:
        base = BASE_BYTES if self.workers.beam else BASE_BYTES_LOCAL
        first = ("Python, JAX and Beam" if self.workers.beam else "Python and JAX", base)
        launcher = parts([first, *self.launching()])
        kept = parts(self.keeping())
        kept = (launcher if self.workers.shared else dict([first])) | kept
        simple = [step for step in self.steps if not isinstance(step, Loop | Branch)]
        steps = {step.name: taken for step in simple if (taken := parts(self.step(step)))}
        worker = peak(kept, steps)
        whole = worker if self.workers.shared else sum(launcher.values())
        return MemoryEstimate(kept, steps, worker, launcher, whole, self.workers.shared)

    def launching(self) -> Iterator[tuple[str, float]]:
        """Yields what takes memory of the launching process."""
        plan = self.plan
        # A source without a spec has its members in this process alone. What a server step reads as
        # a whole counts twice: as read, and as the array that the step takes.
        arrays = [i for i in range(len(plan.inputs)) if i not in self.sources]
        whole = {name for i in arrays for name in _names(plan.inputs[i])}
        live = {id(s): s for s in self.sources.values() if s.local and s.spec() is None}.values()
        served = {spec.server for spec in plan.inputs if spec.server is not None}
        nbytes = self.members(whole | served) + self.members(served) + sum(map(members_bytes, live))
        yield "inputs in memory", nbytes
        outputs = plan.returned().keys()
        kept = self.options.keep == "placed"
        returned = {x for x in outputs if plan.values[x].placement is None or not kept}
        yield "results", 2 * SLACK * self.members(returned)
        servers = {name for step in self.steps if isinstance(step, Server) for name in step.outputs}
        yield "server values", SLACK * self.members(servers - returned)
        between = {x for s in self.steps if isinstance(s, Map) for x in s.results} - outputs
        handed = sum(min(self.members([x]), HANDED_BYTES) for x in between)
        yield "placed values between passes", (2 if self.workers.beam else 1) * handed
        maps = [step for step in self.steps if isinstance(step, Map)]
        held = [accumulators_bytes(step, self.options.reduction) for step in maps]
        yield "accumulators from workers", SLACK * 2 * self.workers.handing * max(held, default=0)

    def keeping(self) -> Iterator[tuple[str, float]]:
        """Yields what takes memory of a worker during all steps."""
        limit = self.limit
        passing = min(PASSING_BYTES, block_budget(limit) // 2)
        used = {id(source): source for source in self.sources.values()}.values()
        blocks = sum(map(block_bytes_of, used))
        if blocks:
            # Each thread holds a block, whatever the limit is, and decodes another one.
            held = self.workers.threads * 2 * blocks
            yield "decoded blocks of sources", SLACK * (passing + held)
        if blocks and self.in_loops:
            total = sum(members_bytes(source) for source in used if block_bytes_of(source))
            yield "blocks for further rounds", min(total, LASTING_BYTES, block_budget(limit) // 2)
        maps = [step for step in self.steps if isinstance(step, Map)]
        if not self.workers.beam:
            yield "broadcasts on the device", self.members({x for s in maps for x in s.broadcasts})
        if self.workers.beam:
            served = {x for s in maps for x in s.broadcasts}
            yield "broadcasts on devices", device_broadcasts(self.plan)
            if self.in_loops:
                results = self.members({x for s in maps for x in s.results})
                yield "placed values for later steps", min(results, store_budget(limit))
            # The values of earlier rounds stay until the caches drop them.
            again = MAX_EXECUTORS if self.in_loops else 1
            yield "broadcasts", min(again * self.members(served), store_budget(limit))
            if self.workers.shared:
                servers = {x for s in self.steps if isinstance(s, Server) for x in s.outputs}
                reduced = {
                    r.result for s in maps for buffer in s.buffers for r in buffer.reductions
                }
                passed_on = again * (self.members(servers) + 2 * self.members(reduced))
                yield "server values for later steps", min(passed_on, store_budget(limit))

    def step(self, step: Step) -> Iterator[tuple[str, float]]:
        """Yields what takes memory of a worker during one step."""
        plan, bundles, computing = self.plan, self.workers.threads, self.workers.computing
        match step:
            case Map():
                for what, nbytes in self.shard(step):
                    # The computing threads of a bundle share its accumulators.
                    once = what in ("accumulators", "partials of associative reductions")
                    yield what, nbytes * (bundles if once else bundles * computing)
                # The partials of shards that are being computed count as computing.
                waiting = bundles * (most_jobs(computing) - computing)
                yield "partials waiting to be added", SLACK * waiting * step.partial_bytes
                if self.workers.beam:
                    more = merging_bytes(step, self.options.reduction, bundles)
                    yield "accumulators being merged", SLACK * more
            case Server():
                moved = 2 * self.members(step.inputs) + 2 * self.members(step.outputs)
                yield "inputs and outputs", SLACK * moved
                yield "computing", SLACK * plan.bodies[step.body].working
            case Gather():
                yield "gathered members", SLACK * 2 * self.members([step.operand])
            case Rows():
                yield "rows", SLACK * self.members([step.result])
            case Scatter():
                yield "scattered members", SLACK * self.members([step.operand])

    def shard(self, step: Map) -> Iterator[tuple[str, float]]:
        """Yields what takes memory of one thread that computes shards of a pass."""
        plan = self.plan
        size = plan.shard_sizes[step.placement]
        # Each of several devices computes a shard, and has another one in its queue.
        devices = self.options.local_devices or 1
        ahead = 1 if devices == 1 else 2 * devices
        shard_bytes = {
            name: size * plan.values[name].nbytes for name in (*step.operands, *step.results)
        }
        yield "members of a shard", SLACK * (ahead + 1) * sum(shard_bytes[x] for x in step.operands)
        working = max(plan.bodies[body].working for body in step.all_bodies)
        yield "computing", SLACK * devices * working
        results = sum(shard_bytes[x] for x in step.results)
        if results:
            files = FILES_BYTES if self.workers.beam else 0
            yield "placed results", SLACK * ((ahead + 1) * results + files)
        yield "accumulators", SLACK * accumulators_bytes(step, self.options.reduction)
        shards = plan.shards(step.placement).count or 1 << 20
        leaves = sum(leaf.nbytes for combine in step.combines for leaf in combine.leaves)
        # These merge in the order of the shards, in a tree whose nodes cover powers of two of them:
        # a partial for each power up to the number of shards.
        yield (
            "partials of associative reductions",
            SLACK * leaves * (max(shards, 1).bit_length() + 2),
        )

    def members(self, names: Iterable[str]) -> int:
        """Returns the bytes of all members of values; 0 for an unknown number of members."""
        values = ((name, self.plan.values[name].placement) for name in names)
        known = [name for name, placement in values if not placement or self.plan.sizes[placement]]
        return sum(map(self.plan.nbytes, known))


def accumulators_bytes(step: Map, mode: str) -> int:
    """Returns the memory of the accumulators of a pass."""
    return sum(accumulator_bytes(buffer, mode, most=True) for buffer in step.buffers)


def merging_bytes(step: Map, mode: str, bundles: int) -> int:
    """Returns the bytes of the accumulators of a pass between its bundles and the result."""
    whole = accumulators_bytes(step, mode)
    # The accumulators of each bundle are encoded in half of their memory, and merged in pieces.
    return bundles * whole // 2 + 4 * min(whole, PIECE_BYTES)


def _names(spec: Any) -> list[str]:
    """Returns one of the names under which steps read an input, or none if no step reads it."""
    names = [spec.server, spec.placed, *(view.placed for view in spec.views)]
    return [name for name in names if name is not None][:1]


def steps_in_loops(plan: Plan) -> set[str]:
    """Returns the names of the steps in the blocks of all loops."""
    loops = [step for step in walk(plan.steps) if isinstance(step, Loop)]
    return {inner.name for loop in loops for inner in walk(loop.block.steps)}


def device_broadcasts(plan: Plan) -> int:
    """Returns the bytes of the broadcasts that a worker keeps on devices for later shards."""
    in_loops = steps_in_loops(plan)
    sums = [
        _bytes(plan, step.broadcasts)
        for step in walk(plan.steps)
        if isinstance(step, Map)
        for _ in range(MAX_EXECUTORS if step.name in in_loops else 1)  # other values each round
    ]
    return sum(sorted(sums)[-MAX_EXECUTORS:])


# --- accelerators


def device_estimates(plan: Plan, options: Options, beam: bool) -> list[DeviceEstimate]:
    """Estimates the memory of an accelerator of a worker, for each platform of the plan."""
    # A CPU uses the memory of its process. The driver and its libraries are not included.
    exported = {platform for body in plan.bodies.values() for platform in body.artefacts}
    known = options.platforms or ()
    platforms = sorted(exported, key=lambda name: (name not in known, name))
    return [_device(plan, name, beam) for name in platforms if name != "cpu"]


def _device(plan: Plan, platform: str, beam: bool) -> DeviceEstimate:
    compiled = {key: compiled_bytes(body, platform, plan.x64) for key, body in plan.bodies.items()}
    # XLA reports what a body takes besides its arguments where this process compiles for the
    # platform. Elsewhere it is counted from the equations of the body.
    working = {key: body.working for key, body in plan.bodies.items()}
    working |= {key: nbytes for key, nbytes in compiled.items() if nbytes is not None}
    # Workers of a pipeline keep broadcasts for later shards.
    kept = parts([("broadcasts", device_broadcasts(plan))]) if beam else {}
    computing = [step for step in walk(plan.steps) if isinstance(step, Map | Server)]
    by_step = {step.name: parts(_on_device(plan, step, working, beam)) for step in computing}
    steps = {name: taken for name, taken in by_step.items() if taken}
    exported = [compiled[key] for key, body in plan.bodies.items() if platform in body.artefacts]
    if None in exported:
        made_from = (
            f"the equations of the bodies, as this process does not compile for {platform}; XLA "
            "may take less or more"
        )
    else:
        made_from = f"the memory that XLA reports for the bodies, compiled for {platform}"
    return DeviceEstimate(platform, kept, steps, peak(kept, steps), made_from)


def _on_device(
    plan: Plan, step: Map | Server, working: Mapping[str, int], beam: bool
) -> Iterator[tuple[str, float]]:
    if isinstance(step, Server):
        yield "inputs", _bytes(plan, step.inputs)
        yield "computing", working[step.body]
        return
    size = plan.shard_sizes[step.placement]
    if not beam:
        yield "broadcasts", _bytes(plan, step.broadcasts)
    yield "members of a shard, twice", COPIES * size * _bytes(plan, step.operands)
    yield "computing", max(working[body] for body in step.all_bodies)
    # The results of one shard are copied to the host while the next one is computed.
    partials = sum(leaf.nbytes for combine in step.combines for leaf in combine.leaves)
    partials += sum(buffer.size * np.dtype(buffer.dtype).itemsize for buffer in step.buffers)
    yield "results of the previous shard", size * _bytes(plan, step.results) + partials


def compiled_bytes(body: Body, platform: str, x64: bool) -> int | None:
    """Returns the bytes that XLA reports for results, temporaries and code of a body, or None."""
    if platform not in body.artefacts or platform != default_platform():
        return None
    artefact = body.artefacts[platform]
    key = hashlib.blake2b(artefact).digest(), x64  # so that the cache holds no executables
    return _COMPILED.get(key, lambda: _reported_by_xla(artefact, x64))


_COMPILED: SharedCache[int | None] = SharedCache(256, lambda _: 1)


def _reported_by_xla(artefact: bytes, x64: bool) -> int | None:
    with with_x64(x64):
        exported = export.deserialize(bytearray(artefact))
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        analysis = jax.jit(exported.call).lower(*specs).compile().memory_analysis()
    if analysis is None:  # some backends do not report it
        return None
    code = analysis.generated_code_size_in_bytes
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes + code)


def _bytes(plan: Plan, names: Iterable[str]) -> int:
    """Returns the bytes of values; of placed ones, those of one member."""
    return sum(plan.values[name].nbytes for name in names)


# --- the option memory


def check_memory(plan: Plan, sources: Mapping[int, Source], options: Options, runner: str) -> None:
    """Checks that a plan takes at most `options.memory` on a runner."""
    limit = options.memory_bytes
    if limit is None:
        # A worker holds all numbers that a pass reduces to, however few members there are.
        _check_accumulators(plan, options)
        return
    workers = Workers.of(runner, options)
    bound = estimate(plan, sources, options, workers)
    if bound.worker_bytes <= limit:
        return
    raise _refusal(plan, bound, limit, list(_advice(plan, sources, options, workers)))


def _check_accumulators(plan: Plan, options: Options) -> None:
    limit = machine_bytes()
    for step in walk(plan.steps):
        if not isinstance(step, Map) or limit is None:
            continue
        nbytes = sum(accumulator_bytes(buffer, options.reduction) for buffer in step.buffers)
        if nbytes > limit:
            at = f" ({_line(plan, step)})" if _line(plan, step) else ""
            raise StagingError(
                f"step {step.name!r}{at}: a worker adds up its shards in {human_bytes(nbytes)} of "
                f"memory, found {human_bytes(limit)} in this machine; reduce fewer numbers at a "
                "time, for example a part of the rows of a matrix in each call, or set the option "
                "memory if the worker processes have more memory than this machine"
            )


def machine_bytes() -> int | None:
    """The memory of this machine in bytes; None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # as on Windows
        return None


def _refusal(plan: Plan, bound: MemoryEstimate, limit: int, advice: Sequence[str]) -> StagingError:
    """Makes the error for a plan that may take more than `limit` bytes in a worker process."""
    name = max(bound.steps, key=lambda name: sum(bound.steps[name].values()), default=None)
    largest = [*bound.kept.items(), *(bound.steps[name].items() if name else ())]
    at = "the run"
    if name:
        (step,) = (step for step in walk(plan.steps) if step.name == name)
        at = f"step {name!r}" + (f" ({_line(plan, step)})" if _line(plan, step) else "")
    parts = ", ".join(
        f"{what} {human_bytes(nbytes)}"
        for what, nbytes in sorted(largest, key=lambda part: -part[1])
    )
    return StagingError(
        f"{at}: a worker process may take {human_bytes(bound.worker_bytes)}, but memory="
        f"{human_bytes(limit)}: {parts}. To change that, {'; or '.join(advice)}"
    )


def _line(plan: Plan, step: Step) -> str:
    if isinstance(step, Map | Server):
        return next(iter(plan.bodies[step.body].lines), "")
    return step.line


def with_fitting_threads(
    plan: Plan, sources: Mapping[int, Source], options: Options, runner: str
) -> Options:
    """Returns options with as many computing threads in this process as fit in `options.memory`."""
    # Only "local", and DirectRunner with one worker, have such threads.
    limit = options.memory_bytes
    if limit is None or options.local_threads is not None:
        return options
    threads = Workers.of(runner, options).computing
    if threads == 1:
        return options
    while threads > 1:
        fewer = Workers.of(runner, replace(options, local_threads=threads))
        if estimate(plan, sources, options, fewer).worker_bytes <= limit:
            break
        threads -= 1
    return replace(options, local_threads=threads)


def _advice(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> Iterator[str]:
    limit = options.memory_bytes or 0

    def need(
        plan: Plan = plan,
        options: Options = options,
        workers: Workers = workers,
        limit: int = limit,
    ) -> int:
        return estimate(plan, sources, replace(options, memory=limit), workers).worker_bytes

    size = max(plan.shard_sizes.values(), default=8)
    smaller = (size >> k for k in range(1, size.bit_length()))
    fits = next((s for s in smaller if s % 8 == 0 and need(_with_shards(plan, s)) <= limit), None)
    if fits is not None:
        yield f"set shard_size={fits} in the options"
    fewer = (few for few in workers.with_fewer_threads() if need(workers=few) <= limit)
    if (few := next(fewer, None)) is not None:
        yield f"use {few.all_threads} of {workers.all_threads} threads in a worker process"
    saved = need() - need(options=replace(options, reduction="fast"))
    if 10 * saved > need() - limit:
        fit = "" if need() - saved <= limit else ", which alone is not enough"
        yield f'set reduction="fast" in the options{fit}'
    if options.keep is None and need(options=replace(options, keep="placed")) <= limit:
        yield 'store placed results in files, with keep="placed"'
    # Caches grow with the limit, so the need at a larger limit is larger too.
    enough = need()
    while need(limit=enough) > enough:
        enough = math.ceil(1.1 * enough)
    yield f'allow a worker process more, with memory="{math.ceil(enough / 2**20)}MiB"'


def _with_shards(plan: Plan, size: int) -> Plan:
    """Returns a plan with smaller shards, and memory of bodies in proportion."""
    share = size / max(plan.shard_sizes.values())
    bodies = {
        key: replace(body, working=math.ceil(share * body.working))
        for key, body in plan.bodies.items()
    }
    sizes = {name: min(n, size) for name, n in plan.shard_sizes.items()}
    return replace(plan, shard_sizes=sizes, bodies=bodies)


def sources_of(values: Sequence[Any]) -> dict[int, Source]:
    """Returns the sources among the values of the inputs of a plan, by the number of the input."""
    return {i: value[0] for i, value in enumerate(values) if isinstance(value, tuple)}
