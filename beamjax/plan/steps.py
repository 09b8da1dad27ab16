"""The plan: a program as data, without JAX tracers and without Beam transforms.

A plan is a list of steps over named values. A *server* value has one copy. A *placed* value has one
entry per member of a placement, and steps only see a shard of it at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 and friends with numpy.dtype)
import numpy as np

from beamjax.plan.shard import Shards, SizeReason


@dataclass(frozen=True)
class Cost:
    """The work in some equations in operations and bytes, as counted without running them."""

    flops: float = 0.0  # arithmetic operations; a transcendental function counts as several
    nbytes: float = 0.0  # at most; between memory and the processor
    guessed: bool = False  # whether a number of rounds depends on data
    # Time by which these operations are slower than matrix products of as many operations, in
    # operations of a matrix product.
    extra: float = 0.0
    # Whether it includes a convolution whose input and kernel both differ between members.
    grouped: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.guessed or other.guessed,
            self.extra + other.extra,
            self.grouped or other.grouped,
        )

    def times(self, count: float) -> Cost:
        """The cost of doing this work `count` times."""
        flops, nbytes, extra = count * self.flops, count * self.nbytes, count * self.extra
        return replace(self, flops=flops, nbytes=nbytes, extra=extra)

    @property
    def weight(self) -> float:
        """The number of operations of a matrix product that take as long as this work."""
        return self.flops + self.extra


class Vectorization(NamedTuple):
    """How a pass computes the members of a shard."""

    kind: str = "vmap"  # all at once; "batches", some at a time; or "loop", sequentially
    batch: int = 0  # members that are computed at once, for "batches"

    def __str__(self) -> str:
        return f"batches of {self.batch}" if self.kind == "batches" else self.kind


VMAP = Vectorization()


class ValueType(NamedTuple):
    """The type of one value."""

    # Steps exchange raw NumPy data, for typed PRNG keys the key data, so code that runs a plan only
    # has to call executables.
    shape: tuple[int, ...]  # of the raw data; for a placed value, of one member
    dtype: str  # name of the raw data's NumPy dtype
    key_impl: str | None = None  # implementation of typed PRNG keys
    placement: str | None = None  # None for a server value

    @property
    def nbytes(self) -> int:
        """Bytes of a server value, or of one member of a placed value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        dims = ",".join(map(str, self.shape))
        return f"{kind}[{dims}]" + (f"@{self.placement}" if self.placement else "")


class View(NamedTuple):
    """A placed value whose members are groups of rows of an input: `x.reshape(n, rows, ...)`."""

    placed: str
    rows: int  # consecutive ones of the input, per member


class Input(NamedTuple):
    """One flat input of the program: an argument, or a closed-over constant."""

    # Steps may read it as a server value, as a placed value, as views, or not at all.
    path: str  # in the arguments, e.g. `params['w']`, or `constant 3`
    server: str | None  # name of the server value, None if no step reads it whole
    placed: str | None  # name of the placed value, None if no step reads it by shards
    axis: int = 0  # of the members, in the user's array
    views: tuple[View, ...] = ()
    short: bool = False  # whether its shards are padded only to a bucket, see `Bucketed`


class Output(NamedTuple):
    """One flat output: a value of the plan, an input that is returned as it is, or a constant."""

    # One of these three is set.
    value: str | None = None
    input: int | None = None  # its index
    constant: np.ndarray | None = None  # a raw array
    axis: int = 0  # of the members in the result, for a placed value


class Reduction(NamedTuple):
    """One reduction: the `size` values from `offset` on in a fused reduction buffer."""

    result: str
    reducer: str
    dtype: str
    offset: int
    size: int


class FusedBuffer(NamedTuple):
    """Reductions of a pass that share an accumulator: a shard gives one flat vector for them."""

    kind: str  # of the accumulator: "sum", "max", ...
    dtype: str  # of the partials
    size: int  # number of values
    reductions: tuple[Reduction, ...]


class Combine(NamedTuple):
    """A reduction by an associative function, which need not be commutative."""

    # The body takes `(*inputs, *left, *right)`: server values and the partials (lists of arrays) of
    # two adjacent ranges of members. It returns the partial of both ranges together. It is called
    # in the order of a `beamjax.numerics.ordered_tree.DyadicTree`.
    name: str  # of the function
    body: str
    inputs: tuple[str, ...]  # names of server values; they are broadcasts of the pass as well
    leaves: tuple[ValueType, ...]  # type of each array of a partial
    results: tuple[str | None, ...]  # the value that each array of the last partial becomes


@dataclass(frozen=True)
class Server:
    """One executable over server values: `outputs = body(*inputs)`."""

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str = ""  # why it holds a `map_fn`, if it does


class Bucketed(NamedTuple):
    """Bodies of a pass for shards whose ragged members fit in a shorter bucket."""

    shapes: tuple[tuple[int, ...], ...]  # of one member of each operand
    body: str  # like that of the pass
    short_body: str | None = None


