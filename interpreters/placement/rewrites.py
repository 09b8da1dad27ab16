"""Rewrites equations that have no rule for the members, so that nothing is gathered for them.

A pattern takes an equation, and returns a function of other values with the same results. Such a
function is traced, and its equations are placed like those of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import MemberAxis, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.rows import rows_by_index
from beamjax.interpreters.rules.sharding_rules import (
    ExpansionMembers,
    answers_of,
    shape_of,
)
from beamjax.interpreters.staging.flatten import flatten
from beamjax.ops.primitives import default_promotion


class Rewrite(NamedTuple):
    """Another way to compute the results of an equation: a function of the values of `atoms`."""

    function: Callable[..., Sequence[Any]]
    atoms: Sequence[Atom]


Pattern = Callable[["BlockRewriter", Eqn], Rewrite | None]


class BlockRewriter:
    """Rewrites the equations of a program, in order, as they are placed."""

    def __init__(
        self,
        program: PlacedProgram,
        names: Iterator[str],
        demand: Mapping[Var, MemberAxis],
        ordered: bool,
    ):
        self.program = program
        self.names = names  # Of new values.
        self.demand = demand  # The places that placed operators need.
        self.ordered = ordered  # Whether rewrites may need all members in order.
        self.makers: dict[Var, Eqn] = {}  # The equation that computes each value so far.
        self.own: set[Var] = set()  # The values of equations of the current block.

    def rewritten(self, eqn: Eqn, patterns: Sequence[Pattern]) -> list[Eqn] | None:
        """The equations to compute instead of one; the first pattern that matches is used."""
        if not eqn.outputs or not runs_on_server(self.program, eqn):
            return None
        rewrites = (pattern(self, eqn) for pattern in patterns)
        rewrite = next(filter(None, rewrites), None)
        if rewrite is None:
            return None
        eqns, results = self.traced(rewrite.function, rewrite.atoms, eqn.line)
        renamed = dict(zip(results, eqn.outputs, strict=True))
        for new in eqns:
            new.outputs[:] = [renamed.get(var, var) for var in new.outputs]
        return eqns

    def traced(
        self, function: Callable[..., Sequence[Any]], atoms: Sequence[Atom], line: str
    ) -> tuple[list[Eqn], list[Atom]]:
        """Traces a function of some atoms to equations, and its results."""
        program, names = self.program.flat, self.names
        with default_promotion():
            closed = jax.make_jaxpr(lambda *args: list(function(*args)))(*map(aval_of, atoms))
        flat = flatten(closed)
        env: dict[Var, Atom] = dict(zip(flat.arguments, atoms, strict=True))
        for var, value in zip(flat.inputs[len(atoms) :], flat.constants, strict=True):
            program.inputs.append(var)
            program.constants.append(value)
            var.name = f"const_{next(names)}"
        for eqn in flat.eqns:
            eqn.inputs[:] = [env.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
            eqn.line = line
            for var in eqn.outputs:
                var.name = next(names)
        return flat.eqns, [env.get(a, a) if isinstance(a, Var) else a for a in flat.outputs]


def runs_on_server(program: PlacedProgram, eqn: Eqn) -> bool:
    """Whether an equation without blocks and effects runs on the server."""
    return eqn not in program.rules and not (eqn.blocks or eqn.effects)


def expanded(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Expands a single equation, as the table says."""
    program, answers = rewriter.program, answers_of(eqn)
    places = list(map(program.place, eqn.inputs))
    keys = {along.placement for along in places if along is not None}
    if answers.expansion is None or (answers.ordered and not rewriter.ordered):
        return None
    if eqn.is_placed_operator:
        name, n = eqn.params["placement"], shape_of(eqn.inputs[0])[0]
    elif len(keys) == 1:
        (key,) = keys
        n = program.sizes[key]
        # Operators are bound with the name in the program, not the unique key of `PlacementKeys`.
        name = key.removesuffix(f"[{n}]")
    else:
        return None
    members = ExpansionMembers(name, n, program.shard_size)
    function = answers.expansion(eqn, [along.axis if along else None for along in places], members)
    return None if function is None else Rewrite(function, eqn.inputs)


def by_index(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Reads rows by index of an input or of a value that an earlier step has stored."""
    # A value of a pass of this block has no stored members yet: the pass itself selects from it.
    # The server reads an input in memory as a whole, unless workers need the rows. Where members
    # may be dropped, only workers read rows: a pass drops a row that fails as it drops a member.
    # Without a driver, nothing reads between passes.
    program = rewriter.program
    x = eqn.inputs[0] if eqn.inputs else None
    along = program.place(x) if x is not None else None
    if not isinstance(x, Var) or along is None or along.axis:
        return None
    if program.flat.unrolled:
        return None
    n = program.sizes[along.placement]
    if is_unknown(n) or (x in rewriter.own and not rewriter.makers[x].blocks):
        return None
    need, wanted = rewriter.demand.get(eqn.outputs[0]), None
    if need is not None and need.axis == 0:
        name = need.placement.removesuffix(f"[{program.sizes[need.placement]}]")
        wanted = need.placement, name
    if wanted is None and (program.guarded or program.is_in_memory(x)):
        return None
    function = rows_by_index(eqn, wanted)
    return None if function is None else Rewrite(function, eqn.inputs)
