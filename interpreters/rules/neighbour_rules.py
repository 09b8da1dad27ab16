"""Neighbours of members: each shard reads the members at the borders of the shards beside it.

A first pass fills tables with the first and the last members of each range, and a second one
computes each shard with them; see `by_shard`. Nothing is rounded.
"""

# y = bj_neighbours x   ->   last = reduce_by_shard[borders] x; first = reduce_by_shard[borders] x;
#                            y = map_by_shard[windows] x last first

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax._text import human_bytes
from beamjax.errors import StagingError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.by_shard import (
    MAX_RANGE_BYTES,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    mapped_by_shard,
    reduced_by_shard,
)
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    ExpansionMembers,
    TracedShard,
    expansion,
)
from beamjax.numerics.reducers import PICK
from beamjax.ops import primitives
from beamjax.ops.neighbours import sums, sums_of, windows, windows_of

NAME = "neighbours"
"""The name of the operator for `explain`."""
MAX_BORDER_BYTES = 64 << 20
"""Largest size of the members at the borders of all shards, in bytes."""


@expansion("bj_neighbours", "bj_sum_of_neighbours", ordered=True)
def _exchanged(
    eqn: Eqn, axes: Axes, members: ExpansionMembers
) -> Callable[..., Sequence[Any]] | None:
    aval, n, p = aval_of(eqn.inputs[0]), members.n, eqn.params
    before, after, wrap = p["before"], p["after"], p["wrap"]
    # The size of the tables has to be known.
    if is_unknown(n):
        return None
    whole: Callable[..., Any] = windows
    of_rows: Callable[..., Any] = windows_of
    # The derivative: a member adds up what it is a neighbour of, which lies on the other sides.
    if eqn.primitive.name == "bj_sum_of_neighbours":
        before, after, whole, of_rows = after, before, sums, sums_of
    member = math.prod(aval.shape[1:]) * aval.dtype.itemsize
    block = _range_size(eqn, members, before, after, member)
    placement = {"placement": members.placement, "n": n, "name": NAME, "mesh": None}

    def function(x: Any) -> list[Any]:
        if axes[0] != 0:
            # The members are on the server, or along another axis. A map puts them along axis 0.
            (x,) = primitives.map_members(lambda v: [v], [], [x], **placement)
        # Integers that XLA does not convert to whole bytes are exchanged as such.
        wide = x if PICK.takes(x.dtype) else x.astype(_wider(x.dtype))
        if n <= block:
            exchanged = mapped_by_shard(_alone(whole, eqn, n), wide, block=block, name=NAME)
        else:
            width = before + 1 + after
            sizes = {"before": before, "after": after, "wrap": wrap, "block": block}
            exchanged = with_neighbours(
                lambda shard, rows: of_rows(rows, shard.size, width), wide, **sizes
            )
        return [exchanged.astype(x.dtype)]

    return function


def _wider(dtype: Any) -> np.dtype:
    return np.dtype("int8" if jnp.issubdtype(dtype, np.integer) else "float32")


def _alone(whole: Any, eqn: Eqn, n: int) -> Callable[[TracedShard, Any], Any]:
    """The results of a shard that has all members, followed by padding."""
    p = eqn.params

    def function(shard: TracedShard, x: Any) -> Any:
        results = whole(x[:n], p["before"], p["after"], p["wrap"])
        return jnp.pad(results, [(0, shard.size - n), *[(0, 0)] * (results.ndim - 1)])

    return function


