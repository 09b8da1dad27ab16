"""Moves slices of the members past equations, until a reduction masks the other members.

Members outside of the slice are computed as well, which at most doubles the work: `jnp.mean(loss(w,
x[:800]))` computes the loss of each member and sums the first 800. A slice that the program returns
is cut out of the placed result.

If an equation reads different slices of equal length, as in `jnp.sum((x[1:] - x[:-1]) ** 2)`, they
are moved onto each other by an exchange of the borders of shards. So are the two parts of
`jnp.roll`. With the same exchange, each shard computes operations that read windows of the members,
such as `jnp.convolve`.

A value may have a few more rows than there are members, as that of `jnp.convolve` or `jnp.pad`. It
is moved past equations as the concatenation of all members and a *tail*, which is a server value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import MemberAxis, PlacedProgram
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
    with_axes_of,
)
from beamjax.numerics.reducers import PICK, REDUCERS

MIN_SHARE = 0.5
"""Smallest share of the members in a slice for which all members are computed. A smaller slice is
selected instead (`rules.indexing.MAX_SHARE`)."""


MAX_STRIDE = 8
"""Largest stride of a slice for which all members are computed. Reductions of members that are
already there cost little, but results would have that many times as many rows."""


@dataclass(frozen=True)
class Slice:
    """Every `stride`-th member from `start` on, `count` of the n of a placement."""

    placement: str
    start: int
    count: int
    n: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """The index after the last member."""
        return self.start + max((self.count - 1) * self.stride + 1, 0)

    @property
    def is_large(self) -> bool:
        """Whether all members may be computed for it."""
        return self.count < self.n <= self.count * self.stride / MIN_SHARE and (
            self.stride <= MAX_STRIDE
        )

    def all_members(self) -> TracedShard:
        """All n members as one shard, where index 0 is the first member of the slice."""
        start, mask = jnp.int32(-self.start), jnp.ones(self.n, bool)
        if self.stride == 1:
            return TracedShard(start, self.n, mask)
        index = lax.iota(np.dtype("int32"), self.n) - np.int32(self.start)
        return TracedShard(start, self.n, mask, index // np.int32(self.stride))

    def of(self, x: Any, axis: int) -> Any:
        """The slice of all members."""
        return lax.slice_in_dim(x, self.start, self.stop, self.stride, axis)

    def has(self, index: Any) -> Any:
        """Which of these members are in the slice."""
        inside = (index >= self.start) & (index < self.stop)
        return inside & ((index - self.start) % self.stride == 0) if self.stride > 1 else inside

    def masked(self, x: Any, axis: int, fill: Any) -> Any:
        """`x`, which holds all members, with `fill` for those outside of the slice."""
        index = lax.broadcasted_iota(np.dtype("int32"), x.shape, axis)
        return jnp.where(self.has(index), x, jnp.asarray(fill, x.dtype))


def windows(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that slices the members, or that reads slices of them."""
    part = _slice_of(rewriter.program, eqn)
    if part is not None:
        return _cut(rewriter, eqn, part) if part.is_large else None
    for find in _roll, _joined, _slid, _tailed:
        found = find(rewriter, eqn)
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

    It returns placed values with their tails, too. Not in a user's own pipeline, where an array
    without all members, or with more rows, is one element.
    """
    if program.flat.unrolled:
        return
    makers = {var: eqn for eqn in program.flat.eqns for var in eqn.outputs}
    for number, atom in enumerate(program.flat.outputs):
        maker = makers.get(atom) if isinstance(atom, Var) else None
        view, extended = _view(program, maker), Extended.of(program, maker)
        if view is not None and view[1] in makers:
            program.flat.outputs[number] = view[1]
            program.slices[number] = view[0].start, view[0].stop, view[0].stride
        elif extended is not None and {extended.members, extended.tail} <= makers.keys():
            program.flat.outputs[number] = extended.members
            program.tails[number] = extended.tail
    program.flat.outputs += program.tails.values()


def _slice_of(program: PlacedProgram, eqn: Eqn) -> Slice | None:
    """The slice of members that a server equation takes, or None."""
    if eqn.primitive.name != "slice" or not runs_on_server(program, eqn):
        return None
    along = program.place(eqn.inputs[0])
    if along is None:
        return None
    n, strides = program.sizes[along.placement], eqn.params["strides"]
    if is_unknown(n):
        return None
    # Parameters of JAX equations may be NumPy integers.
    start = int(eqn.params["start_indices"][along.axis])
    stride = 1 if strides is None else int(strides[along.axis])
    return Slice(along.placement, start, shape_of(eqn.outputs[0])[along.axis], n, stride)


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
    strides = replaced(eqn.params["strides"] or [1] * len(starts), along.axis, 1)
    is_whole = (*starts, *limits) == (*(0 for _ in starts), *shape_of(members))
    is_whole &= set(strides) == {1}
    move = _move(rewriter, members, along.axis, part.start - start)
    if move is None or (is_whole and start == part.start):
        return None

    def function(x: Any) -> Sequence[Any]:
        bounds = {"start_indices": starts, "limit_indices": limits, "strides": strides}
        (cut,) = bind(eqn, [move(x)], **bounds)
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
    if last.stride != 1 or first.stride != 1:
        return None
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
      stride: the number of entries from a window to the next one.
      between: the number of entries for each entry of the operand, all but the first of which are
        neutral.
      padding: how many entries there are before the first entry and after the last one.
      neutral: the value of these entries.
      out_axis: the axis of the results.
      number: the number of the axis in the parameters of the equation.
    """

    width: int
    stride: int
    between: int
    padding: tuple[int, int]
    neutral: Any
    out_axis: int
    number: int

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
        width = (size - 1) * int(dilations[k]) + 1
        low, high = map(int, params["padding"][k])
        return cls(width, int(strides[k]), int(between[k]), (low, high), neutral, out_axis, k)

    def changes(
        self, eqn: Eqn, padding: tuple[int, int], stride: int, entry: int
    ) -> dict[str, Any]:
        """Parameters to read entries that are `entry` rows apart, a window every `stride` rows."""
        window, base = (
            ("rhs_dilation", "lhs_dilation")
            if eqn.primitive.name == "conv_general_dilated"
            else ("window_dilation", "base_dilation")
        )
        new = {"padding": padding, "window_strides": stride, base: 1}
        new[window] = int(eqn.params[window][self.number]) * entry
        return {key: replaced(eqn.params[key], self.number, value) for key, value in new.items()}


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
    pad = rewriter.maker(eqn.inputs[0], "pad") or rewriter.pads.get(eqn.inputs[0])
    atom = pad.inputs[0] if pad is not None else eqn.inputs[0]
    extended = _extended(rewriter, atom)
    view = extended.view() if extended else _view_of(rewriter, atom) or _all_of(program, atom)
    part, members, axis = view or (None, atom, 0)
    sliding = _Sliding.of(eqn, axis) if part is not None else None
    if part is None or sliding is None:
        return None
    # Padding before, after and between the entries, by the equation itself and by a separate `pad`.
    (low, high), between = sliding.padding, sliding.between
    if pad is not None:
        before, after, apart = map(int, pad.params["padding_config"][axis])
        fill = pad.inputs[1]
        is_neutral = not isinstance(fill, Var) and fill.val == sliding.neutral
        if not is_neutral or min(before, after) < 0 or between != 1:
            return None
        low, high, between = low + before, high + after, apart + 1
    if part.stride % between or not part.count:
        return None
    # From one entry to the next there are `entry` members, from one result to the next `stride`.
    n, entry = part.n, part.stride // between
    stride, reach = entry * sliding.stride, entry * (sliding.width - 1)
    entries = (part.count - 1) * between + 1 + low + high
    count = (entries - sliding.width) // sliding.stride + 1
    if entries < sliding.width or min(low, high) < 0 or count > 2 * n:
        return None
    # Results begin at the member at which the slice begins, or earlier if there are more of them.
    span = (count - 1) * stride + 1
    start = max(min(part.start, n - span), 0)
    made = Slice(part.placement, start, min(count, n), n, stride)
    if span > n and (stride, part.stride) != (1, 1):
        return None
    # The window of a result reaches from `before` members before it to `after` members after it.
    before = start - part.start + low * entry
    after = reach - before
    block = _range(rewriter, members, axis, before + after, fewest=max(before, after))
    if block is None or min(before, after) < 0:
        return None
    # The server selects few results of windows that are far apart.
    if not (made.is_large or made.count == n or stride > 1):
        return None

    def results(
        rows: Any, others: Sequence[Any], padding: tuple[int, int], stride: int, entry: int
    ) -> Any:
        return bind(eqn, [rows, *others], **sliding.changes(eqn, padding, stride, entry))[0]

    def windows_of(shard: TracedShard, rows: Any, *others: Any) -> Any:
        member = shard.start - before + lax.iota(np.dtype("int32"), len(rows))
        if extended is not None:
            tail, others = others[0], others[1:]
            after_last = jnp.take(tail, member - n, axis=0, mode="clip")
            rows = jnp.where(with_axes_of(member >= n, rows), after_last, rows)
        inside = with_axes_of(part.has(member), rows)
        rows = jnp.where(inside, rows, jnp.asarray(sliding.neutral, rows.dtype))
        first = (np.int32(start) - shard.start) % np.int32(stride)
        if stride > 1:
            # The first result of the shard is in its row `first`, others every `stride` rows.
            longer = jnp.concatenate([rows, rows[:1].repeat(stride - 1, 0)])
            rows = lax.dynamic_slice_in_dim(longer, first, len(rows))
        found = results(jnp.moveaxis(rows, 0, axis), others, (0, 0), stride, entry)
        found = jnp.moveaxis(found, sliding.out_axis, 0)
        if stride > 1:
            row = (lax.iota(np.dtype("int32"), shard.size) - first) // np.int32(stride)
            found = jnp.take(found, row, axis=0, mode="clip")
        return found

    def padded(x: Any) -> Any:
        """The operand with its padding along other axes."""
        if pad is None:
            return x
        config = replaced(pad.params["padding_config"], axis, (0, 0, 0))
        return bind(pad, [x, sliding.neutral], padding_config=config)[0]

    def last(x: Any, tail: Sequence[Any]) -> Any:
        """The entries that results after the last member read."""
        stop = min(part.start + part.count, n)
        own = lax.slice_in_dim(x, min(part.start + n - low, stop), stop, axis=axis)
        return lax.concatenate([own, *tail], axis)

    def function(x: Any, *others: Any) -> Sequence[Any]:
        x, tail = padded(x), [padded(t) for t in others[: len(tails)]]
        kernel = others[len(tail) :]
        served = [*(jnp.moveaxis(t, axis, 0) for t in tail), *kernel]
        rows, kinds = jnp.moveaxis(x, axis, 0), {"before": before, "after": after, "block": block}
        found = with_neighbours(windows_of, rows, *served, **kinds)
        found = jnp.moveaxis(found, 0, sliding.out_axis)
        if count > n:
            rest = results(last(x, tail), kernel, (0, high), 1, 1)
            return [lax.concatenate([found, rest], sliding.out_axis)]
        return [found if count == n else made.of(found, sliding.out_axis)]

    tails = [extended.tail] if extended is not None else []
    is_view = count > n or made.is_large
    return Rewrite(function, [members, *tails, *eqn.inputs[1:]], is_view=is_view)


