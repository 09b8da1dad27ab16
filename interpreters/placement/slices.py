"""Views: slices of the members, and all members followed by a tail, which is a server value.

This module has the descriptions of views, which equations compute them, and the exchange of members
between shards. `sliced`, `tails` and `windows` rewrite the equations that read views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import MemberAxis, PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.by_shard import range_size
from beamjax.interpreters.rules.ordered import shifted
from beamjax.interpreters.rules.sharding_rules import TracedShard, replaced, shape_of
from beamjax.numerics.reducers import PICK

MIN_SHARE = 0.5
"""Smallest share of the members in a slice for which all members are computed. A smaller slice is
selected instead (`rules.indexing.MAX_SHARE`)."""


MAX_STRIDE = 8
"""Largest stride of a slice for which all members are computed. Reductions of members that are
already there cost little, but results would have that many times as many rows."""


MAX_PARTS = 4
"""Largest number of parts into which a program may cut the members and still have all members
computed for each part. With more parts, it may cost less to gather the members, since bodies may do
much work."""


@dataclass(frozen=True)
class Slice:
    """Every `stride`-th member from `start` on, `count` of the n of a placement.

    With `is_reversed`, the last one of these members comes first.
    """

    placement: str
    start: int
    count: int
    n: int
    stride: int = 1
    is_reversed: bool = False

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

    @property
    def is_part(self) -> bool:
        """Whether all members may be computed for it, if the program reads its other parts, too."""
        return self.stride == 1 and self.count < self.n <= self.count * MAX_PARTS

    def is_most_of(self, other: Slice) -> bool:
        """Whether it is a large share of another slice."""
        inside = other.start <= self.start and self.stop <= other.stop
        return inside and self.count * self.stride >= other.count * MIN_SHARE

    def as_python(self) -> tuple[int, int, int]:
        """The start, the stop and the step of a Python slice."""
        if not self.is_reversed:
            return self.start, self.stop, self.stride
        # The index before the first member is negative, which would count from the end.
        return self.stop - 1, self.start - 1 if self.start else -self.n - 1, -self.stride

    def all_members(self) -> TracedShard:
        """All n members as one shard, where index 0 is the first member of the slice."""
        start, mask = jnp.int32(-self.start), jnp.ones(self.n, bool)
        if self.stride == 1 and not self.is_reversed:
            return TracedShard(start, self.n, mask)
        index = lax.iota(np.dtype("int32"), self.n) - np.int32(self.start)
        index = index // np.int32(self.stride)
        if self.is_reversed:
            index = np.int32(self.count - 1) - index
        return TracedShard(start, self.n, mask, index)

    def of(self, x: Any, axis: int) -> Any:
        """The slice of all members."""
        if self.count < self.n:
            x = lax.slice_in_dim(x, self.start, self.stop, self.stride, axis)
        return lax.rev(x, (axis,)) if self.is_reversed else x

    def has(self, index: Any) -> Any:
        """Which of these members are in the slice."""
        inside = (index >= self.start) & (index < self.stop)
        return inside & ((index - self.start) % self.stride == 0) if self.stride > 1 else inside

    def masked(self, x: Any, axis: int, fill: Any) -> Any:
        """`x`, which holds all members, with `fill` for those outside of the slice."""
        if self.count == self.n:
            return x
        index = lax.broadcasted_iota(np.dtype("int32"), x.shape, axis)
        return jnp.where(self.has(index), x, jnp.asarray(fill, x.dtype))


class View(NamedTuple):
    """The slice `part` of `members`, a value in which the members lie along `axis`."""

    part: Slice
    members: Atom
    axis: int

    @staticmethod
    def of(program: PlacedProgram, makers: Mapping[Var, Eqn], eqn: Eqn | None) -> View | None:
        """The view that an equation computes, if it only takes a slice or reverses one; or None.

        `makers` has the equation that computes each value.
        """
        if eqn is not None and eqn.primitive.name == "rev":
            return View._reversed(program, makers, eqn)
        part = slice_of(program, eqn) if eqn is not None else None
        if eqn is None or part is None or not is_view(program, part):
            return None
        (members,), along = eqn.inputs, program.place(eqn.inputs[0])
        assert along is not None
        uncut = replaced(shape_of(members), along.axis, part.count)
        return View(part, members, along.axis) if shape_of(eqn.outputs[0]) == uncut else None

    @staticmethod
    def _reversed(program: PlacedProgram, makers: Mapping[Var, Eqn], eqn: Eqn) -> View | None:
        (atom,) = eqn.inputs
        if not isinstance(atom, Var) or not runs_on_server(program, eqn):
            return None
        view = View.of_all(program, atom) or View.of(program, makers, makers.get(atom))
        if view is None or view.part.is_reversed or eqn.params["dimensions"] != (view.axis,):
            return None
        return view._replace(part=replace(view.part, is_reversed=True))

    @staticmethod
    def of_all(program: PlacedProgram, atom: Atom) -> View | None:
        """All members of a placed value, as a view; None for others."""
        along = program.place(atom)
        if along is None or is_unknown(program.sizes[along.placement]):
            return None
        n = program.sizes[along.placement]
        return View(Slice(along.placement, 0, n, n), atom, along.axis)


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

    def view(self) -> View:
        """A view whose slice has more members than there are."""
        part = Slice(self.along.placement, 0, self.count, self.n)
        return View(part, self.members, self.along.axis)


def slice_of(program: PlacedProgram, eqn: Eqn) -> Slice | None:
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


def is_view(program: PlacedProgram, part: Slice) -> bool:
    """Whether a slice of the members is computed by equations on all members."""
    if part.count == part.n:
        return part.is_reversed
    return part.is_large or any(part.is_most_of(other) for other in program.parts)


def view_of(rewriter: BlockRewriter, atom: Atom) -> View | None:
    """The view that a value of the block is, or None."""
    makers = rewriter.makers
    maker = makers.get(atom) if isinstance(atom, Var) else None
    return View.of(rewriter.program, makers, maker)


def extended_of(rewriter: BlockRewriter, atom: Atom) -> Extended | None:
    """The members and the tail that a value of the block consists of, or None."""
    return Extended.of(rewriter.program, rewriter.maker(atom, "concatenate"))


# --- the exchange of members between shards


def mover(
    rewriter: BlockRewriter, atom: Atom, axis: int, k: int
) -> Callable[[jax.Array], jax.Array] | None:
    """A function that moves all members by k, as `shifted` does; None if it costs too much."""
    if k == 0:
        return lambda x: x
    block = exchange_range(rewriter, atom, axis, abs(k), fewest=abs(k))
    return functools.partial(shifted, k=k, axis=axis, block=block) if block else None


def exchange_range(
    rewriter: BlockRewriter, atom: Atom, axis: int, rows: int, *, fewest: int
) -> int | None:
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
