"""Running totals and QR decompositions: two passes over the members in order.

The first pass fills a table with a row for each range of members, and the second computes each
shard with it; see `by_shard`. The bits of results depend only on the size of shards.
"""

# t = cumsum x    ->   b = reduce_by_shard[total] x; t = map_by_shard[scan] x b
# q, r = qr x     ->   rs = reduce_by_shard[qr] x; m, r = qr rs; q = map_by_shard[qr] x m
# s = svd x       ->   q, r as above; s = svd r
#
# `b` has the total of all members before each range: the exactly rounded sum of the totals of all
# shards before it, wherever these are computed.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.by_shard import mapped_by_shard, range_size, reduced_by_shard
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    ExpansionMembers,
    TracedShard,
    bind,
    expansion,
    with_axes_of,
)
from beamjax.numerics.reducers import REDUCERS

SCANS = {f"cum{name}": REDUCERS[name] for name in ("sum", "prod", "max", "min")}
"""The reductions by the primitives of their scans."""


@expansion(*SCANS, ordered=True)
def _scan_in_two_passes(
    eqn: Eqn, axes: Axes, members: ExpansionMembers
) -> Callable[..., Sequence[Any]] | None:
    aval, axis, n = aval_of(eqn.inputs[0]), eqn.params["axis"], members.n
    numbers = jnp.issubdtype(aval.dtype, np.integer) or jnp.issubdtype(aval.dtype, np.floating)
    if axes[0] != axis or is_unknown(n) or not numbers:
        return None
    if aval.dtype.itemsize < 2 and aval.dtype.kind not in "iu":
        return None
    member = math.prod(aval.shape) // n * 8  # Bytes of the widest type in which it is added up.
    block = range_size(n, member, member, members.shard_size)
    if block is None:
        return None
    name, reverse = eqn.primitive.name, eqn.params["reverse"]

    def function(x: Any) -> list[Any]:
        totals = running_totals(name, jnp.moveaxis(x, axis, 0), reverse=reverse, block=block)
        return [jnp.moveaxis(totals, 0, axis)]

    return function