class PaddingCheck(NamedTuple):
    """Bodies of a pass for members with more padding, which must give the same results."""

    shapes: tuple[tuple[int, ...], ...]  # of one member of each operand
    body: str  # like that of the pass
    short_body: str | None
    buffers: tuple[FusedBuffer, ...]  # sizes may differ, if they depend on the padding


class Guard(NamedTuple):
    """How a pass handles members that it can't compute."""

    # The body of a guarded pass takes `(start, members, mask, *broadcasts, *operands)`: the index
    # of the first member of the shard, the index of the member in each row (the row of a dropped
    # member is a copy of another row), and a mask of the rows that count. Unless `on_nonfinite` is
    # "keep", its last result is a mask of the members whose floats are all finite.
    on_error: str  # "raise" or "drop", for members that can't be read or computed
    on_nonfinite: str  # "keep", "raise" or "drop", for members whose results hold NaN or infinity
    reads: bool = False  # whether the last operand is a mask: without what earlier passes dropped
    emits_mask: bool = False  # whether the last result is the mask without what this pass dropped

    @property
    def drops(self) -> bool:
        """Whether the pass may drop members."""
        return "drop" in (self.on_error, self.on_nonfinite)


@dataclass(frozen=True)
class Map:
    """One pass over the members of a placement."""

    name: str
    placement: str
    # The body takes `(start, count, *broadcasts, *operands)`: the index of the shard's first
    # member, the number of members without padding, server values, and placed values padded to the
    # shard size. It returns the placed results of the shard, one flat vector of partials per
    # `FusedBuffer`, and the arrays of each `Combine`. With a guard it takes and returns more.
    body: str  # computes full shards
    broadcasts: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    buffers: tuple[FusedBuffer, ...]
    functions: tuple[str, ...] = ()  # names of the user's functions, for messages
    combines: tuple[Combine, ...] = ()
    guard: Guard | None = None
    bucketed: tuple[Bucketed, ...] = ()  # used instead if the operands have their shapes
    loop_reason: str = ""  # why a shard is not one vmap
    vectorization: Vectorization = VMAP
    # Computes shards with padding or dropped members, which need a mask. The same as `body` where a
    # mask costs little; None where all shards are full.
    short_body: str | None = None
    padding_check: PaddingCheck | None = None  # for members of unequal length

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
        return buffers + sum(leaf.nbytes for combine in self.combines for leaf in combine.leaves)

    @functools.cached_property
    def reduced(self) -> tuple[str, ...]:
        """Names of the server values that its reductions define."""
        buffers = (r.result for buffer in self.buffers for r in buffer.reductions)
        combined = (name for combine in self.combines for name in combine.results if name)
        return (*buffers, *combined)


RANGE_VALUES = 1 << 20
"""Largest number of values in a range of a buffer. An exact accumulator of so many float32 values
takes 16 MiB, and at worst 64 MiB, the limit for Beam elements."""


class ValueRange(NamedTuple):
    """The values [start, stop) of buffer number `buffer` of a step."""

    buffer: int
    start: int
    stop: int

    def cut(self, limit: int) -> Iterator[ValueRange]:
        """Splits this range into ranges of at most `limit` values; an empty one stays one range."""
        for start in range(self.start, max(self.stop, self.start + 1), limit):
            yield ValueRange(self.buffer, start, min(start + limit, self.stop))


def accumulator_ranges(step: Map) -> tuple[ValueRange, ...]:
    """The ranges of all buffers of a step, each small enough for an accumulator."""
    return _ranges(tuple([buffer.size for buffer in step.buffers]), RANGE_VALUES)


@functools.lru_cache(maxsize=256)
def _ranges(sizes: tuple[int, ...], limit: int) -> tuple[ValueRange, ...]:
    # An empty buffer is one empty range.
    wholes = [ValueRange(number, 0, size) for number, size in enumerate(sizes)]
    return tuple(piece for whole in wholes for piece in whole.cut(limit))


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
    """Reads rows of a placed value by index."""

    name: str
    operand: str
    numbers: str  # an int32 server value: the member of each row, all in bounds
    result: str  # a server value, or a placed value with a member for each row
    line: str


@dataclass(frozen=True)
class Block:
    """The steps of a branch, of a condition, or of one round of a loop."""

    # Both may read values of the enclosing blocks.
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]


class Carried(NamedTuple):
    """A carried value of a loop: a server value in all rounds, or a placed one in all rounds."""

    init: str  # before the first round
    param: str  # as a round reads it
    result: str  # after the last round


class Sliced(NamedTuple):
    """A value of which each round of a loop reads one entry (`xs` of `lax.scan`)."""

    # Entries lie along axis 0 of a server value, and along axis 0 of each member of a placed one.
    operand: str
    param: str  # as a round reads its entry


