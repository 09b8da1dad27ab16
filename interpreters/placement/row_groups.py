"""Members that are groups of rows: reshapes of rows into members, and of members into rows.

`x.reshape(n, b, ...)` of n * b rows makes members of groups of b rows, and `y.ravel()` makes rows
of members. What is computed of such rows is computed by shards of their members, if each group can
be computed on its own.
"""

# A reshape of rows into members is a *cut*. Workers read the rows of an input in groups: the input
# `view` has the shape (n, b, ...), and a shard of it has b consecutive rows per member. Otherwise
# the launching process would have to read the rows and send them to the workers.
#
#     m = reshape x; y = bj_map m              ->   m = reshape view; y = bj_map m
#     t = mul x 2; m = reshape t; y = bj_map m ->   u = by_rows[mul] view 2; m = reshape u; ...
#     v = reshape y; s = reduce_max v          ->   s = by_rows[reduce_max] y
#     v = reshape y; t = tanh v                ->   u = by_rows[tanh] y; t = reshape u
#     k = random_split key; m = reshape k      ->   u = by_rows[random_split] key; m = reshape u

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.demand import requirements
from beamjax.interpreters.placement.places import MemberAxis
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules import rule_table as rules
from beamjax.interpreters.rules.by_rows import by_rows_p, merged, results_of, split_shape
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    ReductionRule,
    bind,
    read,
    shape_of,
)
from beamjax.ops.placements import MAX_MEMBERS

Split = Mapping[tuple[Atom, int | None], Any]
"""Members of rows, by the value with their rows and its axis; other values at None."""


class Group(NamedTuple):
    """Members of several rows, along an axis of the value with these rows."""

    members: Var  # The value with members; it has the elements of that with the rows.
    placement: str
    axis: int
    rows: int  # The rows of a member.


