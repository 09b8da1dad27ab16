"""Taking out of the body of a map what it computes of all members, and not of its own.

`map_fn(lambda v: v - jnp.mean(x, 0), x)` closes over all members of `x`. Inside of the body they
would have to be gathered; outside of it, the mean is a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core as jex


def hoist(
    closed: jex.ClosedJaxpr, num_served: int, n: int
) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr] | None:
    """Splits a body, if that leaves whole placed values out of it.

    What looks like a placed value here is a served operand with a row for each member.

    Args:
      closed: the body, without consts. Its first inputs are served: they are the same for all
        members.
      num_served: how many these are.
      n: the number of members.

    Returns:
      A jaxpr from the served operands to some values, and a body that takes these values before all
      that it took; or None.
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
