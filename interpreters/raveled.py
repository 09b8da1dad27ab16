"""Reductions of all entries of an array that was raveled before: the ravel makes no difference.

Staged as they are, the reshape would merge the members with another axis and gather them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamjax.interpreters.flat_program import Atom, Eqn, Var, aval_of

REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
)


def before_ravel(
    name: str, params: dict[str, Any], inputs: list[Atom], reshapes: Mapping[Var, Eqn]
) -> tuple[dict[str, Any], list[Atom]]:
    """The parameters and inputs of an equation that gives the same on the arrays before a reshape.

    Args:
      name: of the primitive.
      params, inputs: of the equation.
      reshapes: the equations that made the values that are reshaped ones.
    """
    before = [
        reshapes[atom].inputs[0] if isinstance(atom, Var) and atom in reshapes else atom
        for atom in inputs
    ]
    if before == inputs:
        return params, inputs
    shapes = {aval_of(atom).shape for atom in before}
    every = tuple(range(len(aval_of(before[0]).shape)))
    rank = len(aval_of(inputs[0]).shape)
    if name in REDUCTIONS and len(params["axes"]) == rank:
        return {**params, "axes": every}, before
    vectors = (((0,), (0,)), ((), ()))
    if name != "dot_general" or params["dimension_numbers"] != vectors or len(shapes) != 1:
        return params, inputs
    if any(len(aval_of(atom).shape) != 1 for atom in inputs):
        return params, inputs
    return {**params, "dimension_numbers": ((every, every), ((), ()))}, before
