"""Running sums, products and extremes over the members, in two passes.

The first pass reduces each shard, to what comes before each range of `block` members: a reduction
with one row for each range, to which a shard adds its total in the rows of later ranges. The second
scans each shard, and applies what comes before it. A shard holds whole ranges (`lower.py` sees to
that), so its first member gives its row.

Bits depend on the size of shards alone: what comes before a shard is the exactly rounded sum of the
totals of the shards before it, whatever their number and wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    all_members,
    define,
    rule,
)
from beamjax.numerics.reducers import REDUCERS

SCANS: dict[str, tuple[str, Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "cumsum": ("sum", lax.cumsum, jnp.add),
    "cumprod": ("prod", lax.cumprod, jnp.multiply),
    "cummax": ("max", lax.cummax, jnp.maximum),
    "cummin": ("min", lax.cummin, jnp.minimum),
}
"""For each primitive of a scan, its reduction, and the functions of a shard and of two values."""

before_p = jex.Primitive("before_shards")
"""Takes members to a row for each range of `block` of them: the total of all ranges before it."""
scan_p = jex.Primitive("scan_shards")
"""Takes the rows of `before_shards` and the members to the running totals of the members."""


def two_passes(scan: str, x: jax.Array, *, axis: int, reverse: bool, block: int) -> jax.Array:
    """Running totals of `x` along `axis`, where the members are, with shape and dtype of `x`.

    Args:
      scan: a key of `SCANS`.
      x: ints, or floats of at least 16 bits; those of 16 bits are added up in float32.
      axis: the axis of the members.
      reverse: whether the totals run from the last member to the first.
      block: members per row; every shard begins at a multiple of it.
    """
    params = {"scan": scan, "axis": axis, "reverse": reverse, "block": block}
    wide = x.astype(REDUCERS[SCANS[scan][0]].partial_dtype(x.dtype))
    return scan_p.bind(before_p.bind(wide, **params), wide, **params).astype(x.dtype)


def _before(x: jax.Array, shard: TracedShard, p: dict[str, Any], n: int) -> jax.Array:
    reducer = REDUCERS[SCANS[p["scan"]][0]]
    total = reducer.partial(jnp.moveaxis(x, p["axis"], 0), shard.mask)
    rows = lax.iota(np.dtype("int32"), -(-n // p["block"]))
    row = shard.start // p["block"]
    later = rows < row if p["reverse"] else rows > row
    later = later.reshape(-1, *(1 for _ in total.shape))
    return jnp.where(later, total, jnp.asarray(reducer.identity(total.dtype)))


def _scanned(before: jax.Array, x: jax.Array, shard: TracedShard, p: dict[str, Any]) -> jax.Array:
    reduction, scan, join = SCANS[p["scan"]]
    x = shard.masked(x, p["axis"], REDUCERS[reduction].identity(x.dtype))
    own = scan(x, axis=p["axis"], reverse=p["reverse"])
    start = jnp.take(before, shard.start // p["block"], axis=0)
    return join(own, jnp.expand_dims(start, p["axis"]))


@rule("before_shards")
def _before_rule(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        return _before(args[0], shard, eqn.params, aval_of(eqn.inputs[0]).shape[axis])

    axis, reducer = eqn.params["axis"], SCANS[eqn.params["scan"]][0]
    if axes[0] != axis:
        return None
    return ReductionRule((axis,), reducer, partial, by_shard=True)


@rule("scan_shards")
def _scan_rule(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        before, x = args
        return [_scanned(before, x, shard, eqn.params)]

    axis = eqn.params["axis"]
    if axes[0] is not None or axes[1] != axis:
        return None
    return MemberwiseRule((None, axis), (axis,), emit, by_shard=True)


# --- on the server, where all members are one shard


def _before_all(x: jax.Array, **params: Any) -> jax.Array:
    n = x.shape[params["axis"]]
    return _before(x, all_members(n), params, n)


def _scan_all(before: jax.Array, x: jax.Array, **params: Any) -> jax.Array:
    return _scanned(before, x, all_members(x.shape[params["axis"]]), params)


define(before_p, _before_all)
define(scan_p, _scan_all)