@dataclass(frozen=True)
class Loop:
    """A loop: `lax.scan` or `lax.while_loop` around placed operators."""

    name: str
    rounds: int | None  # None if a condition decides
    condition: Block | None  # over the same params; its only output is a server boolean
    # One round. Its outputs are the next value of each carried value, then one entry of each
    # stacked result. All outputs are read before any carried value is replaced.
    block: Block
    carried: tuple[Carried, ...]
    sliced: tuple[Sliced, ...]
    stacked: tuple[str, ...]  # values with the entries of all rounds, laid out as in `Sliced`
    reverse: bool  # from the last entry to the first
    line: str  # the user's

    def entry_index(self, number: int) -> int:
        """The index at which round `number` reads its slices and writes its stacked results."""
        return (self.rounds or 0) - 1 - number if self.reverse else number


@dataclass(frozen=True)
class Branch:
    """A branch: `lax.cond` or `lax.switch` around placed operators."""

    name: str
    index: str  # a server int32 or boolean that chooses the block; clamped to valid numbers
    blocks: tuple[Block, ...]  # one of them is run
    results: tuple[str, ...]  # what its outputs become; each has one placement in all blocks
    line: str  # the user's


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
    """A body that runs as Python, because JAX can't export it to StableHLO."""

    reason: str  # what can't be exported, and the user's line
    fingerprint: str  # identifies what the body computes
    # A `python_bodies.PythonFunction` in the process that made the plan. Others make it from the
    # program, a pickled `python_bodies.Recipe`, which is empty in that process.
    function: Any = field(default=None, compare=False, repr=False)
    program: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Body:
    """One executable: serialized StableHLO for each platform, or a Python function."""

    name: str
    artefacts: Mapping[str, bytes]
    lines: tuple[str, ...] = ()
    python: PythonBody | None = None
    narrow: tuple[str, ...] = ()  # dtypes of its results where the StableHLO returns wider ones
    working: int = 0  # peak memory in bytes for results and intermediate values
    devices: int = 1  # those of the mesh that the body uses
    custom_calls: tuple[str, ...] = ()  # targets that other versions of JAX may lack

    @functools.cached_property
    def calls_lapack(self) -> bool:
        """Whether its StableHLO for CPUs has one of XLA's names for calls to LAPACK, verbatim."""
        return b"lapack_" in self.artefacts.get("cpu", b"")


def size_name(placement: str) -> str:
    """The name of the server value that is the number of members of a placement."""
    return f"size@{placement}"


@dataclass(frozen=True)
class Plan:
    """A whole program, ready to run."""

    name: str
    # Members of each placement. If it is None, the number is unknown before the plan runs, and
    # steps read it from the int32 server value `size_name(placement)`.
    sizes: Mapping[str, Any]
    shard_sizes: Mapping[str, int]  # members of each placement, a multiple of 8
    values: Mapping[str, ValueType]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    bodies: Mapping[str, Body]  # by content hash
    x64: bool  # whether 64-bit types were enabled when the program was staged
    jax_version: str
    # For placements whose shards are cut at files, the index of each member, except the first one,
    # at which a shard must start since a file does.
    file_starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    constants: tuple[Any, ...] = field(default=(), repr=False)
    # A `python_bodies.Recipe` of the plan, if a body runs as Python.
    recipe: Any = field(default=None, compare=False, repr=False)
    # By name of the step: its cost (of a pass, per member), and the rule that chose it, in words.
    costs: Mapping[str, Cost] = field(default_factory=dict, compare=False, repr=False)
    rules: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    # By placement, the rules that decided its shard size, in the order in which they did.
    size_reasons: Mapping[str, tuple[SizeReason, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def shards(self, placement: str) -> Shards:
        """The shards of a placement."""
        shards = self._shards.get(placement)
        if shards is None:
            cuts = self.file_starts.get(placement, ())
            shards = Shards(self.sizes[placement], self.shard_sizes[placement], cuts)
            self._shards[placement] = shards
        return shards

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

    @functools.cached_property
    def picks_rows(self) -> bool:
        """Whether a step takes rows of a placed value by their numbers."""
        return any(isinstance(step, Rows) for step in walk(self.steps))

    @functools.cached_property
    def is_one_graph(self) -> bool:
        """Whether steps without control flow compute all outputs from the inputs."""
        computed: set[str] = set()
        for step in self.steps:
            match step:
                case Server(outputs=names):
                    computed.update(names)
                case Map():
                    computed.update(step.results, step.reduced)
                case Gather(result=name):
                    computed.add(name)
                case Loop() | Branch() | Rows():
                    return False
        return self.returned().keys() <= computed

    @functools.cached_property
    def handed_bytes(self) -> int:
        """Most bytes of placed results of a pass of which a later pass reads some."""
        passes = [step for step in self.steps if isinstance(step, Map)]
        read = {name for step in passes for name in step.operands}
        return max(
            (
                (self.sizes[step.placement] or 0)
                * sum(self.values[name].nbytes for name in step.results)
                for step in passes
                if not read.isdisjoint(step.results)
            ),
            default=0,
        )

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
