"""Members moved along their axis, by an exchange of what lies at the borders of shards.

One pass picks the first `k` members of each range of `block` members (or the last ones, to move the
other way). The next pass takes these where a member comes from another shard. A shard holds whole
ranges (`lower.py` sees to that), so it needs no others.
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
from beamjax.interpreters.rules.sharding_rules import Axes, MemberwiseRule, Shard, define, rule

shift_p = jex.Primitive("shift_members")
"""Takes members at the borders of ranges, and all members, to the moved members."""


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
    members = jnp.moveaxis(x, axis, 0)
    n = members.shape[0]
    starts = block * np.arange(-(-n // block))
    if k < 0:  # The last members of each range, and those of all.
        starts = np.append(starts + block, n) + k
    rows = np.clip(starts[:, None] + np.arange(abs(k)), 0, n - 1)
    borders = members[jnp.asarray(rows, "int32")]
    return jnp.moveaxis(shift_p.bind(borders, members, k=k, block=block), 0, axis)


@rule("shift_members")
def _shift(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    k, block = eqn.params["k"], eqn.params["block"]

    def emit(eqn: Eqn, args: Sequence[Any], shard: Shard) -> list[Any]:
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


def _shift_all(borders: jax.Array, x: jax.Array, *, k: int, block: int) -> jax.Array:
    return jnp.roll(x, -k, axis=0)


define(shift_p, _shift_all)
