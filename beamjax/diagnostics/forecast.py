"""Predicts the seconds of a plan on a runner, from counted costs and the rates of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from beamjax.diagnostics.calibration import Calibration, calibration
from beamjax.diagnostics.fact_types import PredictionFact, StepSeconds
from beamjax.diagnostics.topology import DIRECT, Workers
from beamjax.options import Options
from beamjax.options.choices import Vectorization
from beamjax.plan.cost import RESIDENT, Cost, runner_overhead
from beamjax.plan.one_pass import is_resident
from beamjax.plan.steps import Branch, Gather, Loop, Map, Plan, Server, Step
from beamjax.runtime.shard_times import LONG_IN_BUNDLE

GUESSED_ROUNDS = 10
"""Assumed number of rounds of a loop that runs while a condition holds."""
SMALL_SHARE = 0.25
"""Work counts as small if it takes less than this share of the overhead of the runner."""
ADVISED_SECONDS = 1.0
"""Smallest overhead of a runner, in seconds, for advice to use the local runner."""
HANDED_RATE = 5e8
"""Bytes per second of server values and partials between workers, in elements or files."""
COMPILE_SECONDS, COMPILE_BYTE_SECONDS = 0.05, 1e-5
"""Seconds to compile an executable, and seconds for each byte of its StableHLO."""


def prediction(plan: Plan, options: Options, runner: str) -> PredictionFact:
    """Predicts the seconds of a plan on a runner, and compares them with those of this process."""
    there = forecast(plan, options, runner)
    here = there if runner == "local" else forecast(plan, options, "local")
    small = not here.guessed and here.seconds < SMALL_SHARE * there.overhead
    small = small and all(plan.sizes.values())
    advice = ""
    if small and there.overhead >= ADVISED_SECONDS:
        pipelines = "a pipeline" if there.pipelines == 1 else f"{there.pipelines} pipelines"
        advice = (
            f"runner='local' would take about {here.seconds:.2g} s; {runner} takes about "
            f"{there.overhead:.2g} s for {pipelines}, in addition to the work"
        )
    return replace(there, is_small=small, advice=advice, local=here.seconds)


def forecast(
    plan: Plan, options: Options, runner: str, known: Calibration | None = None
) -> PredictionFact:
    """Predicts the seconds of a plan on a runner; members of unknown number count as none.

    Args:
      plan: the plan.
      options: the options of the run.
      runner: the name of the runner.
      known: the rates of the machine, by default those of `calibration`.
    """
    known = calibration() if known is None else known
    workers = Workers.of(runner, options)
    cores = os.cpu_count() or 1
    count = min(workers.handing or 1, cores)
    threads = min(workers.computing, cores)
    by = _Rates(known, count, threads, cores)
    steps = tuple(_steps(plan, plan.steps, 1, False, by))
    if workers.beam:
        steps = tuple(in_bundles(step, threads) for step in steps)
    direct = runner.lower().removesuffix("runner") in DIRECT
    in_memory = workers.shared and direct and not options.keeps_files
    pipelines, stages, shards, nbytes = _pipelines(plan, options, workers, in_memory)
    fixed = runner_overhead(runner)
    if workers.beam and is_resident(plan, options):
        fixed = replace(RESIDENT, pipeline=fixed.pipeline)
    overhead = pipelines * fixed.pipeline + stages * fixed.step + shards * fixed.shard
    overhead += nbytes / HANDED_RATE
    sizes = [sum(map(len, body.artefacts.values())) for body in plan.bodies.values()]
    return PredictionFact(
        runner, steps, pipelines, overhead,
        compile=sum(COMPILE_SECONDS + COMPILE_BYTE_SECONDS * nbytes for nbytes in sizes),
        seconds=sum(step.seconds for step in steps) + overhead,
        guessed=any(step.guessed for step in steps),
        calibrated=known.measured,
    )  # fmt: skip


def in_bundles(step: StepSeconds, threads: int) -> StepSeconds:
    """The prediction of a step on Beam.

    One thread of a bundle computes shards that are short, or that XLA divides among the cores.
    """
    short = step.compute < LONG_IN_BUNDLE * step.rounds * step.shards
    return replace(step, gain=1.0) if short or round(threads / step.cores) <= 1 else step


@dataclass(frozen=True)
class _Rates:
    """The rates by which steps are predicted.

    Attributes:
      known: the rates of the machine.
      workers: the number of processes that share a pass.
      threads: the number of threads for shards in each.
      cores: the number of cores of the machine.
    """

    known: Calibration
    workers: int
    threads: int
    cores: int


def _steps(
    plan: Plan, steps: Sequence[Step], rounds: int, guessed: bool, by: _Rates
) -> Iterator[StepSeconds]:
    known = by.known
    for step in steps:
        match step:
            case Loop(condition=condition, block=block):
                times = rounds * (GUESSED_ROUNDS if step.rounds is None else step.rounds)
                inner = (*(condition.steps if condition else ()), *block.steps)
                open_ = guessed or step.rounds is None
                yield from _steps(plan, inner, times, open_, by)
            case Branch(blocks=blocks):
                ways = [list(_steps(plan, b.steps, rounds, guessed, by)) for b in blocks]
                yield from max(ways, key=lambda way: sum(s.seconds for s in way), default=[])
            case Map():
                once = _map(plan, step, by)
                yield replace(
                    once, rounds=rounds, read=rounds * once.read, compute=rounds * once.compute,
                    merge=rounds * once.merge, guessed=guessed or once.guessed,
                )  # fmt: skip
            case Server(name=name) if name in plan.costs:
                cost = plan.costs[name]
                seconds = known.rates.seconds(cost) * alone(cost, by.cores)
                seconds += cost.calls * known.rates.call
                seconds = rounds * (seconds + known.rates.shard)
                yield StepSeconds(name, rounds, compute=seconds, guessed=guessed or cost.guessed)
            case Gather(name=name, operand=operand):
                value = plan.values[operand]
                n = plan.sizes[value.placement or ""] or 0
                yield StepSeconds(name, rounds, read=rounds * n * value.nbytes / known.read)


def _map(plan: Plan, step: Map, by: _Rates) -> StepSeconds:
    """Predicts one pass over all members."""
    known = by.known
    n = plan.sizes[step.placement] or 0
    size = plan.shard_sizes[step.placement]
    shards = plan.shards(step.placement).count or 0
    read = n * sum(plan.values[name].nbytes for name in step.operands) / known.read
    partial = sum(buffer.size * 8 for buffer in step.buffers)
    merge = shards * partial / known.merge
    tried = {(t.step, t.size, t.vectorization): t.seconds for t in plan.choices.tried}
    cost = plan.costs.get(step.name)
    cores = max(by.cores // by.workers, 1)
    gain = speed_up(cost, step.vectorization, size, shards, by.threads, cores)
    source, guessed = "counted", False
    if (step.name, size, step.vectorization) in tried:
        source = "probe"
        compute = max(shards * tried[step.name, size, step.vectorization] - merge, 0.0)
    else:
        each = known.rates.shard
        if cost is not None:
            each += cost.calls * known.rates.call * _calls(step.vectorization, size)
            each += gain.alone * known.rates.seconds(cost) * size
            guessed = cost.guessed
        compute = shards * each
    return StepSeconds(
        step.name, 1, read, compute, merge, source, guessed, by.workers, gain.threads, shards,
        gain.busy,
    )  # fmt: skip


def _calls(vectorization: Vectorization, size: int) -> float:
    """How often a shard starts the operations of a body."""
    return {"vmap": 1, "loop": size, "batches": size / max(vectorization.batch, 1)}[
        vectorization.kind
    ]


def _pipelines(
    plan: Plan, options: Options, workers: Workers, in_memory: bool
) -> tuple[int, int, int, int]:
    """The number of pipelines, their steps and shards, and the bytes between steps."""
    from beamjax.pipelines.values.store import LOCAL_BYTES

    def counted(steps: Sequence[Step]) -> np.ndarray:
        total = np.zeros(4, np.int64)
        row = False
        for step in steps:
            match step:
                case Loop(rounds=rounds, block=block, condition=condition):
                    row = False
                    more = GUESSED_ROUNDS if rounds is None else rounds
                    inner = counted(block.steps)
                    if condition is not None:
                        inner += counted(condition.steps)
                    total += more * inner
                case Branch(blocks=blocks):
                    row = False
                    total += np.max([counted(block.steps) for block in blocks], axis=0)
                case Map():
                    shards = plan.shards(step.placement).count or 0
                    nbytes = sum(map(plan.nbytes, step.broadcasts)) * (not in_memory)
                    if step.partial_bytes <= LOCAL_BYTES or not in_memory:
                        nbytes += shards * step.partial_bytes
                    total += (not row, 1, shards, nbytes)
                    row = True
                case Gather():
                    total += (not row, 1, 0, 0)
                    row = True
        return total

    pipelines, stages, shards, nbytes = map(int, counted(plan.steps))
    if not workers.beam:
        return 0, stages, 0, 0
    return 1 if is_resident(plan, options) else max(pipelines, 1), stages, shards, nbytes


# --- the speed-up of several cores

OWN_CORES = 1e6
"""Approximate number of operations from which XLA divides a product among all cores."""
THREAD_GAIN = 0.8
"""Speed-up by each core after the first, for threads and for products that XLA divides."""
DIVIDED = 0.5
"""Speed of a core at operations that XLA divides among cores, relative to the same in a loop.
Measured for sines: 1.7e8 per second on each of two cores, and 3.6e8 on one."""


@dataclass(frozen=True)
class Gain:
    """The speed-up of the shards of a pass, relative to one core.

    Attributes:
      alone: seconds in one thread for each second on one core.
      threads: the speed-up of several threads relative to one.
      busy: the number of cores that one thread keeps busy.
    """

    alone: float = 1.0
    threads: float = 1.0
    busy: float = 1.0


def times_as_fast(cores: float) -> float:
    """The speed of so many cores, relative to one."""
    return 1.0 + THREAD_GAIN * (cores - 1)


def alone(cost: Cost, cores: int) -> float:
    """Seconds in one thread for each second on one core: XLA divides large products."""
    share = min(cost.shared / cost.weight, 1.0) if cost.weight else 0.0
    return 1.0 - share + share / times_as_fast(cores)


def speed_up(
    cost: Cost | None,
    vectorization: Vectorization,
    size: int,
    shards: int,
    threads: int,
    cores: int,
) -> Gain:
    """The speed-up by threads for shards, and by the threads of XLA.

    XLA divides large products among all cores, and other large operations that are in no loop.
    Threads for shards use only the cores that are left.

    Args:
      cost: the cost of a member, if it is known.
      vectorization: how the members of a shard are computed.
      size: the number of members in a shard.
      shards: the number of shards in a pass.
      threads: the number of threads for shards.
      cores: the number of cores of the process.
    """
    if cost is None:
        return Gain()
    at_once = {"loop": 1, "vmap": size}.get(vectorization.kind, vectorization.batch)
    operation = cost.weight * at_once / max(cost.calls, 1.0)
    if cost.shared * at_once < OWN_CORES:  # XLA does not divide a product of this size
        cost = replace(cost, shared=0.0)
    if vectorization.kind == "vmap" and not cost.shared and operation >= OWN_CORES:
        return Gain(1 / max(1.0, DIVIDED * times_as_fast(cores)), busy=float(cores))
    one = alone(cost, cores)
    several = min(one, 1 / times_as_fast(side_by_side(shards, threads)))
    return Gain(one, one / several, 1 / one)


def side_by_side(shards: int, threads: int) -> float:
    """The mean number of shards computed at once; the last ones leave threads idle."""
    return shards / math.ceil(shards / max(threads, 1)) if shards else 1.0
