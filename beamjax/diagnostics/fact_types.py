"""The view of a plan that `explain`, the pages, `--json` and the records of jobs share.

`beamjax.diagnostics.facts` makes it; `schema.to_plain` turns it into JSON values. Bytes and seconds
are numbers; nothing is formatted.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from beamjax._text import Bytes
from beamjax.plan.cost import Cost
from beamjax.plan.merging import FanOut

# --- values and steps


@dataclass(frozen=True)
class ValueFact:
    """A value of the plan."""

    name: str
    type: str  # such as `float32[5,3]@clients`
    nbytes: Bytes  # of all members, if the value is placed
    member_bytes: int | None = None  # None for a server value
    shard_bytes: int | None = None  # of a full shard; None for a server value


@dataclass(frozen=True)
class InputFact:
    """An input of the plan."""

    path: str  # where it is in the arguments, such as `args[0]['w']`
    type: str
    nbytes: Bytes
    read: str  # how the plan reads it, in words
    values: tuple[str, ...]  # the names under which steps read it


@dataclass(frozen=True)
class OutputFact:
    """An output of the plan."""

    path: str  # where it is in the result, such as `result['w']`
    type: str
    nbytes: Bytes
    source: str  # the input or step that it comes from, or "constant"
    value: str  # the name of the value there; "" for a constant


@dataclass(frozen=True)
class Edge:
    """A value that passes from an input or a step to a step or an output."""

    source: str
    target: str
    value: str
    nbytes: Bytes


@dataclass(frozen=True)
class ReductionFact:
    """A reduction that ends in a pass."""

    result: ValueFact
    reducer: str  # such as "sum"
    buffer: str  # the fused reduction buffer that it is part of, by kind and dtype
    exactness: str  # what its bits depend on, in words
    nbytes: int  # sent by each shard


@dataclass(frozen=True)
class HandedFact:
    """A value that a loop carries, slices or stacks."""

    how: str  # "carries", "slices" or "stacks"
    inside: ValueFact  # the value in a round
    outside: str | None = None  # its name before the loop; None if it is stacked
    afterwards: str | None = None  # its name after the loop; None if it is sliced


@dataclass(frozen=True)
class BlockFact:
    """A block of a loop or a branch."""

    title: str  # "condition", "each round", or "block 1" for a block of a branch
    steps: tuple[StepFact, ...]
    outputs: tuple[ValueFact, ...]


@dataclass(frozen=True)
class StepFact:
    """A step of the plan."""

    name: str
    kind: str  # "Server", "Map", "Gather", "Scatter", "Loop" or "Branch"
    placement: str | None  # of a pass, gather or scatter
    served: tuple[ValueFact, ...]  # the server values that it reads
    placed: tuple[ValueFact, ...]  # the placed values that it reads
    results: tuple[ValueFact, ...]  # the values that it makes, except results of reductions
    functions: tuple[str, ...] = ()  # the names of the functions that a pass maps
    reductions: tuple[ReductionFact, ...] = ()
    executables: Mapping[str, int] = field(default_factory=dict)  # bytes of StableHLO by platform
    axis: int | None = None  # of the members, in a gather or a scatter
    # Why a value is gathered or scattered, why a map is on the server, or why a pass does not
    # compute all members of a shard at once.
    reason: str = ""
    lines: tuple[str, ...] = ()  # of the user's code, as `file:line (function)`
    python: str = ""  # why the step runs as Python; "" if it does not
    read_bytes: Bytes = 0  # of the placed values that a pass reads, of all members
    broadcast_bytes: int = 0  # of the server values that a pass reads, counted once
    partial_bytes: int = 0  # sent by each shard to the reductions
    merge: FanOut | None = None  # of the accumulators of a pass
    cost: Cost | None = None  # of a member in a pass, or of a server step
    rounds: int | None = None  # of a loop; None while a condition holds
    reverse: bool = False  # whether a loop begins with the last entries
    handed: tuple[HandedFact, ...] = ()
    blocks: tuple[BlockFact, ...] = ()


def walk_facts(steps: Sequence[StepFact]) -> Iterator[StepFact]:
    """Yields all steps, including those in the blocks of loops and branches."""
    for step in steps:
        yield step
        for block in step.blocks:
            yield from walk_facts(block.steps)


# --- memory


Parts = Mapping[str, int]
"""Bytes by what takes them."""


@dataclass(frozen=True)
class DeviceFact:
    """The estimated peak memory of an accelerator of a worker, in bytes."""

    platform: str  # "cuda", "rocm" or "tpu"
    kept: Parts  # in use during all steps
    steps: Mapping[str, Parts]  # of each step in addition
    nbytes: int  # the total, with the largest step
    made_from: str  # what the estimate for bodies comes from, in words


@dataclass(frozen=True)
class MemoryFact:
    """An upper bound of the memory of the processes of a run, in bytes."""

    kept: Parts  # of a worker, in use during all steps
    steps: Mapping[str, Parts]  # of each step in addition
    worker_bytes: int  # the total of a worker process, with the largest step
    launcher: Parts
    launcher_bytes: int  # the total of `launcher`, or `worker_bytes` if it is `shared`
    shared: bool  # whether the launching process is the worker
    where: str = ""  # the runner and its workers, in words
    devices: tuple[DeviceFact, ...] = ()  # one for each platform of accelerators in the plan


# --- choices


@dataclass(frozen=True)
class ChoiceFact:
    """A choice of the planner."""

    what: str
    chosen: str
    why: str
    option: str  # that fixes it, or ""


# --- the plan


@dataclass(frozen=True)
class PlacementFact:
    """A placement; the numbers are None where they are known only while the program runs."""

    name: str
    members: int | None
    shard_size: int
    shards: int | None


@dataclass(frozen=True)
class PlanFacts:
    """All facts of a plan. Of a loop, each round counts once in the sums of bytes."""

    program: str
    jax_version: str  # that traced it
    x64: bool  # whether 64-bit types are on
    passes: int
    placements: tuple[PlacementFact, ...]
    inputs: tuple[InputFact, ...]
    steps: tuple[StepFact, ...]  # `walk_facts` also visits those of loops and branches
    edges: tuple[Edge, ...]
    outputs: tuple[OutputFact, ...]
    read_bytes: Bytes
    broadcast_bytes: int
    partial_bytes: int
    gathered_bytes: Bytes
    executable_bytes: Mapping[str, int]  # of StableHLO, by platform
    notes: tuple[str, ...] = ()  # how sources of unknown length are read, and similar notes
    memory: MemoryFact | None = None  # of a run on the runner of `explain`
    choices: tuple[ChoiceFact, ...] = ()


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
