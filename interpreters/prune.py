"""A placed program without what its maps read and hand on for nothing.

A body that replaces a part of a state returns the rest as it came, and never looks at the part that
it replaces. Here its results that are operands become those operands, and what nobody reads any
longer is neither computed, nor read, nor kept from an earlier pass for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from jax.extend import core as jex

from beamjax import _compat
from beamjax.interpreters.flatten import Atom, Eqn, FlatProgram, Var
from beamjax.interpreters.place import PlacedProgram
from beamjax.interpreters.rules import Local


def prune(program: PlacedProgram) -> PlacedProgram:
    """The same program, with maps that compute and read no more than is used of them.

    Results of the program keep their variables where they would become inputs of the program: what
    is placed for the reader is an array for the writer then.
    """
    flat = program.flat
    same: dict[Var, Var] = {}
    inputs = set(flat.inputs)

    def known(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, Var) else atom

    def result(atom: Atom) -> Atom:
        return known(atom) if isinstance(atom, Var) and same.get(atom) not in inputs else atom

    eqns = []
    for eqn in flat.eqns:
        eqns.append(dataclasses.replace(eqn, inputs=[known(atom) for atom in eqn.inputs]))
        same.update(_handed_on(program, eqns[-1]))
    outputs = [result(atom) for atom in flat.outputs]
    live = {atom for atom in outputs if isinstance(atom, Var)}
    readings, kept = {}, {}
    for old, eqn in zip(reversed(flat.eqns), reversed(eqns), strict=True):
        used = [var in live for var in eqn.outputs]
        if not any(used):
            continue
        if old in program.readings:
            placement, reading = program.readings[old]
            if isinstance(reading, Local) and eqn.primitive.name == "bj_map":
                eqn, reading = _narrowed(eqn, reading, used)
            readings[eqn] = placement, reading
        live.update(atom for atom in eqn.inputs if isinstance(atom, Var))
        kept[old] = eqn
    flat = FlatProgram(flat.inputs, flat.constants, list(kept.values())[::-1], outputs)
    creations = {
        key: (kept[eqn], local) for key, (eqn, local) in program.creations.items() if eqn in kept
    }
    return PlacedProgram(flat, program.sizes, program.places, readings, creations)


def _handed_on(program: PlacedProgram, eqn: Eqn) -> Iterator[tuple[Var, Var]]:
    """The results of a map that are its operands, with these."""
    if eqn.primitive.name != "bj_map":
        return
    body = eqn.params["jaxpr"].jaxpr
    operands = dict(zip(body.invars, eqn.inputs, strict=True))
    for result, inner in zip(eqn.outputs, body.outvars, strict=True):
        operand = None if isinstance(inner, jex.Literal) else operands.get(inner)
        if isinstance(operand, Var) and program.place(operand) == program.place(result) is not None:
            yield result, operand


def _narrowed(eqn: Eqn, reading: Local, used: list[bool]) -> tuple[Eqn, Local]:
    """A map with the results that are used, and the operands that they need."""
    jaxpr, needed = _compat.dce(eqn.params["jaxpr"], used)
    served = sum(needed[: eqn.params["num_broadcast"]])
    take = lambda values, which: list(itertools.compress(values, which))
    narrowed = dataclasses.replace(
        eqn,
        params={**eqn.params, "jaxpr": jaxpr, "num_broadcast": served},
        inputs=take(eqn.inputs, needed),
        outputs=take(eqn.outputs, used),
    )
    in_axes, out_axes = take(reading.in_axes, needed), take(reading.out_axes, used)
    return narrowed, Local(tuple(in_axes), tuple(out_axes), reading.emit)
