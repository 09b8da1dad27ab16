"""What beamjax reports of a plan: plain facts, which `beamjax.diagnostics.facts` finds."""

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
    """A value, its type (`float32[5,3]@clients`) and its bytes, of all members if it is placed.

    The bytes of a member, and of a shard with its padding, are None for server values.
    """

    name: str
    type: str
    nbytes: Bytes
    member_bytes: int | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True)
class InputFact:
    """One input: `read` says how, `values` under which names the steps read it."""

    path: str
    type: str
    nbytes: Bytes
    read: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class ReductionFact:
    """One reduction that ends in a pass; `nbytes` is what each shard sends for it."""

    result: ValueFact
    reducer: str
    lane: str
    exactness: str
    nbytes: int


@dataclass(frozen=True)
class HandedFact:
    """A value as the rounds of a loop read it, what it was outside, and what it is afterwards.

    What is carried has `outside` and `afterwards`, what is sliced or stacked one of them.
    """

    how: str
    inside: ValueFact
    outside: str | None = None
    afterwards: str | None = None


@dataclass(frozen=True)
class BlockFact:
    """Steps that run as one: `title` is "condition", "each round" or "block 1"."""

    title: str
    steps: tuple[StepFact, ...]
    outputs: tuple[ValueFact, ...]


@dataclass(frozen=True)
class StepFact:
    """One step.

    Attributes:
      kind: "Server", "Map", "Gather", "Scatter", "Loop" or "Branch".
      placement: whose members it deals with, or None.
      functions: names of the user's functions in a map.
      served: server values that it reads.
      placed: placed values that it reads.
      results: what it makes, but for reductions.
      executables: bytes of StableHLO by platform.
      axis: of the members, if the step gathers or scatters; `reason` says why it does, why a step
        on the server holds a map, or why a map computes its members one after the other.
      lines: the user's `file:line (function)`.
      python: why the step runs as Python, if it does.
      read_bytes: of the placed values that a pass reads, all members.
      broadcast_bytes: of the server values that a pass reads, once.
      partial_bytes: that each shard sends to the reductions.
      saved_bytes: that these are less for compression.
      merge: how the accumulators of a pass are merged, if it reduces anything by lanes.
      rounds: of a loop, if they are known.
      reverse: whether a loop starts with the last entries.
      handed: values that a loop carries, slices and stacks.
      blocks: of a loop or a branch.
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
    """All steps, those in the blocks of loops and branches included."""
    for step in steps:
        yield step
        for block in step.blocks:
            yield from walk_facts(block.steps)


@dataclass(frozen=True)
class OutputFact:
    """One output, the input or step it comes from, and the value's name there."""

    path: str
    type: str
    nbytes: Bytes
    source: str
    value: str


@dataclass(frozen=True)
class Edge:
    """A value that goes from an input or a step to a step or an output."""

    source: str
    target: str
    value: str
    nbytes: Bytes


@dataclass(frozen=True)
class PlacementFact:
    """A placement, the number of its members, and how they are cut to shards.

    The numbers of members and of shards are None where they are found while the program runs.
    """

    name: str
    members: int | None
    shard_size: int
    shards: int | None


@dataclass(frozen=True)
class DeviceFact:
    """What a device of a worker holds at its peak, about, in bytes.

    Attributes:
      platform: of the device: "cuda", "rocm" or "tpu".
      kept: whatever step the worker is at, by what it is for.
      steps: the same of each step besides.
      nbytes: of the device.
      made_from: how bytes of bodies were found, in words.
    """

    platform: str
    kept: Mapping[str, int]
    steps: Mapping[str, Mapping[str, int]]
    nbytes: int
    made_from: str


@dataclass(frozen=True)
class MemoryFact:
    """The peak memory of the processes of a run, at most, in bytes.

    Attributes:
      kept: what a worker has whatever step it is at, by what it is for.
      steps: the same of each step besides.
      worker_bytes: of a worker process.
      launcher: of the launching process, by what it is for.
      launcher_bytes: all of this; `worker_bytes` where it is `shared`, the worker itself.
      shared: whether the launching process is the worker.
      where: the runner, and what its workers are, in words.
      devices: an entry for each platform of accelerators that the plan is for.
    """

    kept: Mapping[str, int]
    steps: Mapping[str, Mapping[str, int]]
    worker_bytes: int
    launcher: Mapping[str, int]
    launcher_bytes: int
    shared: bool
    where: str = ""
    devices: tuple[DeviceFact, ...] = ()


@dataclass(frozen=True)
class WayFact:
    """A way of doing something, and what it is told to take; None where nobody knows.

    The seconds are by usual rates, which are the same on all machines, as the choices are.
    """

    what: str
    seconds: float | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class ChoiceFact:
    """One thing that could be otherwise.

    Attributes:
      what: it is.
      chosen: what was chosen.
      why: in words.
      option: that fixes it, or "".
      seconds, nbytes: that what was chosen is told to take and to move, as for `WayFact`.
      others: the ways that were compared with it.
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
    """What a probe timed: a pass with shards of a size, computed in a way."""

    step: str
    shard_size: int
    member_loop: str
    member_seconds: float
    is_chosen: bool


@dataclass(frozen=True)
class StepSeconds:
    """What a step is told to take, all of its rounds and workers together, and what tells it."""

    step: str
    rounds: int
    read: float
    compute: float
    merge: float
    source: str


@dataclass(frozen=True)
class PredictionFact:
    """What a plan is told to take on a runner, in seconds.

    Attributes:
      steps: those that compute.
      pipelines: of Beam.
      overhead: what the runner takes for itself.
      compile: for executables, the first time in a process; not part of `seconds`.
      seconds: until all is over, where workers and threads share the work.
      guessed: whether a number of rounds that depends on data is taken to be a few.
      calibrated: whether this machine was measured.
      advice: what would be quicker, if something is known to be.
      local: all together on runner "local".
    """

    runner: str
    steps: tuple[StepSeconds, ...]
    pipelines: int
    overhead: float
    compile: float
    seconds: float
    guessed: bool
    calibrated: bool
    advice: str
    local: float


@dataclass(frozen=True)
class PlanFacts:
    """A plan as numbers and text.

    `steps` has those of blocks inside of their loops and branches (see `walk_facts`). Bytes are the
    sums of those of all steps, of which each round of a loop is counted once. `notes` say how
    sources of unknown length are read. `memory` is for the runner that was asked for. `choices` are
    what could be otherwise, `tried` what was timed for them, and `predicted` what all of it takes.
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
    """The text of lines by `file:line (function)`, of those that can be read here."""
    found = {}
    for line in dict.fromkeys(line for step in walk_facts(facts.steps) for line in step.lines):
        match = _LINE.match(line)
        text = linecache.getline(match[1], int(match[2])).strip() if match else ""
        if text:
            found[line] = text
    return found
