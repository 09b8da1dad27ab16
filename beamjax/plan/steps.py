"""The plan: a program as data, without JAX tracers and without Beam transforms.

A plan is a list of steps over named values. A *server* value has one copy. A *placed* value has one
entry per member of a placement, and steps only see a shard of it at a time. Steps exchange raw
NumPy data (for typed PRNG keys the key data; the type names their implementation), so code that
runs a plan only has to call executables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and friends with numpy.dtype)
import numpy as np

from beamjax.plan.cost import Cost
from beamjax.plan.dropping import Guard
from beamjax.plan.shard import Shards


@dataclass(frozen=True)
class Vectorization:
    """How a pass computes the members of a shard.

    Attributes:
      kind: "vmap" all at once, "batches" some at a time, or "loop" sequentially.
      batch: number of members that are computed at once, for "batches"; otherwise 0.
    """

    kind: str = "vmap"
    batch: int = 0

    def __str__(self) -> str:
        return f"batches of {self.batch}" if self.kind == "batches" else self.kind


VMAP = Vectorization()


@dataclass(frozen=True)
class ValueType:
    """The type of one value.

    Attributes:
      shape: shape of the raw data; for a placed value, of one member.
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
    """A placed value whose members are groups of rows of an input: `x.reshape(n, rows, ...)`.

    Attributes:
      placed: name of the value.
      rows: number of consecutive rows of the input per member.
    """

    placed: str
    rows: int


@dataclass(frozen=True)
class Input:
    """One flat input of the program: an argument, or a closed-over constant.

    Steps may read it as a server value, as a placed value, as views, or not at all.

    Attributes:
      path: where it stands in the arguments, e.g. `args[0]['w']`, or `constant 3`.
      server: name of the server value, None if no step reads it whole.
      placed: name of the placed value, None if no step reads it by shards.
      axis: the axis of the members in the user's array.
      views: placed values with several rows per member.
      short: whether its shards are padded only to a bucket of its source, see `Bucketed`.
    """

    path: str
    server: str | None
    placed: str | None
    axis: int = 0
    views: tuple[View, ...] = ()
    short: bool = False


@dataclass(frozen=True)
class Output:
    """One flat output: a value of the plan, an input that is returned as it is, or a constant.

    Attributes:
      value: name of a server or placed value, or None.
      input: index of the returned input, or None.
      constant: raw array of an output that depends on no input, or None.
      axis: the axis of the members in the result, for a placed value.
    """

    value: str | None = None
    input: int | None = None
    constant: np.ndarray | None = None
    axis: int = 0


@dataclass(frozen=True)
class Reduction:
    """One reduction: the `size` values from `offset` on in a fused reduction buffer."""

    result: str
    reducer: str
    dtype: str
    offset: int
    size: int


@dataclass(frozen=True)
class FusedBuffer:
    """A fused reduction buffer: reductions of a pass that share an accumulator.

    Each shard gives one flat vector of partials for it.

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
    """A reduction by an associative function, which need not be commutative.

    The body takes `(*inputs, *left, *right)`: server values and the partials (lists of arrays) of
    two adjacent ranges of members. It returns the partial of both ranges together. It is called in
    the order of a `beamjax.numerics.ordered_tree.DyadicTree`.

    Attributes:
      name: name of the function.
      inputs: names of server values; they are broadcasts of the pass as well.
      leaves: type of each array of a partial.
      results: for each array of the last partial, the name of the value it becomes, or None.
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
class Bucketed:
    """Bodies of a pass for shards whose ragged members fit in a shorter bucket.

    Attributes:
      shapes: shape of one member of each operand.
      body: like the `body` of the pass, for these shapes.
      short_body: like the `short_body` of the pass, for these shapes.
    """

    shapes: tuple[tuple[int, ...], ...]
    body: str
    short_body: str | None = None


@dataclass(frozen=True)
class PaddingCheck:
    """Bodies of a pass for members with more padding.

    A run compares their results with those of the pass to find out whether a body reads padding.

    Attributes:
      shapes: shape of one member of each operand.
      body: like the `body` of the pass, for these shapes.
      short_body: like the `short_body` of the pass, for these shapes.
      buffers: reduction buffers of these bodies; sizes may differ if they depend on the padding.
    """

    shapes: tuple[tuple[int, ...], ...]
    body: str
    short_body: str | None
    buffers: tuple[FusedBuffer, ...]


