"""Simplifications of a flat program, so that fewer values have to be gathered.

* `hoist` moves computations on all members out of the body of a map. `map_fn(lambda v: v -
  jnp.mean(x, 0), x)` closes over all members of `x`. Inside the body, they would have to be
  gathered. Outside, the mean is a reduction.
* `Ravels` rewrites reductions and products of raveled arrays to those of the arrays themselves.
  Raveling merges the axis of the members with others, so that raveled arrays must be gathered. But
  the results of `jnp.vdot(x, y)` and `x.reshape(-1).sum()` do not depend on the order of elements.
* `prune` removes equations that are not used, and unused parts of maps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core as jex

from beamjax import _compat
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var, aval_of
from beamjax.numerics.reducers import JAX_REDUCTIONS


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
    # `known` values can be computed before the map, and `tainted` ones also depend on whole placed
    # values. Only equations with tainted results leave the body; the other equations that they
    # need are evaluated before the map and in the body.
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


# --- raveled arrays


VECTORS = (((0,), (0,)), ((), ()))
"""The dimension numbers of the inner product of two vectors."""


class Ravels:
    """Tracks which vectors of a program are raveled arrays."""

    def __init__(self) -> None:
        self.arrays: dict[Atom, Atom] = {}

    def see(self, eqn: Eqn) -> None:
        """Records an equation that ravels; rewrites one, in place, that reads raveled arrays."""
        name, shapes = eqn.primitive.name, [getattr(atom.aval, "shape", ()) for atom in eqn.inputs]
        if name == "reshape" and eqn.params["dimensions"] is None and len(shapes) == 1:
            (out,) = eqn.outputs
            if len(out.aval.shape) == 1 < len(shapes[0]) and isinstance(eqn.inputs[0], Var):
                self.arrays[out] = eqn.inputs[0]
            return
        arrays = [self.arrays.get(atom) for atom in eqn.inputs if isinstance(atom, Var)]
        whole = [array for array in arrays if array is not None]
        if len(whole) < len(shapes):
            return
        changes = _over_arrays(name, eqn.params, [aval_of(array).shape for array in whole])
        if changes is not None:
            eqn.params = {**eqn.params, **changes}
            eqn.inputs = whole


def _over_arrays(name: str, params: dict[str, Any], shapes: list[Any]) -> dict[str, Any] | None:
    """Parameters to change if an equation reads arrays of these shapes instead of raveled ones.

    None if the equation can't be rewritten.
    """
    if not shapes:
        return None
    axes = tuple(range(len(shapes[0])))
    if name in JAX_REDUCTIONS:
        return {"axes": axes} if params["axes"] == (0,) else None
    if name == "dot_general" and shapes[0] == shapes[1] and params["dimension_numbers"] == VECTORS:
        return {"dimension_numbers": ((axes, axes), ((), ()))}
    return None


# --- dead code


def prune(flat: FlatBlock, narrow_maps: bool = True) -> None:
    """Removes, in place, equations without uses and effects, and unused parts of maps.

    Args:
      flat: the program, or a block whose values only its own equations and outputs read.
      narrow_maps: whether to remove parts of maps. This changes the operands of a map, so a placed
        program, in which the map has a sharding rule already, must not do it.
    """
    _prune(flat, {atom for atom in flat.outputs if isinstance(atom, Var)}, narrow_maps)


def _prune(block: FlatBlock, live: set[Var], narrow_maps: bool) -> None:
    """Works backward; `live` are the values that are read later, in this block or after it."""
    used_eqns: list[Eqn] = []
    for eqn in reversed(block.eqns):
        used = [var in live for var in eqn.outputs]
        if not any(used) and not eqn.effects:
            continue
        if narrow_maps and eqn.primitive.name == "bj_map" and not eqn.effects:
            _narrow(eqn, used)
        for inner in eqn.blocks:
            live.update(atom for atom in inner.outputs if isinstance(atom, Var))
            _prune(inner, live, narrow_maps)
        live.update(atom for atom in eqn.inputs if isinstance(atom, Var))
        used_eqns.append(eqn)
    block.eqns[:] = used_eqns[::-1]


def _narrow(eqn: Eqn, used: list[bool]) -> None:
    """Removes unused results of a map, and the operands that only they need."""
    jaxpr, needed = _compat.dce(eqn.params["jaxpr"], used)
    served = sum(needed[: eqn.params["num_broadcast"]])
    eqn.params = {**eqn.params, "jaxpr": jaxpr, "num_broadcast": served}
    eqn.inputs = list(itertools.compress(eqn.inputs, needed))
    eqn.outputs = list(itertools.compress(eqn.outputs, used))
