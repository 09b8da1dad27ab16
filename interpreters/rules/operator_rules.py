"""Rules for the placed operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from beamjax import _compat
from beamjax.bodies.jaxprs import equations
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    Rule,
    TracedShard,
    bind,
    draw_by_batch,
    rule,
)
from beamjax.numerics.reducers import REDUCERS


@rule("bj_map")
def _map(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    # Draws from rbg keys under vmap depend on the whole batch, so a shard can't reproduce them.
    if draw_by_batch(eqn.params["jaxpr"]) is not None:
        return None
    served = eqn.params["num_broadcast"]
    in_axes = (None,) * served + (0,) * (len(eqn.inputs) - served)
    return MemberwiseRule(in_axes, (0,) * len(eqn.outputs), _mapped)


def _mapped(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
    """Emits a map, without vmap if there is one member."""
    # XLA computes that faster: vmap evaluates both sides of a cond, turns convolutions into grouped
    # ones, and adds an axis to products, so that XLA reads transposed operands with a stride.
    closed, served = eqn.params["jaxpr"], eqn.params["num_broadcast"]
    if shard.size > 1 or _needs_vmap(closed):
        return _at_shard_size(eqn, args, shard)
    member = [jnp.squeeze(x, 0) for x in args[served:]]
    outs = _compat.jaxpr_as_fun(closed)(*args[:served], *member)
    return [jnp.expand_dims(x, 0) for x in outs]


def _needs_vmap(closed: Any) -> bool:
    """Whether a body holds something that may behave differently without vmap."""
    return any(
        eqn.effects or eqn.primitive.name in ("custom_vmap_call", "pure_callback")
        for eqn in equations(closed)
    )


@rule("bj_broadcast")
def broadcast(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule:
    """The rule of a broadcast, of which a shard makes its own copies."""
    return MemberwiseRule((None,), (0,), _at_shard_size)


def _at_shard_size(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
    return bind(eqn, args, n=shard.size)


def _reduction(name: str) -> Rule:
    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        return REDUCERS[name].partial(args[0], shard.counted)

    return lambda eqn, axes, n: ReductionRule((0,), name, partial)


for _name in REDUCERS:
    rule(f"bj_reduce_{_name}")(_reduction(_name))
