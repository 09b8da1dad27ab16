"""Rewrites running totals of the members to two passes; see `rules.prefixes`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.blocks import block_of
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.regrouping import Step, runs_on_server
from beamjax.interpreters.program import Eqn, FlatBlock, aval_of
from beamjax.interpreters.rules.prefixes import SCANS, two_passes


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
    member = math.prod(aval.shape) // n * 8  # Bytes of the widest type in which it is added up.
    block = block_of(n, member, member, program.shard_size)
    if block is None:
        return None
    name = eqn.primitive.name

    def function(x: Any) -> list[Any]:
        return [two_passes(name, x, axis=axis, reverse=reverse, block=block)]

    return Step(eqn.inputs, [False], function, is_end=True)
