"""How long a plan takes on a runner, step by step, from what it counts and rates of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from beamjax.diagnostics import gains
from beamjax.diagnostics.calibration import Calibration, calibration
from beamjax.diagnostics.topology import DIRECT, Workers
from beamjax.options import Options
from beamjax.options.choices import Vectorization
from beamjax.plan.cost import runner_overhead
from beamjax.plan.steps import Branch, Gather, Loop, Map, Plan, Server, Step
from beamjax.runtime.pace import LONG_IN_BUNDLE

GUESSED_ROUNDS = 10
"""The assumed number of rounds of a loop that runs while a condition holds."""
SMALL_SHARE = 0.25
"""The share of the overhead of a runner below which work counts as small."""
ADVISED_SECONDS = 1.0
"""Seconds of overhead from which beamjax advises to use the local runner."""
HANDED_RATE = 5e8
"""Bytes a second of server values and partials between workers, in elements or in files."""
COMPILE_SECONDS, COMPILE_BYTE_SECONDS = 0.05, 1e-5
"""Seconds to compile an executable, and seconds for each byte of its StableHLO."""


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step, over all rounds, workers and threads together.

    Attributes:
      rounds: how often the step runs.
      source: of the seconds that it computes: "counted" or "probe".
      guessed: whether a number of rounds depends on data.
      workers: the number of processes that share the step.
      gain: the speed-up by the threads of a worker.
      shards: the number of shards in a round.
      cores: the number of cores that XLA keeps busy in one thread.
    """

    step: str
    rounds: int
    read: float = 0.0
    compute: float = 0.0
    merge: float = 0.0
    source: str = "counted"
    guessed: bool = False
    workers: int = 1
    gain: float = 1.0
    shards: int = 1
    cores: float = 1.0

    def in_bundles(self, threads: int) -> StepTime:
        """The same on Beam, where one thread of a bundle computes shards that are short, or that
        XLA divides among the cores.
        """
        short = self.compute < LONG_IN_BUNDLE * self.rounds * self.shards
        return replace(self, gain=1.0) if short or round(threads / self.cores) <= 1 else self

    @property
    def busy(self) -> float:
        """Seconds of all workers and threads together."""
        return self.read + self.compute + self.merge

    @property
    def seconds(self) -> float:
        """Seconds from the start of the step to its end."""
        return (self.read + self.compute / self.gain + self.merge) / self.workers


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of a plan on a runner, without compilation.

    Attributes:
      steps: the steps that compute, in order.
      pipelines: the number of Beam pipelines.
      overhead: seconds of the runner itself.
      compile: seconds to compile the executables, once in a process.
      guessed: whether a number of rounds depends on data.
    """

    runner: str
    steps: tuple[StepTime, ...]
    pipelines: int
    overhead: float
    compile: float
    guessed: bool

    @property
    def work(self) -> float:
        """Seconds of the steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def seconds(self) -> float:
        """All together, without compiling."""
        return self.work + self.overhead

    def by_name(self) -> dict[str, float]:
        """Seconds by step, of all workers together, and of the runner and until all is over under
        names that no step has.
        """
        return {s.step: s.busy for s in self.steps} | {
            "(runner)": self.overhead,
            "(total)": self.seconds,
        }


def forecast(
    plan: Plan, options: Options, runner: str, known: Calibration | None = None
) -> Forecast:
    """Predicts the seconds of a plan on a runner."""
    known = calibration() if known is None else known
    workers = Workers.of(runner, options)
    cores = os.cpu_count() or 1
    count = min(workers.handing or 1, cores)
    threads = min(workers.computing, cores)
    by = _Rates(known, count, threads, cores)
    found = _steps(plan, plan.steps, 1, False, by)
    steps = tuple(step.in_bundles(threads) if workers.beam else step for step in found)
    pipelines, stages, shards, nbytes = _pipelines(
        plan, options, workers, _in_memory(runner, options, workers)
    )  # fmt: skip
    fixed = runner_overhead(runner)
    overhead = pipelines * fixed.pipeline + stages * fixed.step + shards * fixed.shard
    overhead += nbytes / HANDED_RATE
    sizes = [sum(map(len, body.artefacts.values())) for body in plan.bodies.values()]
    made = sum(COMPILE_SECONDS + COMPILE_BYTE_SECONDS * nbytes for nbytes in sizes)
    return Forecast(
        runner, steps, pipelines, overhead, made,
        any(step.guessed for step in steps),
    )  # fmt: skip


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
) -> Iterator[StepTime]:
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
                found = _map(plan, step, by)
                yield StepTime(
                    step.name, rounds, rounds * found.read, rounds * found.compute,
                    rounds * found.merge, found.source, guessed or found.guessed, by.workers,
                    found.gain, found.shards, found.cores,
                )  # fmt: skip
            case Server(name=name) if name in plan.costs:
                cost = plan.costs[name]
                seconds = known.rates.seconds(cost) * gains.alone(cost, by.cores)
                seconds += cost.calls * known.rates.call
                seconds = rounds * (seconds + known.rates.shard)
                yield StepTime(name, rounds, compute=seconds, guessed=guessed or cost.guessed)
            case Gather(name=name, operand=operand):
                value = plan.values[operand]
                n = plan.sizes[value.placement or ""] or 0
                yield StepTime(name, rounds, read=rounds * n * value.nbytes / known.read)


