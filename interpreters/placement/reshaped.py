"""Rewrites reductions of reshaped members to reductions of the members in their original shape.

A reduction depends on which elements are reduced together, not on their shape. If all elements are
reduced, the members can be reduced directly. If only some axes are reduced, each member contributes
to one or a few rows of the result, as in `jax.ops.segment_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import MemberAxis, PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, aval_of
from beamjax.interpreters.rules.factors import ELEMENTWISE
from beamjax.interpreters.rules.reductions import REDUCTIONS
from beamjax.interpreters.rules.sharding_rules import bind, shape_of
from beamjax.numerics.accumulators import lowest_value
from beamjax.numerics.reducers import REDUCERS
from beamjax.plan.steps import MAX_MEMBERS

MAX_ROWS = 8
"""Largest number of rows of the table that each shard sends, or the square root of the number of
members if that is larger."""

Function = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Reshape:
    """A reshape of a placed value: its original shape and its new one."""

    along: MemberAxis
    shape: tuple[int, ...]
    to: tuple[int, ...]

    @staticmethod
    def of(program: PlacedProgram, eqn: Eqn) -> Reshape | None:
        """The reshape that a server equation does, if its operand is placed and of known size."""
        if eqn.primitive.name != "reshape" or not runs_on_server(program, eqn):
            return None
        along = program.place(eqn.inputs[0])
        if along is None or len(eqn.inputs) > 1 or is_unknown(program.sizes[along.placement]):
            return None
        plain = eqn.params["dimensions"] is None
        return Reshape(along, shape_of(eqn.inputs[0]), shape_of(eqn.outputs[0])) if plain else None


def reshaped(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that reads reshaped members: an elementwise one or a reduction."""
    made = [rewriter.maker(atom, "reshape") for atom in eqn.inputs]
    changes = [Reshape.of(rewriter.program, maker) for maker in made if maker is not None]
    change = next(filter(None, changes), None)
    if change is None:
        return None
    if eqn.primitive.name in ELEMENTWISE:
        return _elementwise(rewriter, eqn, change)
    function = _end(eqn, change) if len(eqn.inputs) == 1 else None
    return Rewrite(function, made[0].inputs) if function and made[0] else None


def _elementwise(rewriter: BlockRewriter, eqn: Eqn, change: Reshape) -> Rewrite | None:
    """Rewrites an equation on reshaped members, scalars, and arrays of one number."""
    atoms: list[Atom] = []
    fills: dict[int, Eqn] = {}
    for i, atom in enumerate(eqn.inputs):
        view, fill = rewriter.maker(atom, "reshape"), rewriter.maker(atom, "broadcast_in_dim")
        if view is not None and Reshape.of(rewriter.program, view) == change:
            atoms += view.inputs
        elif fill is not None and _is_fill(fill) and shape_of(atom) == change.to:
            fills[i] = fill
            atoms += fill.inputs
        elif shape_of(atom) == () and rewriter.program.place(atom) is None:
            atoms.append(atom)
        else:
            return None

    def function(*args: Any) -> Sequence[Any]:
        values = list(args)
        for i, fill in fills.items():
            (values[i],) = bind(fill, [args[i]], shape=change.shape)
        return [lax.reshape(x, change.to) for x in bind(eqn, values)]

    return Rewrite(function, atoms, is_view=True)


def _is_fill(eqn: Eqn) -> bool:
    return len(eqn.inputs) == 1 and shape_of(eqn.inputs[0]) == ()


def _end(eqn: Eqn, change: Reshape) -> Function | None:
    """A function from the members to a reduction, or to a reshape back, of the reshaped members."""
    name = eqn.primitive.name
    if name == "reshape" and shape_of(eqn.outputs[0]) == change.shape:
        return lambda x: bind(eqn, [x])
    if name in REDUCTIONS:
        return _Axes.reduction(eqn, change)
    if name in ("argmax", "argmin") and len(change.to) == 1 and eqn.params["axes"] == (0,):
        return _place_of_extreme(eqn, change)
    return None


# --- argmax and argmin of all elements


def _place_of_extreme(eqn: Eqn, change: Reshape) -> Function | None:
    dtype, index = aval_of(eqn.inputs[0]).dtype, np.dtype(eqn.params["index_dtype"])
    buffer = "max" if eqn.primitive.name == "argmax" else "min"
    if change.to[0] > np.iinfo(index).max:
        return None

    def better(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, Any]:
        (x, i), (y, j) = left, right
        is_right = y > x if buffer == "max" else y < x
        # The first NaN is the extreme.
        is_right |= (y != y) & (x == x)
        is_right |= ((x == y) | (x != x) & (y != y)) & (j < i)
        return jnp.where(is_right, y, x), jnp.where(is_right, j, i)

    def function(x: Any) -> Sequence[Any]:
        strides = [math.prod(x.shape[k + 1 :]) for k in range(x.ndim)]
        places = [lax.broadcasted_iota(index, x.shape, k) for k in range(x.ndim)]
        number = sum(i * index.type(s) for i, s in zip(places, strides, strict=True))
        operands = tuple(jnp.moveaxis(each, change.along.axis, 0) for each in (x, number))
        start = lowest_value(buffer, dtype), index.type(np.iinfo(index).max)
        return [lax.reduce(operands, start, better, range(x.ndim))[1]]

    return function


# --- reductions along some axes

_WRITES = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "max", "all": "min"}
"""For each reduction, the method of `table.at[keys]` that adds rows to a table."""