def _range_size(eqn: Eqn, members: ExpansionMembers, before: int, after: int, member: int) -> int:
    """The number of members per range: the shard size if the user gives it, else a power of two."""
    n, fewest, row = members.n, max(before, after, 1), (before + after) * member
    where = f"{eqn.line or 'in the program'}: neighbours"
    size = members.shard_size
    if size is None:
        rows = max(1, min(MAX_ROWS, MAX_TABLE_BYTES // max(row, 1)))
        # With more members than borders, an exchange costs little compared with a pass.
        size = _power_of_two(max(-(-n // rows), 16 * fewest))
        # A shard reads no further than the ranges beside it, so a range has the `fewest` members.
        while size // 2 >= fewest and size * member > MAX_RANGE_BYTES:
            size //= 2
    if fewest > size and n > size:
        raise StagingError(
            f"{where}: found before={eqn.params['before']}, after={eqn.params['after']} and shards "
            f"of {size} members, expected at most that many neighbours: a shard reads the members "
            "at the borders of the shards beside it. Raise the option shard_size"
        )
    borders = -(-n // size) * row
    if borders > MAX_BORDER_BYTES and n > size:
        raise StagingError(
            f"{where}: the members at the borders of {-(-n // size)} shards of {size} take "
            f"{human_bytes(borders)}, expected at most {human_bytes(MAX_BORDER_BYTES)}. Raise the "
            "option shard_size, or take fewer neighbours"
        )
    return size


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def with_neighbours(
    function: Callable[[TracedShard, Any], Any],
    x: jax.Array,
    *,
    before: int,
    after: int,
    wrap: bool,
    block: int,
) -> jax.Array:
    """The results of `function(shard, rows)`, where `rows` are its members and their neighbours."""
    # `x` has a dtype that `PICK` takes, and more members than one range (`block`). The members that
    # other shards read are in tables: the last `before` and the first `after` ones of each range,
    # neither more than a range has. Before the first member come the last ones, or zeros without
    # `wrap`.
    n, number = x.shape[0], np.dtype("int32")
    starts = block * np.arange(-(-n // block))

    def table(first: np.ndarray, count: int) -> jax.Array:
        """The table with `count` members from each of the members `first` on."""
        members = np.clip(first[:, None] + np.arange(count), 0, n - 1).astype(number)

        def borders(shard: TracedShard, x: Any) -> tuple[Any, Any]:
            rows = shard.rows(jnp.asarray(members))
            return jnp.take(x, rows, axis=0, mode="clip"), shard.has(rows)

        return reduced_by_shard(borders, x, block=block, name=NAME)

    tables = []
    if before:
        tables.append(table(np.append(starts[1:], n) - before, before))
    if after:
        tables.append(table(starts, after))

    def extended(shard: TracedShard, x: Any, *tables: Any) -> Any:
        row = lax.iota(number, before + shard.size + after) - np.int32(before)
        member = shard.start + row
        rows = jnp.take(x, jnp.clip(row, 0, shard.size - 1), axis=0)
        if before:
            # Row j of a table has member j - before of the next range.
            range_ = jnp.where(member < 0, len(starts) - 1, member // block)
            index = jnp.where(member < 0, member, member % block - block) + before
            rows = _replaced(rows, row < 0, tables[0], range_, index)
        if after:
            # The last shard has padding, after which the members at the other end come.
            over = jnp.where(member >= n, member - n, member)
            outside = (row >= shard.size) | (member >= n)
            rows = _replaced(rows, outside, tables[-1], over // block, over % block)
        if not wrap:
            rows = _masked(rows, (member >= 0) & (member < n))
        return function(shard, rows)

    return mapped_by_shard(extended, x, *tables, block=block, name=NAME)


def _replaced(rows: Any, outside: Any, table: Any, range_: Any, index: Any) -> Any:
    """`rows`, in which those `outside` of the shard are from a table."""
    from_table = table[jnp.clip(range_, 0), jnp.clip(index, 0, table.shape[1] - 1)]
    return jnp.where(outside.reshape(-1, *(1 for _ in rows.shape[1:])), from_table, rows)


def _masked(rows: Any, inside: Any) -> Any:
    return jnp.where(
        inside.reshape(-1, *(1 for _ in rows.shape[1:])), rows, jnp.zeros((), rows.dtype)
    )