def _map(plan: Plan, step: Map, by: _Rates) -> StepTime:
    """Predicts one pass over all members, in the threads of one process."""
    known = by.known
    n = plan.sizes[step.placement] or 0
    size = plan.shard_sizes[step.placement]
    shards = -(-n // size)
    read = n * sum(plan.values[name].nbytes for name in step.operands) / known.read
    partial = sum(lane.size * 8 for lane in step.lanes)
    merge = shards * partial / known.merge
    tried = {(t.step, t.size, t.vectorization): t.seconds for t in plan.choices.tried}
    cost = plan.costs.get(step.name)
    cores = max(by.cores // by.workers, 1)
    gain = gains.gain(cost, step.vectorization, size, shards, by.threads, cores)
    if (step.name, size, step.vectorization) in tried:
        seconds = shards * tried[step.name, size, step.vectorization]
        compute = max(seconds - merge, 0.0)
        return StepTime(
            step.name, 1, read, compute, merge, "probe", gain=gain.threads, shards=shards,
            cores=gain.busy,
        )  # fmt: skip
    if cost is None:
        return StepTime(step.name, 1, read, shards * known.rates.shard, merge)
    calls = cost.calls * known.rates.call * _calls(step.vectorization, size)
    work = gain.alone * known.rates.seconds(cost) * size
    compute = shards * (work + calls + known.rates.shard)
    return StepTime(
        step.name, 1, read, compute, merge, guessed=cost.guessed, gain=gain.threads,
        shards=shards, cores=gain.busy,
    )  # fmt: skip


def _calls(vectorization: Vectorization, size: int) -> float:
    """How often a shard starts the operations of a body."""
    return {"vmap": 1, "loop": size, "batches": size / max(vectorization.batch, 1)}[
        vectorization.kind
    ]


def _in_memory(runner: str, options: Options, workers: Workers) -> bool:
    """Whether large sums and server values stay objects in memory between steps."""
    direct = runner.lower().removesuffix("runner") in DIRECT
    return workers.shared and direct and not options.keeps_files


def _pipelines(
    plan: Plan, options: Options, workers: Workers, in_memory: bool
) -> tuple[int, int, int, int]:
    """The number of pipelines, their steps and shards, and the bytes between steps."""
    from beamjax.pipelines.worker.spill import LOCAL_BYTES
    from beamjax.plan.graph_sizes import rounds_per_graph
    from beamjax.plan.unroll import is_straight

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
                    pipelines = more * inner[0]
                    if rounds is not None and is_straight(block.steps):
                        width = rounds_per_graph(plan, step, options, workers.shared)
                        pipelines = math.ceil(rounds / width) * min(inner[0], 1)
                    total += (pipelines, *(more * inner[1:]))
                case Branch(blocks=blocks):
                    row = False
                    total += np.max([counted(block.steps) for block in blocks], axis=0)
                case Map():
                    size = plan.shard_sizes[step.placement]
                    shards = -(-(plan.sizes[step.placement] or 0) // size)
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
    return (max(pipelines, 1), stages, shards, nbytes) if workers.beam else (0, stages, 0, 0)


@dataclass(frozen=True)
class SmallWork:
    """Whether a plan is predicted to be faster in this process than on its runner.

    Attributes:
      is_small: whether it clearly is.
      advice: a sentence for the user; "" if the difference is below `ADVISED_SECONDS`.
    """

    is_small: bool = False
    advice: str = ""


def small_work(plan: Plan, options: Options, there: Forecast) -> SmallWork:
    """Compares the prediction for a runner with that for this process."""
    if there.runner == "local" or not all(plan.sizes.values()):
        return SmallWork()
    here = forecast(plan, options, "local")
    if here.guessed or here.seconds >= SMALL_SHARE * there.overhead:
        return SmallWork()
    if there.overhead < ADVISED_SECONDS:
        return SmallWork(True)
    return SmallWork(
        True,
        f"runner='local' would take about {here.seconds:.2g} s; {there.runner} takes about "
        f"{there.overhead:.2g} s for {_count(there.pipelines)} besides the work",
    )


def _count(pipelines: int) -> str:
    return "a pipeline" if pipelines == 1 else f"{pipelines} pipelines"
