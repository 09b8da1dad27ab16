"""Gathers a placed value once if the server reads several views of it.

`y @ y.T` and `x[:, None] - x[None]` read one value in two shapes. The value is gathered once, and
the server computes the views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var

VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
        "unstack",
    }
)


def share_gathers(program: PlacedProgram, block: FlatBlock) -> None:
    """Moves views of a placed value to the server, in place, if the value is smaller than them."""
    makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
    views: dict[Var, set[Var]] = {}
    for eqn in block.eqns:
        for var in _gathered(program, eqn):
            views.setdefault(_origin(var, makers), set()).add(var)
    clones: dict[Var, Var] = {}
    made: dict[Eqn, Eqn] = {}
    for origin, found in views.items():
        if sum(map(_size, found)) > _size(origin):
            for var in found - {origin}:
                _clone(var, origin, makers, clones, made)
    if made:
        block.eqns[:] = [e for eqn in block.eqns for e in (eqn, made.get(eqn)) if e is not None]
    for eqn in block.eqns:
        reads = zip(eqn.inputs, program.reads(eqn), strict=False)
        if not eqn.blocks:
            eqn.inputs = [
                clones[atom] if along is None and isinstance(atom, Var) and atom in clones else atom
                for atom, (_, along) in reads
            ]
        for inner in eqn.blocks:
            share_gathers(program, inner)


def _gathered(program: PlacedProgram, eqn: Eqn) -> Iterator[Var]:
    """The placed values that an equation reads on the server."""
    for atom, along in program.reads(eqn) if not eqn.blocks else ():
        if along is None and isinstance(atom, Var) and program.place(atom) is not None:
            yield atom


def _origin(var: Var, makers: dict[Var, Eqn]) -> Var:
    """The value of which `var` is a view; `var` itself if it is none."""
    while var in makers and makers[var].primitive.name in VIEWS:
        operands = _variables(makers[var].inputs)
        if len(operands) != 1 or len(makers[var].outputs) != 1:
            break
        (var,) = operands
    return var


def _variables(atoms: list[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)


def _clone(
    var: Var, origin: Var, makers: dict[Var, Eqn], clones: dict[Var, Var], made: dict[Eqn, Eqn]
) -> Var:
    """The variable of a view that the server computes from the gathered value."""
    if var is origin:
        return var
    if var not in clones:
        eqn = makers[var]
        (operand,) = _variables(eqn.inputs)
        source = _clone(operand, origin, makers, clones, made)
        clones[var] = Var(f"{var.name}_served", var.aval)
        inputs = [source if isinstance(atom, Var) else atom for atom in eqn.inputs]
        made[eqn] = Eqn(eqn.primitive, eqn.params, inputs, [clones[var]], eqn.line)
    return clones[var]
