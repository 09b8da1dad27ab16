"""Moves slices of the members past equations, until a reduction masks the other members.

Members outside of the slice are computed as well, which at most doubles the work: `jnp.mean(loss(w,
x[:800]))` computes the loss of each member and sums the first 800.

Slices of as many members that meet in an equation, as in `jnp.sum((x[1:] - x[:-1]) ** 2)`, are
moved onto each other by an exchange of the borders of shards; so are the two parts of `jnp.roll`.
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
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.by_shard import range_size
from beamjax.interpreters.rules.ordered import shifted
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
"""Smallest share of the members that a slice must have for all members to be computed for it."""


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
    part = _slice_of(rewriter, eqn)
    if part is not None:
        return _cut(rewriter, eqn, part) if part.is_large else None
    rolled = _roll(rewriter, eqn)
    if rolled is not None:
        return rolled
    parts = {found[0] for atom in eqn.inputs if (found := _view(rewriter, atom))}
    if not parts:
        return None
    if len(parts) > 1:
        _meet(rewriter, parts)
        return None
    (part,) = parts
    return _Window(rewriter, part).rewrite(eqn)


def _slice_of(rewriter: BlockRewriter, eqn: Eqn) -> Slice | None:
    """The slice of members that a server equation takes, or None."""
    if eqn.primitive.name != "slice" or not runs_on_server(rewriter.program, eqn):
        return None
    along = rewriter.program.place(eqn.inputs[0])
    if along is None:
        return None
    n, strides = rewriter.program.sizes[along.placement], eqn.params["strides"]
    if is_unknown(n) or (strides is not None and strides[along.axis] != 1):
        return None
    start = eqn.params["start_indices"][along.axis]
    return Slice(along.placement, start, eqn.params["limit_indices"][along.axis] - start, n)


def _view(rewriter: BlockRewriter, atom: Atom) -> tuple[Slice, Atom, int] | None:
    """If a value is a large slice of members: the slice, the members and their axis; else None."""
    eqn = rewriter.maker(atom, "slice")
    part = _slice_of(rewriter, eqn) if eqn is not None else None
    if eqn is None or part is None or not part.is_large:
        return None
    along = rewriter.program.place(eqn.inputs[0])
    pure = replaced(shape_of(eqn.inputs[0]), along.axis, part.count) if along else ()
    return (part, eqn.inputs[0], along.axis) if along and shape_of(atom) == pure else None


def _cut(rewriter: BlockRewriter, eqn: Eqn, part: Slice) -> Rewrite | None:
    """Moves the members of a slice that meets others, and cuts the other axes first."""
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
    """Decides to move slices of as many members to the same place, in the next attempt."""
    starts, first = rewriter.rewrites.starts, min(parts, key=lambda part: part.start)
    if not rewriter.rewrites.moves or len({replace(part, start=0) for part in parts}) > 1:
        return
    # Those that begin where one of them does now have been moved there.
    moved = {part for part, start in starts.items() if replace(part, start=start) in parts}
    changes = dict.fromkeys(parts | moved, first.start)
    rewriter.rewrites.is_outdated |= not changes.items() <= starts.items()
    starts.update(changes)


def _move(
    rewriter: BlockRewriter, atom: Atom, axis: int, k: int
) -> Callable[[jax.Array], jax.Array] | None:
    """A function that moves all members by k, as `shifted` does; None if that is not worth it."""
    aval, n = aval_of(atom), shape_of(atom)[axis]
    numbers = jnp.issubdtype(aval.dtype, np.number) or aval.dtype == np.bool_
    if k == 0 or not numbers or not PICK.takes(aval.dtype):
        return None if k else lambda x: x
    member = aval.dtype.itemsize * math.prod(aval.shape) // n
    size = rewriter.program.shard_size
    block = range_size(n, abs(k) * member, member, size, fewest=abs(k))
    return functools.partial(shifted, k=k, axis=axis, block=block) if block else None


def _roll(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites the concatenation of the last and the first members: `jnp.roll`."""
    if not rewriter.rewrites.moves or eqn.primitive.name != "concatenate":
        return None
    cuts = [cut for atom in eqn.inputs if (cut := rewriter.maker(atom, "slice")) is not None]
    parts = [part for cut in cuts if (part := _slice_of(rewriter, cut)) is not None]
    if not len(eqn.inputs) == len(parts) == 2:
        return None
    (last, first), members = parts, cuts[0].inputs[0]
    along = rewriter.program.place(members)
    assert along is not None
    k = min(last.start, last.start - last.n, key=abs)
    move = _move(rewriter, members, along.axis, k)
    rolls = (
        members is cuts[1].inputs[0]
        and eqn.params["dimension"] == along.axis
        and shape_of(eqn.outputs[0]) == shape_of(members)
        and (first.start, first.count) == (0, last.start)
    )
    return Rewrite(lambda x: [move(x)], [members]) if rolls and move is not None else None


class _Window:
    """Rewrites equations that read a slice of the members to ones that read all members."""

    def __init__(self, rewriter: BlockRewriter, part: Slice):
        self.rewriter = rewriter
        self.part = part

    def rewrite(self, eqn: Eqn) -> Rewrite | None:
        views = [_view(self.rewriter, atom) for atom in eqn.inputs]
        if views[0] is not None and eqn.primitive.name == "pad":
            return self.padded(eqn, *views[0][1:])
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
        """The operands of an equation for all members, where a rule takes them by members."""
        selects = isinstance(rule, ReductionRule) and rule.selects_members
        if rule is None or selects or isinstance(rule, FunctionReductionRule):
            return None
        atoms: list[Atom] = []
        for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True):
            found = atom if axis is None else self.whole(atom, axis)
            is_placed = self.rewriter.program.place(atom) is not None
            if found is None or is_placed or (axis is None and _view(self.rewriter, atom)):
                return None
            atoms.append(found)
        return atoms

    def whole(self, atom: Atom, axis: int) -> Atom | None:
        """All members of a value of which this equation has those of the slice, or None.

        Of a server value, such as `jnp.arange(800)`, they can be created.
        """
        view = _view(self.rewriter, atom)
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

    def padded(self, eqn: Eqn, members: Atom, axis: int) -> Rewrite | None:
        """Rewrites the derivative of a slice: fills the other members, and moves all."""
        low, high, between = eqn.params["padding_config"][axis]
        fits = min(low, high) >= 0 == between and low + self.part.count + high == self.part.n
        moves = self.rewriter.rewrites.moves or low == self.part.start
        move = _move(self.rewriter, eqn.outputs[0], axis, self.part.start - low)
        if not fits or not moves or move is None or self.rewriter.program.place(eqn.inputs[1]):
            return None

        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            return [move(self.part.masked(padded, axis, fill))]

        return Rewrite(function, [members, eqn.inputs[1]])

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
