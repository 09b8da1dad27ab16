"""A flat program in which every value has a place: the words in which placement answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from beamjax.interpreters.program import Atom, Eqn, FlatBlock, FlatProgram, Var
from beamjax.interpreters.rules.table import Fold, Local


@dataclass(frozen=True)
class Along:
    """The members of `placement` lie along `axis`."""

    placement: str
    axis: int

    def moved(self, by: int) -> Along | None:
        """The same members in an array with more or fewer leading axes, if they are left in it."""
        return Along(self.placement, self.axis + by) if self.axis + by >= 0 else None

    def __str__(self) -> str:
        return f"{self.placement} along axis {self.axis}"


Place = Along | None
"""Where a value is; None is the server."""


@dataclass(frozen=True)
class Border:
    """The places at which a loop or a branch takes and gives values.

    Attributes:
      inputs: of its inputs, when it begins.
      outputs: for each of its blocks, of the block's outputs when it ends.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[tuple[Place, ...], ...]


@dataclass(eq=False)
class PlacedProgram:
    """A flat program with a place for every value.

    Attributes:
      sizes: number of members of each placement.
      places: where placed values have their members; values not in it are server values.
      readings: for each equation that is computed by shards, its placement and how.
      creations: for server values that a shard can make by itself, the equation and how, by value
        and place.
      borders: of loops and branches.
      expanded: for scans, whiles and conds that are not computed as a whole, what is instead.
    """

    flat: FlatProgram
    sizes: dict[str, int]
    places: dict[Var, Along] = field(default_factory=dict)
    readings: dict[Eqn, tuple[str, Local | Fold]] = field(default_factory=dict)
    creations: dict[tuple[Var, Along], tuple[Eqn, Local]] = field(default_factory=dict)
    borders: dict[Eqn, Border] = field(default_factory=dict)
    expanded: dict[Eqn, Eqn] = field(default_factory=dict)

    def place(self, atom: Atom) -> Place:
        return self.places.get(atom) if isinstance(atom, Var) else None

    def equations(self, block: FlatBlock) -> Iterator[Eqn]:
        """The equations of a block, as they are computed."""
        return (self.expanded.get(eqn, eqn) for eqn in block.eqns)

    def walk(self, block: FlatBlock) -> Iterator[Eqn]:
        """All equations of a block as they are computed, those in loops and branches included."""
        for eqn in self.equations(block):
            yield eqn
            for inner in eqn.blocks:
                yield from self.walk(inner)

    def settle(self, block: FlatBlock) -> None:
        """Puts what is computed in the place of what was staged."""
        block.eqns[:] = self.equations(block)
        for eqn in block.eqns:
            for inner in eqn.blocks:
                self.settle(inner)

    def reads(self, eqn: Eqn) -> Iterator[tuple[Atom, Place]]:
        """The atoms that an equation reads, with the places at which it does.

        For a loop or a branch these are its inputs, and what the equations and the outputs of its
        blocks read, the blocks' own values included.
        """
        if eqn.blocks:
            border = self.borders[eqn]
            yield from zip(eqn.inputs, border.inputs, strict=True)
            for block, places in zip(eqn.blocks, border.outputs, strict=True):
                for inner in self.equations(block):
                    yield from self.reads(inner)
                yield from zip(block.outputs, places, strict=True)
            return
        placement, reading = self.readings.get(eqn, ("", None))
        yield from _reads_of(eqn, placement, reading)

    def reads_to_create(self, var: Var, along: Along) -> Iterator[tuple[Atom, Place]]:
        """What a shard reads to make the members of a server value by itself."""
        maker, reading = self.creations[var, along]
        yield from _reads_of(maker, along.placement, reading)

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
    eqn: Eqn, placement: str, reading: Local | Fold | None
) -> Iterator[tuple[Atom, Place]]:
    axes = reading.in_axes if reading else (None,) * len(eqn.inputs)
    for atom, axis in zip(eqn.inputs, axes, strict=True):
        yield atom, None if axis is None else Along(placement, axis)
