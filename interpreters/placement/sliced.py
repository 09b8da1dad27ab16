"""Rewrites reductions of a slice of the members to reductions of all members.

Members outside of the slice are computed as well, which at most doubles the work, and masked in the
reduction: `jnp.mean(loss(w, x[:800]))` computes the loss of each member and sums the first 800.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.regrouping import Step, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    MemberwiseRule,
    ReductionRule,
    Shard,
    bind,
    replaced,
    shape_of,
)
from beamjax.numerics.reducers import REDUCERS

MIN_SHARE = 0.5
"""Smallest share of the members that a slice must have for all members to be computed for it."""


@dataclass(frozen=True)
class Slice:
    """The members [start, start + count) of the n of a placement."""

    placement: str
    start: int
    count: int
    n: int

    def all_members(self) -> Shard:
        """All n members as one shard, where index 0 is the first member of the slice."""
        return Shard(jnp.int32(-self.start), self.n, jnp.ones(self.n, bool))

    def masked(self, x: Any, axis: int, fill: Any) -> Any:
        """`x`, which holds all members, with `fill` for those outside of the slice."""
        index = lax.broadcasted_iota(np.dtype("int32"), x.shape, axis)
        inside = (index >= self.start) & (index < self.start + self.count)
        return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def sliced(program: PlacedProgram, block: FlatBlock) -> Iterator[dict[Eqn, Step]]:
    """For each slice of members in a block, the rewrites that it allows."""
    for part in dict.fromkeys(filter(None, (_slice_of(program, eqn) for eqn in block.eqns))):
        cone = _Cone(program, part)
        for eqn in block.eqns:
            if runs_on_server(program, eqn):
                cone.see(eqn)
        yield cone.steps


def _slice_of(program: PlacedProgram, eqn: Eqn) -> Slice | None:
    """The slice of members that a server equation takes, if it takes a large share of them."""
    along = program.place(eqn.inputs[0]) if eqn.primitive.name == "slice" else None
    if along is None or not runs_on_server(program, eqn):
        return None
    n, strides = program.sizes[along.placement], eqn.params["strides"]
    if is_unknown(n) or (strides is not None and strides[along.axis] != 1):
        return None
    start = eqn.params["start_indices"][along.axis]
    count = eqn.params["limit_indices"][along.axis] - start
    return Slice(along.placement, start, count, n) if MIN_SHARE * n <= count < n else None


class _Cone:
    """Collects the equations after a slice that can be computed for all members instead.

    Attributes:
      axes: for each value computed from the slice, the axis of its members.
      made: for each server value that can be created for all members, the axis of its members.
    """

    def __init__(self, program: PlacedProgram, part: Slice):
        self.program = program
        self.part = part
        self.steps: dict[Eqn, Step] = {}
        self.axes: dict[Var, int] = {}
        self.made: dict[Var, int] = {}

    def see(self, eqn: Eqn) -> None:
        """Records how to rewrite the next equation, if that is possible."""
        if _slice_of(self.program, eqn) == self.part:
            self.cut(eqn)
            return
        axes = list(map(self.axis_of, eqn.inputs))
        if all(axis is None for axis in axes):
            self.create(eqn)
            return
        axis = axes[0]
        if axis is not None and self.is_undone(eqn, axis):
            self.pad(eqn, axis)
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
        if rule is None or (isinstance(rule, ReductionRule) and rule.picks):
            return False
        return all(
            self.program.place(atom) is None and self.axis_of(atom) is None
            if axis is None
            else isinstance(atom, Var) and axis in (self.axes.get(atom), self.made.get(atom))
            for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)
        )

    def cut(self, eqn: Eqn) -> None:
        """Rewrites the slice itself: it takes all members, and slices the other axes."""
        along = self.program.place(eqn.inputs[0])
        assert along is not None
        starts = replaced(eqn.params["start_indices"], along.axis, 0)
        limits = replaced(eqn.params["limit_indices"], along.axis, self.part.n)

        def function(x: Any) -> Sequence[Any]:
            return bind(eqn, [x], start_indices=starts, limit_indices=limits)

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

    def is_undone(self, eqn: Eqn, axis: int) -> bool:
        """Whether an equation pads the slice to all members: the derivative of the slice."""
        part = self.part
        around = (part.start, part.n - part.start - part.count, 0)
        if eqn.primitive.name != "pad" or self.program.place(eqn.inputs[1]) is not None:
            return False
        return tuple(eqn.params["padding_config"][axis]) == around

    def pad(self, eqn: Eqn, axis: int) -> None:
        def function(x: Any, fill: Any) -> Sequence[Any]:
            config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
            (padded,) = bind(eqn, [x, fill], padding_config=config)
            return [self.part.masked(padded, axis, fill)]

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
