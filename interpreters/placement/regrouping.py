"""Rewrites reductions of sliced or reshaped members to reductions of the members.

`jnp.mean(x[:800], 0)`, `jnp.max(jnp.abs(x.ravel()))` and `x.reshape(4, -1, k).sum(1)` reduce values
that do not have one row per member, although they act on each member before the reduction. Their
equations are rewritten for all members in their original shape, so that nothing is gathered. Only
the result of the reduction has the shape that the program asks for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, FlatProgram, Var, aval_of
from beamjax.interpreters.staging.flatten import flatten


@dataclass(frozen=True)
class Step:
    """How to rewrite an equation for all members.

    Attributes:
      atoms: the atoms that it reads.
      whole: for each atom, whether to read its rewritten value, which another step computes.
      function: maps the values of `atoms` to the results, one for each output of the equation.
      is_end: whether the results equal those of the original equation, which is a reduction.
    """

    atoms: Sequence[Atom]
    whole: Sequence[bool]
    function: Callable[..., Sequence[Any]]
    is_end: bool = False


Steps = Mapping[Eqn, Step]
Find = Callable[[PlacedProgram, FlatBlock], Iterator[Steps]]


class Regrouping:
    """Rewrites reductions of a program in place, and can undo that."""

    def __init__(self, flat: FlatProgram, finds: Iterable[Find]):
        self.flat = flat
        self.finds = tuple(finds)
        self.before: dict[FlatBlock, list[Eqn]] = {}
        self.names = map("all{}".format, itertools.count())

    def rewrite(self, program: PlacedProgram) -> bool:
        """Rewrites reductions that then need no gather; returns whether there were any."""
        blocks = [self.flat, *(block for eqn in self.flat.walk() for block in eqn.blocks)]
        return any(list(map(functools.partial(self._block, program), blocks)))

    def undo(self) -> None:
        """Restores the original equations."""
        for block, eqns in self.before.items():
            block.eqns[:] = eqns
        self.before.clear()

    def _block(self, program: PlacedProgram, block: FlatBlock) -> bool:
        found = [steps for find in self.finds for steps in find(program, block)]
        found = [steps for steps in found if any(step.is_end for step in steps.values())]
        found = _sufficient(program, block, found) if found else []
        for steps in found:
            self.before.setdefault(block, list(block.eqns))
            old = {v for v in _of_members(program, block, steps) if program.place(v) is None}
            block.eqns[:] = self._written(block, steps, old)
        return bool(found)

    def _written(self, block: FlatBlock, steps: Steps, old: set[Var]) -> list[Eqn]:
        """The equations of a block with rewritten ones, without those that define `old` values."""
        needed: set[Var] = set()
        for eqn in reversed(block.eqns):
            step = steps.get(eqn)
            if step and (step.is_end or not needed.isdisjoint(eqn.outputs)):
                pairs = zip(step.atoms, step.whole, strict=True)
                needed |= _variables(atom for atom, mark in pairs if mark)
        wholes: dict[Var, Atom] = {}
        written: list[Eqn] = []
        for eqn in block.eqns:
            step = steps.get(eqn)
            is_end = step is not None and step.is_end
            if not is_end and old.isdisjoint(eqn.outputs):
                written.append(eqn)
            if step is None or not (is_end or not needed.isdisjoint(eqn.outputs)):
                continue
            pairs = zip(step.atoms, step.whole, strict=True)
            atoms = [wholes[a] if mark and isinstance(a, Var) else a for a, mark in pairs]
            made, results = self._traced(step.function, atoms, eqn.line)
            if is_end:
                renamed = dict(zip(results, eqn.outputs, strict=True))
                for new in made:
                    new.outputs[:] = [renamed.get(var, var) for var in new.outputs]
            else:
                wholes.update(zip(eqn.outputs, results, strict=True))
            written += made
        return written

    def _traced(
        self, function: Callable[..., Sequence[Any]], atoms: Sequence[Atom], line: str
    ) -> tuple[list[Eqn], list[Atom]]:
        """Traces a function of some atoms to equations, and its results."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            closed = jax.make_jaxpr(lambda *args: list(function(*args)))(*map(aval_of, atoms))
        flat = flatten(closed)
        env: dict[Var, Atom] = dict(zip(flat.arguments, atoms, strict=True))
        for var, value in zip(flat.inputs[len(atoms) :], flat.constants, strict=True):
            self.flat.inputs.append(var)
            self.flat.constants.append(value)
            var.name = f"const_{next(self.names)}"
        for eqn in flat.eqns:
            eqn.inputs[:] = [env.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
            eqn.line = line
            for var in eqn.outputs:
                var.name = next(self.names)
        return flat.eqns, [env.get(a, a) if isinstance(a, Var) else a for a in flat.outputs]


def _sufficient(program: PlacedProgram, block: FlatBlock, found: Sequence[Steps]) -> list[Steps]:
    """The rewrites after which the members that they begin with are not gathered."""
    members = {id(steps): _of_members(program, block, steps) for steps in found}
    kept = [*found]
    while True:
        stepped = {eqn for steps in kept for eqn in steps}
        others = (program.expanded.get(e, e) for e in block.eqns if e not in stepped)
        pairs = (pair for eqn in others for pair in program.reads(eqn))
        whole = _variables(a for a, along in pairs if along is None or along != program.place(a))
        whole |= {var for var in _variables(block.outputs) if program.place(var) is None}
        left = [steps for steps in kept if not members[id(steps)] & whole]
        if len(left) == len(kept):
            return kept
        kept = left


def _of_members(program: PlacedProgram, block: FlatBlock, steps: Steps) -> set[Var]:
    """The placed values that steps begin with, and the values computed from them."""
    found: set[Var] = set()
    for eqn in block.eqns:
        step = steps.get(eqn)
        if step is None:
            continue
        read = _variables(step.atoms)
        begins = {var for var in read if program.place(var) is not None}
        if begins or read & found:
            found |= begins
            found.update(() if step.is_end else eqn.outputs)
    return found


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def runs_on_server(program: PlacedProgram, eqn: Eqn) -> bool:
    """Whether an equation runs on the server, or on workers only to select members."""
    _, rule = program.rules.get(eqn, ("", None))
    selects = rule is not None and getattr(rule, "selects_members", False)
    plain = not (eqn.blocks or eqn.effects or eqn.is_placed_operator)
    return plain and (rule is None or selects)
