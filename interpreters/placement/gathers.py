"""Changes what the server gathers, once all values have places.

* `share_gathers` gathers a placed value once if the server reads several views of it. `y @ y.T` and
  `x[:, None] - x[None]` read one value in two shapes. The server computes the views.
* `gather_from_passes` is for runs that may drop members or check them for NaN. Such a run gathers
  only results of passes. A pass checks its results, and fills those of dropped members with NaN, or
  with 0 if the dtype has no NaN. So before an input or a carried value of a loop is gathered, a
  pass copies it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.placement.places import Place, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule

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


# --- runs with a guard


def gather_from_passes(program: PlacedProgram) -> None:
    """Changes a program in place so that all gathered and returned values are results of passes."""
    _Tests(program).block(program.flat)
    flat, copies = program.flat, dict[Var, Eqn]()
    made = {var for eqn in flat.walk() if eqn in program.rules for var in eqn.outputs}

    def copied(atom: Atom, along: Place) -> Atom:
        """What to read at a place instead of a value: a copy, if the server gathers it."""
        place = program.place(atom)
        if not isinstance(atom, Var) or atom in made or place is None or along is not None:
            return atom
        if atom not in copies:
            eqn = copies[atom] = _copy(atom)
            rule = MemberwiseRule((place.axis,), (place.axis,), lambda eqn, args, shard: [*args])
            program.rules[eqn] = place.placement, rule
            program.places[eqn.outputs[0]] = place
        return copies[atom].outputs[0]

    for eqn in flat.walk():
        if not eqn.blocks:
            eqn.inputs[:] = [copied(*pair) for pair in program.reads(eqn)]
            continue
        border = program.borders[eqn]
        eqn.inputs[:] = map(copied, eqn.inputs, border.inputs)
        for block, places in zip(eqn.blocks, border.outputs, strict=True):
            block.outputs[:] = map(copied, block.outputs, places)
    flat.outputs[:] = [copied(a, None) if a in flat.inputs else a for a in flat.outputs]
    for block in (flat, *[block for eqn in flat.walk() for block in eqn.blocks]):
        inputs = (*block.inputs, *(flat.views if block is flat else ()))
        eqns = [copies[var] for var in inputs if var in copies]
        for eqn in block.eqns:
            eqns += [eqn, *(copies[var] for var in eqn.outputs if var in copies)]
        block.eqns[:] = eqns


class _Tests:
    """Moves tests of all members, by `jnp.any` and `jnp.all`, to the server.

    `jnp.median` looks for NaN among the members before it sorts them on the server. It must also
    find the NaN of dropped members, so the server tests the gathered values that it sorts.
    """

    def __init__(self, program: PlacedProgram):
        self.program = program

    def block(self, block: FlatBlock) -> None:
        """Makes the equations of a block that run on the server read tests of the server."""
        self.makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
        self.tested: dict[Var, bool] = {}
        self.clones: dict[Var, Var] = {}
        found: list[Eqn] = []
        for eqn in block.eqns:
            if not eqn.blocks and eqn not in self.program.rules:
                eqn.inputs[:] = [
                    self.on_server(atom, found)
                    if self.program.place(atom) and self.is_tested(atom)
                    else atom
                    for atom in eqn.inputs
                ]
            found.append(eqn)
        block.eqns[:] = found
        for eqn in found:
            for inner in eqn.blocks:
                self.block(inner)

    def is_tested(self, atom: Atom) -> bool:
        """Whether a value depends on a test of all members."""
        eqn = self._maker(atom)
        if eqn is None or not isinstance(atom, Var):
            return False
        if atom not in self.tested:
            is_test = eqn in self.program.rules and eqn.primitive.name in (
                "reduce_and",
                "reduce_or",
            )
            self.tested[atom] = is_test or any(map(self.is_tested, eqn.inputs))
        return self.tested[atom]

    def on_server(self, atom: Atom, found: list[Eqn]) -> Atom:
        """The same value, computed by the server from gathered floats.

        Appends the new equations to `found`.
        """
        eqn = self._maker(atom)
        if eqn is None or not isinstance(atom, Var):
            return atom
        has_holes = not self.program.place(atom) or jnp.issubdtype(atom.aval.dtype, np.inexact)
        if has_holes and not self.is_tested(atom):
            return atom
        if atom not in self.clones:
            inputs = [self.on_server(each, found) for each in eqn.inputs]
            outputs = [Var(f"{var.name}_served", var.aval) for var in eqn.outputs]
            self.clones.update(zip(eqn.outputs, outputs, strict=True))
            found.append(Eqn(eqn.primitive, eqn.params, inputs, outputs, eqn.line))
        return self.clones[atom]

    def _maker(self, atom: Atom) -> Eqn | None:
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or eqn.blocks or eqn.effects or eqn.is_placed_operator:
            return None
        return eqn


def _copy(var: Var) -> Eqn:
    like = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct((), np.float32)).eqns[0]
    return Eqn(like.primitive, {}, [var], [Var(f"{var.name}_kept", var.aval)], "")
