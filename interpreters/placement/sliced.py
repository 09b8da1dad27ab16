"""Moves slices of the members past equations, until a reduction masks the other members.

Members outside of the slice are computed as well, which at most doubles the work: `jnp.mean(loss(w,
x[:800]))` computes the loss of each member and sums the first 800. A slice that the program returns
is cut out of the placed result.

If an equation reads different slices of equal length, as in `jnp.sum((x[1:] - x[:-1]) ** 2)`, they
are moved onto each other by an exchange of the borders of shards. So are the two parts of
`jnp.roll`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.placement.slices import (
    Extended,
    Slice,
    View,
    is_view,
    mover,
    slice_of,
    view_of,
)
from beamjax.interpreters.placement.tails import appended, concatenated, padded, tiled
from beamjax.interpreters.placement.windows import windows
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.ordered import SCANS
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    bind,
    replaced,
    shape_of,
)
from beamjax.numerics.reducers import REDUCERS


def sliced(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that slices the members, or that reads slices of them."""
    part = slice_of(rewriter.program, eqn)
    if part is not None:
        return _cut(rewriter, eqn, part) if is_view(rewriter.program, part) else None
    if eqn.primitive.name == "rev":
        found = _reversed(rewriter, eqn)
        if found is not None:
            return found
    for find in _rolled, _adjacent, appended, padded, tiled, windows, concatenated:
        found = find(rewriter, eqn)
        if found is not None:
            return found
    parts = {view.part for atom in eqn.inputs if (view := view_of(rewriter, atom))}
    if not parts:
        return None
    if len(parts) > 1:
        _meet(rewriter, parts)
        return None
    (part,) = parts
    return _Slice(rewriter, part).rewrite(eqn)


def return_views(program: PlacedProgram) -> None:
    """Lets a program return placed values instead of large slices of them, in place.

    It returns placed values with their tails, too. Not in a user's own pipeline, where an array
    without all members, or with more rows, is one element.
    """
    if program.flat.unrolled:
        return
    makers = {var: eqn for eqn in program.flat.eqns for var in eqn.outputs}
    for number, atom in enumerate(program.flat.outputs):
        maker = makers.get(atom) if isinstance(atom, Var) else None
        view, extended = View.of(program, makers, maker), Extended.of(program, maker)
        # To return all members for each of several parts would cost more than to gather them once.
        is_part = view is not None and view.part.count < view.part.n and not view.part.is_large
        if view is not None and view.members in makers and not is_part:
            program.flat.outputs[number] = view.members
            program.slices[number] = view.part.as_python()
        elif extended is not None and {extended.members, extended.tail} <= makers.keys():
            program.flat.outputs[number] = extended.members
            program.tails[number] = extended.tail
    program.flat.outputs += program.tails.values()


def parts_of_members(program: PlacedProgram, eqns: Iterable[Eqn]) -> set[Slice]:
    """The slices among some equations for each of which all members can be computed."""
    slices = (slice_of(program, eqn) for eqn in eqns)
    return {part for part in slices if part is not None and part.is_part}


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
    move = mover(rewriter, members, along.axis, part.start - start)
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
    parts = {replace(part, is_reversed=False) for part in parts}
    # `parts` are as this attempt moved them, `starts` has their original positions.
    moved = {part for part, start in starts.items() if replace(part, start=start) in parts}
    changes = dict.fromkeys(parts | moved, first.start)
    rewriter.rewrites.is_outdated |= not changes.items() <= starts.items()
    starts.update(changes)


