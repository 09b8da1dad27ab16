"""Moves slices of the members past equations, until a reduction masks the other members.

Members outside of the slice are computed as well, which at most doubles the work: `jnp.mean(loss(w,
x[:800]))` computes the loss of each member and sums the first 800. A slice that the program returns
is cut out of the placed result.

If an equation reads different slices of equal length, as in `jnp.sum((x[1:] - x[:-1]) ** 2)`, they
are moved onto each other by an exchange of the borders of shards. So are the two parts of
`jnp.roll`. With the same exchange, each shard computes operations that read windows of the members,
such as `jnp.convolve`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.by_shard import range_size
from beamjax.interpreters.rules.ordered import shifted, with_neighbours
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
    replaced,
    shape_of,
)
from beamjax.numerics.reducers import PICK, REDUCERS

MIN_SHARE = 0.5
"""Smallest share of the members in a slice for which all members are computed. A smaller slice is
selected instead (`rules.indexing.MAX_SHARE`)."""


@dataclass(frozen=True)
class Slice:
    """The members [start, start + count) of the n of a placement."""

    placement: str
    start: int
    count: int
    n: int

    @property
    def is_large(self) -> bool:
        """Whether all members may be computed for it."""
        return MIN_SHARE * self.n <= self.count < self.n

    def all_members(self) -> TracedShard:
        """All n members as one shard, where index 0 is the first member of the slice."""
        return TracedShard(jnp.int32(-self.start), self.n, jnp.ones(self.n, bool))

    def of(self, x: Any, axis: int) -> Any:
        """The slice of all members."""
        return lax.slice_in_dim(x, self.start, self.start + self.count, axis=axis)

    def masked(self, x: Any, axis: int, fill: Any) -> Any:
        """`x`, which holds all members, with `fill` for those outside of the slice."""
        index = lax.broadcasted_iota(np.dtype("int32"), x.shape, axis)
        inside = (index >= self.start) & (index < self.start + self.count)
        return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def windows(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that slices the members, or that reads slices of them."""
    part = _slice_of(rewriter.program, eqn)
    if part is not None:
        return _cut(rewriter, eqn, part) if part.is_large else None
    found = _roll(rewriter, eqn) or _slid(rewriter, eqn)
    if found is not None:
        return found
    parts = {view[0] for atom in eqn.inputs if (view := _view_of(rewriter, atom))}
    if not parts:
        return None
    if len(parts) > 1:
        _meet(rewriter, parts)
        return None
    (part,) = parts
    return _Window(rewriter, part).rewrite(eqn)


def return_slices(program: PlacedProgram) -> None:
    """Lets a program return placed values instead of large slices of them, in place.

    Not in a user's own pipeline, where an array without all members is one element.
    """
    if program.flat.unrolled:
        return
    makers = {var: eqn for eqn in program.flat.eqns for var in eqn.outputs}
    for number, atom in enumerate(program.flat.outputs):
        view = _view(program, makers.get(atom)) if isinstance(atom, Var) else None
        if view is not None and view[1] in makers:
            program.flat.outputs[number] = view[1]
            program.slices[number] = view[0].start, view[0].start + view[0].count


def _slice_of(program: PlacedProgram, eqn: Eqn) -> Slice | None:
    """The slice of members that a server equation takes, or None."""
    if eqn.primitive.name != "slice" or not runs_on_server(program, eqn):
        return None
    along = program.place(eqn.inputs[0])
    if along is None:
        return None
    n, strides = program.sizes[along.placement], eqn.params["strides"]
    if is_unknown(n) or (strides is not None and strides[along.axis] != 1):
        return None
    # Parameters of JAX equations may be NumPy integers.
    start, stop = (int(eqn.params[f"{end}_indices"][along.axis]) for end in ("start", "limit"))
    return Slice(along.placement, start, stop - start, n)


def _view(program: PlacedProgram, eqn: Eqn | None) -> tuple[Slice, Atom, int] | None:
    """The slice, the members and their axis, if an equation only takes a large slice; or None."""
    part = _slice_of(program, eqn) if eqn is not None else None
    if eqn is None or part is None or not part.is_large:
        return None
    (members,), along = eqn.inputs, program.place(eqn.inputs[0])
    assert along is not None
    uncut = replaced(shape_of(members), along.axis, part.count)
    return (part, members, along.axis) if shape_of(eqn.outputs[0]) == uncut else None


def _view_of(rewriter: BlockRewriter, atom: Atom) -> tuple[Slice, Atom, int] | None:
    """The same as `_view`, for the equation that computes a value of the block."""
    return _view(rewriter.program, rewriter.maker(atom, "slice"))


