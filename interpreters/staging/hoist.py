"""Hoists computations on all members out of the body of a map.

`map_fn(lambda v: v - jnp.mean(x, 0), x)` closes over all members of `x`. Inside the body, they
would have to be gathered. Outside, the mean is a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core as jex


def hoist(
    closed: jex.ClosedJaxpr, num_served: int, n: int
) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr] | None:
    """Splits a body in two, if the second part then reads fewer whole placed values.

    A whole placed value is a server operand with one row per member.

    Args:
      closed: the body, without consts. Its first inputs are server values.
      num_served: the number of these inputs.
      n: the number of members.

    Returns:
      A jaxpr from the server operands to some values, and a body that takes these values before its
      other operands; or None.
    """
    jaxpr = closed.jaxpr
    served: list[Any] = jaxpr.invars[:num_served]
    wholes = {var for var in served if var.aval.shape[:1] == (n,)}
    if not wholes:
        return None
    known, tainted, first, rest = set(served), set(wholes), [], []
    for eqn in jaxpr.eqns:
        read = _variables(eqn.invars)
        if not eqn.effects and read <= known:
            first.append(eqn)
            known.update(eqn.outvars)
            if read & tainted:
                tainted.update(eqn.outvars)
                continue
        rest.append(eqn)
    needed = _variables(jaxpr.outvars).union(*(_variables(eqn.invars) for eqn in rest))
    values = [var for eqn in first for var in eqn.outvars if var in tainted & needed]
    if not values or _numbers(values) >= _numbers(wholes - needed):
        return None
    names = jaxpr.debug_info.with_unknown_names()
    before = jaxpr.replace(
        invars=served, outvars=values, eqns=first, effects=set(), debug_info=names
    )
    body = jaxpr.replace(invars=[*values, *jaxpr.invars], eqns=rest, debug_info=names)
    return jex.ClosedJaxpr(before, []), jex.ClosedJaxpr(body, [])


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, jex.Literal)}


def _numbers(variables: Iterable[Any]) -> int:
    return sum(math.prod(var.aval.shape) for var in variables)
