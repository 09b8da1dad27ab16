"""Rules for reductions over the members whose partials are lists of arrays.

These are reductions by functions of the user, argmax and argmin, top_k, and bitwise reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.indexing import MAX_SHARE
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    FunctionReductionRule,
    TracedShard,
    bind,
    draw_by_batch,
    reduction,
    rule,
    shape_of,
)
from beamjax.numerics.accumulators import lowest_value
from beamjax.numerics.reducers import REDUCTIONS, Choice
from beamjax.ops.combining import combine_of, fold_members
from beamjax.ops.placements import MAX_MEMBERS

# --- reductions by a function of the user


@rule("bj_reduce")
def _reduce_by_function(eqn: Eqn, axes: Axes, n: Any) -> FunctionReductionRule | None:
    num_served, jaxpr = eqn.params["num_served"], eqn.params["jaxpr"]
    if draw_by_batch(jaxpr) is not None:
        return None
    size = len(eqn.outputs)

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        combine = combine_of(jaxpr, args[:num_served])
        return fold_members(combine, args[num_served:], shard.count())

    def combine(eqn: Eqn, served: Sequence[Any], left: Any, right: Any) -> Sequence[Any]:
        return combine_of(jaxpr, served)(left, right)

    in_axes = (None,) * num_served + (0,) * size
    leaves = tuple(aval_of(var) for var in eqn.outputs)
    return FunctionReductionRule(
        in_axes, eqn.params["name"], partial, combine, leaves, tuple(range(size))
    )


@reduction("reduce")
def _reduce(eqn: Eqn, in_axes: Axes, n: Any) -> FunctionReductionRule | None:
    """`lax.reduce` by an associative function of numbers, in the order of the members."""
    size, reduced = len(eqn.outputs), eqn.params["dimensions"]
    axis = in_axes[0]
    assert axis is not None
    others = [k for k in sorted(reduced) if k != axis]
    entries = [shape_of(eqn.inputs[0])[k] for k in others]
    # XLA calls the function in row-major order, which matters if it is not commutative. So the axis
    # of the members must be the first of the reduced axes.
    if axis != min(reduced) or 0 in entries or draw_by_batch(eqn.params["jaxpr"]) is not None:
        return None
    function = _compat.jaxpr_as_fun(eqn.params["jaxpr"])

    # The function takes numbers, so it is mapped over all entries of two arrays.
    def joined(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
        shape = left[0].shape
        outs = jax.vmap(function)(*(x.reshape(-1) for x in (*left, *right)))
        return [out.reshape(shape) for out in outs]

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        rows = [jnp.moveaxis(x, [axis, *others], range(1 + len(others))) for x in args[:size]]
        inner = math.prod(entries)
        leaves = [x.reshape(-1, *x.shape[1 + len(others) :]) for x in rows]
        totals = fold_members(joined, leaves, shard.count() * inner)
        starts = [jnp.broadcast_to(x, totals[0].shape) for x in args[size:]]
        begun = joined(starts, totals)
        # The initial value counts once, before all members: in the first shard.
        return [jnp.where(shard.start == 0, x, y) for x, y in zip(begun, totals, strict=True)]

    def combine(eqn: Eqn, served: Sequence[Any], left: Any, right: Any) -> Sequence[Any]:
        return joined(left, right)

    leaves = tuple(aval_of(var) for var in eqn.outputs)
    return FunctionReductionRule(
        tuple(in_axes), "reduce", partial, combine, leaves, tuple(range(size))
    )


# --- argmax, argmin and top_k


@rule(*(f"bj_reduce_{name}" for name, choice in REDUCTIONS.items() if isinstance(choice, Choice)))
def _operator(eqn: Eqn, axes: Axes, n: Any) -> FunctionReductionRule | None:
    return _index_of_extreme(eqn, (0,), n)


@reduction("argmax", "argmin")
def _index_of_extreme(eqn: Eqn, in_axes: Axes, n: Any) -> FunctionReductionRule | None:
    """The index of the first extreme along the members; a partial holds index and extreme."""
    choice = REDUCTIONS[eqn.primitive.name.removeprefix("bj_reduce_")]
    assert isinstance(choice, Choice)
    axis, function = in_axes[0], getattr(jax.lax, choice.name)
    assert axis is not None
    result, operand = aval_of(eqn.outputs[0]), aval_of(eqn.inputs[0])
    last = np.iinfo(result.dtype).max
    if last < MAX_MEMBERS and (is_unknown(n) or n - 1 > last):
        # Indices of a dtype that is too narrow wrap around in XLA, and the smallest one wins.
        return None

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        # Padding is at the end of a shard, so it is never the first of equal extremes.
        x = shard.masked(args[0], axis, lowest_value(choice.extreme, operand.dtype))
        row = function(x, axis, result.dtype)
        extreme = jnp.take_along_axis(x, jnp.expand_dims(row, axis), axis)
        index = jnp.take(shard.indices(), row).astype(result.dtype)
        return [index, jnp.squeeze(extreme, axis)]

    def combine(eqn: Eqn, served: Sequence[Any], left: Any, right: Any) -> Sequence[Any]:
        (i, x), (j, y) = left, right
        is_better = choice.replaces(y, x)
        return [jnp.where(is_better, b, a) for a, b in ((i, j), (x, y))]

    leaves = (result, jax.ShapeDtypeStruct(result.shape, operand.dtype))
    return FunctionReductionRule((axis,), choice.name, partial, combine, leaves, (0,))


NOWHERE = np.int32(MAX_MEMBERS)
"""The index of padding, which is larger than that of any member."""


@reduction("top_k")
def _top_k(eqn: Eqn, in_axes: Axes, n: Any) -> FunctionReductionRule | None:
    """The k highest values along the members with their indices; a partial holds k of both."""
    axis, k = in_axes[0], eqn.params["k"]
    assert axis is not None
    if k == 0 or (not is_unknown(n) and k > MAX_SHARE * n):
        return None
    lowest = _lowest_of_all(aval_of(eqn.inputs[0]).dtype)

    def highest(x: Any, indices: Any) -> list[Any]:
        # Of equal values, top_k takes the first. A stable sort moves padding after all members.
        order = jnp.argsort(indices == NOWHERE, axis=-1, stable=True)
        x, indices = (jnp.take_along_axis(array, order, -1) for array in (x, indices))
        values, chosen = jax.lax.top_k(x, k)
        top = [values, jnp.take_along_axis(indices, chosen, -1)]
        return [jnp.moveaxis(array, -1, axis) for array in top]

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        x = jnp.moveaxis(shard.masked(args[0], axis, lowest), axis, -1)
        own = shard.masked(shard.indices(), 0, NOWHERE)
        indices = jnp.broadcast_to(own, x.shape)
        # A shard may have fewer than k members.
        # So all partials have k rows; padding fills up those that are too short.
        missing = [(0, 0)] * (x.ndim - 1) + [(0, max(0, k - shard.size))]
        x = jnp.pad(x, missing, constant_values=lowest)
        return highest(x, jnp.pad(indices, missing, constant_values=NOWHERE))

    def combine(eqn: Eqn, served: Sequence[Any], left: Any, right: Any) -> Sequence[Any]:
        pairs = zip(left, right, strict=True)
        both = [jnp.moveaxis(jnp.concatenate(pair, axis), axis, -1) for pair in pairs]
        return highest(*both)

    leaves = tuple(aval_of(var) for var in eqn.outputs)
    return FunctionReductionRule((axis,), "top_k", partial, combine, leaves, (0, 1))


def _lowest_of_all(dtype: Any) -> Any:
    """The scalar that comes last in the order of `lax.top_k`: a negative NaN if there is one."""
    if not jnp.issubdtype(dtype, np.floating):
        return lowest_value("max", dtype)
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    return np.array(np.iinfo(bits).max, bits).view(dtype)[()]


# --- bits


@reduction("reduce_xor")
def reduce_bits(eqn: Eqn, in_axes: Axes, n: Any) -> FunctionReductionRule:
    """The rule of a bitwise reduction of integers over the members and other axes."""
    axis = in_axes[0]
    assert axis is not None
    ufunc = getattr(np, eqn.primitive.name.replace("reduce", "bitwise"))
    result = aval_of(eqn.outputs[0])
    identity = np.array(ufunc.identity).astype(result.dtype)

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        return bind(eqn, [shard.masked(args[0], axis, identity)])

    def combine(eqn: Eqn, served: Sequence[Any], left: Any, right: Any) -> Sequence[Any]:
        return [getattr(jnp, ufunc.__name__)(*left, *right)]

    return FunctionReductionRule((axis,), eqn.primitive.name, partial, combine, (result,), (0,))
