"""Rewrites decompositions of tall matrices, whose rows are the members, to passes.

The singular values of a matrix are those of the R of its QR decomposition. `jnp.linalg.lstsq`,
`pinv` and `cond` compute an SVD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.blocks import block_of
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.placement.regrouping import Step, runs_on_server
from beamjax.interpreters.program import Eqn, FlatBlock, aval_of
from beamjax.interpreters.rules.sharding_rules import bind
from beamjax.interpreters.rules.tall_qr import tall_qr


def tall_matrices(program: PlacedProgram, block: FlatBlock) -> Iterator[dict[Eqn, Step]]:
    """The rewrites of the decompositions of tall matrices of members in a block."""
    for eqn in block.eqns:
        if eqn.primitive.name in ("qr", "svd") and runs_on_server(program, eqn):
            step = _step(program, eqn)
            if step is not None:
                yield {eqn: step}


def _step(program: PlacedProgram, eqn: Eqn) -> Step | None:
    along, aval, params = program.place(eqn.inputs[0]), aval_of(eqn.inputs[0]), eqn.params
    is_real = jnp.issubdtype(aval.dtype, np.floating) and aval.ndim == 2
    if along is None or along.axis != 0 or not is_real or is_unknown(aval.shape[0]):
        return None
    n, k = aval.shape
    whole = params["full_matrices"] and params.get("compute_uv", True)
    if whole or params.get("pivoting") or params.get("subset_by_index") or not 0 < 2 * k <= n:
        return None
    size = aval.dtype.itemsize
    rows = block_of(n, k * k * size, k * size, program.shard_size, fewest=k)
    if rows is None:
        return None

    def decomposed(x: Any) -> list[Any]:
        q, r = tall_qr(x, rows)
        if eqn.primitive.name == "qr":
            return [q, r]
        singular, *vectors = bind(eqn, [r])
        if not vectors:
            return [singular]
        return [singular, q @ vectors[0], vectors[1]]

    return Step(eqn.inputs, [False], decomposed, is_end=True)
