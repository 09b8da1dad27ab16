"""Rewrites reductions of reshaped members to reductions of the members in their original shape.

A reduction depends on which elements are reduced together, not on their shape. If all elements are
reduced, the members can be reduced directly: `v = reshape x; m = reduce_max v` becomes
`m = reduce_max x`. The same holds for inner products, `argmax`, and slices of raveled members. If
only some axes are reduced, each member contributes to one or a few rows of the result, as in
`jax.ops.segment_sum`. An elementwise operation of reshaped members is one of the members:
`v = reshape x; t = tanh v` becomes `u = tanh x; t = reshape u`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from beamjax.interpreters.rules.indexing import MAX_SHARE, clamped
from beamjax.interpreters.rules.sharding_rules import bind, shape_of
from beamjax.numerics.accumulators import lowest_value
from beamjax.numerics.reducers import JAX_REDUCTIONS, REDUCTIONS, Choice
from beamjax.ops.placements import MAX_MEMBERS

MAX_ROWS = 8
"""Largest number of rows of the table that each shard sends, unless the square root of the number
of members is larger. With more rows, a shard would send about as much as it has members."""

Function = Callable[[Any], Sequence[Any]]

VECTORS = (((0,), (0,)), ((), ()))
"""The dimension numbers of the inner product of two vectors."""


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
    if eqn.primitive.name in ("slice", "dynamic_slice") and made[0] is not None:
        entries = _entries(eqn, change)
        return Rewrite(entries, [*made[0].inputs, *eqn.inputs[1:]]) if entries else None
    if eqn.primitive.name == "dot_general":
        return _inner_product(eqn, made)
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

    return Rewrite(function, atoms)


def _is_fill(eqn: Eqn) -> bool:
    return len(eqn.inputs) == 1 and shape_of(eqn.inputs[0]) == ()


def _inner_product(eqn: Eqn, made: Sequence[Eqn | None]) -> Rewrite | None:
    """The inner product of raveled arrays, as of the arrays themselves."""
    atoms = [atom for maker in made if maker is not None for atom in maker.inputs]
    shapes = set(map(shape_of, atoms))
    if len(atoms) < 2 or len(shapes) > 1 or eqn.params["dimension_numbers"] != VECTORS:
        return None
    axes = tuple(range(len(*shapes)))
    return Rewrite(
        lambda x, y: bind(eqn, [x, y], dimension_numbers=((axes, axes), ((), ()))), atoms
    )


def _end(eqn: Eqn, change: Reshape) -> Function | None:
    """A function from the members to a reduction, or to a reshape back, of the reshaped members."""
    name = eqn.primitive.name
    if name == "reshape" and shape_of(eqn.outputs[0]) == change.shape:
        return lambda x: bind(eqn, [x])
    if name in JAX_REDUCTIONS:
        return _reduction(eqn, change)
    if name in ("argmax", "argmin") and len(change.to) == 1 and eqn.params["axes"] == (0,):
        return _place_of_extreme(eqn, change)
    return None


def _entries(eqn: Eqn, change: Reshape) -> Callable[..., Sequence[Any]] | None:
    """A function from the members to consecutive entries of them all, as `x.ravel()[i]`."""
    size = math.prod(change.shape)
    if change.along.axis != 0 or change.to != (size,) or not 0 < size <= MAX_MEMBERS:
        return None
    n = change.shape[0]
    width, p = size // n, eqn.params
    if eqn.primitive.name == "slice":
        (start,), (stop,) = p["start_indices"], p["limit_indices"]
        first, last = start // width, -(-stop // width)
        if last - first > MAX_SHARE * n:
            return None
        shift = first * width
        bounds = {"start_indices": (start - shift,), "limit_indices": (stop - shift,)}

        def sliced(x: Any) -> Sequence[Any]:
            rows = lax.slice_in_dim(x, first, last)
            return bind(eqn, [rows.ravel()], **bounds)

        return sliced
    (count,) = p["slice_sizes"]
    rows = (count + width - 2) // width + 1
    if rows > MAX_SHARE * n:
        return None

    def taken(x: Any, start: Any) -> Sequence[Any]:
        start = clamped(start, size - count)
        first = jnp.minimum(start // width, n - rows)
        found = lax.dynamic_slice_in_dim(x, first, rows)
        return bind(eqn, [found.ravel(), start - first * width])

    return taken


# --- argmax and argmin of all elements


def _place_of_extreme(eqn: Eqn, change: Reshape) -> Function | None:
    dtype, index = aval_of(eqn.inputs[0]).dtype, np.dtype(eqn.params["index_dtype"])
    choice = REDUCTIONS[eqn.primitive.name]
    assert isinstance(choice, Choice)
    if change.to[0] > np.iinfo(index).max:
        return None

    def better(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, Any]:
        """The better of two pairs of a value and its index; of equal values, the first one."""
        (x, i), (y, j) = left, right
        is_right = choice.replaces(y, x)
        is_right |= ((x == y) | (x != x) & (y != y)) & (j < i)
        return jnp.where(is_right, y, x), jnp.where(is_right, j, i)

    def function(x: Any) -> Sequence[Any]:
        strides = [math.prod(x.shape[k + 1 :]) for k in range(x.ndim)]
        indices = [lax.broadcasted_iota(index, x.shape, k) for k in range(x.ndim)]
        number = sum(i * index.type(s) for i, s in zip(indices, strides, strict=True))
        operands = tuple(jnp.moveaxis(each, change.along.axis, 0) for each in (x, number))
        start = lowest_value(choice.extreme, dtype), index.type(np.iinfo(index).max)
        return [lax.reduce(operands, start, better, range(x.ndim))[1]]

    return function


# --- reductions along some axes


def _reduction(eqn: Eqn, change: Reshape) -> Function | None:
    """A function from the members to a reduction over axes of the reshaped value, or None.

    The new axes are, from the first to the last one: axes in front of the members, axes that the
    members fill together with the first entries of each member, and axes inside a member. So the
    members can have the shape (*front, n, width, *inside), where `width` counts those entries.
    """
    to, axis, reduced = change.to, change.along.axis, set(eqn.params["axes"])
    if len(reduced) == len(to):
        return lambda x: bind(eqn, [x], axes=tuple(range(len(change.shape))))
    n, inner = change.shape[axis], math.prod(change.shape[axis + 1 :])
    if not 0 < math.prod(change.shape) <= MAX_MEMBERS:
        return None
    strides = [math.prod(to[k + 1 :]) for k in range(len(to))]
    front = [k for k in range(len(to)) if strides[k] % (n * inner) == 0]
    inside = [k for k in range(len(front), len(to)) if inner % (to[k] * strides[k]) == 0]
    mixed = range(len(front), len(to) - len(inside))
    if math.prod(to[k] for k in front) != math.prod(change.shape[:axis]):
        return None  # An axis in front is merged with the members.
    kept = [k for k in mixed if k not in reduced]
    if len(kept) == len(mixed):
        return None  # No members are reduced together.
    width = inner // math.prod(to[k] for k in inside)
    shape = (*(to[k] for k in front), n, width, *(to[k] for k in inside))
    # The other axes of `shape` to reduce. In `shape`, `n` and `width` replace the mixed axes.
    gone = sorted(reduced.difference(mixed))
    others = tuple(k if k in front else k - len(mixed) + 2 for k in gone)
    member, result = len(front), shape_of(eqn.outputs[0])
    if all(to[k] == 1 for k in kept):
        axes = tuple(sorted((*others, member, member + 1)))
        return lambda x: [bind(eqn, [x.reshape(shape)], axes=axes)[0].reshape(result)]
    rows = math.prod(to[k] for k in kept)
    if rows > max(MAX_ROWS, math.isqrt(n)) or not _has_table(eqn):
        return None
    reducer, before = JAX_REDUCTIONS[eqn.primitive.name], sum(k not in reduced for k in front)

    def by_row(x: Any) -> Sequence[Any]:
        x = x.reshape(shape)
        if others:
            (x,) = bind(eqn, [x], axes=others)
        x = jnp.moveaxis(x, [before, before + 1], [0, 1])
        # The number of each entry among all members, and the row of the table that it goes to.
        entry, element = (lax.broadcasted_iota(np.dtype("int32"), (n, width), k) for k in (0, 1))
        entry, row = entry * width + element, jnp.zeros_like(entry)
        for k in kept:
            row = row * to[k] + entry // (strides[k] // math.prod(shape[member + 2 :])) % to[k]
        neutral = jnp.asarray(reducer.identity(x.dtype))
        table = jnp.full((rows, *x.shape[2:]), neutral).at[row]
        total = getattr(table, reducer.scatter)(x)
        return [jnp.moveaxis(total, 0, before).reshape(result)]

    return by_row


def _has_table(eqn: Eqn) -> bool:
    """Whether there is a scatter for a reduction and its dtype."""
    kind, reducer = aval_of(eqn.inputs[0]).dtype.kind, JAX_REDUCTIONS[eqn.primitive.name]
    if kind == "c":
        return reducer.name == "sum"
    return kind == "b" or not reducer.is_logical
