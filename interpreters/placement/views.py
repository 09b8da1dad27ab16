"""Views: inputs that a program reshapes into members, `x.reshape(n, b, ...)` of n * b rows.

Workers read such an input by shards, b consecutive rows per member. Otherwise the launching process
would have to read it and send it to the workers. The reshaped input becomes a separate input of the
flat program, a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import jax

from beamjax.interpreters.placement.places import Along
from beamjax.interpreters.placement.row_maps import is_cut, move_cuts
from beamjax.interpreters.program import Eqn, FlatProgram, Var


def make_views(
    flat: FlatProgram, wanted: MutableMapping[Var, Along], sizes: Mapping[str, Any]
) -> dict[Var, Along]:
    """Replaces the operands of reshapes of inputs into members by views, in place.

    Args:
      flat: the program; the views are added to it.
      wanted: from `find_wanted`.
      sizes: the number of members of each placement.

    Returns:
      The place of each view.
    """
    move_cuts(flat, wanted, sizes)
    made: dict[tuple[Var, str], Var] = {}
    places = {}
    for eqn, origin, along in _cuts(flat, wanted, sizes):
        view = made.get((origin, along.placement))
        if view is None:
            view = made[origin, along.placement] = _view(origin, sizes[along.placement])
            flat.views[view], places[view] = origin, along
        eqn.inputs[0] = view
    return places


def drop_view(flat: FlatProgram, view: Var) -> None:
    """Replaces a view by its input in all equations, in place."""
    origin = flat.views.pop(view)
    for eqn in flat.walk():
        eqn.inputs[:] = [origin if atom is view else atom for atom in eqn.inputs]


def _cuts(
    flat: FlatProgram, wanted: Mapping[Var, Along], sizes: Mapping[str, Any]
) -> Iterator[tuple[Eqn, Var, Along]]:
    """The reshapes of inputs into members, with the input and the place of the result."""
    inputs = set(flat.inputs)
    for eqn in flat.walk():
        along = wanted.get(eqn.outputs[0]) if eqn.outputs else None
        if along is not None and is_cut(eqn, along, sizes[along.placement]):
            origin = eqn.inputs[0]
            if isinstance(origin, Var) and origin in inputs:
                yield eqn, origin, along


def _view(origin: Var, n: int) -> Var:
    rows, *rest = origin.aval.shape
    view = jax.ShapeDtypeStruct((n, rows // n, *rest), origin.aval.dtype)
    return Var(f"{origin.name}.rows{n}", jax.make_jaxpr(lambda x: x)(view).in_avals[0])
