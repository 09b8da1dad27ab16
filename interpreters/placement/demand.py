"""The backward pass of placement: finds out which values placed operators need, and where."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from beamjax.interpreters.placement.places import MemberAxis
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
from beamjax.interpreters.rules import rule_table as rules
from beamjax.interpreters.rules.sharding_rules import Axes, shape_of


class PlacementKeys:
    """Unique names for the placements of a program."""

    def __init__(self, flat: FlatProgram, placements: Iterable[tuple[str, int]]):
        pairs = dict.fromkeys((*placements, *flat.mapped.values()))
        pairs.update(
            dict.fromkeys(
                (eqn.params["placement"], _members(eqn)) for eqn in flat.walk() if _is_operator(eqn)
            )
        )
        names = [name for name, _ in pairs]
        # Composed programs may use one name with different sizes: `clients[10]`, `clients[20]`.
        self._keys = {
            (name, n): name if names.count(name) == 1 else f"{name}[{n}]" for name, n in pairs
        }
        self.sizes = {key: n for (_, n), key in self._keys.items()}

    def rows(self, var: Var) -> MemberAxis | None:
        """Axis 0 of the only placement with as many members as a value has rows, or None."""
        fitting = [key for key, n in self.sizes.items() if var.aval.shape[:1] == (n,)]
        # Any array may have one row.
        if len(fitting) != 1 or self.sizes[fitting[0]] == 1:
            return None
        return MemberAxis(fitting[0], 0)

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


def find_demand(
    flat: FlatProgram, keys: PlacementKeys, sources: Container[Var] = ()
) -> tuple[dict[Var, MemberAxis], set[Var]]:
    """The place of each value that is needed placed, and the values that are needed whole."""
    # A placed operator needs its operands placed, and so what these are computed from. The first
    # use decides. A value with one row per member that a placed operator needs whole is a server
    # value, unless another use needs it placed.
    finder = _Finder(keys, sources)
    for var, pair in flat.mapped.items():
        finder.needs[var] = _Need(MemberAxis(keys.key(*pair), 0), whole=False)
    finder.block(flat)
    demand = {var: need.along for var, need in finder.needs.items() if not need.whole}
    return demand, finder.needs.keys() - demand.keys()


class _Need(NamedTuple):
    """Where the members of a value are; `whole` if an operator needs it as a server value."""

    along: MemberAxis
    whole: bool

    def moved(self, by: int) -> _Need | None:
        along = self.along.moved(by)
        return None if along is None else _Need(along, self.whole)


class _Finder:
    """Visits equations backward, so that an earlier use overwrites the need of a later one."""

    def __init__(self, keys: PlacementKeys, sources: Container[Var]):
        self.keys = keys
        self.sources = sources
        self.needs: dict[Var, _Need] = {}

    def block(self, block: FlatBlock) -> None:
        for eqn in reversed(block.eqns):
            if isinstance(eqn, LoopEqn):
                self.loop(eqn)
            elif isinstance(eqn, BranchEqn):
                for branch in eqn.branches:
                    for inner, var in zip(branch.outputs, eqn.outputs, strict=True):
                        self.require(inner, self.needs.get(var))
                    self.block(branch)
            else:
                self.equation(eqn)

    def equation(self, eqn: Eqn) -> None:
        key = self.keys.of(eqn)
        in_axes = rules.axes_of_operator(eqn) if key else None
        if key and in_axes is not None:
            for atom, axis in zip(eqn.inputs, in_axes, strict=True):
                if axis is not None:
                    self.require(atom, _Need(MemberAxis(key, axis), whole=False))
                elif shape_of(atom)[:1] == (self.keys.sizes[key],):
                    self.require(atom, _Need(MemberAxis(key, 0), whole=True))
            return
        for out, var in enumerate(eqn.outputs):
            need = self.needs.get(var)
            if need is None:
                continue
            along, n = need.along, self.keys.sizes[need.along.placement]
            rule = rules.invert(eqn, out, along.axis, n)
            whole = need.whole or (
                eqn.primitive.name == "gather" and self.has_members(eqn.inputs[0], along)
            )
            for operand, axis in requirements(eqn, rule.in_axes) if rule else ():
                self.require(operand, _Need(MemberAxis(along.placement, axis), whole))

    def has_members(self, atom: Atom, along: MemberAxis) -> bool:
        """Whether rows of a value are members, but not those of `along`, which read them."""
        # Such rows are read by index, and the server reads the indices. Members that look up rows
        # of another table have indices of their own.
        rows = self.keys.rows(atom) if isinstance(atom, Var) else None
        return atom in self.sources or (rows is not None and rows.placement != along.placement)

    def loop(self, eqn: LoopEqn) -> None:
        block, carried = eqn.block, eqn.carried
        stacked = zip(block.outputs[carried:], eqn.outputs[carried:], strict=True)
        for entry, var in stacked:
            need = self.needs.get(var)
            self.require(entry, need.moved(-1) if need else None)
        ends = list(zip(block.outputs[:carried], eqn.outputs, block.inputs, strict=False))
        for _ in range(carried + 2):  # An iteration moves a need by at most one carried value.
            before = [self.needs.get(param) for param in block.inputs]
            for last, var, param in ends:
                self.require(last, self.needs.get(param) or self.needs.get(var))
            for inner in reversed(eqn.blocks):
                self.block(inner)
            # A carried value that rounds do not change is placed as the loop's result is.
            for last, var, param in ends:
                if last is param:
                    self.require(param, self.needs.get(param) or self.needs.get(var))
            if before == [self.needs.get(param) for param in block.inputs]:
                break
        for number, (atom, param) in enumerate(zip(eqn.inputs, block.inputs, strict=True)):
            need = self.needs.get(param)
            self.require(atom, need.moved(number >= carried) if need else None)

    def require(self, atom: Atom, need: _Need | None) -> None:
        """Records a need; a value that is needed placed anywhere is placed."""
        if need is None or not isinstance(atom, Var):
            return
        known = self.needs.get(atom)
        if known is None or known.whole or not need.whole:
            self.needs[atom] = need
