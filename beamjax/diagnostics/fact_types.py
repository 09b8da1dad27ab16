"""The facts of a plan: dataclasses of plain values, which `beamjax.diagnostics.facts` makes.

`Explanation`, the pages, `--json` and the records of jobs all read these, and `dataclasses.asdict`
turns them into JSON values. Bytes and seconds are numbers; nothing is formatted.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from beamjax._text import Bytes
from beamjax.plan.merging import FanOut


@dataclass(frozen=True)
class ValueFact:
    """A value of the plan.

    Attributes:
      name: the name of the value in the plan.
      type: the type, such as `float32[5,3]@clients`.
      nbytes: bytes of the value, of all members if it is placed.
      member_bytes: bytes of one member; None for a server value.
      shard_bytes: bytes of a full shard; None for a server value.
    """

    name: str
    type: str
    nbytes: Bytes
    member_bytes: int | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True)
class InputFact:
    """An input of the plan.

    Attributes:
      path: where it is in the arguments, such as `args[0]['w']`.
      type: as for `ValueFact`.
      nbytes: bytes of all of it.
      read: how the plan reads it, in words.
      values: the names under which steps read it.
    """

    path: str
    type: str
    nbytes: Bytes
    read: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class ReductionFact:
    """A reduction that ends in a pass.

    Attributes:
      result: the value that it makes.
      reducer: the name of the reduction, such as "sum".
      buffer: the fused reduction buffer that it is part of, by kind and dtype.
      exactness: what its bits depend on, in words.
      nbytes: bytes that each shard sends for it.
    """

    result: ValueFact
    reducer: str
    buffer: str
    exactness: str
    nbytes: int


@dataclass(frozen=True)
class HandedFact:
    """A value that a loop carries, slices or stacks.

    Attributes:
      how: "carries", "slices" or "stacks".
      inside: the value in a round.
      outside: the name of the value before the loop; None if it is stacked.
      afterwards: the name of the value after the loop; None if it is sliced.
    """

    how: str
    inside: ValueFact
    outside: str | None = None
    afterwards: str | None = None


@dataclass(frozen=True)
class BlockFact:
    """A block of a loop or a branch.

    Attributes:
      title: "condition", "each round", or "block 1" for a block of a branch.
      steps: its steps.
      outputs: the values that it gives.
    """

    title: str
    steps: tuple[StepFact, ...]
    outputs: tuple[ValueFact, ...]


@dataclass(frozen=True)
class StepFact:
    """A step of the plan.

    Attributes:
      name: the name of the step.
      kind: "Server", "Map", "Gather", "Scatter", "Loop" or "Branch".
      placement: the placement of a pass, gather or scatter; None for other steps.
      served: the server values that it reads.
      placed: the placed values that it reads.
      results: the values that it makes, without the results of reductions.
      functions: the names of the functions that a pass maps.
      reductions: the reductions that end in a pass.
      executables: bytes of StableHLO, by platform.
      axis: the axis of the members, of a gather or a scatter.
      reason: why a value is gathered or scattered, why a map is on the server, or why a pass does
        not compute all members of a shard at once.
      lines: lines of the user's code, as `file:line (function)`.
      python: why the step runs as Python; "" if it does not.
      read_bytes: bytes of the placed values that a pass reads, of all members.
      broadcast_bytes: bytes of the server values that a pass reads, counted once.
      partial_bytes: bytes that each shard sends to the reductions.
      saved_bytes: bytes that compression saves of these.
      merge: how the accumulators of a pass are merged; None if it has none.
      rounds: the number of rounds of a loop; None while a condition holds.
      reverse: whether a loop begins with the last entries.
      handed: the values that a loop carries, slices and stacks.
      blocks: the blocks of a loop or a branch.
    """

    name: str
    kind: str
    placement: str | None
    served: tuple[ValueFact, ...]
    placed: tuple[ValueFact, ...]
    results: tuple[ValueFact, ...]
    functions: tuple[str, ...] = ()
    reductions: tuple[ReductionFact, ...] = ()
    executables: Mapping[str, int] = dataclasses.field(default_factory=dict)
    axis: int | None = None
    reason: str = ""
    lines: tuple[str, ...] = ()
    python: str = ""
    read_bytes: Bytes = 0
    broadcast_bytes: int = 0
    partial_bytes: int = 0
    saved_bytes: int = 0
    merge: FanOut | None = None
    rounds: int | None = None
    reverse: bool = False
    handed: tuple[HandedFact, ...] = ()
    blocks: tuple[BlockFact, ...] = ()


def walk_facts(steps: Sequence[StepFact]) -> Iterator[StepFact]:
    """Yields all steps, including those in the blocks of loops and branches."""
    for step in steps:
        yield step
        for block in step.blocks:
            yield from walk_facts(block.steps)


@dataclass(frozen=True)
class OutputFact:
    """An output of the plan.

    Attributes:
      path: where it is in the result, such as `result['w']`.
      type: as for `ValueFact`.
      nbytes: bytes of all of it.
      source: the input or step that it comes from, or "constant".
      value: the name of the value there; "" for a constant.
    """

    path: str
    type: str
    nbytes: Bytes
    source: str
    value: str


@dataclass(frozen=True)
class Edge:
    """A value that passes from an input or a step to a step or an output, with its bytes."""

    source: str
    target: str
    value: str
    nbytes: Bytes


@dataclass(frozen=True)
class PlacementFact:
    """A placement, with the numbers of members, of members in a shard, and of shards.

    `members` and `shards` are None where they are known only while the program runs.
    """

    name: str
    members: int | None
    shard_size: int
    shards: int | None


Parts = Mapping[str, int]
"""Bytes by what takes them."""


@dataclass(frozen=True)
class DeviceFact:
    """The estimated peak memory of an accelerator of a worker, in bytes.

    Attributes:
      platform: "cuda", "rocm" or "tpu".
      kept: the memory that is in use during all steps.
      steps: the memory of each step in addition.
      nbytes: the total, with the largest step.
      made_from: how the memory of bodies was estimated, in words.
    """

    platform: str
    kept: Parts
    steps: Mapping[str, Parts]
    nbytes: int
    made_from: str


@dataclass(frozen=True)
class MemoryFact:
    """An upper bound of the memory of the processes of a run, in bytes.

    Attributes:
      kept: the memory of a worker that is in use during all steps.
      steps: the memory of each step in addition.
      worker_bytes: the total of a worker process, with the largest step.
      launcher: the memory of the launching process.
      launcher_bytes: the total of `launcher`, or `worker_bytes` if it is `shared`.
      shared: whether the launching process is the worker.
      where: the runner and its workers, in words.
      devices: one entry for each platform of accelerators in the plan.
    """

    kept: Parts
    steps: Mapping[str, Parts]
    worker_bytes: int
    launcher: Parts
    launcher_bytes: int
    shared: bool
    where: str = ""
    devices: tuple[DeviceFact, ...] = ()


@dataclass(frozen=True)
class WayFact:
    """An alternative, with its predicted seconds and bytes; None if they are unknown.

    The seconds follow from fixed rates, the same on all machines, as the choices do.
    """

    what: str
    seconds: float | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class ChoiceFact:
    """A choice of the planner.

    Attributes:
      what: what was chosen.
      chosen: the choice.
      why: the reason, in words.
      option: the option that fixes it, or "".
      seconds, nbytes: the predicted seconds and bytes of the choice, as for `WayFact`.
      others: the alternatives that it was compared with.
    """

    what: str
    chosen: str
    why: str
    option: str
    seconds: float | None = None
    nbytes: int | None = None
    others: tuple[WayFact, ...] = ()


@dataclass(frozen=True)
class TriedFact:
    """A measurement of a probe: seconds of a member, by pass, shard size and vectorization."""

    step: str
    shard_size: int
    member_loop: str
    member_seconds: float
    is_chosen: bool


@dataclass(frozen=True)
class StepSeconds:
    """The predicted seconds of a step, over all rounds, workers and threads together.

    Attributes:
      rounds: how often the step runs.
      source: where `compute` comes from: "counted" or "probe".
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

    @property
    def busy(self) -> float:
        """Seconds of all workers and threads together."""
        return self.read + self.compute + self.merge

    @property
    def seconds(self) -> float:
        """Seconds from the start of the step to its end."""
        return (self.read + self.compute / self.gain + self.merge) / self.workers


