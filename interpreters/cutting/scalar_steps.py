"""Computes server stages that only make scalars from constants, when the plan is made.

The gradient of a mean begins with such a stage, which divides 1 by the number of members. On Beam
it would be a transform of its own, before all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from beamjax.interpreters.cutting.stages import (
    BranchStage,
    LoopStage,
    ServerStage,
    Stage,
    blocks_of,
)
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Eqn, FlatBlock, Var, aval_of

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
"""Operations whose results for floats are correctly rounded, so that NumPy and XLA agree."""


def without_scalar_steps(program: PlacedProgram, stages: Sequence[Stage]) -> list[Stage]:
    """The other stages; the scalars that they read become constants of the program.

    Args:
      program: the placed program, to which the constants are added.
      stages: its stages, in order. Those in the blocks of loops and branches are left out as well.
    """
    known: dict[Var, np.ndarray] = {}
    left = _left(program.flat, stages, known)
    program.flat.inputs += known.keys()
    program.flat.constants += known.values()
    return left


def _left(block: FlatBlock, stages: Sequence[Stage], known: dict[Var, np.ndarray]) -> list[Stage]:
    """The stages of a block that are left; adds the scalars that the others make to `known`."""
    left: list[Stage] = []
    for stage in stages:
        if isinstance(stage, LoopStage | BranchStage):
            inside: dict[Var, np.ndarray] = {}
            for inner in blocks_of(stage):
                inner.stages = _left(inner.block, inner.stages, inside)
            stage.served += inside.keys()
            known.update(inside)
        found = _scalars(stage) if isinstance(stage, ServerStage) else None
        if found is None or any(atom in found for atom in block.outputs if isinstance(atom, Var)):
            left.append(stage)
        else:
            known.update(found)
    return left


def _scalars(stage: ServerStage) -> dict[Var, np.ndarray] | None:
    """The outputs of a stage, or None if more than scalar arithmetic is needed for them."""
    known: dict[Var, np.ndarray] = {}
    for eqn in stage.eqns:
        value = _scalar(eqn, known)
        if value is None:
            return None
        known[eqn.outputs[0]] = value
    return {var: known[var] for var in stage.outputs}


def _scalar(eqn: Eqn, known: Mapping[Var, np.ndarray]) -> np.ndarray | None:
    """The result of an equation, from literals and known scalars, if that is simple."""
    values = [known.get(atom) if isinstance(atom, Var) else atom.val for atom in eqn.inputs]
    if len(eqn.outputs) != 1 or any(value is None or np.ndim(value) for value in values):
        return None
    name, dtype = eqn.primitive.name, aval_of(eqn.outputs[0]).dtype
    if name == "bj_size" and not is_unknown(eqn.params["n"]):
        return np.asarray(eqn.params["n"], dtype)
    if dtype not in (np.float32, np.float64):
        return None
    if name == "convert_element_type":
        return np.asarray(values[0]).astype(dtype)
    if name not in _ARITHMETIC:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(_ARITHMETIC[name](*(np.asarray(value, dtype) for value in values)))
