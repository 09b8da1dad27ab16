"""Rewrites reductions of a slice of the members to reductions of all members.

Members outside of the slice are computed as well, which at most doubles the work, and masked in the
reduction: `jnp.mean(loss(w, x[:800]))` computes the loss of each member and sums the first 800.

Slices of as many members that meet in an equation, as in `jnp.sum((x[1:] - x[:-1]) ** 2)`, are
moved onto each other by an exchange of the borders of shards; so are the two parts of `jnp.roll`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.blocks import block_of
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.regrouping import Step, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var, aval_of
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
    replaced,
    shape_of,
)
from beamjax.interpreters.rules.shifts import shifted
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

    def masked(self, x: Any, axis: int, fill: Any) -> Any:
        """`x`, which holds all members, with `fill` for those outside of the slice."""
        index = lax.broadcasted_iota(np.dtype("int32"), x.shape, axis)
        inside = (index >= self.start) & (index < self.start + self.count)
        return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def sliced(
    program: PlacedProgram, block: FlatBlock, moves: bool = True
) -> Iterator[dict[Eqn, Step]]:
    """For the slices of members in a block, the rewrites that they allow.

    Args:
      program: the placed program.
      block: the block.
      moves: whether members may be moved from one shard to another.
    """
    slices = (_slice_of(program, eqn) for eqn in block.eqns)
    parts = dict.fromkeys(part for part in slices if part and part.is_large)
    cones = [_Cone(program, block, [part], moves) for part in parts]
    while moves and (pair := _meeting(block, cones)) is not None:
        cones = [cone for cone in cones if cone not in pair]
        cones.append(_Cone(program, block, [*pair[0].parts, *pair[1].parts], moves))
    for cone in cones:
        yield cone.steps
    if moves:
        yield from _rolls(program, block)


def _meeting(block: FlatBlock, cones: Sequence[_Cone]) -> tuple[_Cone, _Cone] | None:
    """Two cones of slices of equal length from which one equation reads values, or None."""
    for eqn in block.eqns:
        read = [cone for cone in cones if any(cone.axis_of(a) is not None for a in eqn.inputs)]
        for one, other in itertools.combinations(read, 2):
            if replace(one.part, start=0) == replace(other.part, start=0):
                return one, other
    return None


def _rolls(program: PlacedProgram, block: FlatBlock) -> Iterator[dict[Eqn, Step]]:
    """The rewrites of concatenations of the last and the first members: `jnp.roll`."""
    makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
    for eqn in block.eqns:
        cuts = [makers[a] for a in eqn.inputs if isinstance(a, Var) and a in makers]
        parts = [part for cut in cuts if (part := _slice_of(program, cut)) is not None]
        joins = eqn.primitive.name == "concatenate" and runs_on_server(program, eqn)
        if not joins or not len(eqn.inputs) == len(parts) == 2:
            continue
        (last, first), members = parts, cuts[0].inputs[0]
        along = program.place(members)
        assert along is not None
        k = min(last.start, last.start - last.n, key=abs)
        move = _move(program, members, along.axis, k)
        if (
            members is cuts[1].inputs[0]
            and eqn.params["dimension"] == along.axis
            and shape_of(eqn.outputs[0]) == shape_of(members)
            and (first.start, first.count) == (0, last.start)
            and move is not None
        ):
            steps = {cut: Step([members], [False], lambda x: [x]) for cut in cuts}
            yield {**steps, eqn: Step([members], [False], lambda x, m=move: [m(x)], is_end=True)}


def _move(
    program: PlacedProgram, atom: Atom, axis: int, k: int
) -> Callable[[jax.Array], jax.Array] | None:
    """A function that moves all members by k, as `shifted` does; None if that is not worth it."""
    aval, n = aval_of(atom), shape_of(atom)[axis]
    numbers = jnp.issubdtype(aval.dtype, np.number) or aval.dtype == np.bool_
    if k == 0 or not numbers or not PICK.takes(aval.dtype):
        return None if k else lambda x: x
    member = aval.dtype.itemsize * math.prod(aval.shape) // n
    block = block_of(n, abs(k) * member, member, program.shard_size, fewest=abs(k))
    return functools.partial(shifted, k=k, axis=axis, block=block) if block else None


def _slice_of(program: PlacedProgram, eqn: Eqn) -> Slice | None:
    """The slice of members that a server equation takes, or None."""
    along = program.place(eqn.inputs[0]) if eqn.primitive.name == "slice" else None
    if along is None or not runs_on_server(program, eqn):
        return None
    n, strides = program.sizes[along.placement], eqn.params["strides"]
    if is_unknown(n) or (strides is not None and strides[along.axis] != 1):
        return None
    start = eqn.params["start_indices"][along.axis]
    count = eqn.params["limit_indices"][along.axis] - start
    return Slice(along.placement, start, count, n)


class _Cone:
    """Collects the equations after a slice that can be computed for all members instead.

    Attributes:
      axes: for each value computed from the slice, the axis of its members.
      made: for each server value that can be created for all members, the axis of its members.
    """

    def __init__(self, program: PlacedProgram, block: FlatBlock, parts: list[Slice], moves: bool):
        self.program = program
        self.parts = parts
        self.part = min(parts, key=lambda part: part.start)
        self.moves = moves
        self.steps: dict[Eqn, Step] = {}
        self.axes: dict[Var, int] = {}
        self.made: dict[Var, int] = {}
        for eqn in block.eqns:
            if runs_on_server(program, eqn):
                self.see(eqn)

    def see(self, eqn: Eqn) -> None:
        """Records how to rewrite the next equation, if that is possible."""
        found = _slice_of(self.program, eqn)
        if found is not None and found in self.parts:
            self.cut(eqn, found.start - self.part.start)
            return
        axes = list(map(self.axis_of, eqn.inputs))
        if all(axis is None for axis in axes):
            self.create(eqn)
            return
        axis = axes[0]
        start = None if axis is None else self.undone(eqn, axis)
        if axis is not None and start is not None:
            self.pad(eqn, axis, self.part.start - start)
            return
        rule = rules.classify(eqn, axes, self.part.count)
        if not self.reads(eqn, rule):
            return
        if isinstance(rule, MemberwiseRule):
            self.local(eqn, rule)
            self.axes.update(_placed_results(eqn, rule))
        elif isinstance(rule, ReductionRule) and not isinstance(rule, FunctionReductionRule):
            self.fold(eqn, rule)

    def axis_of(self, atom: Atom) -> int | None:
        return self.axes.get(atom) if isinstance(atom, Var) else None

    def reads(self, eqn: Eqn, rule: MemberwiseRule | ReductionRule | None) -> bool:
        """Whether all operands are available along the axes that a rule requires."""
        if rule is None or (isinstance(rule, ReductionRule) and rule.selects_members):
            return False
        return all(
            self.program.place(atom) is None and self.axis_of(atom) is None
            if axis is None
            else isinstance(atom, Var) and axis in (self.axes.get(atom), self.made.get(atom))
            for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)
        )

    def cut(self, eqn: Eqn, k: int) -> None:
        """Rewrites the slice itself: it takes all members, moved by k, and cuts the other axes."""
        along = self.program.place(eqn.inputs[0])
        assert along is not None
        move = _move(self.program, eqn.inputs[0], along.axis, k)
        if move is None:
            return
        starts = replaced(eqn.params["start_indices"], along.axis, 0)
        limits = replaced(eqn.params["limit_indices"], along.axis, self.part.n)

        def function(x: Any) -> Sequence[Any]:
            return bind(eqn, [move(x)], start_indices=starts, limit_indices=limits)

        self.steps[eqn] = Step(eqn.inputs, [False], function)
        self.axes[eqn.outputs[0]] = along.axis

    def create(self, eqn: Eqn) -> None:
        """Rewrites the creation of a server value with as many entries as the slice has members."""
        for var in eqn.outputs:
            for axis, dim in enumerate(shape_of(var)):
                if dim == self.part.count and var not in self.made:
                    rule = rules.invert(eqn, eqn.outputs.index(var), axis, dim)
                    if rule is not None and self.reads(eqn, rule):
                        self.local(eqn, rule)
                        self.made.update(_placed_results(eqn, rule))

    def local(self, eqn: Eqn, rule: MemberwiseRule) -> None:
        def function(*args: Any) -> Sequence[Any]:
            return rule.emit(eqn, args, self.part.all_members())

        whole = [axis is not None and isinstance(atom, Var)
                 for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)]  # fmt: skip
        self.steps[eqn] = Step(eqn.inputs, whole, function)

    def undone(self, eqn: Eqn, axis: int) -> int | None:
        """Where an equation puts the slice among all members: the derivative of a slice."""
        if eqn.primitive.name != "pad" or self.program.place(eqn.inputs[1]) is not None:
            return None
        low, high, between = eqn.params["padding_config"][axis]
        whole = min(low, high) >= 0 == between and low + self.part.count + high == self.part.n
        return low if whole and (self.moves or low == self.part.start) else None

    def pad(self, eqn: Eqn, axis: int, k: int) -> None:
        """Rewrites the padding: it fills the other members, and moves all by k."""
        move = _move(self.program, eqn.outputs[0], axis, k)
        if move is None:
            return

        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            return [move(self.part.masked(padded, axis, fill))]

        self.steps[eqn] = Step(eqn.inputs, [True, False], function, is_end=True)

    def fold(self, eqn: Eqn, rule: ReductionRule) -> None:
        """Rewrites a reduction over the slice: masks the other members by the neutral element."""
        scatters = eqn.primitive.name.startswith("scatter")

        def function(*args: Any) -> Sequence[Any]:
            masked = list(args)
            for i, axis in enumerate(rule.in_axes):
                if axis is not None and not (scatters and i == 1):
                    neutral = REDUCERS[rule.reducer].identity(args[i].dtype)
                    masked[i] = self.part.masked(args[i], axis, neutral)
            # Indices that are unique and sorted in the slice need not be so outside of it.
            free = {"indices_are_sorted": False, "unique_indices": False} if scatters else {}
            return bind(eqn, masked, **free)

        whole = [axis is not None for axis in rule.in_axes]
        self.steps[eqn] = Step(eqn.inputs, whole, function, is_end=True)


def _placed_results(eqn: Eqn, rule: MemberwiseRule) -> dict[Var, int]:
    pairs = zip(eqn.outputs, rule.out_axes, strict=True)
    return {var: axis for var, axis in pairs if axis is not None}