@dataclass(frozen=True)
class Map:
    """One pass over the members of a placement.

    The body takes `(start, count, *broadcasts, *operands)`: the index of the shard's first member,
    the number of members without padding, server values, and placed values padded to the shard
    size. It returns the placed results of the shard, one flat vector of partials per `FusedBuffer`,
    and the arrays of each `Combine`. With a `guard` it takes and returns more, see `Guard`.

    `body` computes full shards. `short_body` computes shards with padding or dropped members, which
    need a mask. They are the same body where a mask costs little; `short_body` is None where all
    shards are full. If the shapes of the operands are those of an entry of `bucketed`, its bodies
    are used instead. A pass over members of unequal length has a `padding_check` if its body can be
    made for more padding.

    `vectorization` says how the body computes the members of a shard, and `loop_reason` why it does
    not use vmap for all of them at once ("" if it does).
    """

    name: str
    placement: str
    body: str
    broadcasts: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    buffers: tuple[FusedBuffer, ...]
    functions: tuple[str, ...] = ()
    combines: tuple[Combine, ...] = ()
    guard: Guard | None = None
    bucketed: tuple[Bucketed, ...] = ()
    loop_reason: str = ""
    vectorization: Vectorization = VMAP
    short_body: str | None = None
    padding_check: PaddingCheck | None = None

    @property
    def executables(self) -> tuple[str, ...]:
        """Keys of the bodies that compute its shards, each once."""
        keys = [self.body, self.short_body]
        for bucketed in self.bucketed:
            keys += bucketed.body, bucketed.short_body
        return tuple(dict.fromkeys(key for key in keys if key is not None))

    @property
    def all_bodies(self) -> tuple[str, ...]:
        """Keys of all its bodies, including those of its combines and its padding check."""
        check = self.padding_check
        keys = [*self.executables, *(combine.body for combine in self.combines)]
        keys += [check.body, check.short_body or check.body] if check else []
        return tuple(dict.fromkeys(keys))

    @functools.cached_property
    def partial_bytes(self) -> int:
        """Bytes of the partials of a shard."""
        buffers = sum(buffer.size * np.dtype(buffer.dtype).itemsize for buffer in self.buffers)
        return buffers + sum(leaf.nbytes for each in self.combines for leaf in each.leaves)

    @functools.cached_property
    def reduced(self) -> tuple[str, ...]:
        """Names of the server values that its reductions define."""
        buffers = (r.result for buffer in self.buffers for r in buffer.reductions)
        combined = (name for combine in self.combines for name in combine.results if name)
        return (*buffers, *combined)


@dataclass(frozen=True)
class Gather:
    """Makes a server value of a placed value, with the members along `axis`."""

    name: str
    operand: str
    result: str
    axis: int
    reason: str
    line: str


@dataclass(frozen=True)
class Scatter:
    """Makes a placed value of a server value, whose members lie along `axis`."""

    name: str
    operand: str
    result: str
    axis: int
    reason: str
    line: str


@dataclass(frozen=True)
class Rows:
    """Reads rows of a placed value by index.

    Attributes:
      operand: name of the placed value.
      numbers: name of an int32 server value: the member of each row, all in bounds.
      result: name of the rows: a server value, or a placed value with a member for each row.
    """

    name: str
    operand: str
    numbers: str
    result: str
    line: str


@dataclass(frozen=True)
class Block:
    """The steps of a branch, of a condition, or of one round of a loop.

    They may read values of the enclosing blocks.

    Attributes:
      outputs: names of the values that the block returns; they may come from enclosing blocks.
    """

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Carried:
    """A carried value of a loop; it is a server value in all rounds or a placed one in all rounds.

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
    """A value of which each round of a loop reads one entry (`xs` of `lax.scan`).

    The entries lie along axis 0 of a server value, and along axis 0 of each member of a placed one.

    Attributes:
      operand: name of the whole value.
      param: name under which a round reads its entry.
    """

    operand: str
    param: str


@dataclass(frozen=True)
class Loop:
    """A loop: `lax.scan` or `lax.while_loop` around placed operators.

    The outputs of the block are the next value of each carried value, then one entry of each
    stacked result. All outputs are read before any carried value is replaced.

    Attributes:
      rounds: number of rounds, or None if a condition decides.
      condition: a block over the same params, with a server boolean as its only output, or None.
      block: one round.
      carried: the carried values.
      sliced: values of which each round reads one entry.
      stacked: names of the values that hold the entries of all rounds, laid out as in `Sliced`.
      reverse: whether rounds run from the last entry to the first.
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

    def entry_index(self, number: int) -> int:
        """The index at which round `number` reads its slices and writes its stacked results."""
        return (self.rounds or 0) - 1 - number if self.reverse else number


@dataclass(frozen=True)
class Branch:
    """A branch: `lax.cond` or `lax.switch` around placed operators.

    Attributes:
      index: name of a server int32 or boolean that chooses the block; clamped to valid numbers.
      blocks: the blocks; one of them is run.
      results: names of the values that its outputs become; each has one placement in all blocks.
      line: the user's line.
    """

    name: str
    index: str
    blocks: tuple[Block, ...]
    results: tuple[str, ...]
    line: str


