"""Rules for equations that reduce over the members; each shard gives one partial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.function_reductions import reduce_bits
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    Rule,
    TracedShard,
    as_is,
    bind,
    dropping,
    rule,
    shape_of,
)
from beamjax.numerics.reducers import REDUCERS

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_or": "any",
    "reduce_and": "all",
    # What `jax.vmap` makes of a collective over its `axis_name`.
    "psum": "sum",
    "pmax": "max",
    "pmin": "min",
}


@rule(*REDUCTIONS)
def _reduce(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    axis, reduced = axes[0], eqn.params["axes"]
    if axis is None:
        return None
    if axis not in reduced:
        return MemberwiseRule((axis,), (dropping(axis, reduced),), as_is)
    name = REDUCTIONS[eqn.primitive.name]
    if name in ("any", "all") and aval_of(eqn.inputs[0]).dtype != np.bool_:
        return reduce_bits(eqn, axis)
    others = tuple(a for a in reduced if a != axis)

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        (x,) = args
        if name in ("sum", "prod"):
            x = x.astype(REDUCERS[name].partial_dtype(x.dtype))
        if others:
            (x,) = bind(eqn, [x], axes=others)
        return REDUCERS[name].partial(jnp.moveaxis(x, dropping(axis, others), 0), shard.mask)

    return ReductionRule((axis,), name, partial)


def _placed_reduction(name: str) -> Rule:
    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        return REDUCERS[name].partial(args[0], shard.mask)

    return lambda eqn, axes, n: ReductionRule((0,), name, partial)


for _name in REDUCERS:
    rule(f"bj_reduce_{_name}")(_placed_reduction(_name))


# --- products


def _product(lhs: int, rhs: int) -> Callable[[Eqn, Sequence[Any], TracedShard], Any]:
    """The partial of a product that contracts axis `lhs` with `rhs`, those of the members."""

    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        # Masking one side is not enough: padding repeats a member, and 0 * inf is nan.
        operands = [shard.masked(args[0], lhs), shard.masked(args[1], rhs)]
        result = eqn.outputs[0].aval.dtype
        wide = REDUCERS["sum"].partial_dtype(result)
        algorithm = isinstance(
            eqn.params["precision"], jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
        )
        if wide == np.float32 != result and not algorithm:
            # XLA's CPU backend lacks products of bfloat16 with a float32 result in some fusions.
            operands = [x.astype(wide) for x in operands]
            return bind(eqn, operands, preferred_element_type=wide)[0]
        return bind(eqn, operands)[0].astype(wide)

    return partial


@rule("dot_general")
def _dot_general(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = axes
    paired = dict(zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True))
    if lhs is None and rhs in paired.values():
        lhs = next(a for a, b in paired.items() if b == rhs)
    if lhs in paired and rhs is None:
        rhs = paired[lhs]
    if lhs is not None and lhs in paired:
        if rhs is None or paired[lhs] != rhs:
            return None
        if lhs in lhs_batch:
            return MemberwiseRule((lhs, rhs), (lhs_batch.index(lhs),), as_is)
        return ReductionRule((lhs, rhs), "sum", _product(lhs, rhs))
    if lhs is not None and rhs is not None:
        return None
    if lhs is not None:
        out = len(lhs_batch) + dropping(lhs, (*lhs_contract, *lhs_batch))
        return MemberwiseRule((lhs, None), (out,), as_is)
    if rhs is None:
        return None
    before = len(shape_of(eqn.inputs[0])) - len(lhs_contract)
    return MemberwiseRule(
        (None, rhs), (before + dropping(rhs, (*rhs_contract, *rhs_batch)),), as_is
    )


@rule("conv_general_dilated")
def _conv(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | ReductionRule | None:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] != 1:
        return None
    batch, features = numbers.lhs_spec[:2]
    kernels, contracted = numbers.rhs_spec[:2]
    lhs, rhs = axes
    if lhs == batch and rhs is None:
        return MemberwiseRule((batch, None), (numbers.out_spec[0],), as_is)
    if groups != 1:
        return None
    if lhs is None and rhs == kernels:
        return MemberwiseRule((None, kernels), (numbers.out_spec[1],), as_is)
    # The gradient of a kernel that the members share contracts over the members.
    if lhs in (None, features) and rhs in (None, contracted):
        return ReductionRule((features, contracted), "sum", _product(features, contracted))
    return None
