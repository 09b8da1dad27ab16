"""Rewrites running totals of the members to two passes; see `rules.prefixes`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.regrouping import Step, runs_on_server
from beamjax.interpreters.program import Eqn, FlatBlock, aval_of
from beamjax.interpreters.rules.prefixes import SCANS, two_passes

MAX_ROWS = 1024
"""Largest number of rows that each shard sends, where the user does not give the shard size."""
MAX_TABLE_BYTES = 4 << 20
"""Largest size of all rows that a shard sends, in bytes."""
MAX_BLOCK_BYTES = 16 << 20
"""Largest size of the members of a row, which must be in one shard, in bytes."""


def prefixes(program: PlacedProgram, block: FlatBlock) -> Iterator[dict[Eqn, Step]]:
    """The rewrites of the running totals of members in a block."""
    for eqn in block.eqns:
        if eqn.primitive.name in SCANS and runs_on_server(program, eqn):
            along = program.place(eqn.inputs[0])
            if along is not None and along.axis == eqn.params["axis"]:
                step = _step(program, eqn, program.sizes[along.placement])
                if step is not None:
                    yield {eqn: step}


def _step(program: PlacedProgram, eqn: Eqn, n: Any) -> Step | None:
    aval, axis, reverse = aval_of(eqn.inputs[0]), eqn.params["axis"], eqn.params["reverse"]
    numbers = jnp.issubdtype(aval.dtype, np.integer) or jnp.issubdtype(aval.dtype, np.floating)
    if is_unknown(n) or not numbers or (aval.dtype.itemsize < 2 and aval.dtype.kind not in "iu"):
        return None
    block = block_of(n, math.prod(aval.shape) // n * 8, program.shard_size)
    if block is None:
        return None
    name = eqn.primitive.name

    def function(x: Any) -> list[Any]:
        return [two_passes(name, x, axis=axis, reverse=reverse, block=block)]

    return Step(eqn.inputs, [False], function, is_end=True)


def block_of(n: int, nbytes: int, shard_size: int | None) -> int | None:
    """The number of members per row of a table with `nbytes` for each row and each member.

    It is a power of two, as shard sizes are, or the shard size that the user gives. None if the
    rows or the shards would be too large.
    """
    rows = max(1, min(MAX_ROWS, MAX_TABLE_BYTES // max(nbytes, 1)))
    block = shard_size or 1 << max(3, (-(-n // rows) - 1).bit_length())
    if block < 1 or block * nbytes > MAX_BLOCK_BYTES or -(-n // block) * nbytes > MAX_TABLE_BYTES:
        return None
    return block