def _all_of(program: PlacedProgram, atom: Atom) -> tuple[Slice, Atom, int] | None:
    """All members of a placed value, as a slice; None for others."""
    along = program.place(atom)
    if along is None or is_unknown(program.sizes[along.placement]):
        return None
    n = program.sizes[along.placement]
    return Slice(along.placement, 0, n, n), atom, along.axis


# --- more rows than members


@dataclass(frozen=True)
class Extended:
    """All n members along `axis`, followed by the rows of a server value, `count` rows in all."""

    members: Var
    tail: Var
    along: MemberAxis
    n: int
    count: int

    @staticmethod
    def of(program: PlacedProgram, eqn: Eqn | None) -> Extended | None:
        """The members and the tail that an equation concatenates, if it does so, or None."""
        if eqn is None or eqn.primitive.name != "concatenate" or len(eqn.inputs) != 2:
            return None
        (members, tail), axis = eqn.inputs, eqn.params["dimension"]
        along = program.place(members)
        if along is None or along.axis != axis or not isinstance(members, Var):
            return None
        n = program.sizes[along.placement]
        if program.place(tail) is not None or is_unknown(n) or not isinstance(tail, Var):
            return None
        return Extended(members, tail, along, n, shape_of(eqn.outputs[0])[axis])

    def view(self) -> tuple[Slice, Atom, int]:
        """Like `_view`, where the slice has more members than there are."""
        part = Slice(self.along.placement, 0, self.count, self.n)
        return part, self.members, self.along.axis


