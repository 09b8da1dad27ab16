"""Placed programs: a flat program with a place for every value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from beamjax.interpreters.program import Atom, Eqn, FlatBlock, FlatProgram, MemberEqn, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule


class MemberAxis(NamedTuple):
    """The members of `placement` lie along `axis`."""

    placement: str
    axis: int

    def moved(self, by: int) -> MemberAxis | None:
        """The place in an array with `by` more leading axes; None if the member axis is removed."""
        return MemberAxis(self.placement, self.axis + by) if self.axis + by >= 0 else None

    def __str__(self) -> str:
        return f"{self.placement} along axis {self.axis}"


Place = MemberAxis | None
"""The place of a value; None is the server."""


class Border(NamedTuple):
    """The places of the inputs and outputs of a loop or a branch."""

    inputs: tuple[Place, ...]
    outputs: tuple[tuple[Place, ...], ...]  # For each of its blocks.


class FileGroups(NamedTuple):
    """How the files of a placement are grouped: shards do not cross the border of a group."""

    # The average number of files in a group. The hash of a file's name says whether it is the first
    # one of its group, so that a file that is added or removed changes one group only.
    files: int
    rows: int  # The approximate number of members of a group.


@dataclass(eq=False)
class PlacedProgram:
    """A flat program with a place for every value."""

    # A copy that belongs to this object; passes of this folder rewrite it.
    flat: FlatProgram
    sizes: dict[str, int]  # The number of members of each placement.
    # The place of each placed value; all other values are server values.
    places: dict[Var, MemberAxis] = field(default_factory=dict)
    # For each equation that is computed by shards, its placement and sharding rule.
    rules: dict[Eqn, tuple[str, MemberwiseRule | ReductionRule]] = field(default_factory=dict)
    # For each server value that a shard can compute, and each place at which it can, the equation
    # that computes it and its sharding rule.
    creations: dict[tuple[Var, MemberAxis], tuple[Eqn, MemberwiseRule]] = field(
        default_factory=dict
    )
    borders: dict[Eqn, Border] = field(default_factory=dict)
    # For each equation that is rewritten, and for each scan, while or cond without placed operators
    # that is not computed on the server, the equations that replace it. It is empty once `settle`
    # has replaced them.
    expanded: dict[Eqn, list[Eqn]] = field(default_factory=dict)
    # For each `take_rows`, the place of the value whose rows it reads.
    rows: dict[Eqn, MemberAxis] = field(default_factory=dict)
    # If members may be dropped, a placement and the beginning of a sentence for each division by
    # the number of members that counts dropped ones.
    undropped: list[tuple[str, str]] = field(default_factory=list)
    # Inputs that only workers read. The server reads all others whole, where it needs them, and
    # gathers nothing for that.
    by_shards: frozenset[Var] = frozenset()
    guarded: bool = False  # Whether members may be dropped or are checked for NaN.
    shard_size: int | None = None  # Members per shard, if the user gives it.
    # For each placement whose shards are cut at files, how its files are grouped.
    file_groups: dict[str, FileGroups] = field(default_factory=dict)

    def place(self, atom: Atom) -> Place:
        return self.places.get(atom) if isinstance(atom, Var) else None

    def runs_alone(self, eqn: Eqn) -> bool:
        """Whether an equation becomes a step of its own: a loop, a branch, a read of rows."""
        return bool(eqn.blocks) or eqn in self.rows

    def is_in_memory(self, var: Var) -> bool:
        """Whether a value is an input that the launching process holds."""
        return var in self.flat.inputs and var not in self.by_shards

    def equations(self, block: FlatBlock) -> Iterator[Eqn]:
        """The equations of a block, with replacements from `expanded`."""
        return self._expanded(block.eqns)

    def _expanded(self, eqns: Iterable[Eqn]) -> Iterator[Eqn]:
        """These equations, with replacements, which may have replacements themselves."""
        for eqn in eqns:
            if eqn in self.expanded:
                yield from self._expanded(self.expanded[eqn])
            else:
                yield eqn

    def walk(self, block: FlatBlock) -> Iterator[Eqn]:
        """Like `equations`, with the equations in loops and branches."""
        for eqn in self.equations(block):
            yield eqn
            for inner in eqn.blocks:
                yield from self.walk(inner)

    def settle(self) -> None:
        """Applies the replacements of `expanded`, in place."""
        self._settle(self.flat)
        self.expanded.clear()

    def _settle(self, block: FlatBlock) -> None:
        block.eqns[:] = self.equations(block)
        for eqn in block.eqns:
            for inner in eqn.structure.blocks if isinstance(eqn, MemberEqn) else eqn.blocks:
                self._settle(inner)

    def reads(self, eqn: Eqn) -> Iterator[tuple[Atom, Place]]:
        """The atoms that an equation reads, with the places at which it reads them."""
        # For a loop or a branch these are its inputs and all atoms that the equations and the
        # outputs of its blocks read, including values of these blocks.
        if eqn.blocks:
            yield from self.border_reads(eqn)
            for block in eqn.blocks:
                for inner in self.equations(block):
                    yield from self.reads(inner)
            return
        if eqn in self.rows:
            yield from zip(eqn.inputs, (self.rows[eqn], None), strict=True)
            return
        placement, rule = self.rules.get(eqn, ("", None))
        yield from _reads_of(eqn, placement, rule)

    def border_reads(self, eqn: Eqn) -> Iterator[tuple[Atom, Place]]:
        """The inputs of a loop or a branch and the outputs of its blocks, with their places."""
        border = self.borders[eqn]
        yield from zip(eqn.inputs, border.inputs, strict=True)
        for block, places in zip(eqn.blocks, border.outputs, strict=True):
            yield from zip(block.outputs, places, strict=True)

    def reads_to_create(self, var: Var, along: MemberAxis) -> Iterator[tuple[Atom, Place]]:
        """The atoms that a shard reads to compute the members of a server value."""
        maker, rule = self.creations[var, along]
        yield from _reads_of(maker, along.placement, rule)

    def __str__(self) -> str:
        lines = [f"{var!r}: {self._label(var)}" for var in self.flat.inputs]
        return "\n".join([*lines, *self._lines(self.flat, "")])

    def _lines(self, block: FlatBlock, indent: str) -> Iterator[str]:
        for eqn in block.eqns:
            where = ", ".join(self._label(var) for var in eqn.outputs)
            yield f"{indent}{eqn!r}    -> {where}"
            for inner in eqn.blocks:
                for var in inner.inputs:
                    yield f"{indent}  {var!r}: {self._label(var)}"
                yield from self._lines(inner, indent + "  ")

    def _label(self, var: Var) -> str:
        return str(self.places.get(var, "server"))


def _reads_of(
    eqn: Eqn, placement: str, rule: MemberwiseRule | ReductionRule | None
) -> Iterator[tuple[Atom, Place]]:
    axes = rule.in_axes if rule else (None,) * len(eqn.inputs)
    for atom, axis in zip(eqn.inputs, axes, strict=True):
        yield atom, None if axis is None else MemberAxis(placement, axis)