@dataclass(frozen=True)
class PredictionFact:
    """The predicted seconds of a plan on a runner, without compilation.

    Attributes:
      steps: the steps that compute, in order.
      pipelines: the number of Beam pipelines.
      overhead: seconds of the runner itself.
      compile: seconds to compile the executables, once in a process.
      seconds: seconds from start to end, with the overhead.
      guessed: whether a number of rounds depends on data.
      calibrated: whether the rates of this machine were measured.
      is_small: whether the plan is clearly faster in this process than on the runner.
      advice: a sentence if that saves enough time; "" otherwise.
      local: `seconds` with `runner="local"`.
    """

    runner: str
    steps: tuple[StepSeconds, ...]
    pipelines: int
    overhead: float
    compile: float
    seconds: float
    guessed: bool
    calibrated: bool
    is_small: bool = False
    advice: str = ""
    local: float = 0.0

    def by_name(self) -> dict[str, float]:
        """Returns the seconds of each step over all workers, "(runner)" and "(total)"."""
        steps = {step.step: step.busy for step in self.steps}
        return steps | {"(runner)": self.overhead, "(total)": self.seconds}


@dataclass(frozen=True)
class PlanFacts:
    """All facts of a plan.

    Attributes:
      program: the name of the program.
      jax_version: the version of JAX that traced it.
      x64: whether 64-bit types are on.
      passes: the number of passes over members.
      placements: the placements and their shards.
      inputs, outputs: the inputs and outputs of the plan.
      steps: the steps; `walk_facts` also visits those of loops and branches.
      edges: the values that pass between inputs, steps and outputs.
      read_bytes, broadcast_bytes, partial_bytes, saved_bytes: the sums of those of all steps, where
        each round of a loop counts once.
      gathered_bytes: bytes that are gathered on the server.
      executable_bytes: bytes of StableHLO, by platform.
      notes: how sources of unknown length are read, and similar notes.
      memory: the memory of a run on the runner of `explain`.
      choices: the choices of the planner.
      tried: the measurements behind them.
      predicted: the predicted seconds; None if the number of members is unknown.
    """

    program: str
    jax_version: str
    x64: bool
    passes: int
    placements: tuple[PlacementFact, ...]
    inputs: tuple[InputFact, ...]
    steps: tuple[StepFact, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[OutputFact, ...]
    read_bytes: Bytes
    broadcast_bytes: int
    partial_bytes: int
    saved_bytes: int
    gathered_bytes: Bytes
    executable_bytes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    memory: MemoryFact | None = None
    choices: tuple[ChoiceFact, ...] = ()
    tried: tuple[TriedFact, ...] = ()
    predicted: PredictionFact | None = None


_LINE = re.compile(r"(.+):(\d+)(?: \(|$)")


def source_lines(facts: PlanFacts) -> dict[str, str]:
    """Returns the text of the user's lines that are readable, by `file:line (function)`."""
    found = {}
    for line in dict.fromkeys(line for step in walk_facts(facts.steps) for line in step.lines):
        match = _LINE.match(line)
        text = linecache.getline(match[1], int(match[2])).strip() if match else ""
        if text:
            found[line] = text
    return found
