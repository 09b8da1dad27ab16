"""The backward pass of placement: finds the place that the uses of each value require."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from beamjax.interpreters.placement.places import MemberAxis, Place
from beamjax.interpreters.program import (
    Atom,
    BranchEqn,
    Eqn,
    FlatBlock,
    FlatProgram,
    LoopEqn,
    Var,
    aval_of,
)
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.sharding_rules import Axes


class PlacementKeys:
    """Unique names for the placements of a program.

    Composed programs may use one name with different sizes. Such placements get names like
    `clients[10]` and `clients[20]`.
    """

    def __init__(self, flat: FlatProgram, placements: Iterable[tuple[str, int]]):
        pairs = dict.fromkeys((*placements, *flat.mapped.values()))
        pairs.update(
            dict.fromkeys(
                (eqn.params["placement"], _members(eqn)) for eqn in flat.walk() if _is_operator(eqn)
            )
        )
        names = [name for name, _ in pairs]
        self._keys = {
            (name, n): name if names.count(name) == 1 else f"{name}[{n}]" for name, n in pairs
        }
        self.sizes = {key: n for (_, n), key in self._keys.items()}

    def rows(self, var: Var) -> MemberAxis | None:
        """Axis 0 of the only placement with as many members as a value has rows, or None.

        A placement with one member does not count, as any array may have one row.
        """
        fitting = [key for key, n in self.sizes.items() if var.aval.shape[:1] == (n,)]
        return (
            MemberAxis(fitting[0], 0) if len(fitting) == 1 and self.sizes[fitting[0]] != 1 else None
        )

    def key(self, name: str, n: int) -> str:
        """The unique name of a placement."""
        return self._keys[name, n]

    def of(self, eqn: Eqn) -> str | None:
        """The placement of a placed operator, or None."""
        return self._keys[eqn.params["placement"], _members(eqn)] if _is_operator(eqn) else None


def _is_operator(eqn: Eqn) -> bool:
    return eqn.is_placed_operator and eqn.primitive.name != "bj_size"


def _members(eqn: Eqn) -> int:
    n = eqn.params.get("n")
    return aval_of(eqn.inputs[0]).shape[0] if n is None else n


def requirements(eqn: Eqn, in_axes: Axes) -> Iterator[tuple[Var, int]]:
    """The placed operands that are variables, each with the axis that its members must be on."""
    for atom, axis in zip(eqn.inputs, in_axes, strict=True):
        if axis is not None and isinstance(atom, Var):
            yield atom, axis


def find_demand(flat: FlatProgram, keys: PlacementKeys) -> dict[Var, MemberAxis]:
    """The place of each value that some use needs placed; the first use decides."""
    finder = _Finder(keys)
    finder.demand.update({var: MemberAxis(keys.key(*pair), 0) for var, pair in flat.mapped.items()})
    finder.block(flat)
    return finder.demand


class _Finder:
    """Visits equations backward, so that an earlier use overwrites the demand of a later one."""

    def __init__(self, keys: PlacementKeys):
        self.keys = keys
        self.demand: dict[Var, MemberAxis] = {}

    def block(self, block: FlatBlock) -> None:
        for eqn in reversed(block.eqns):
            if isinstance(eqn, LoopEqn):
                self.loop(eqn)
            elif isinstance(eqn, BranchEqn):
                for branch in eqn.branches:
                    for inner, var in zip(branch.outputs, eqn.outputs, strict=True):
                        self.require(inner, self.demand.get(var))
                    self.block(branch)
            else:
                self.equation(eqn)

    def equation(self, eqn: Eqn) -> None:
        key = self.keys.of(eqn)
        rule = rules.classify(eqn, [None] * len(eqn.inputs), None) if key else None
        if key and rule is not None:
            for var, axis in requirements(eqn, rule.in_axes):
                self.demand[var] = MemberAxis(key, axis)
            return
        for out, var in enumerate(eqn.outputs):
            along = self.demand.get(var)
            if along is None:
                continue
            found = rules.invert(eqn, out, along.axis, self.keys.sizes[along.placement])
            for operand, axis in requirements(eqn, found.in_axes) if found else ():
                self.demand[operand] = MemberAxis(along.placement, axis)

    def loop(self, eqn: LoopEqn) -> None:
        block, carried = eqn.block, eqn.carried
        stacked = zip(block.outputs[carried:], eqn.outputs[carried:], strict=True)
        for entry, var in stacked:
            along = self.demand.get(var)
            self.require(entry, along.moved(-1) if along else None)
        ends = list(zip(block.outputs[:carried], eqn.outputs, block.inputs, strict=False))
        for _ in range(carried + 2):  # An iteration moves a demand by at most one carried value.
            before = [self.demand.get(param) for param in block.inputs]
            for last, var, param in ends:
                self.require(last, self.demand.get(param) or self.demand.get(var))
            for inner in reversed(eqn.blocks):
                self.block(inner)
            # A carried value that rounds do not change is placed as the loop's result is.
            for last, var, param in ends:
                if last is param:
                    self.require(param, self.demand.get(param) or self.demand.get(var))
            if before == [self.demand.get(param) for param in block.inputs]:
                break
        for number, (atom, param) in enumerate(zip(eqn.inputs, block.inputs, strict=True)):
            along = self.demand.get(param)
            self.require(atom, along.moved(number >= carried) if along else None)

    def require(self, atom: Atom, along: Place) -> None:
        if along is not None and isinstance(atom, Var):
            self.demand[atom] = along
