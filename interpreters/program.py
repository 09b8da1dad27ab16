"""Flat programs: equations over values. Loops and branches are equations with blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from beamjax import _compat
from beamjax.bodies.jaxprs import equations_inside


@dataclass(eq=False, slots=True)
class Var:
    """One value of a flat program; compared and hashed by identity."""

    name: str
    aval: Any

    def __repr__(self) -> str:
        return f"{self.name}:{self.aval.str_short()}"


Atom = Var | _compat.Literal


def is_placed_operator(primitive: _compat.Primitive) -> bool:
    """Whether a primitive is one of `beamjax.ops.primitives`, or a reduction by a function."""
    return primitive.name.startswith("bj_")


def aval_of(atom: Atom) -> Any:
    """The abstract value of an atom; JAX's annotations for literals are too loose for mypy."""
    return atom.aval


@dataclass(eq=False, slots=True)
class Eqn:
    """One primitive applied to atoms."""

    primitive: _compat.Primitive
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Var]
    line: str  # the user's `file:line (function)`, or ""
    # With effects, it is evaluated exactly once, even if its results are not used.
    effects: frozenset[Any] = field(default=frozenset(), kw_only=True)

    @property
    def blocks(self) -> tuple[FlatBlock, ...]:
        """The blocks of a loop or a branch."""
        return ()

    @property
    def is_placed_operator(self) -> bool:
        return is_placed_operator(self.primitive)

    def __repr__(self) -> str:
        outs = " ".join(map(repr, self.outputs))
        ins = " ".join(atom.name if isinstance(atom, Var) else str(atom) for atom in self.inputs)
        return f"{outs} = {self.primitive.name} {ins}".rstrip() + f"    # {self.line}"


@dataclass(eq=False)
class FlatBlock:
    """Equations in order, over the inputs of the block and values of enclosing blocks."""

    inputs: list[Var]
    eqns: list[Eqn] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)

    def copied(self) -> Self:
        """A copy with equations and blocks of its own, over the same variables."""
        eqns = [_copied(eqn) for eqn in self.eqns]
        return replace(self, inputs=[*self.inputs], eqns=eqns, outputs=[*self.outputs])

    def walk(self) -> Iterator[Eqn]:
        """All equations, including those in the blocks of loops and branches."""
        for eqn in self.eqns:
            yield eqn
            for block in eqn.blocks:
                yield from block.walk()

    def reads(self) -> Iterator[Atom]:
        """All operands of equations and outputs of blocks, here and in nested blocks."""
        yield from self.outputs
        for eqn in self.eqns:
            yield from eqn.inputs
            for block in eqn.blocks:
                yield from block.reads()

    def __str__(self) -> str:
        outs = " ".join(atom.name if isinstance(atom, Var) else str(atom) for atom in self.outputs)
        lines = [f"inputs {' '.join(map(repr, self.inputs))}"]
        for eqn in self.eqns:
            lines += [repr(eqn), *(textwrap.indent(str(block), "  ") for block in eqn.blocks)]
        return "\n  ".join("\n".join(lines).splitlines()) + f"\noutputs {outs}"


@dataclass(eq=False)
class FlatProgram(FlatBlock):
    """The outermost block; its inputs are the arguments, then closed-over constants."""

    # The values of the last inputs.
    constants: list[Any] = field(default_factory=list)
    # For each variable whose members are groups of rows of an input, that input.
    views: dict[Var, Var] = field(default_factory=dict)
    # For each value that a map returns unchanged, the name and the size of its placement.
    mapped: dict[Var, tuple[str, Any]] = field(default_factory=dict)
    # For each result of an equation that would count each member once in a function with weights,
    # the placements with weights; see `ops.weights.unweighted`.
    unweighted: dict[Var, set[str]] = field(default_factory=dict)
    # Whether loops and branches around placed operators were inlined.
    unrolled: bool = False
    # For each symbol that stands for an unknown number of members, an int32 variable, which no
    # equation defines: a run knows it after it has counted the members.
    sizes: dict[str, Var] = field(default_factory=dict)

    @property
    def arguments(self) -> list[Var]:
        return self.inputs[: len(self.inputs) - len(self.constants)]

    def copied(self) -> Self:
        return replace(
            super().copied(),
            constants=[*self.constants],
            views=dict(self.views),
            mapped=dict(self.mapped),
            sizes=dict(self.sizes),
        )

    def drop_unused_constants(self) -> None:
        """Removes, in place, the constants that nothing reads."""
        read = {atom for atom in self.reads() if isinstance(atom, Var)} | set(self.views.values())
        arguments = self.arguments
        pairs = zip(self.inputs[len(arguments) :], self.constants, strict=True)
        left = [(var, value) for var, value in pairs if var in read]
        self.inputs = [*arguments, *(var for var, _ in left)]
        self.constants = [value for _, value in left]


@dataclass(eq=False, repr=False, slots=True)
class LoopEqn(Eqn):
    """A scan or a while around placed operators."""

    # The inputs are the initial carried values, then stacked values, of which each round reads one
    # entry. The outputs are the final carried values, then the stacked results.
    block: FlatBlock  # one round; its inputs are the carried values and the entries
    condition: FlatBlock | None  # for a while: over the same inputs, returns one boolean
    carried: int  # the number of carried values
    rounds: int | None  # for a scan
    reverse: bool  # from the last entry to the first
    # A vmapped while: its condition holds if it does for any row, and a round changes only the rows
    # for which it does.
    selects: bool = False

    @property
    def blocks(self) -> tuple[FlatBlock, ...]:
        return (self.condition, self.block) if self.condition else (self.block,)


@dataclass(eq=False, repr=False, slots=True)
class WholeEqn(Eqn):
    """A scan, a while or a cond without placed operators."""

    # Makes an equivalent loop or branch with the same outputs; adds its constants to a program.
    expand: Callable[[FlatProgram], LoopEqn | BranchEqn]


@dataclass(eq=False, repr=False, slots=True)
class MemberEqn(Eqn):
    """A scan, a while or a cond that acts on each member separately."""

    structure: LoopEqn | BranchEqn  # the equivalent loop or branch


@dataclass(eq=False, repr=False, slots=True)
class BranchEqn(Eqn):
    """A cond or a switch around placed operators. Its only input is the number of the block."""

    branches: tuple[FlatBlock, ...]

    @property
    def blocks(self) -> tuple[FlatBlock, ...]:
        return self.branches


def _copied(eqn: Eqn) -> Eqn:
    # The structure of a `MemberEqn` is not copied: placement makes it, after the last copy.
    eqn = replace(eqn, inputs=[*eqn.inputs], outputs=[*eqn.outputs])
    match eqn:
        case LoopEqn(block=block, condition=condition):
            return replace(eqn, block=block.copied(), condition=condition and condition.copied())
        case BranchEqn(branches=branches):
            return replace(eqn, branches=tuple(block.copied() for block in branches))
    return eqn


def with_nested(eqn: Any) -> Iterator[Any]:
    """An equation, of a program or of a jaxpr, and all that its blocks and jaxprs hold."""
    yield eqn
    structure = eqn.structure if isinstance(eqn, MemberEqn) else eqn
    for block in getattr(structure, "blocks", ()):
        for inner in block.eqns:
            yield from with_nested(inner)
    yield from equations_inside(eqn)


def effects_of(*blocks: FlatBlock) -> frozenset[Any]:
    """The effects of all equations in some blocks."""
    return frozenset(effect for block in blocks for eqn in block.eqns for effect in eqn.effects)