class _Axes:
    """Relates the axes of a reshaped value to those of the members.

    Attributes:
      shape: a shape of the original value that has as many axes of the reshaped value as possible:
        all but those that mix with the axis of the members.
      numbers: for each axis of `shape`, the same axis of the reshaped value; None for the axis of
        the members and the elements of a member that are merged with it.
      merged: the axes of the reshaped value that the members, and elements merged with them, fill.
      member: the axis of the members in `shape`; the axis of the elements that are merged with them
        follows. None if the reshape can't be described in this way.
    """

    def __init__(self, change: Reshape):
        self.to = change.to
        self.shape: list[int] = []
        self.numbers: list[int | None] = []
        self.merged: list[int] = []
        self.member: int | None = None
        for olds, news in _groups(change.shape, change.to):
            if change.along.axis not in olds:
                self.shape += [change.to[k] for k in news]
                self.numbers += news
                continue
            if math.prod(change.shape[k] for k in olds if k < change.along.axis) != 1:
                return
            inner = math.prod(change.shape[k] for k in olds if k > change.along.axis)
            alone = len(news)
            while alone and inner % math.prod(change.to[k] for k in news[alone - 1 :]) == 0:
                alone -= 1
            rest = news[alone:]
            self.member, self.merged = len(self.shape), news[:alone]
            width = inner // math.prod(change.to[k] for k in rest)
            self.shape += [change.shape[change.along.axis], width, *(change.to[k] for k in rest)]
            self.numbers += [None, None, *rest]

    @staticmethod
    def reduction(eqn: Eqn, change: Reshape) -> Function | None:
        """A function from the members to a reduction over axes of the reshaped value, or None."""
        reduced = set(eqn.params["axes"])
        if not 0 < math.prod(change.shape) <= MAX_MEMBERS:
            return None
        axes = _Axes(change)
        kept = [k for k in axes.merged if k not in reduced]
        if axes.member is None or len(kept) == len(axes.merged):
            return None
        if all(change.to[k] == 1 for k in kept):
            return axes.whole(eqn, reduced)
        rows, n = math.prod(change.to[k] for k in kept), axes.shape[axes.member]
        if rows > max(MAX_ROWS, math.isqrt(n)) or not _has_table(eqn):
            return None
        return axes.by_row(eqn, reduced, kept)

    def whole(self, eqn: Eqn, reduced: set[int]) -> Function:
        """The reduction if all members contribute to all results."""
        gone = tuple(i for i, k in enumerate(self.numbers) if k is None or k in reduced)
        result = shape_of(eqn.outputs[0])

        def function(x: Any) -> Sequence[Any]:
            (total,) = bind(eqn, [x.reshape(self.shape)], axes=gone)
            return [total.reshape(result)]

        return function

    def by_row(self, eqn: Eqn, reduced: set[int], kept: list[int]) -> Function:
        """The reduction if each member contributes to one row of a table, or a few."""
        assert self.member is not None
        member, name = self.member, REDUCTIONS[eqn.primitive.name]
        others = tuple(i for i, k in enumerate(self.numbers) if k is not None and k in reduced)
        rows = math.prod(self.to[k] for k in kept)
        result = shape_of(eqn.outputs[0])
        before = sum(k is not None and k not in reduced for k in self.numbers[:member])

        def function(x: Any) -> Sequence[Any]:
            x = x.reshape(self.shape)
            if others:
                (x,) = bind(eqn, [x], axes=others)
            x = jnp.moveaxis(x, [before, before + 1], [0, 1])
            keys = self.rows_of(x.shape[:2], kept)
            neutral = jnp.asarray(REDUCERS[name].identity(x.dtype))
            table = jnp.full((rows, *x.shape[2:]), neutral).at[keys]
            total = getattr(table, _WRITES[name])(x)
            return [jnp.moveaxis(total, 0, before).reshape(result)]

        return function

    def rows_of(self, shape: tuple[int, ...], kept: list[int]) -> Any:
        """int32 of `shape`: the row of the table for each member and element merged with it."""
        number, width = np.dtype("int32"), shape[1]
        place = lax.broadcasted_iota(number, shape, 0) * width + lax.broadcasted_iota(
            number, shape, 1
        )
        row = jnp.zeros_like(place)
        for i, k in enumerate(self.merged):
            if k in kept:
                stride = math.prod(self.to[j] for j in self.merged[i + 1 :])
                row = row * self.to[k] + place // stride % self.to[k]
        return row


def _has_table(eqn: Eqn) -> bool:
    """Whether there is a scatter for a reduction and its dtype."""
    kind, name = aval_of(eqn.inputs[0]).dtype.kind, REDUCTIONS[eqn.primitive.name]
    if kind == "c":
        return name == "sum"
    return kind == "b" or name not in ("any", "all")


def _groups(olds: Sequence[int], news: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Splits the axes of two shapes of equal size into the smallest consecutive groups of equal
    size.
    """
    i = j = 0
    while i < len(olds) or j < len(news):
        left, right = list[int](), list[int]()
        sizes = [1, 1]
        while not (left or right) or sizes[0] != sizes[1]:
            if j == len(news) or (i < len(olds) and sizes[0] <= sizes[1]):
                sizes[0] *= olds[i]
                left.append(i)
                i += 1
            else:
                sizes[1] *= news[j]
                right.append(j)
                j += 1
        yield left, right