def _cut(rewriter: BlockRewriter, eqn: Eqn, part: Slice) -> Rewrite | None:
    """Rewrites a slice to one of moved members (see `_meet`) whose other axes are cut first.

    None if there is nothing to move or cut: the slice is a view already.
    """
    (members,), along = eqn.inputs, rewriter.program.place(eqn.inputs[0])
    assert along is not None
    start = rewriter.rewrites.starts.get(part, part.start)
    starts = replaced(eqn.params["start_indices"], along.axis, 0)
    limits = replaced(eqn.params["limit_indices"], along.axis, part.n)
    is_whole = (*starts, *limits) == (*(0 for _ in starts), *shape_of(members))
    is_whole &= eqn.params["strides"] is None or set(eqn.params["strides"]) == {1}
    move = _move(rewriter, members, along.axis, part.start - start)
    if move is None or (is_whole and start == part.start):
        return None

    def function(x: Any) -> Sequence[Any]:
        (cut,) = bind(eqn, [move(x)], start_indices=starts, limit_indices=limits)
        return [replace(part, start=start).of(cut, along.axis)]

    return Rewrite(function, [members], is_view=True)


def _meet(rewriter: BlockRewriter, parts: set[Slice]) -> None:
    """Decides to move slices of equal length onto the first one, in the next attempt."""
    starts, first = rewriter.rewrites.starts, min(parts, key=lambda part: part.start)
    if not rewriter.rewrites.moves or len({replace(part, start=0) for part in parts}) > 1:
        return
    # `parts` are as this attempt moved them, `starts` has their original positions.
    moved = {part for part, start in starts.items() if replace(part, start=start) in parts}
    changes = dict.fromkeys(parts | moved, first.start)
    rewriter.rewrites.is_outdated |= not changes.items() <= starts.items()
    starts.update(changes)


def _move(
    rewriter: BlockRewriter, atom: Atom, axis: int, k: int
) -> Callable[[jax.Array], jax.Array] | None:
    """A function that moves all members by k, as `shifted` does; None if it costs too much."""
    if k == 0:
        return lambda x: x
    block = _range(rewriter, atom, axis, abs(k), fewest=abs(k))
    return functools.partial(shifted, k=k, axis=axis, block=block) if block else None


def _range(rewriter: BlockRewriter, atom: Atom, axis: int, rows: int, *, fewest: int) -> int | None:
    """The number of members per range where shards exchange `rows` of each; None if there is none.

    Args:
      rewriter: of the block.
      atom: the members.
      axis: their axis.
      rows: how many members of each range its neighbours read.
      fewest: how many of them a single neighbour reads; a range can't be shorter.
    """
    aval, n = aval_of(atom), shape_of(atom)[axis]
    numbers = jnp.issubdtype(aval.dtype, np.number) or aval.dtype == np.bool_
    if not numbers or not PICK.takes(aval.dtype):
        return None
    member = aval.dtype.itemsize * math.prod(aval.shape) // n
    return range_size(n, rows * member, member, rewriter.program.shard_size, fewest=fewest)