def _reversed(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a reversal of members or of a view along several axes, or of a reversed view.

    None for another one: the reversal of members or of a slice is a view already.
    """
    (atom,), axes = eqn.inputs, eqn.params["dimensions"]
    view = View.of_all(rewriter.program, atom) or view_of(rewriter, atom)
    if view is None or view.axis not in axes:
        return None
    part = replace(view.part, is_reversed=not view.part.is_reversed)
    others = tuple(axis for axis in axes if axis != view.axis)
    if part.is_reversed and not others:
        return None
    return Rewrite(
        lambda x: [part.of(bind(eqn, [x], dimensions=others)[0], view.axis)],
        [view.members],
        is_view=is_view(rewriter.program, part),
    )


def _rolled(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites the concatenation of the last and the first members: `jnp.roll`."""
    if not rewriter.rewrites.moves or eqn.primitive.name != "concatenate":
        return None
    cuts = [cut for atom in eqn.inputs if (cut := rewriter.maker(atom, "slice")) is not None]
    parts = [part for cut in cuts if (part := slice_of(rewriter.program, cut)) is not None]
    if not len(eqn.inputs) == len(parts) == 2:
        return None
    (last, first), members = parts, cuts[0].inputs[0]
    if last.stride != 1 or first.stride != 1:
        return None
    along = rewriter.program.place(members)
    assert along is not None
    # To move forward by `last.start` is to move backward by the rest; the shorter way is cheaper.
    k = min(last.start, last.start - last.n, key=abs)
    move = mover(rewriter, members, along.axis, k)
    rolls = (
        members is cuts[1].inputs[0]
        and eqn.params["dimension"] == along.axis
        and shape_of(eqn.outputs[0]) == shape_of(members)
        and (first.start, first.count) == (0, last.start)
    )
    return Rewrite(lambda x: [move(x)], [members]) if rolls and move is not None else None


def _adjacent(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a concatenation of adjacent slices, such as the derivative of `jnp.split`."""
    if eqn.primitive.name != "concatenate":
        return None
    views = [view for atom in eqn.inputs if (view := view_of(rewriter, atom)) is not None]
    parts, axis = [view.part for view in views], eqn.params["dimension"]
    if len(parts) < len(eqn.inputs) or {view.axis for view in views} != {axis}:
        return None
    if any(part.is_reversed or part.stride > 1 for part in parts):
        return None
    made = replace(parts[0], count=sum(part.count for part in parts))
    if any(replace(made, start=a.stop, count=b.count) != b for a, b in itertools.pairwise(parts)):
        return None

    def function(found: Any, *others: Any) -> Sequence[Any]:
        index = lax.broadcasted_iota(np.dtype("int32"), found.shape, axis)
        for part, x in zip(parts[1:], others, strict=True):
            found = jnp.where(index >= part.start, x, found)
        return [made.of(found, axis)]

    return Rewrite(function, [view.members for view in views], is_view=made.count < made.n)


class _Slice:
    """Rewrites equations that read the slice `part` of the members to read all members."""

    def __init__(self, rewriter: BlockRewriter, part: Slice):
        self.rewriter = rewriter
        self.part = part

    def rewrite(self, eqn: Eqn) -> Rewrite | None:
        views = [view_of(self.rewriter, atom) for atom in eqn.inputs]
        if views[0] is not None and eqn.primitive.name == "pad":
            return self.padded(eqn, views[0])
        if views[0] is not None and eqn.primitive.name == "slice":
            return self.cut_again(eqn, views[0])
        if views[0] is not None and eqn.primitive.name in (*SCANS, "cumlogsumexp"):
            return self.scanned(eqn, views[0])
        rule = rules.classify(eqn, [view.axis if view else None for view in views], self.part.count)
        atoms = self.operands(eqn, rule)
        if rule is None or atoms is None:
            return None
        if isinstance(rule, MemberwiseRule):
            # A scatter numbers the rows of a shard from its first member on.
            in_order = self.part.stride == 1 and not self.part.is_reversed
            if not in_order and eqn.primitive.name.startswith("scatter"):
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
            if found is None or is_placed or (axis is None and view_of(self.rewriter, atom)):
                return None
            atoms.append(found)
        return atoms

    def whole(self, atom: Atom, axis: int) -> Atom | None:
        """All members of a value that holds those of the slice, or None.

        The others of a server value such as `jnp.arange(800)` can be created.
        """
        view = view_of(self.rewriter, atom)
        if view is not None or not isinstance(atom, Var):
            is_same = view is not None and (view.part, view.axis) == (self.part, axis)
            return view.members if view is not None and is_same else None
        maker = self.rewriter.makers.get(atom)
        if maker is None or not runs_on_server(self.rewriter.program, maker):
            return self.reversed_on_server(atom, axis)
        out = maker.outputs.index(atom)
        rule = rules.invert(maker, out, axis, self.part.count)
        atoms = self.operands(maker, rule)
        if rule is None or atoms is None:
            return self.reversed_on_server(atom, axis)
        emit = functools.partial(rule.emit, maker)
        function = lambda *args: [emit(args, self.part.all_members())[out]]
        made, (result,) = self.rewriter.traced(function, atoms, maker.line)
        self.rewriter.added += made
        return result

    def reversed_on_server(self, atom: Var, axis: int) -> Atom | None:
        """A server value in the order of the members, if the view has all of them; or None."""
        if self.part.count < self.part.n or self.rewriter.program.place(atom) is not None:
            return None
        made, (result,) = self.rewriter.traced(lambda x: [lax.rev(x, (axis,))], [atom], "")
        self.rewriter.added += made
        return result

    def cut_again(self, eqn: Eqn, view: View) -> Rewrite | None:
        """Rewrites a slice of a slice to one of the members."""
        (part, members, axis), p = view, eqn.params
        strides = p["strides"] or [1] * len(p["start_indices"])
        stride, count = int(strides[axis]), shape_of(eqn.outputs[0])[axis]
        first = int(p["start_indices"][axis])
        if part.is_reversed and count:
            first = part.count - 1 - (first + (count - 1) * stride)
        start = part.start + part.stride * first
        again = replace(part, start=start, count=count, stride=part.stride * stride)
        bounds = {
            "start_indices": replaced(p["start_indices"], axis, again.start),
            "limit_indices": replaced(p["limit_indices"], axis, again.stop),
            "strides": replaced(strides, axis, again.stride),
        }

        def function(x: Any) -> Sequence[Any]:
            (found,) = bind(eqn, [x], **bounds)
            return [lax.rev(found, (axis,)) if part.is_reversed else found]

        return Rewrite(function, [members], is_view=True)

    def scanned(self, eqn: Eqn, view: View) -> Rewrite | None:
        """Rewrites running totals of all members in reverse order to those from the last one on."""
        part, members, axis = view
        if part.count < part.n or eqn.params["axis"] != axis:
            return None
        reverse = not eqn.params["reverse"]
        return Rewrite(
            lambda x: [part.of(bind(eqn, [x], reverse=reverse)[0], axis)], [members], is_view=True
        )

    def padded(self, eqn: Eqn, view: View) -> Rewrite | None:
        """Rewrites the derivative of a slice, which pads: fills other members and moves all."""
        (part, members, axis), n = view, self.part.n
        low, high, between = map(int, eqn.params["padding_config"][axis])
        if part.is_reversed:
            low, high = high, low
        stride = part.stride // (between + 1)
        count = low + (part.count - 1) * (between + 1) + 1 + high
        span = (count - 1) * stride + 1
        if min(low, high) < 0 or part.stride % (between + 1) or not part.count or span > n:
            return None
        first = part.start - low * stride
        made = replace(part, start=min(max(first, 0), n - span), count=count, stride=stride)
        k = first - made.start
        move = mover(self.rewriter, members, axis, k)
        moves = self.rewriter.rewrites.moves or k == 0
        if not moves or move is None or self.rewriter.program.place(eqn.inputs[1]):
            return None

        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            found = move(part.masked(padded, axis, fill))
            return [made.of(found, axis)]

        return Rewrite(function, [members, eqn.inputs[1]], is_view=count < n or part.is_reversed)

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
