"""Simplifications of a flat program, so that fewer values have to be gathered.

`hoist` moves computations on all members out of the body of a map, `fold_scalars` computes scalars
that depend on no argument, `prune` removes equations and parts of maps that are not used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from beamjax import _compat
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.program import Eqn, FlatBlock, Var

# --- computations on all members


def hoist(
    closed: _compat.ClosedJaxpr, num_served: int, n: int
) -> tuple[_compat.ClosedJaxpr, _compat.ClosedJaxpr] | None:
    """Splits a body in two, or returns None if the second part would read as many whole values."""
    # `map_fn(lambda v: v - jnp.mean(x, 0), x)` closes over all members of `x`. Inside the body,
    # they would have to be gathered; outside, the mean is a reduction:
    #
    #     y = bj_map[num_broadcast=1: x, v -> v - mean(x)] x x
    # becomes
    #     m = mean(x);  y = bj_map[num_broadcast=2: m, x, v -> v - m] m x x
    #
    # and `prune` removes the whole `x` from the operands. A whole value is a server operand with
    # one row per member. The second jaxpr takes the results of the first one before its other
    # operands.
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
    return _compat.ClosedJaxpr(before, []), _compat.ClosedJaxpr(body, [])


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, _compat.Literal)}


def _numbers(variables: Iterable[Any]) -> int:
    return sum(math.prod(var.aval.shape) for var in variables)


# --- scalars

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
"""Operations whose results for floats are correctly rounded, so that NumPy and XLA agree."""


def fold_scalars(block: FlatBlock, known: Mapping[Var, _compat.Literal]) -> None:
    """Replaces scalars that depend on no argument by literals, in place, given those around it."""
    # In the gradient of a mean over 4 members, `s = bj_size; d = div 1.0 s; y = mul x d` becomes
    # `y = mul x 0.25`, so that no server step has to compute `d` before the pass.
    literals = dict(known)
    for eqn in block.eqns:
        for inner in eqn.blocks:
            fold_scalars(inner, literals)
        if type(eqn) is not Eqn:  # Loops and branches read variables.
            continue
        eqn.inputs = [literals.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
        literal = _scalar(eqn)
        if literal is not None:
            literals[eqn.outputs[0]] = literal


def _scalar(eqn: Eqn) -> _compat.Literal | None:
    """The result of an equation of literals, if that is simple."""
    values = [
        atom.val for atom in eqn.inputs if not isinstance(atom, Var) and not np.ndim(atom.val)
    ]
    if len(eqn.outputs) != 1 or len(values) < len(eqn.inputs):
        return None
    aval = eqn.outputs[0].aval
    name, dtype = eqn.primitive.name, aval.dtype
    if name == "bj_size" and not is_unknown(eqn.params["n"]):
        return _compat.Literal(np.asarray(eqn.params["n"], dtype), aval)
    # NumPy rounds these as XLA does; narrower floats XLA may compute in float32.
    if dtype not in (np.float32, np.float64):
        return None
    if name == "convert_element_type":
        return _compat.Literal(np.asarray(values[0]).astype(dtype), aval)
    if name not in _ARITHMETIC:
        return None
    with np.errstate(all="ignore"):
        value = _ARITHMETIC[name](*(np.asarray(value, dtype) for value in values))
    return _compat.Literal(np.asarray(value), aval)


# --- dead code


def prune(flat: FlatBlock, narrow_maps: bool = True) -> None:
    """Removes, in place, equations without uses and effects, and unused parts of maps."""
    # Only its own equations and outputs may read the values of the block. `narrow_maps` changes the
    # operands of a map, so a placed program, in which it has a sharding rule already, must not do
    # it.
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