def _roll(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites the concatenation of the last and the first members: `jnp.roll`."""
    if not rewriter.rewrites.moves or eqn.primitive.name != "concatenate":
        return None
    cuts = [cut for atom in eqn.inputs if (cut := rewriter.maker(atom, "slice")) is not None]
    parts = [part for cut in cuts if (part := _slice_of(rewriter.program, cut)) is not None]
    if not len(eqn.inputs) == len(parts) == 2:
        return None
    (last, first), members = parts, cuts[0].inputs[0]
    along = rewriter.program.place(members)
    assert along is not None
    # To move forward by `last.start` is to move backward by the rest; the shorter way is cheaper.
    k = min(last.start, last.start - last.n, key=abs)
    move = _move(rewriter, members, along.axis, k)
    rolls = (
        members is cuts[1].inputs[0]
        and eqn.params["dimension"] == along.axis
        and shape_of(eqn.outputs[0]) == shape_of(members)
        and (first.start, first.count) == (0, last.start)
    )
    return Rewrite(lambda x: [move(x)], [members]) if rolls and move is not None else None


# --- windows of the members


@dataclass(frozen=True)
class _Sliding:
    """How the results of an equation read windows of its first operand, along one axis.

    Attributes:
      width: the number of entries from the first one of a window to its last one.
      padding: how many entries there are before the first entry and after the last one.
      neutral: the value of these entries.
      out_axis: the axis of the results.
      changes: parameters of the equation without the padding.
    """

    width: int
    padding: tuple[int, int]
    neutral: Any
    out_axis: int
    changes: dict[str, Any]

    @classmethod
    def of(cls, eqn: Eqn, axis: int) -> _Sliding | None:
        """How an equation reads windows along an axis, if neighbours read neighbouring ones."""
        params, name, out_axis = eqn.params, eqn.primitive.name, axis
        neutral: Any = 0
        if name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            spatial = numbers.lhs_spec[2:]
            if axis not in spatial or params["batch_group_count"] != 1:
                return None
            k = spatial.index(axis)
            out_axis = numbers.out_spec[2 + k]
            size = shape_of(eqn.inputs[1])[numbers.rhs_spec[2 + k]]
            strides, dilations = params["window_strides"], params["rhs_dilation"]
            between = params["lhs_dilation"]
        else:
            k, size = axis, params["window_dimensions"][axis]
            strides, dilations = params["window_strides"], params["window_dilation"]
            between = params["base_dilation"]
            neutral = REDUCERS[_WINDOWED[name]].identity(aval_of(eqn.inputs[0]).dtype)
        if strides[k] != 1 or between[k] != 1:
            return None
        padding = params["padding"]
        changes = {"padding": replaced(padding, k, (0, 0))}
        width = (size - 1) * int(dilations[k]) + 1
        low, high = map(int, padding[k])
        return cls(width, (low, high), neutral, out_axis, changes)


_WINDOWED = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}
"""The primitives that reduce windows, and their reductions."""


def _slid(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation whose results each read a window of consecutive members."""
    program = rewriter.program
    if eqn.primitive.name not in (*_WINDOWED, "conv_general_dilated"):
        return None
    if not rewriter.rewrites.moves or any(map(program.place, eqn.inputs[1:])):
        return None
    # The derivative of windows pads its operand.
    pad = rewriter.maker(eqn.inputs[0], "pad")
    atom = pad.inputs[0] if pad is not None else eqn.inputs[0]
    part, members, axis = _view_of(rewriter, atom) or _all_of(program, atom) or (None, atom, 0)
    sliding = _Sliding.of(eqn, axis) if part is not None else None
    if part is None or sliding is None:
        return None
    # Padding before and after the entries, by the equation itself and by a separate `pad`.
    low, high = sliding.padding
    if pad is not None:
        before, after, between = map(int, pad.params["padding_config"][axis])
        fill = pad.inputs[1]
        is_neutral = not isinstance(fill, Var) and fill.val == sliding.neutral
        if not is_neutral or min(before, after) < 0 or between:
            return None
        low, high = low + before, high + after
    count = part.count + low + high - (sliding.width - 1)
    if not (0 <= low < sliding.width > high >= 0 and sliding.width > 1) or count > part.n:
        return None
    # Results begin at the member at which the slice begins, or earlier if there are more of them.
    start = min(part.start, part.n - count)
    made = replace(part, start=start, count=count)
    # The window of a result reaches from `before` members before it to `after` members after it.
    before = start - part.start + low
    after = sliding.width - 1 - before
    block = _range(rewriter, members, axis, before + after, fewest=max(before, after))
    if block is None or not (made.is_large or count == part.n):
        return None

    def windows_of(shard: TracedShard, rows: Any, *others: Any) -> Any:
        member = shard.start - before + lax.iota(np.dtype("int32"), len(rows))
        inside = (member >= part.start) & (member < part.start + part.count)
        inside = inside.reshape(-1, *(1 for _ in rows.shape[1:]))
        rows = jnp.where(inside, rows, jnp.asarray(sliding.neutral, rows.dtype))
        (found,) = bind(eqn, [jnp.moveaxis(rows, 0, axis), *others], **sliding.changes)
        return jnp.moveaxis(found, sliding.out_axis, 0)

    def function(x: Any, *others: Any) -> Sequence[Any]:
        if pad is not None:
            config = replaced(pad.params["padding_config"], axis, (0, 0, 0))
            (x,) = bind(pad, [x, sliding.neutral], padding_config=config)
        x = jnp.moveaxis(x, axis, 0)
        found = with_neighbours(windows_of, x, *others, before=before, after=after, block=block)
        found = jnp.moveaxis(found, 0, sliding.out_axis)
        return [found if count == part.n else made.of(found, sliding.out_axis)]

    return Rewrite(function, [members, *eqn.inputs[1:]], is_view=count < part.n)


def _all_of(program: PlacedProgram, atom: Atom) -> tuple[Slice, Atom, int] | None:
    """All members of a placed value, as a slice; None for others."""
    along = program.place(atom)
    if along is None or is_unknown(program.sizes[along.placement]):
        return None
    n = program.sizes[along.placement]
    return Slice(along.placement, 0, n, n), atom, along.axis


class _Window:
    """Rewrites equations that read the slice `part` of the members to read all members."""

    def __init__(self, rewriter: BlockRewriter, part: Slice):
        self.rewriter = rewriter
        self.part = part

    def rewrite(self, eqn: Eqn) -> Rewrite | None:
        views = [_view_of(self.rewriter, atom) for atom in eqn.inputs]
        if views[0] is not None and eqn.primitive.name == "pad":
            return self.padded(eqn, *views[0][1:])
        if views[0] is not None and eqn.primitive.name == "slice":
            return self.cut_again(eqn, *views[0][1:])
        rule = rules.classify(eqn, [view[2] if view else None for view in views], self.part.count)
        atoms = self.operands(eqn, rule)
        if rule is None or atoms is None:
            return None
        if isinstance(rule, MemberwiseRule):

            def function(*args: Any) -> Sequence[Any]:
                outs = rule.emit(eqn, args, self.part.all_members())
                pairs = zip(outs, rule.out_axes, strict=True)
                return [self.part.of(x, axis) for x, axis in pairs if axis is not None]

            return Rewrite(function, atoms, is_view=True)
        return Rewrite(functools.partial(self.reduced, eqn, rule), atoms)

    def operands(self, eqn: Eqn, rule: MemberwiseRule | ReductionRule | None) -> list[Atom] | None:
        """The operands of an equation for all members; None if some hold only the slice."""
        selects = isinstance(rule, ReductionRule) and rule.selects_members
        if rule is None or selects or isinstance(rule, FunctionReductionRule):
            return None
        atoms: list[Atom] = []
        for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True):
            found = atom if axis is None else self.whole(atom, axis)
            is_placed = self.rewriter.program.place(atom) is not None
            if found is None or is_placed or (axis is None and _view_of(self.rewriter, atom)):
                return None
            atoms.append(found)
        return atoms

    def whole(self, atom: Atom, axis: int) -> Atom | None:
        """All members of a value that holds those of the slice, or None.

        The others of a server value such as `jnp.arange(800)` can be created.
        """
        view = _view_of(self.rewriter, atom)
        if view is not None or not isinstance(atom, Var):
            return view[1] if view and view[0] == self.part and view[2] == axis else None
        maker = self.rewriter.makers.get(atom)
        if maker is None or not runs_on_server(self.rewriter.program, maker):
            return None
        out = maker.outputs.index(atom)
        rule = rules.invert(maker, out, axis, self.part.count)
        atoms = self.operands(maker, rule)
        if rule is None or atoms is None:
            return None
        emit = functools.partial(rule.emit, maker)
        function = lambda *args: [emit(args, self.part.all_members())[out]]
        made, (result,) = self.rewriter.traced(function, atoms, maker.line)
        self.rewriter.added += made
        return result

    def cut_again(self, eqn: Eqn, members: Atom, axis: int) -> Rewrite | None:
        """Rewrites a slice of a slice to one of the members."""
        if eqn.params["strides"] is not None and eqn.params["strides"][axis] != 1:
            return None
        bounds = {
            key: replaced(eqn.params[key], axis, eqn.params[key][axis] + self.part.start)
            for key in ("start_indices", "limit_indices")
        }
        return Rewrite(lambda x: bind(eqn, [x], **bounds), [members], is_view=True)

    def padded(self, eqn: Eqn, members: Atom, axis: int) -> Rewrite | None:
        """Rewrites the derivative of a slice, which pads: fills other members and moves all."""
        low, high, between = map(int, eqn.params["padding_config"][axis])
        part, count = self.part, low + self.part.count + high
        if not min(low, high) >= 0 == between or not count <= part.n:
            return None
        made = replace(part, start=min(max(part.start - low, 0), part.n - count), count=count)
        k = part.start - low - made.start
        move = _move(self.rewriter, members, axis, k)
        moves = self.rewriter.rewrites.moves or k == 0
        if not moves or move is None or self.rewriter.program.place(eqn.inputs[1]):
            return None

        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            found = move(part.masked(padded, axis, fill))
            return [found if count == part.n else made.of(found, axis)]

        return Rewrite(function, [members, eqn.inputs[1]], is_view=count < part.n)

    def reduced(self, eqn: Eqn, rule: ReductionRule, *args: Any) -> Sequence[Any]:
        """Reduces all members, where those outside of the slice are the neutral element."""
        scatters = eqn.primitive.name.startswith("scatter")
        masked = list(args)
        for i, axis in enumerate(rule.in_axes):
            if axis is not None and not (scatters and i == 1):
                neutral = REDUCERS[rule.reducer].identity(args[i].dtype)
                masked[i] = self.part.masked(args[i], axis, neutral)
        # Indices that are unique and sorted in the slice need not be so outside of it.
        free = {"indices_are_sorted": False, "unique_indices": False} if scatters else {}
        return bind(eqn, masked, **free)
