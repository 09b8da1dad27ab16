"""The plan: what is to be run, as data, with no JAX tracing and no Beam in it.

A plan is a list of steps over named values. A *server* value has one copy; a *placed* value has
one per member of a placement, and is only ever seen a shard at a time. Arrays cross the border of a
step as raw NumPy data (the data of typed PRNG keys, with the name of their implementation), so
nothing that runs a plan needs to know more of JAX than how to call an executable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and friends with numpy.dtype)
import numpy as np

from beamjax.options.choices import Choices, Looping
from beamjax.plan.cost import Cost
from beamjax.plan.dropping import Guard

VMAP = Looping()


@dataclass(frozen=True)
class ValueType:
    """The type of one value.

    Attributes:
      shape: of the raw data; for a placed value, of one member.
      dtype: name of the raw data's NumPy dtype.
      key_impl: implementation name if the value is an array of typed PRNG keys, else None.
      placement: name of the placement, or None for a server value.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None
    placement: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a server value, or of one member of a placed value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        dims = ",".join(map(str, self.shape))
        return f"{kind}[{dims}]" + (f"@{self.placement}" if self.placement else "")


@dataclass(frozen=True)
class View:
    """A placed value that reads an input in groups of rows: `x.reshape(n, rows, ...)`.

    Attributes:
      placed: its name.
      rows: the number of consecutive rows of the input in one member.
    """

    placed: str
    rows: int


@dataclass(frozen=True)
class Input:
    """One flat input of the program: an argument, or a closed-over constant.

    It may be read as a server value, by shards as a placed value or in views, or not at all.

    Attributes:
      path: where it stands in the arguments, e.g. `args[0]['w']`, or `constant 3`.
      server: name of the server value, if any step reads it whole.
      placed: name of the placed value, if any step reads it by shards.
      axis: the member axis in the array given by the user.
      views: the ways in which steps read it by shards with several rows in each member.
      short: whether shards of it are read padded to a bucket of its source, see `Fitted`.
    """

    path: str
    server: str | None
    placed: str | None
    axis: int = 0
    views: tuple[View, ...] = ()
    short: bool = False


@dataclass(frozen=True)
class Output:
    """One flat output: a value of the plan, an input passed through, or a constant.

    Attributes:
      value: name of a server or placed value, or None.
      input: index of the input that is returned as it is, or None.
      constant: raw array if the output does not depend on any input, or None.
      axis: where the member axis of a placed value goes in the result.
    """

    value: str | None = None
    input: int | None = None
    constant: np.ndarray | None = None
    axis: int = 0


@dataclass(frozen=True)
class Reduction:
    """One reduction in a lane: `size` values from `offset` in the lane's flat vector."""

    result: str
    reducer: str
    dtype: str
    offset: int
    size: int


@dataclass(frozen=True)
class Lane:
    """All reductions of a pass that share an accumulator: one flat vector a shard.

    Attributes:
      kind: name of the accumulator ("sum", "max", ...).
      dtype: dtype of the partials.
      size: number of values.
    """

    kind: str
    dtype: str
    size: int
    reductions: tuple[Reduction, ...]


@dataclass(frozen=True)
class Combine:
    """A reduction by a function, which is associative but need not commute.

    The body takes `(*inputs, *left, *right)`, server values and the arrays of two neighbouring
    ranges of members, to the arrays of both. It is called on shards in the order of a
    `beamjax.numerics.ordered_tree.DyadicTree`.

    Attributes:
      name: of the function.
      inputs: names of server values, which the pass broadcasts too.
      leaves: the type of each array.
      results: for each array, the name of the result that it is, or None.
    """

    name: str
    body: str
    inputs: tuple[str, ...]
    leaves: tuple[ValueType, ...]
    results: tuple[str | None, ...]


@dataclass(frozen=True)
class Server:
    """One executable over server values: `outputs = body(*inputs)`.

    `reason` says why it holds a `map_fn`, if it does.
    """

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Fitted:
    """The body of a pass for shards whose ragged members are short.

    Attributes:
      shapes: of one member of each operand.
      body: takes and returns what that of the pass does, but for these shapes.
      short_body: likewise.
    """

    shapes: tuple[tuple[int, ...], ...]
    body: str
    short_body: str | None = None