Step = Server | Map | Gather | Scatter | Rows | Loop | Branch


def walk(steps: Iterable[Step]) -> Iterator[Step]:
    """All steps, including those in the blocks of loops and branches."""
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
    """A body that runs as Python, because JAX can't export it to StableHLO.

    Attributes:
      reason: what can't be exported, and the user's line.
      fingerprint: identifies what the body computes.
      function: a `python_bodies.PythonFunction` in the process that made the plan, else None.
      program: a pickled `python_bodies.Recipe` from which other processes make the function; empty
        in the process that made the plan.
    """

    reason: str
    fingerprint: str
    function: Any = field(default=None, compare=False, repr=False)
    program: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Body:
    """One executable: serialized StableHLO for each platform, or a Python function.

    `narrow` are the dtypes of its results where the StableHLO returns wider ones. `working` is its
    peak memory in bytes for results and intermediate values. `devices` is 1, or the number of
    devices of the mesh that the body uses. `custom_calls` are the custom-call targets in the
    StableHLO, which other versions of JAX may lack.
    """

    name: str
    artefacts: Mapping[str, bytes]
    lines: tuple[str, ...] = ()
    python: PythonBody | None = None
    narrow: tuple[str, ...] = ()
    working: int = 0
    devices: int = 1
    custom_calls: tuple[str, ...] = ()

    @functools.cached_property
    def calls_lapack(self) -> bool:
        """Whether its StableHLO for CPUs has one of XLA's names for calls to LAPACK, verbatim."""
        return b"lapack_" in self.artefacts.get("cpu", b"")


def size_name(placement: str) -> str:
    """The name of the server value that is the number of members of a placement."""
    return f"size@{placement}"


@dataclass(frozen=True)
class Plan:
    """A whole program, ready to run.

    Attributes:
      sizes: number of members of each placement, or None if it is unknown before the plan runs. In
        that case steps read it from the int32 server value `size_name(placement)`.
      shard_sizes: members per shard of each placement, a multiple of 8.
      file_starts: for placements whose shards are cut at files, the index of each member, except
        the first one, at which a shard must start since a file does.
      values: type of each named value.
      bodies: executables by content hash.
      x64: whether 64-bit types were enabled when the program was staged.
      recipe: a `python_bodies.Recipe` of the plan, if a body runs as Python.
      costs: cost per member of each pass, and of each server step, by name of the step.
      rules: for each step, by its name, the rule that chose it, in words.
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
    file_starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    constants: tuple[Any, ...] = field(default=(), repr=False)
    recipe: Any = field(default=None, compare=False, repr=False)
    costs: Mapping[str, Cost] = field(default_factory=dict, compare=False, repr=False)
    rules: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def shards(self, placement: str) -> Shards:
        """The shards of a placement."""
        found = self._shards.get(placement)
        if found is None:
            cuts = self.file_starts.get(placement, ())
            found = Shards(self.sizes[placement], self.shard_sizes[placement], cuts)
            self._shards[placement] = found
        return found

    @property
    def open_placements(self) -> list[str]:
        """The placements whose members are counted while the plan runs."""
        return [placement for placement, n in self.sizes.items() if n is None]

    @functools.cached_property
    def _shards(self) -> dict[str, Shards]:
        return {}

    @functools.cached_property
    def placed_inputs(self) -> frozenset[str]:
        """The names of the inputs that steps read by shards."""
        views = (view.placed for spec in self.inputs for view in spec.views)
        return frozenset((*views, *(spec.placed for spec in self.inputs if spec.placed)))

    def returned(self) -> Mapping[str, None]:
        """The names of the values that the outputs are made of, in order."""
        return self._returned

    @functools.cached_property
    def _returned(self) -> Mapping[str, None]:
        return dict.fromkeys(out.value for out in self.outputs if out.value is not None)

    def passes(self) -> int:
        """Number of passes over placed data; a pass in a loop counts once."""
        return sum(isinstance(step, Map) for step in walk(self.steps))

    @property
    def vectorizations(self) -> dict[str, Vectorization]:
        """How each pass computes its shards, by name of the pass."""
        return {step.name: step.vectorization for step in walk(self.steps) if isinstance(step, Map)}

    def nbytes(self, name: str) -> int:
        """Bytes of a value, with all members."""
        value = self.values[name]
        return value.nbytes * (self.sizes[value.placement] if value.placement else 1)


def is_straight(steps: Iterable[Step]) -> bool:
    """Whether steps have no control flow."""
    return not any(isinstance(step, Loop | Branch) for step in steps)
