"""Members moved along their axis, by an exchange of what lies at the borders of shards.

One pass gathers the first `k` members of each range of `block` members (or the last ones, to move
the other way). The next pass takes these where a member comes from another shard. A shard holds
whole ranges (`lower.py` sees to that), so it needs no others.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    define,
    rule,
)
from beamjax.numerics.reducers import PICK

borders_p = jex.Primitive("borders_of_shards")
"""Takes all members (n, ...) to those at the borders of ranges: (ranges, abs(k), ...)."""
shift_p = jex.Primitive("shift_members")
"""Takes the members at the borders of ranges, and all members, to the moved members."""


def shifted(x: jax.Array, k: int, *, axis: int, block: int) -> jax.Array:
    """Row i of the result is row `(i + k) % n` of `x` along `axis`, where its n members are.

    Args:
      x: the members, of a dtype of at most 8 bytes that is not complex.
      k: by how many members to move, of at most `block` to either side.
      axis: the axis of the members.
      block: members per range; every shard begins at a multiple of it.
    """
    if k == 0:
        return x
    members, params = jnp.moveaxis(x, axis, 0), {"k": k, "block": block}
    borders = borders_p.bind(members, **params)
    return jnp.moveaxis(shift_p.bind(borders, members, **params), 0, axis)


def _at_borders(n: int, k: int, block: int) -> np.ndarray:
    """int32 (ranges, abs(k)): the first members of each range, or the last of each, and of all."""
    starts = block * np.arange(-(-n // block))
    if k < 0:
        starts = np.append(starts + block, n) + k
    return np.clip(starts[:, None] + np.arange(abs(k)), 0, n - 1).astype(np.int32)


@rule("borders_of_shards")
def _borders(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
    def partial(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> Any:
        members = _at_borders(aval_of(eqn.inputs[0]).shape[0], **eqn.params)
        rows = shard.rows(jnp.asarray(members))
        return PICK.partial(jnp.take(args[0], rows, axis=0, mode="clip"), shard.has(rows))

    return ReductionRule((0,), PICK.name, partial, by_shard=True) if axes[0] == 0 else None


@rule("shift_members")
def _shift(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    k, block = eqn.params["k"], eqn.params["block"]

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        borders, x = args
        size, count = shard.size, aval_of(eqn.inputs[1]).shape[0]
        row = lax.iota(np.dtype("int32"), size) + np.int32(k)
        member = shard.start + row
        if k > 0:
            outside = (row >= size) | (member >= count)
            member = jnp.where(member >= count, member - count, member)
            index = member // block, member % block
        else:
            outside = row < 0
            index = (
                jnp.where(member < 0, borders.shape[0] - 1, member // block),
                jnp.where(member < 0, member, member % block - block) - k,
            )
        others = borders[jnp.clip(index[0], 0), jnp.clip(index[1], 0, abs(k) - 1)]
        own = jnp.take(x, jnp.clip(row, 0, size - 1), axis=0)
        return [jnp.where(outside.reshape(-1, *(1 for _ in x.shape[1:])), others, own)]

    if axes[0] is not None or axes[1] != 0:
        return None
    return MemberwiseRule((None, 0), (0,), emit, by_shard=True)


# --- on the server, where all members are one shard


def _all_borders(x: jax.Array, *, k: int, block: int) -> jax.Array:
    return x[jnp.asarray(_at_borders(x.shape[0], k, block))]


def _all_shifted(borders: jax.Array, x: jax.Array, *, k: int, block: int) -> jax.Array:
    return jnp.roll(x, -k, axis=0)


define(borders_p, _all_borders)
define(shift_p, _all_shifted)
