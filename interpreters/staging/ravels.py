"""Rewrites reductions and products of raveled arrays to those of the arrays themselves.

Raveling merges the axis of the members with others, so that raveled arrays must be gathered. But
the results of `jnp.vdot(x, y)` and `x.reshape(-1).sum()` do not depend on the order of the
elements.
"""

from __future__ import annotations

from typing import Any

from beamjax.interpreters.program import Atom, Eqn, Var, aval_of

REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
VECTORS = (((0,), (0,)), ((), ()))


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
    if name in REDUCTIONS:
        return {"axes": axes} if params["axes"] == (0,) else None
    if name == "dot_general" and shapes[0] == shapes[1] and params["dimension_numbers"] == VECTORS:
        return {"dimension_numbers": ((axes, axes), ((), ()))}
    return None
