"""Dead code elimination for a flat program: removes equations and unused parts of maps."""

from __future__ import annotations

import itertools

from beamjax import _compat
from beamjax.interpreters.program import Eqn, FlatBlock, FlatProgram, Var


def prune(flat: FlatProgram) -> None:
    """Removes, in place, equations without uses and effects, and unused parts of maps."""
    _prune(flat, {atom for atom in flat.outputs if isinstance(atom, Var)})


def _prune(block: FlatBlock, live: set[Var]) -> None:
    """Works backward; `live` are the values that are read later, in this block or after it."""
    kept: list[Eqn] = []
    for eqn in reversed(block.eqns):
        used = [var in live for var in eqn.outputs]
        if not any(used) and not eqn.effects:
            continue
        if eqn.primitive.name == "bj_map" and not eqn.effects:
            _narrow(eqn, used)
        for inner in eqn.blocks:
            live.update(atom for atom in inner.outputs if isinstance(atom, Var))
            _prune(inner, live)
        live.update(atom for atom in eqn.inputs if isinstance(atom, Var))
        kept.append(eqn)
    block.eqns[:] = kept[::-1]


def _narrow(eqn: Eqn, used: list[bool]) -> None:
    """Removes unused results of a map, and the operands that only they need."""
    jaxpr, needed = _compat.dce(eqn.params["jaxpr"], used)
    served = sum(needed[: eqn.params["num_broadcast"]])
    eqn.params = {**eqn.params, "jaxpr": jaxpr, "num_broadcast": served}
    eqn.inputs = list(itertools.compress(eqn.inputs, needed))
    eqn.outputs = list(itertools.compress(eqn.outputs, used))
