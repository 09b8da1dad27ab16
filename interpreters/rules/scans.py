"""Expands scans over members to maps and reductions.

`lax.map(f, x)` is a scan that carries nothing from one member to the next, so it is a map. A scan
that only adds to a carried value, such as the derivative of `lax.map` by a server value, is a map
and a sum. The same holds for products, maxima and minima.
"""

# ys = scan[f] x                         ->   ys = bj_map[f] x
# c, ys = scan[c + f(x), g(x)] c0 x      ->   fs, ys = bj_map[f, g] x; s = bj_reduce_sum fs;
#                                             c = add c0 s

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from beamjax import _compat
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.sharding_rules import (
    Axes,
    ExpansionMembers,
    any_placed,
    draw_by_batch,
    expansion,
    only,
)
from beamjax.numerics.reducers import REDUCERS
from beamjax.ops import primitives

_REDUCTIONS = {name: reducer for reducer in REDUCERS.values() for name in reducer.pairs}
"""For each primitive by which a carried value may change, the reduction over the members."""


@expansion("scan")
def _scan_over_members(
    eqn: Eqn, axes: Axes, members: ExpansionMembers
) -> Callable[..., Sequence[Any]] | None:
    constants, carried = _compat.scan_counts(eqn)
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    stacked = axes[constants + carried :]
    if closed.consts or any_placed(axes[: constants + carried]) or only(stacked) != 0:
        return None
    # Under vmap, such draws depend on the other members.
    without_carries = _without_carries(closed, constants, carried)
    if members.n != length or without_carries is None or draw_by_batch(closed) is not None:
        return None
    body, changes = without_carries
    name = members.placement

    def function(*args: Any) -> list[Any]:
        fixed, start, xs = args[:constants], args[constants:][:carried], args[constants + carried :]
        outs = primitives.bind_map(
            body, fixed, xs, placement=name, n=length, name="lax.scan", mesh=None
        )
        ends, rest = [], iter(outs)
        for value, change in zip(start, changes, strict=True):
            if change is not None:
                reducer = _REDUCTIONS[change]
                reduction = primitives.REDUCE_PRIMITIVES[reducer.name]
                total = reduction.bind(next(rest), placement=name)
                total = lax.convert_element_type(total, value.dtype)
                value = reducer.merge(value, jnp.broadcast_to(total, value.shape))
            ends.append(value)
        return [*ends, *rest]

    return function


def _without_carries(
    closed: Any, constants: int, carried: int
) -> tuple[_compat.ClosedJaxpr, list[str | None]] | None:
    """The body of a scan as that of a map, and the primitive that changes each carried value."""
    # The body returns what a round adds to each carried value that changes, then the stacked
    # results. The primitive of a value that does not change is None. There is no such body if a
    # round reads a carried value otherwise.
    jaxpr = closed.jaxpr
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    read = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    read = [v for v in read if not isinstance(v, _compat.Literal)]
    carries = jaxpr.invars[constants : constants + carried]
    changes: list[str | None] = []
    totals, gone = [], set()
    for var, out in zip(carries, jaxpr.outvars[:carried], strict=True):
        # The only reader of a carried value must be the equation that adds to it.
        if read.count(var) != 1:
            return None
        if out is var:
            changes.append(None)
            continue
        eqn = next((reader for reader in jaxpr.eqns if var in _variables(reader.invars)), None)
        if eqn is None:  # The round returns the value.
            return None
        others = [atom for atom in eqn.invars if atom is not var]
        plain = eqn.primitive.name in _REDUCTIONS and makers.get(out) is eqn
        if not plain or read.count(out) != 1 or isinstance(others[0], _compat.Literal):
            return None
        changes.append(eqn.primitive.name)
        totals.append(others[0])
        gone.add(eqn)
    body = jaxpr.replace(
        invars=[v for v in jaxpr.invars if v not in carries],
        outvars=[*totals, *jaxpr.outvars[carried:]],
        eqns=[eqn for eqn in jaxpr.eqns if eqn not in gone],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return _compat.ClosedJaxpr(body, []), changes


def _variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, _compat.Literal)}
