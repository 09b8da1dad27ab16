"""The QR decomposition of a matrix whose rows are the members, in two passes.

Each shard gives the R of its rows, and the server decomposes these R, one below the other, into the
R of all and a small orthogonal matrix for each shard. The second pass decomposes each shard again
and multiplies its Q by that matrix (direct TSQR: Benson, Gleich and Demmel, "Direct QR
factorizations for tall-and-skinny matrices in MapReduce architectures", 2013).

R and Q are unique up to the signs of rows and columns. They get those of the Householder
reflections of the whole matrix, as LAPACK computes them. The first rows of Q determine these
(Ballard et al., "Reconstructing Householder vectors from Tall-Skinny QR", 2014, section 5).
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
from beamjax.numerics.reducers import PICK

factors_p = jex.Primitive("qr_of_shards")
"""Takes rows (n, k) to the R of each range of `block` rows: (ranges, k, k), zeros for none."""
first_p = jex.Primitive("first_q_of_shards")
"""Takes rows (n, k) to the first k rows of the Q of the first shard: (k, k)."""
apply_p = jex.Primitive("apply_q_of_shards")
"""Takes matrices (ranges, k, k) and rows (n, k) to the product of the Q of each shard and its
matrix: (n, k)."""


def tall_qr(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The reduced QR decomposition of `x`, where the members are rows.

    Args:
      x: (n, k), floats of at least 32 bits.
      block: rows per range, at least k; every shard begins at a multiple of it.

    Returns:
      Q (n, k) and R (k, k).
    """
    k = x.shape[1]
    factors = factors_p.bind(x, block=block)
    q, r = jnp.linalg.qr(factors.reshape(-1, k))
    matrices = q.reshape(-1, k, k)
    signs = _signs(first_p.bind(x, block=block) @ matrices[0], r)
    return apply_p.bind(matrices * signs, x, block=block), r * signs[:, None]


def _signs(q: jax.Array, r: jax.Array) -> jax.Array:
    """The signs by which the R of a matrix differs from that of its Householder decomposition.

    Args:
      q: the first rows of its Q.
      r: its R.

    A modified LU decomposition of Q finds them: it subtracts each from its pivot.
    """
    k = q.shape[0]
    rows, tiny = jnp.arange(k), 4 * jnp.finfo(q.dtype).eps  # Rounding errors of a zero.

    def eliminate(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        rest, signs = carry
        # LAPACK reflects to the negative side where the first element of the column of x is zero.
        pivot = jnp.where(jnp.abs(rest[j, j]) > tiny, rest[j, j], jnp.diag(r)[j])
        sign = jnp.where(pivot >= 0, -1, 1).astype(q.dtype)
        column = jnp.where(rows > j, rest[:, j] / (rest[j, j] - sign), 0)
        return rest - column[:, None] * rest[j][None], signs.at[j].set(sign)

    return lax.fori_loop(0, k, eliminate, (q, jnp.ones(k, q.dtype)))[1]


def _decomposed(x: jax.Array, shard: TracedShard) -> tuple[jax.Array, jax.Array]:
    return jnp.linalg.qr(shard.masked(x, 0))


def _factors(x: jax.Array, shard: TracedShard, block: int, n: int) -> tuple[jax.Array, jax.Array]:
    """The rows of all ranges, of which this shard holds one, and which that is."""
    own = lax.iota(np.dtype("int32"), -(-n // block)) == shard.start // block
    r = _decomposed(x, shard)[1]
    return jnp.broadcast_to(r, (*own.shape, *r.shape)), own


def _first(x: jax.Array, shard: TracedShard) -> jax.Array:
    return _decomposed(x, shard)[0][: x.shape[1]]


def _applied(matrices: jax.Array, x: jax.Array, shard: TracedShard, block: int) -> jax.Array:
    return _decomposed(x, shard)[0] @ matrices[shard.start // block]


def _selecting(
    partial: Callable[[Eqn, Any, TracedShard], Any],
) -> Callable[..., ReductionRule | None]:
    def found(eqn: Eqn, axes: Axes, n: Any) -> ReductionRule | None:
        if axes[0] != 0:
            return None
        reduced = lambda eqn, args, shard: partial(eqn, args[0], shard)
        return ReductionRule((0,), PICK.name, reduced, by_shard=True)

    return found


@rule("qr_of_shards")
@_selecting
def _factors_rule(eqn: Eqn, x: Any, shard: TracedShard) -> Any:
    rows = aval_of(eqn.inputs[0]).shape[0]
    return PICK.partial(*_factors(x, shard, eqn.params["block"], rows))


@rule("first_q_of_shards")
@_selecting
def _first_rule(eqn: Eqn, x: Any, shard: TracedShard) -> Any:
    first = _first(x, shard)
    return PICK.partial(first, jnp.broadcast_to(shard.start == 0, first.shape[:1]))


@rule("apply_q_of_shards")
def _apply_rule(eqn: Eqn, axes: Axes, n: Any) -> MemberwiseRule | None:
    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        matrices, x = args
        return [_applied(matrices, x, shard, eqn.params["block"])]

    if axes[0] is not None or axes[1] != 0:
        return None
    return MemberwiseRule((None, 0), (0,), emit, by_shard=True)


# --- on the server, where all members are one shard


def _all_factors(x: jax.Array, *, block: int) -> jax.Array:
    factors, own = _factors(x, all_members(x.shape[0]), block, x.shape[0])
    return jnp.where(own[:, None, None], factors, 0)


def _all_first(x: jax.Array, *, block: int) -> jax.Array:
    return _first(x, all_members(x.shape[0]))


def _all_applied(matrices: jax.Array, x: jax.Array, *, block: int) -> jax.Array:
    return _applied(matrices, x, all_members(x.shape[0]), block)


define(factors_p, _all_factors)
define(first_p, _all_first)
define(apply_p, _all_applied)
