"""Changes which values are gathered to the server, once all values have places."""

# `gather_selections` gathers a placed value once if the server selects most of its members, by
# several equations. Both of these, of 8 members, move from a pass to the server:
#
#     a = slice[0:4] x; b = slice[4:8] x
#
# `share_gathers` gathers a placed value once if the server reads several views of it, as `y @ y.T`
# and `x[:, None] - x[None]` do. The server computes the views. `t` is placed, `s` is not:
#
#     t = transpose y; g = dot_general y t    ->    s = transpose y; g = dot_general y s
#
# `gather_from_passes` is for runs that may drop members or check them for NaN. Such a run gathers
# only results of passes, because a pass checks its results, and fills those of dropped members with
# NaN, or with 0 if the dtype has no NaN. So a pass copies an input or a carried value of a loop
# before it is gathered:
#
#     s = sort x    ->    c = copy x; s = sort c

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.interpreters.placement.places import Place, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var
from beamjax.interpreters.rules.indexing import MAX_SHARE
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule

VIEWS = frozenset(
    "broadcast_in_dim expand_dims reshape rev slice squeeze transpose unstack".split()
)
"""Primitives that compute a view of their operand, at little cost for the server."""


def gather_selections(program: PlacedProgram) -> None:
    """Selects members of a value on the server, in place, if it selects a large share of them."""
    # The results are server values in any case, so no place changes.
    selections: dict[Var, list[Eqn]] = {}
    for eqn in program.flat.walk():
        _, rule = program.rules.get(eqn, ("", None))
        (atom, *_) = eqn.inputs or (None,)
        if isinstance(rule, ReductionRule) and rule.selects_members and isinstance(atom, Var):
            selections.setdefault(atom, []).append(eqn)
    for var, eqns in selections.items():
        taken = sum(_size(eqn.outputs[0]) for eqn in eqns)
        if len(eqns) > 1 and taken > MAX_SHARE * _size(var):
            for eqn in eqns:
                del program.rules[eqn]


class _ServerCopies:
    """Copies of equations by which the server computes placed values from gathered ones."""

    def __init__(self, maker: Callable[[Var], Eqn | None]):
        # The equation to copy for a variable; None for one that the server reads as it is.
        self._maker = maker
        self._values: dict[Var, Var] = {}
        self._made: dict[Eqn, Eqn] = {}

    def of(self, atom: Atom) -> Atom:
        """The atom that the server reads instead of `atom`; copies equations if necessary."""
        eqn = self._maker(atom) if isinstance(atom, Var) else None
        if eqn is None or not isinstance(atom, Var):
            return atom
        if atom not in self._values:
            inputs = list(map(self.of, eqn.inputs))
            outputs = [Var(f"{var.name}_served", var.aval) for var in eqn.outputs]
            self._values.update(zip(eqn.outputs, outputs, strict=True))
            self._made[eqn] = Eqn(eqn.primitive, eqn.params, inputs, outputs, eqn.line)
        return self._values[atom]

    def add_to(self, block: FlatBlock) -> None:
        """Adds the copies to the block, in place, each after its original."""
        pairs = ((eqn, self._made.get(eqn)) for eqn in block.eqns)
        block.eqns[:] = [eqn for pair in pairs for eqn in pair if eqn is not None]


def share_gathers(program: PlacedProgram, block: FlatBlock) -> None:
    """Moves views of a placed value to the server, in place, if the value is smaller than them."""
    makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
    views: dict[Var, set[Var]] = {}
    for eqn in block.eqns:
        for var in _gathered(program, eqn):
            origin = var
            while (view := _view(origin, makers)) is not None:
                (origin,) = _variables(view.inputs)
            views.setdefault(origin, set()).add(var)
    copies = _ServerCopies(lambda var: _view(var, makers))
    moved = {
        var
        for origin, gathered in views.items()
        if sum(map(_size, gathered)) > _size(origin)
        for var in gathered
    }
    for eqn in block.eqns:
        if not eqn.blocks:
            eqn.inputs = [
                copies.of(a) if along is None and isinstance(a, Var) and a in moved else a
                for a, along in program.reads(eqn)
            ]
        for inner in eqn.blocks:
            share_gathers(program, inner)
    copies.add_to(block)


