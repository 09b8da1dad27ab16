"""Rewrites equations that have no rule for the members, so that nothing is gathered for them.

A pattern takes an equation, and returns a function of other values with the same results. There are
two kinds of rewrites. An *end*, such as `jnp.cumsum(x, 0)` or the sum of reshaped members, is
computed from placed values by equations that have rules. A *view* is moved past an equation: if `v`
is `x.ravel()`, `jnp.tanh(v)` becomes `jnp.tanh(x).ravel()`, until an end reads a view of placed
values.

A view without an end is gathered. If the server gathers a value anyway, rewrites of what is
computed from it save nothing. They are refused, and the program is placed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.sharding_rules import (
    EXPANSIONS,
    ORDERED_EXPANSIONS,
    Members,
    shape_of,
)
from beamjax.interpreters.staging.flatten import flatten
from beamjax.ops.primitives import default_promotion


@dataclass(frozen=True)
class Rewrite:
    """Another way to compute the results of an equation.

    Attributes:
      function: maps the values of `atoms` to the results, one for each output of the equation.
      atoms: the values that it reads.
      is_view: whether the results are views of new placed values.
    """

    function: Callable[..., Sequence[Any]]
    atoms: Sequence[Atom]
    is_view: bool = False


Pattern = Callable[["BlockRewriter", Eqn], Rewrite | None]


class Rewrites:
    """What is known of the rewrites of a program, over all attempts to place it.

    Attributes:
      moves: whether expansions may need all members in order.
      refused: first results of equations that are not rewritten.
      sources: for the first result of each rewritten equation, the placed values that it is
        computed from.
      owners: for each value that a rewrite computes, the first result of the equation of the
        program that it replaces. That result is the same variable in each attempt.
      roots: the same as `sources` for new placed values that view rewrites compute.
    """

    def __init__(self, patterns: Sequence[Pattern], moves: bool):
        self.patterns = patterns
        self.moves = moves
        self.refused: set[Var] = set()
        self.begin()

    def begin(self) -> None:
        """Begins another attempt."""
        self.names = map("all{}".format, itertools.count())
        self.sources: dict[Var, frozenset[Var]] = {}
        self.owners: dict[Var, Var] = {}
        self.roots: dict[Var, frozenset[Var]] = {}

    def are_settled(self, program: PlacedProgram) -> bool:
        """Whether to use the rewritten program; if not, `refused` has grown."""
        gathered = frozenset[Var]().union(*map(self.origins, self._gathered(program)))
        refused = [var for var, origins in self.sources.items() if origins & gathered]
        self.refuse(refused)
        return not refused

    def refuse(self, results: Iterable[Var]) -> None:
        """Refuses the rewrites that compute some values, in the next attempts."""
        self.refused |= {self.owners.get(var, var) for var in results}

    def origins(self, atom: Atom) -> frozenset[Var]:
        """The placed values that a placed one was computed from by rewrites; itself, if none."""
        return self.roots.get(atom, frozenset({atom})) if isinstance(atom, Var) else frozenset()

    def _gathered(self, program: PlacedProgram) -> Iterator[Var]:
        """The placed values that the server reads."""
        for eqn in program.flat.walk():
            for atom, along in program.reads(eqn):
                if isinstance(atom, Var) and program.place(atom) not in (None, along):
                    yield atom


class BlockRewriter:
    """Rewrites the equations of one block, in order, as they are placed.

    Attributes:
      makers: for each value of the block, the equation that computes it.
    """

    def __init__(self, program: PlacedProgram, rewrites: Rewrites):
        self.program = program
        self.rewrites = rewrites
        self.makers: dict[Var, Eqn] = {}

    def rewritten(self, eqn: Eqn) -> list[Eqn] | None:
        """The equations to compute instead of one without a rule; None to leave it."""
        if not eqn.outputs or eqn.outputs[0] in self.rewrites.refused:
            return None
        if not runs_on_server(self.program, eqn):
            return None
        found = (pattern(self, eqn) for pattern in self.rewrites.patterns)
        rewrite = next(filter(None, found), None)
        if rewrite is None:
            return None
        read = {a for a in rewrite.atoms if isinstance(a, Var)}
        placed = [a for a in read if self.program.place(a) is not None]
        origins = frozenset[Var]().union(*map(self.rewrites.origins, placed))
        made, results = self.traced(rewrite.function, rewrite.atoms, eqn.line)
        renamed = dict(zip(results, eqn.outputs, strict=True))
        owners = self.rewrites.owners
        owner = owners.get(eqn.outputs[0], eqn.outputs[0])
        for new in made:
            owners.update(dict.fromkeys(new.outputs, owner))
            new.outputs[:] = [renamed.get(var, var) for var in new.outputs]
            if rewrite.is_view:
                self.rewrites.roots.update(dict.fromkeys(new.outputs, origins))
        self.rewrites.sources[eqn.outputs[0]] = origins
        return made

    def maker(self, atom: Atom, name: str) -> Eqn | None:
        """The equation with the primitive `name` that computes a value of this block, or None."""
        eqn = self.makers.get(atom) if isinstance(atom, Var) else None
        return eqn if eqn is not None and eqn.primitive.name == name else None

    def traced(
        self, function: Callable[..., Sequence[Any]], atoms: Sequence[Atom], line: str
    ) -> tuple[list[Eqn], list[Atom]]:
        """Traces a function of some atoms to equations, and its results."""
        program, names = self.program.flat, self.rewrites.names
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


def expansions(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Expands a single equation; see `rules.table`."""
    program, name = rewriter.program, eqn.primitive.name
    find = EXPANSIONS.get(name)
    if find is None and rewriter.rewrites.moves:
        find = ORDERED_EXPANSIONS.get(name)
    places = list(map(program.place, eqn.inputs))
    keys = {along.placement for along in places if along is not None}
    if find is None or (len(keys) != 1 and not eqn.is_placed_operator):
        return None
    if eqn.is_placed_operator:
        name, n = eqn.params["placement"], shape_of(eqn.inputs[0])[0]
    else:
        (key,) = keys
        n = program.sizes[key]
        # Operators are bound with the name in the program, not the unique key of `PlacementKeys`.
        name = key.removesuffix(f"[{n}]")
    members = Members(name, n, program.shard_size)
    function = find(eqn, [along.axis if along else None for along in places], members)
    return None if function is None else Rewrite(function, eqn.inputs)
