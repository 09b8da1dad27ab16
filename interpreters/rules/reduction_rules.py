"""Rules for equations that reduce over the members; each shard gives one partial."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.function_reductions import reduce_bits
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    ReductionRule,
    TracedShard,
    bind,
    dropping,
    reduction,
)
from beamjax.numerics.reducers import JAX_REDUCTIONS, REDUCERS


@reduction(*JAX_REDUCTIONS)
def _reduce(eqn: Eqn, in_axes: Axes, n: Any) -> ReductionRule:
    (axis,), reducer = in_axes, JAX_REDUCTIONS[eqn.primitive.name]
    assert axis is not None
    if reducer.is_logical and aval_of(eqn.inputs[0]).dtype != np.bool_:
        return reduce_bits(eqn, in_axes, n)
    others = tuple(a for a in eqn.params["axes"] if a != axis)

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        (x,) = args
        x = reducer.prepared(x)
        if others:
            (x,) = bind(eqn, [x], axes=others)
        return reducer.partial(jnp.moveaxis(x, dropping(axis, others), 0), shard.counted)

    return ReductionRule((axis,), reducer.name, partial)


# --- products


@reduction("dot_general", "conv_general_dilated")
def _product(eqn: Eqn, in_axes: Axes, n: Any) -> ReductionRule:
    """A product that contracts the axes of the members, or the gradient of a shared kernel."""
    lhs, rhs = in_axes
    assert lhs is not None
    assert rhs is not None

    def product(eqn: Eqn, *operands: Any) -> Any:
        result = eqn.outputs[0].aval.dtype
        wide = REDUCERS["sum"].partial_dtype(result)
        algorithm = isinstance(
            eqn.params["precision"], jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
        )
        if wide == np.float32 != result and not algorithm:
            # XLA's CPU backend lacks products of bfloat16 with a float32 result in some fusions.
            operands = tuple(x.astype(wide) for x in operands)
            return bind(eqn, operands, preferred_element_type=wide)[0]
        return bind(eqn, operands)[0].astype(wide)

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        if shard.counted is None:
            return product(eqn, *args)

        def masked(x: Any, y: Any) -> Any:
            # Masking one side is not enough: padding repeats a member, and 0 * inf is nan.
            return product(eqn, shard.masked(x, lhs), shard.masked(y, rhs))

        # A mask copies both operands, which takes up to half as long as the product.
        return lax.cond(jnp.all(shard.counted), functools.partial(product, eqn), masked, *args)

    return ReductionRule((lhs, rhs), "sum", partial)


# --- scatters

_SCATTERS = {
    f"scatter-{REDUCERS[name].scatter}": REDUCERS[name] for name in ("sum", "prod", "max", "min")
}


@reduction(*_SCATTERS)
def _scatter(eqn: Eqn, in_axes: Axes, n: Any) -> ReductionRule | None:
    """A scatter of placed rows into a server table, as `jax.ops.segment_sum` does."""
    reducer, (_, index, position) = _SCATTERS[eqn.primitive.name], in_axes
    if not reducer.adds and aval_of(eqn.inputs[0]).dtype.kind == "c":
        return None  # In XLA, whether a complex NaN gets lost depends on its position.
    p, scatter = eqn.params, getattr(lax, f"scatter_{reducer.scatter}")
    assert position is not None

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        table, where, rows = args
        dtype = reducer.partial_dtype(table.dtype)
        neutral = jnp.asarray(reducer.identity(dtype))
        # The initial table counts once: in the first shard.
        table = jnp.where(shard.start == 0, table.astype(dtype), neutral)
        return scatter(
            table,
            where,
            shard.masked(rows.astype(dtype), position, neutral),
            p["dimension_numbers"],
            # The copy of a member that stands for a dropped one is out of order.
            indices_are_sorted=p["indices_are_sorted"] and shard.members is None,
            unique_indices=False,  # Padding repeats an index.
            mode=p["mode"],
        )

    return ReductionRule((None, index, position), reducer.name, partial)