def _gathered(program: PlacedProgram, eqn: Eqn) -> Iterator[Var]:
    """The placed values that an equation reads on the server."""
    for atom, along in program.reads(eqn) if not eqn.blocks else ():
        if along is None and isinstance(atom, Var) and program.place(atom) is not None:
            yield atom


def _view(var: Var, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The equation by which a value is a view of one other value, or None."""
    eqn = makers.get(var)
    if eqn is None or eqn.primitive.name not in VIEWS or len(eqn.outputs) != 1:
        return None
    return eqn if len(_variables(eqn.inputs)) == 1 else None


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)


# --- runs with a guard


def gather_from_passes(program: PlacedProgram) -> None:
    """Changes a program in place so that all gathered and returned values are results of passes."""
    _Tests(program).block(program.flat)
    flat, copies = program.flat, dict[Var, Eqn]()
    from_passes = {var for eqn in flat.walk() if eqn in program.rules for var in eqn.outputs}

    def copied(atom: Atom, along: Place) -> Atom:
        """What to read at a place instead of a value: a copy, if the server gathers it."""
        place = program.place(atom)
        if not isinstance(atom, Var) or atom in from_passes or place is None or along is not None:
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


_TESTS = ("reduce_and", "reduce_or")


class _Tests:
    """Moves tests of all members, by `jnp.any` and `jnp.all`, to the server."""

    # `jnp.median` tests whether any member is NaN before it sorts them on the server. It must find
    # the NaN of dropped members too, which only gathered values hold. So the server tests those:
    # `a` is the result of a pass, `b` is not.
    #
    #     a = reduce_or x; s = sort x; m = select_n a s nan
    #     ->   b = reduce_or x; s = sort x; m = select_n b s nan

    def __init__(self, program: PlacedProgram):
        self.program = program

    def block(self, block: FlatBlock) -> None:
        """Makes the equations of a block that run on the server read tests of the server."""
        self.makers = {var: eqn for eqn in block.eqns for var in eqn.outputs}
        self.tested: dict[Var, bool] = {}
        copies = _ServerCopies(self.copied)
        for eqn in block.eqns:
            if not eqn.blocks and eqn not in self.program.rules:
                eqn.inputs[:] = [
                    copies.of(atom) if self.program.place(atom) and self.is_tested(atom) else atom
                    for atom in eqn.inputs
                ]
        copies.add_to(block)
        for eqn in block.eqns:
            for inner in eqn.blocks:
                self.block(inner)

    def is_tested(self, atom: Atom) -> bool:
        """Whether a value depends on a test of all members."""
        eqn = self._maker(atom)
        if eqn is None or not isinstance(atom, Var):
            return False
        if atom not in self.tested:
            is_test = eqn in self.program.rules and eqn.primitive.name in _TESTS
            self.tested[atom] = is_test or any(map(self.is_tested, eqn.inputs))
        return self.tested[atom]

    def copied(self, var: Var) -> Eqn | None:
        """The equation to copy for a value; None if the server gathers the value."""
        # A gathered value without NaN, such as the bools of `isnan x`, does not show which members
        # are dropped, so the server computes it from floats.
        shows_dropped = not self.program.place(var) or jnp.issubdtype(var.aval.dtype, np.inexact)
        return None if shows_dropped and not self.is_tested(var) else self._maker(var)

    def _maker(self, atom: Atom) -> Eqn | None:
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or eqn.blocks or eqn.effects or eqn.is_placed_operator:
            return None
        return eqn


def _copy(var: Var) -> Eqn:
    like = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct((), np.float32)).eqns[0]
    return Eqn(like.primitive, {}, [var], [Var(f"{var.name}_copy", var.aval)], "")