def _extended(rewriter: BlockRewriter, atom: Atom) -> Extended | None:
    return Extended.of(rewriter.program, rewriter.maker(atom, "concatenate"))


def _joined(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a concatenation of members and server values, or padding of all members."""
    program, name = rewriter.program, eqn.primitive.name
    if name == "concatenate" and Extended.of(program, eqn) is None:
        axis, atoms = eqn.params["dimension"], list(eqn.inputs)
        found = [
            i for i, atom in enumerate(atoms) if program.place(atom) or _view_of(rewriter, atom)
        ]
        if len(found) != 1:
            return None
        (at,) = found
        view = _view_of(rewriter, atoms[at]) or _all_of(program, atoms[at])
        others = atoms[:at] + atoms[at + 1 :]

        def ends(*others: Any) -> list[Any]:
            return [lax.concatenate(x, axis) if x else None for x in (others[:at], others[at:])]

        heads = sum(shape_of(atom)[axis] for atom in atoms[:at])
        tails = sum(shape_of(atom)[axis] for atom in atoms[at + 1 :])
        return _placed_rows(rewriter, view, axis, (heads, tails), others, ends)
    if name == "pad":
        (atom, fill), config = eqn.inputs, eqn.params["padding_config"]
        view = _all_of(program, atom)
        if view is None or program.place(fill) is not None:
            return None
        axis = view[2]
        low, high, between = map(int, config[axis])
        others_padded = any(any(map(int, c)) for k, c in enumerate(config) if k != axis)
        if between or others_padded or min(low, high) < 0:
            return None
        rewriter.pads[eqn.outputs[0]] = eqn

        def fills(fill: Any) -> list[Any]:
            shape = shape_of(atom)
            return [lax.full(replaced(shape, axis, k), fill) if k else None for k in (low, high)]

        return _placed_rows(rewriter, view, axis, (low, high), [fill], fills)
    return None


def _placed_rows(
    rewriter: BlockRewriter,
    view: tuple[Slice, Atom, int] | None,
    axis: int,
    sizes: tuple[int, int],
    served: Sequence[Atom],
    ends: Callable[..., Sequence[Any]],
    before: Callable[[Any], Any] = lambda x: x,
) -> Rewrite | None:
    """Rewrites a view with further rows before and after it.

    Args:
      rewriter: of the block.
      view: the members of the view.
      axis: the axis along which there are further rows.
      sizes: the number of rows before and after the view.
      served: server values.
      ends: computes these rows from the server values; None for no rows.
      before: is applied to the members before they are moved. It keeps their axis.
    """
    if view is None or view[2] != axis or not rewriter.rewrites.moves or view[0].stride > 1:
        return None
    part, members, _ = view
    head, after = sizes
    total, n = head + part.count + after, part.n
    # Row r of the result becomes member `first + r`, but for the rows of the tail.
    first = min(max(part.start - head, 0), max(n - total, 0))
    made = replace(part, start=first, count=min(total, n))
    k = part.start - head - first
    move = _move(rewriter, members, axis, k)
    if move is None or not (made.is_large or made.count == n) or total > 2 * n:
        return None

    def function(x: Any, *served: Any) -> Sequence[Any]:
        x = before(x)
        rows, (front, back) = move(x), ends(*served)
        if front is not None:
            rows = lax.dynamic_update_slice_in_dim(rows, front, first, axis)
        inside = min(after, max(n - first - head - part.count, 0))
        if inside:
            placed = lax.slice_in_dim(back, 0, inside, axis=axis)
            start = first + head + part.count
            rows = lax.dynamic_update_slice_in_dim(rows, placed, start, axis)
        if total <= n:
            return [rows if total == n else made.of(rows, axis)]
        tail = []
        if head + part.count > n:
            # The last members of the view.
            stop = part.start + part.count
            tail.append(lax.slice_in_dim(x, stop - (head + part.count - n), stop, axis=axis))
        if inside < after:
            tail.append(lax.slice_in_dim(back, inside, after, axis=axis))
        return [lax.concatenate([rows, lax.concatenate(tail, axis)], axis)]

    return Rewrite(function, [members, *served], is_view=total != n)


JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add, "prod": lax.mul, "max": lax.max, "min": lax.min,
    "any": lax.bitwise_or, "all": lax.bitwise_and,
}  # fmt: skip
"""For each reduction, its function of two values."""


def _tailed(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that reads members with a tail: computes both parts."""
    found = [_extended(rewriter, atom) for atom in eqn.inputs]
    given = next(filter(None, found), None)
    if given is None:
        return None
    if eqn.primitive.name == "slice":
        return _slice_with_tail(rewriter, eqn, given)
    n, count = given.n, given.count
    rule = rules.classify(eqn, [x.along.axis if x else None for x in found], count)
    # All must have the same placement, or the operands have different numbers of rows.
    if rule is None or len({x.along.placement for x in found if x is not None}) > 1:
        return None
    if isinstance(rule, ReductionRule) and not _joins(eqn, rule):
        return None
    atoms: list[Atom] = []
    operands: list[Callable[[Iterator[Any], TracedShard], Any]] = []
    for atom, view, axis in zip(eqn.inputs, found, rule.in_axes, strict=True):
        if view is None:
            operand, read = _of_part(rewriter, atom, axis, count)
        elif axis == view.along.axis:
            operand, read = _either_part, [view.members, view.tail]
        else:
            return None
        if rewriter.program.place(atom) is not None or _view_of(rewriter, atom) is not None:
            return None
        operands.append(operand)
        atoms += read

    def function(*args: Any) -> Sequence[Any]:
        parts = []
        for start, stop in (0, n), (n, count):
            shard = TracedShard(np.int32(start), stop - start, jnp.ones(stop - start, bool))  # type: ignore[arg-type]
            rest = iter(args)
            values = [operand(rest, shard) for operand in operands]
            if isinstance(rule, MemberwiseRule):
                parts.append(rule.emit(eqn, values, shard))
            else:
                parts.append(bind(eqn, values))
        if isinstance(rule, ReductionRule):
            return [JOINS[rule.reducer](x, y) for x, y in zip(*parts, strict=True)]
        pairs = zip(*parts, rule.out_axes, strict=True)
        return [lax.concatenate([x, y], axis) for x, y, axis in pairs if axis is not None]

    return Rewrite(function, atoms, is_view=isinstance(rule, MemberwiseRule))


def _joins(eqn: Eqn, rule: ReductionRule) -> bool:
    """Whether the reductions of two parts can be joined by `JOINS`."""
    plain = not (isinstance(rule, FunctionReductionRule) or rule.selects_members)
    return plain and rule.reducer in JOINS and not eqn.primitive.name.startswith("scatter")


def _either_part(args: Iterator[Any], shard: TracedShard) -> Any:
    """The members or the tail, which are the next two arguments."""
    members, tail = next(args), next(args)
    return tail if shard.start else members


def _of_part(
    rewriter: BlockRewriter, atom: Atom, axis: int | None, count: int
) -> tuple[Callable[[Iterator[Any], TracedShard], Any], list[Atom]]:
    """A function that gives the part of a server value, and what it reads.

    Shards create values such as `jnp.arange(count)`.
    """
    maker = rewriter.makers.get(atom) if isinstance(atom, Var) else None
    if axis is None:
        return lambda args, shard: next(args), [atom]
    if isinstance(atom, Var) and maker is not None and not maker.blocks:
        out = maker.outputs.index(atom)
        made = rules.invert(maker, out, axis, count)
        values = [a.val for a in maker.inputs if not isinstance(a, Var)]
        if made is not None and len(values) == len(maker.inputs):
            return lambda args, shard: made.emit(maker, values, shard)[out], []

    def cut(args: Iterator[Any], shard: TracedShard) -> Any:
        start = int(shard.start)
        return lax.slice_in_dim(next(args), start, start + shard.size, axis=axis)

    return cut, [atom]


def _slice_with_tail(rewriter: BlockRewriter, eqn: Eqn, given: Extended) -> Rewrite | None:
    """Rewrites a slice of members with a tail."""
    p, axis, n = eqn.params, given.along.axis, given.n
    start, stop = (int(p[f"{end}_indices"][axis]) for end in ("start", "limit"))
    if stop <= n:
        return Rewrite(lambda x: bind(eqn, [x]), [given.members], is_view=True)
    if start >= n or (p["strides"] is not None and p["strides"][axis] != 1):
        return None

    def cut(x: Any, start: int, stop: int) -> Any:
        starts, limits = (
            replaced(p[f"{end}_indices"], axis, k) for end, k in (("start", start), ("limit", stop))
        )
        return bind(eqn, [x], start_indices=starts, limit_indices=limits)[0]

    part = Slice(given.along.placement, start, n - start, n)
    return _placed_rows(
        rewriter, (part, given.members, axis), axis, (0, stop - n), [given.tail],
        lambda tail: (None, cut(tail, 0, stop - n)), before=lambda x: cut(x, 0, n),
    )  # fmt: skip


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
            # A scatter numbers the rows of a shard from its first member on.
            if self.part.stride > 1 and eqn.primitive.name.startswith("scatter"):
                return None

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
        p, part = eqn.params, self.part
        strides = p["strides"] or [1] * len(p["start_indices"])
        stride, count = int(strides[axis]), shape_of(eqn.outputs[0])[axis]
        start = part.start + part.stride * int(p["start_indices"][axis])
        again = Slice(part.placement, start, count, part.n, part.stride * stride)
        bounds = {
            "start_indices": replaced(p["start_indices"], axis, again.start),
            "limit_indices": replaced(p["limit_indices"], axis, again.stop),
            "strides": replaced(strides, axis, again.stride),
        }
        return Rewrite(lambda x: bind(eqn, [x], **bounds), [members], is_view=True)

    def padded(self, eqn: Eqn, members: Atom, axis: int) -> Rewrite | None:
        """Rewrites the derivative of a slice, which pads: fills other members and moves all."""
        low, high, between = map(int, eqn.params["padding_config"][axis])
        part, n = self.part, self.part.n
        stride = part.stride // (between + 1)
        count = low + (part.count - 1) * (between + 1) + 1 + high
        span = (count - 1) * stride + 1
        if min(low, high) < 0 or part.stride % (between + 1) or not part.count or span > n:
            return None
        first = part.start - low * stride
        made = Slice(part.placement, min(max(first, 0), n - span), count, n, stride)
        k = first - made.start
        move = _move(self.rewriter, members, axis, k)
        moves = self.rewriter.rewrites.moves or k == 0
        if not moves or move is None or self.rewriter.program.place(eqn.inputs[1]):
            return None

        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            found = move(part.masked(padded, axis, fill))
            return [found if count == n else made.of(found, axis)]

        return Rewrite(function, [members, eqn.inputs[1]], is_view=count < n)

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
