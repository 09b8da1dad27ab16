"""A flat program: equations over values. Loops and branches are equations that hold blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex


@dataclass(eq=False, slots=True)
class Var:
    """One value of a flat program. Compared and hashed by identity."""

    name: str
    aval: Any

    def __repr__(self) -> str:
        return f"{self.name}:{self.aval.str_short()}"


Atom = Var | jex.Literal


def is_placed_operator(primitive: jex.Primitive) -> bool:
    """Whether a primitive is one of `beamjax.ops.primitives`, or a reduction by a function."""
    return primitive.name.startswith("bj_")


def aval_of(atom: Atom) -> Any:
    """The type of an atom, which JAX declares for literals more loosely than it is."""
    return atom.aval


@dataclass(eq=False, slots=True)
class Eqn:
    """One primitive applied to atoms.

    `line` is the user's `file:line (function)` or empty; an equation with `effects` is evaluated
    once, whether its results are used or not.
    """

    primitive: jex.Primitive
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Var]
    line: str
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
    """Equations in order, over inputs of their own and values of the blocks around them."""

    inputs: list[Var]
    eqns: list[Eqn] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)

    def walk(self) -> Iterator[Eqn]:
        """All equations, those in the blocks of loops and branches included."""
        for eqn in self.eqns:
            yield eqn
            for block in eqn.blocks:
                yield from block.walk()

    def reads(self) -> Iterator[Atom]:
        """All that an equation reads or that leaves a block, here or in the blocks inside."""
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
    """The outermost block; its inputs are the arguments, then closed-over constants.

    Attributes:
      constants: the values of the last inputs.
      views: inputs of their own that read others in groups of rows, with those others.
      mapped: values that maps hand on as they came, with the name and the size of the placement.
      unrolled: whether loops and branches around placed operators are written out, since nobody
        drives them.
      sizes: for each symbol that stands for an unknown number of members, a variable that no
        equation makes, an int32.
    """

    constants: list[Any] = field(default_factory=list)
    views: dict[Var, Var] = field(default_factory=dict)
    mapped: dict[Var, tuple[str, Any]] = field(default_factory=dict)
    unrolled: bool = False
    sizes: dict[str, Var] = field(default_factory=dict)

    @property
    def arguments(self) -> list[Var]:
        return self.inputs[: len(self.inputs) - len(self.constants)]

    __str__ = FlatBlock.__str__


@dataclass(eq=False, repr=False, slots=True)
class LoopEqn(Eqn):
    """A scan or a while around placed operators.

    The inputs are the first values of the carried ones, then the stacked values of which each round
    reads an entry; the outputs the last values of the carried ones, then stacked results.

    Attributes:
      block: one round, over params for the carried values and the entries.
      condition: for a while, a block over the same params that gives one boolean.
      carried: the number of carried values.
      rounds: for a scan, their number.
      reverse: whether the first round reads and gives the last entries.
      selects: whether the condition says, under vmap, that any row goes on, and a round changes
        only the rows that do.
    """

    block: FlatBlock
    condition: FlatBlock | None
    carried: int
    rounds: int | None
    reverse: bool
    selects: bool = False

    @property
    def blocks(self) -> tuple[FlatBlock, ...]:
        return (self.condition, self.block) if self.condition else (self.block,)

    @property
    def params_of_carried(self) -> list[Var]:
        return self.block.inputs[: self.carried]


@dataclass(eq=False, repr=False, slots=True)
class WholeEqn(Eqn):
    """A scan, a while or a cond without placed operators; `expand` makes a loop or a branch of it.

    The loop or branch has the same outputs.
    """

    expand: Callable[[], LoopEqn | BranchEqn]


@dataclass(eq=False, repr=False, slots=True)
class MemberEqn(Eqn):
    """A scan, a while or a cond that acts on each member alone.

    `structure` is the same, expanded.
    """

    structure: LoopEqn | BranchEqn


@dataclass(eq=False, repr=False, slots=True)
class BranchEqn(Eqn):
    """A cond or a switch around placed operators: one input, the number of the block to take."""

    branches: tuple[FlatBlock, ...]

    @property
    def blocks(self) -> tuple[FlatBlock, ...]:
        return self.branches


def effects_of(*blocks: FlatBlock) -> frozenset[Any]:
    """The effects of all equations in some blocks."""
    return frozenset(effect for block in blocks for eqn in block.eqns for effect in eqn.effects)