@dataclass(frozen=True)
class PaddingCheck:
    """The body of a pass for more padding, with which a run finds out whether a body reads padding.

    Attributes:
      shapes: of one member of each operand.
      body: takes and returns what that of the pass does, but for these shapes.
      short_body: likewise.
      lanes: of that body; reductions whose size depends on the padding have other sizes in them.
    """

    shapes: tuple[tuple[int, ...], ...]
    body: str
    short_body: str | None
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Map:
    """One pass over the members of a placement.

    The body takes `(start, count, *broadcasts, *operands)`, with the index of the shard's first
    member, the number of true members in it and operands padded to the shard size; it returns the
    placed results of the shard, one flat vector of partials per lane, and the arrays of each
    combine. A `guard` has it take and return more. It is for shards that are full, and `short_body`
    for those that are not, or of which members are left out; the two are one where a mask costs
    little, and `short_body` is None where all shards are full. One of `fitted` takes their place
    for operands of the shapes that it is for. A pass over members of unequal length has a
    `padding_check`, if its body can be had for more padding. `looping` says how the body computes
    the members of a shard, and `turns` why not all of them at once, if so. Compression makes the
    partials of a shard `saved` bytes smaller.
    """

    name: str
    placement: str
    body: str
    broadcasts: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    lanes: tuple[Lane, ...]
    functions: tuple[str, ...] = ()
    combines: tuple[Combine, ...] = ()
    guard: Guard | None = None
    fitted: tuple[Fitted, ...] = ()
    turns: str = ""
    looping: Looping = VMAP
    saved: int = 0
    short_body: str | None = None
    padding_check: PaddingCheck | None = None

    @property
    def executables(self) -> tuple[str, ...]:
        """The bodies that compute its shards, each once."""
        keys = [self.body, self.short_body]
        for fitted in self.fitted:
            keys += fitted.body, fitted.short_body
        return tuple(dict.fromkeys(key for key in keys if key is not None))

    @property
    def all_bodies(self) -> tuple[str, ...]:
        """Those, and the bodies of its combines and of the check of the padding."""
        check = self.padding_check
        keys = [*self.executables, *(combine.body for combine in self.combines)]
        keys += [check.body, check.short_body or check.body] if check else []
        return tuple(dict.fromkeys(keys))

    @property
    def partial_bytes(self) -> int:
        """Bytes of what a shard is reduced to."""
        lanes = sum(lane.size * np.dtype(lane.dtype).itemsize for lane in self.lanes)
        return lanes + sum(leaf.nbytes for each in self.combines for leaf in each.leaves)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Names of the server values that its reductions give."""
        lanes = (r.result for lane in self.lanes for r in lane.reductions)
        combined = (name for combine in self.combines for name in combine.results if name)
        return (*lanes, *combined)


@dataclass(frozen=True)
class Gather:
    """A placed value made a server value, with all members along `axis`."""

    name: str
    operand: str
    result: str
    axis: int
    reason: str
    line: str


@dataclass(frozen=True)
class Scatter:
    """A server value cut into members along `axis`, to be read by shards."""

    name: str
    operand: str
    result: str
    axis: int
    reason: str
    line: str


@dataclass(frozen=True)
class Block:
    """Steps that run as one: a branch, a condition, or one round of a loop.

    They read their own values and those of the blocks around them.

    Attributes:
      outputs: names of the values that leave the block: made in it, or known outside.
    """

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Carried:
    """A value that one round of a loop hands to the next; server or placed, the same in all.

    Attributes:
      init: name of its value before the first round.
      param: name under which a round reads it.
      result: name of its value after the last round.
    """

    init: str
    param: str
    result: str


@dataclass(frozen=True)
class Sliced:
    """A value of which each round of a loop reads one entry.

    The entries lie along axis 0 of a server value, and of each member of a placed value.

    Attributes:
      operand: name of the whole; `param` is that of its entry.
    """

    operand: str
    param: str


@dataclass(frozen=True)
class Loop:
    """Rounds of one block, `lax.scan` or `lax.while_loop` around placed operators.

    The outputs of the block are the next value of each carried one, and then one entry for each
    stacked result. All are read before any is handed on.

    Attributes:
      rounds: how many, or None if a condition says so.
      condition: a block over the same params, with a server boolean as its only output, or None.
      block: one round.
      carried: values that rounds hand on.
      sliced: values that rounds read an entry of.
      stacked: names of the values that hold the entries of all rounds, laid out as in `Sliced`.
      reverse: whether the first round reads and gives the last entry.
      line: the user's line.
    """

    name: str
    rounds: int | None
    condition: Block | None
    block: Block
    carried: tuple[Carried, ...]
    sliced: tuple[Sliced, ...]
    stacked: tuple[str, ...]
    reverse: bool
    line: str


@dataclass(frozen=True)
class Branch:
    """One of several blocks, `lax.cond` or `lax.switch` around placed operators.

    Attributes:
      index: name of a server int32 or boolean: the number of the block, clamped to those there are.
      blocks: of which one is run.
      results: names of its outputs afterwards; an output is placed alike in all blocks.
      line: the user's line.
    """

    name: str
    index: str
    blocks: tuple[Block, ...]
    results: tuple[str, ...]
    line: str


Step = Server | Map | Gather | Scatter | Loop | Branch


def walk(steps: Iterable[Step]) -> Iterator[Step]:
    """All steps, those in the blocks of loops and branches included."""
    for step in steps:
        yield step
        match step:
            case Loop(condition=condition, block=block):
                yield from walk((*(condition.steps if condition else ()), *block.steps))
            case Branch(blocks=blocks):
                for block in blocks:
                    yield from walk(block.steps)


@dataclass(frozen=True)
class PythonBody:
    """A body that runs as Python, because StableHLO can't hold it.

    Attributes:
      reason: what StableHLO can't hold, and the user's line.
      fingerprint: of what the body computes.
      function: a `restaging.PythonFunction`, in the process that made the plan; None elsewhere.
      program: a pickled `restaging.Recipe` that other processes make the function from; empty in
        the process that made the plan.
    """

    reason: str
    fingerprint: str
    function: Any = field(default=None, compare=False, repr=False)
    program: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Body:
    """One executable: serialized StableHLO, an artefact a platform, or a Python function.

    `narrow` are the dtypes of its results, if those at the border of the StableHLO are wider;
    `working` are the bytes that it needs at once for its results and all that is in between. It
    computes on one of the `devices` of a worker, or, where it holds a mesh, on so many together.
    `custom_calls` are the targets in the StableHLO that other versions of JAX may lack.
    """

    name: str
    artefacts: Mapping[str, bytes]
    lines: tuple[str, ...] = ()
    python: PythonBody | None = None
    narrow: tuple[str, ...] = ()
    working: int = 0
    devices: int = 1
    custom_calls: tuple[str, ...] = ()


MAX_MEMBERS = 2**31 - 1
"""Of a placement: a shard knows its first member by an int32."""


def size_name(placement: str) -> str:
    """The name of the server value that is the number of members of a placement."""
    return f"size@{placement}"


@dataclass(frozen=True)
class Plan:
    """A whole program, ready to be run.

    Attributes:
      sizes: number of members of each placement, or None if it is found while the plan runs: then
        there is a server value of the name `size_name(placement)`, an int32, from the start.
      shard_sizes: members in a shard of each placement, a multiple of 8.
      values: type of each named value.
      bodies: executables by content hash.
      x64: whether 64-bit types were enabled when the program was staged.
      recipe: a `restaging.Recipe` of the plan, if a body runs as Python.
      costs: of a member in each pass, and of each server step, by name of the step.
      choices: what it was fixed to, and who chose it.
    """

    name: str
    sizes: Mapping[str, Any]
    shard_sizes: Mapping[str, int]
    values: Mapping[str, ValueType]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    bodies: Mapping[str, Body]
    x64: bool
    jax_version: str
    constants: tuple[Any, ...] = field(default=(), repr=False)
    recipe: Any = field(default=None, compare=False, repr=False)
    costs: Mapping[str, Cost] = field(default_factory=dict, compare=False, repr=False)
    choices: Choices = field(default_factory=Choices, compare=False, repr=False)

    def shards(self, placement: str) -> int:
        """Number of shards of a placement."""
        return -(-self.sizes[placement] // self.shard_sizes[placement])

    def passes(self) -> int:
        """Number of passes over placed data, those of a round of a loop counted once."""
        return sum(isinstance(step, Map) for step in walk(self.steps))

    def nbytes(self, name: str) -> int:
        """Bytes of a value, all members included."""
        value = self.values[name]
        return value.nbytes * (self.sizes[value.placement] if value.placement else 1)