def running_totals(name: str, x: jax.Array, *, reverse: bool, block: int) -> jax.Array:
    """Running totals of `x` along axis 0, where the members are; `name` is a key of `SCANS`."""
    # `x` has ints, or floats of at least 16 bits, which are added up in float32.
    reducer, scan = SCANS[name], getattr(lax, name)
    rows = np.arange(-(-x.shape[0] // block), dtype=np.int32)

    def before(shard: TracedShard, x: Any) -> tuple[Any, Any]:
        """The total of a shard in the rows of all ranges that come after it."""
        total = reducer.partial(x, shard.counted)
        row = shard.start // block
        return jnp.broadcast_to(total, (len(rows), *total.shape)), (
            rows < row if reverse else rows > row
        )

    def scanned(shard: TracedShard, x: Any, before: Any) -> Any:
        own = scan(shard.masked(x, 0, reducer.identity(x.dtype)), axis=0, reverse=reverse)
        return reducer.merge(own, jnp.take(before, shard.start // block, axis=0)[None])

    wide = x.astype(reducer.partial_dtype(x.dtype))
    table = reduced_by_shard(before, wide, block=block, reducer=reducer.name)
    return mapped_by_shard(scanned, wide, table, block=block).astype(x.dtype)


@expansion("cumlogsumexp", ordered=True)
def _logsumexp_in_two_passes(
    eqn: Eqn, axes: Axes, members: ExpansionMembers
) -> Callable[..., Sequence[Any]] | None:
    aval, axis, n = aval_of(eqn.inputs[0]), eqn.params["axis"], members.n
    if axes[0] != axis or is_unknown(n) or not jnp.issubdtype(aval.dtype, np.floating):
        return None
    wide = np.promote_types(aval.dtype, np.float32)
    member = math.prod(aval.shape) // n * wide.itemsize
    block = range_size(n, member, member, members.shard_size)
    if block is None:
        return None

    def function(x: Any) -> list[Any]:
        rows = jnp.moveaxis(x, axis, 0).astype(wide)
        running = running_logsumexp(rows, reverse=eqn.params["reverse"], block=block)
        return [jnp.moveaxis(running, 0, axis).astype(aval.dtype)]

    return function


def running_logsumexp(x: jax.Array, *, reverse: bool, block: int) -> jax.Array:
    """`lax.cumlogsumexp` of floats of at least 32 bits along axis 0, where the members are."""
    starts = block * np.arange(-(-x.shape[0] // block), dtype=np.int32)

    def total(shard: TracedShard, x: Any) -> tuple[Any, Any]:
        """The total of a shard in the row of its first range, and -inf in those of the others."""
        row, shard_total = starts - shard.start, logsumexp(shard.masked(x, 0, -np.inf), axis=0)
        table = jnp.where(with_axes_of(row == 0, shard_total[None]), shard_total, -np.inf)
        return table, (row >= 0) & (row < shard.size)

    def scanned(shard: TracedShard, x: Any, others: Any) -> Any:
        own = lax.cumlogsumexp(shard.masked(x, 0, -np.inf), axis=0, reverse=reverse)
        return jnp.logaddexp(own, jnp.take(others, shard.start // block, axis=0)[None])

    totals = reduced_by_shard(total, x, block=block)
    # The totals of all shards before each range, or after it.
    none = jnp.full_like(totals[:1], -np.inf)
    rows = [totals[1:], none] if reverse else [none, totals[:-1]]
    others = lax.cumlogsumexp(jnp.concatenate(rows), axis=0, reverse=reverse)
    return mapped_by_shard(scanned, x, others, block=block)


# --- QR decompositions


@expansion("qr", "svd", ordered=True)
def _decomposition_of_tall_matrix(
    eqn: Eqn, axes: Axes, members: ExpansionMembers
) -> Callable[..., Sequence[Any]] | None:
    """The decomposition of a matrix whose rows are the members."""
    # The singular values of a matrix are those of the R of its QR decomposition, so an SVD takes a
    # QR decomposition of the members and an SVD of R. `jnp.linalg.lstsq`, `pinv` and `cond` compute
    # an SVD.
    aval, params = aval_of(eqn.inputs[0]), eqn.params
    is_real = jnp.issubdtype(aval.dtype, np.floating) and aval.ndim == 2
    if axes[0] != 0 or not is_real or is_unknown(members.n):
        return None
    n, k = aval.shape
    whole = params["full_matrices"] and params.get("compute_uv", True)
    if whole or params.get("pivoting") or params.get("subset_by_index") or not 0 < 2 * k <= n:
        return None
    size = aval.dtype.itemsize
    block = range_size(n, k * k * size, k * size, members.shard_size, fewest=k)
    if block is None:
        return None

    def decomposed(x: Any) -> list[Any]:
        q, r = tall_qr(x, block)
        if eqn.primitive.name == "qr":
            return [q, r]
        singular, *vectors = bind(eqn, [r])
        return [singular, q @ vectors[0], vectors[1]] if vectors else [singular]

    return decomposed


def tall_qr(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Q and R of `x`, floats (n, k) of at least 32 bits, where the members are rows."""
    # Each shard gives the R of its rows, at least k, and the server decomposes these R, one below
    # the other, into the R of all and a small orthogonal matrix for each shard. The second pass
    # repeats the decomposition of each shard and multiplies its Q by that matrix (direct TSQR:
    # Benson, Gleich and Demmel, "Direct QR factorizations for tall-and-skinny matrices in MapReduce
    # architectures", 2013):
    #
    #     x = [x0; x1] = [q0 r0; q1 r1] = diag(q0, q1) [r0; r1],   [r0; r1] = [m0; m1] r
    #     so q = [q0 m0; q1 m1], and r is the R of x.
    #
    # R and Q are unique up to the signs of rows and columns. They get the signs of the Householder
    # reflections of the whole matrix, as LAPACK computes it. The first rows of Q determine these
    # (Ballard et al., "Reconstructing Householder vectors from Tall-Skinny QR", 2014, section 5).
    n, k = x.shape
    rows = np.arange(-(-n // block), dtype=np.int32)

    def decomposed(shard: TracedShard, x: Any) -> tuple[Any, Any]:
        return jnp.linalg.qr(shard.masked(x, 0))

    def factors(shard: TracedShard, x: Any) -> tuple[Any, Any]:
        r = decomposed(shard, x)[1]
        return jnp.broadcast_to(r, (len(rows), *r.shape)), rows == shard.start // block

    def first_rows(shard: TracedShard, x: Any) -> tuple[Any, Any]:
        return decomposed(shard, x)[0][:k], jnp.broadcast_to(shard.start == 0, k)

    def applied(shard: TracedShard, x: Any, matrices: Any) -> Any:
        return decomposed(shard, x)[0] @ matrices[shard.start // block]

    q, r = jnp.linalg.qr(reduced_by_shard(factors, x, block=block).reshape(-1, k))
    matrices = q.reshape(-1, k, k)
    first = reduced_by_shard(first_rows, x, block=block)
    signs = _signs(first @ matrices[0], r)
    return mapped_by_shard(applied, x, matrices * signs, block=block), r * signs[:, None]


def _signs(q: jax.Array, r: jax.Array) -> jax.Array:
    """The signs by which `r` differs from the R of Householder; `q` has the first rows of Q."""
    # A modified LU decomposition of Q finds them: it subtracts each from its pivot.
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