def by_rows(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites a cut, and equations that read rows of members."""
    program = rewriter.program
    need = rewriter.demand.get(eqn.outputs[0])
    if need is not None and _is_cut(eqn, need, program.sizes[need.placement]):
        groups = _RowGroups(rewriter, need.placement, shape_of(eqn.inputs[0])[0])
        return groups.cut(eqn)
    group = next(filter(None, (group_of(rewriter, atom) for atom in eqn.inputs)), None)
    if group is None:
        return None
    if eqn.primitive.name == "reshape":
        return Rewrite(lambda x: bind(eqn, [x]), [group.members])
    total = program.sizes[group.placement] * group.rows
    return _RowGroups(rewriter, group.placement, total).reader(eqn)


def _is_reshape(eqn: Eqn) -> bool:
    plain = eqn.primitive.name == "reshape" and len(eqn.inputs) == 1
    return plain and eqn.params["dimensions"] is None


def _is_cut(eqn: Eqn, along: MemberAxis, n: Any) -> bool:
    """Whether an equation reshapes rows into n members of several rows, along axis 0."""
    if not _is_reshape(eqn) or along.axis != 0 or is_unknown(n):
        return False
    shape = shape_of(eqn.inputs[0])
    return eqn.params["new_sizes"][0] == n and bool(shape) and _are_groups(shape[0], n)


def _are_groups(length: Any, n: int) -> bool:
    """Whether n members of several rows have this number of rows."""
    return not is_unknown(length) and 0 < n < length and length % n == 0


def group_of(rewriter: BlockRewriter, atom: Atom) -> Group | None:
    """The members whose rows a value has, if it is a reshape of placed members."""
    program = rewriter.program
    maker = rewriter.makers.get(atom) if isinstance(atom, Var) else None
    if maker is None or not _is_reshape(maker) or not runs_on_server(program, maker):
        return None
    (members,) = maker.inputs
    along = _place(rewriter, members)
    if along is None or not isinstance(members, Var) or is_unknown(program.sizes[along.placement]):
        return None
    n, to = program.sizes[along.placement], shape_of(atom)
    before = math.prod(shape_of(members)[: along.axis])
    for axis in range(len(to)):
        # The rows of a member are consecutive if as many elements come before this axis.
        if math.prod(to[:axis]) == before and _are_groups(to[axis], n):
            return Group(members, along.placement, axis, to[axis] // n)
    return None


def _place(rewriter: BlockRewriter, atom: Atom) -> MemberAxis | None:
    """The place of a value, or that at which `by_rows` creates it."""
    program = rewriter.program
    maker = rewriter.makers.get(atom) if isinstance(atom, Var) else None
    if maker is None or maker.primitive is not by_rows_p or program.place(atom) is not None:
        return program.place(atom)
    created = (along for var, along in program.creations if var is atom)
    return next(created, None)


class _RowGroups:
    """The equations that compute `total` rows, for members of several rows each."""

    def __init__(self, rewriter: BlockRewriter, placement: str, total: int):
        self.rewriter = rewriter
        self.program = rewriter.program
        self.placement = placement
        self.total = total
        self.rows = total // self.program.sizes[placement]
        self.are_counted = total <= MAX_MEMBERS  # Rules take indices of rows as int32.
        # In order, each with its rule for rows.
        self.eqns: dict[Eqn, MemberwiseRule | ReductionRule] = {}
        # For each value with rows along an axis that the equations read, the value with members.
        self.leaves: dict[tuple[Var, int], Var] = {}

    def cut(self, eqn: Eqn) -> Rewrite | None:
        """Rewrites a cut, if its rows can be computed group by group."""
        (rows,) = eqn.inputs
        if not isinstance(rows, Var) or not self.need(rows, 0):
            return None
        return self.rewrite(lambda split: bind(eqn, [split[rows, 0]]))

    def reader(self, eqn: Eqn) -> Rewrite | None:
        """Rewrites an equation that reads rows of members."""
        groups = [group_of(self.rewriter, atom) for atom in eqn.inputs]
        axes = [group.axis if group and self.fits(group) else None for group in groups]
        rule = rules.classify(eqn, axes, self.total) if self.are_counted else None
        if rule is None:
            return None
        for atom, axis in requirements(eqn, rule.in_axes):
            if not self.need(atom, axis):
                self.leaves[atom, axis] = atom  # A server value, which is scattered.
        self.eqns[eqn] = rule
        pairs = results_of(eqn, rule)
        return self.rewrite(lambda split: [merged(split[pair], pair[1]) for pair in pairs])

    def fits(self, group: Group) -> bool:
        return group.placement == self.placement and group.rows == self.rows

    def need(self, var: Var, axis: int) -> bool:
        """Adds what computes a value with rows along an axis; False if some equation mixes rows."""
        if (var, axis) in self.leaves:
            return True
        leaf = self.leaf(var, axis)
        if leaf is not None:
            self.leaves[var, axis] = leaf
            return True
        eqn = self.rewriter.makers.get(var)
        if eqn is None or eqn.is_placed_operator or not runs_on_server(self.program, eqn):
            return False
        if not self.are_counted:
            return False
        out = eqn.outputs.index(var)
        if eqn in self.eqns:
            known = self.eqns[eqn]
            return isinstance(known, MemberwiseRule) and known.out_axes[out] == axis
        rule = rules.invert(eqn, out, axis, self.total)
        if rule is None or not all(self.need(*pair) for pair in requirements(eqn, rule.in_axes)):
            return False
        self.eqns[eqn] = rule
        return True

    def leaf(self, var: Var, axis: int) -> Var | None:
        """The members whose rows a value has, without any computation, or None."""
        group = group_of(self.rewriter, var)
        if group is not None and group.axis == axis and self.fits(group):
            return group.members
        is_input = var in self.program.flat.inputs and self.program.place(var) is None
        return self.view(var) if is_input and axis == 0 else None

    def view(self, origin: Var) -> Var:
        """The input whose members are groups of rows of another input."""
        program, along = self.program, MemberAxis(self.placement, 0)
        for view, other in program.flat.views.items():
            if other is origin and program.places[view] == along:
                return view
        shape = split_shape(origin.aval.shape, 0, self.rows)
        view = Var(f"{origin.name}.rows{shape[0]}", origin.aval.update(shape=shape))
        program.flat.views[view], program.places[view] = origin, along
        return view

    def rewrite(self, results: Callable[[Split], Sequence[Any]]) -> Rewrite:
        """Computes the equations, and then the results from their values."""
        wholes = [
            atom
            for eqn, rule in self.eqns.items()
            for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)
            if axis is None and isinstance(atom, Var)
        ]
        atoms = list(dict.fromkeys([*self.leaves.values(), *wholes]))

        def function(*values: Any) -> Sequence[Any]:
            env: dict[Var, Any] = dict(zip(atoms, values, strict=True))
            split: dict[tuple[Atom, int | None], Any] = {}
            for (var, axis), members in self.leaves.items():
                shape = split_shape(shape_of(var), axis, self.rows)
                split[var, axis] = lax.reshape(env[members], shape)
            for eqn, rule in self.eqns.items():
                operands = zip(eqn.inputs, rule.in_axes, strict=True)
                args = [read(env, a) if axis is None else split[a, axis] for a, axis in operands]
                outs = by_rows_p.bind(*args, equation=eqn, rule=rule, rows=self.rows)
                split.update(zip(results_of(eqn, rule), outs, strict=True))
            return results(split)

        return Rewrite(function, atoms)
