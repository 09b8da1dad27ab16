"""Views: inputs that a program reshapes into members, `x.reshape(n, b, ...)` of n * b rows.

`m = reshape x; y = bj_map m` becomes `m = reshape view; y = bj_map m`, where `view` is an input of
shape (n, b, ...), called a view. Workers read it by shards, b consecutive rows per member.
Otherwise the launching process would have to read it and send it to the workers. A *cut* below is a
reshape of rows into members.

A program may also compute on the rows before it makes members of them. `(tokens[:, 1:] * 2)
.reshape(n, b, ...)` acts on each row separately, so each member can compute it for its own b rows:
the inputs are reshaped instead, and the computation becomes a map over members: `t = mul x 2;
m = reshape t` becomes `v = reshape x; m = bj_map[mul 2] v`. The same holds for
`jax.random.split(key, 2 * n).reshape(n, 2)`: each member computes its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.places import MemberAxis
from beamjax.interpreters.program import Atom, Eqn, FlatProgram, Var, aval_of
from beamjax.interpreters.rules import rule_table as rules
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    TracedShard,
    read,
)
from beamjax.interpreters.staging.simplify import prune
from beamjax.ops import primitives
from beamjax.ops.placements import MAX_MEMBERS
from beamjax.ops.primitives import default_promotion


def make_views(
    flat: FlatProgram, demand: MutableMapping[Var, MemberAxis], sizes: Mapping[str, Any]
) -> dict[Var, MemberAxis]:
    """Replaces the operands of reshapes of inputs into members by views, in place.

    Args:
      flat: the program; the views are added to it.
      demand: from `find_demand`.
      sizes: the number of members of each placement.

    Returns:
      The place of each view.
    """
    move_cuts(flat, demand, sizes)
    made: dict[tuple[Var, str], Var] = {}
    places = {}
    for eqn, origin, along in _cuts(flat, demand, sizes):
        view = made.get((origin, along.placement))
        if view is None:
            view = made[origin, along.placement] = _view(origin, sizes[along.placement])
            flat.views[view], places[view] = origin, along
        eqn.inputs[0] = view
    return places


def _cuts(
    flat: FlatProgram, demand: Mapping[Var, MemberAxis], sizes: Mapping[str, Any]
) -> Iterator[tuple[Eqn, Var, MemberAxis]]:
    """The reshapes of inputs into members, with the input and the place of the result."""
    inputs = set(flat.inputs)
    for eqn in flat.walk():
        along = demand.get(eqn.outputs[0]) if eqn.outputs else None
        if along is not None and is_cut(eqn, along, sizes[along.placement]):
            origin = eqn.inputs[0]
            if isinstance(origin, Var) and origin in inputs:
                yield eqn, origin, along


def _view(origin: Var, n: int) -> Var:
    rows, *rest = origin.aval.shape
    view = jax.ShapeDtypeStruct((n, rows // n, *rest), origin.aval.dtype)
    return Var(f"{origin.name}.rows{n}", jax.make_jaxpr(lambda x: x)(view).in_avals[0])


# --- computations on rows


def is_cut(eqn: Eqn, along: MemberAxis | None, n: Any) -> bool:
    """Whether an equation reshapes rows into n members of several rows, along axis 0."""
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None:
        return False
    shape = aval_of(eqn.inputs[0]).shape
    fits = len(eqn.inputs) == 1 and along is not None and along.axis == 0 and bool(shape)
    return fits and shape[0] > n and shape[0] % n == 0 and eqn.params["new_sizes"][0] == n


def move_cuts(
    flat: FlatProgram, demand: MutableMapping[Var, MemberAxis], sizes: Mapping[str, Any]
) -> None:
    """Moves reshapes into members, if only placed operators read them, to the inputs, in place.

    Args:
      flat: the program; it is changed.
      demand: from `find_demand`; the places of reshaped inputs are added.
      sizes: the number of members of each placement.
    """
    users: dict[Var, list[Eqn]] = {}
    for eqn in flat.walk():
        for atom in (*eqn.inputs, *(a for block in eqn.blocks for a in block.outputs)):
            if isinstance(atom, Var):
                users.setdefault(atom, []).append(eqn)
    program_output = {atom for atom in flat.outputs if isinstance(atom, Var)}
    for eqn in list(flat.walk()):
        along = demand.get(eqn.outputs[0]) if len(eqn.outputs) == 1 else None
        if along is None or not is_cut(eqn, along, sizes[along.placement]):
            continue
        if aval_of(eqn.inputs[0]).shape[0] > MAX_MEMBERS:  # Indices of rows are int32.
            continue
        readers = users.get(eqn.outputs[0], [])
        placements = {_placement(reader) for reader in readers}
        if eqn.outputs[0] in program_output or len(placements) != 1:
            continue
        placement = placements.pop()
        if placement is not None:
            moved = _Rows(flat, aval_of(eqn.inputs[0]).shape[0])
            if moved.need(eqn.inputs[0]) and moved.eqns:
                moved.replace(eqn, along, placement, sizes[along.placement], demand)
    prune(flat)


def _placement(eqn: Eqn) -> str | None:
    return eqn.params.get("placement") if eqn.is_placed_operator else None


class _Rows:
    """The equations that compute a value with `size` rows, row by row.

    Attributes:
      eqns: the equations in order, each with its sharding rule.
      inputs: inputs of the program whose rows they read.
      served: values that they read as a whole, such as scalars.
    """

    def __init__(self, flat: FlatProgram, size: int):
        self.flat = flat
        self.size = size
        self.makers = {v: eqn for eqn in flat.eqns if not eqn.blocks for v in eqn.outputs}
        self.eqns: dict[Eqn, MemberwiseRule] = {}
        self.inputs: dict[Var, None] = {}
        self.served: dict[Var, None] = {}

    def need(self, atom: Atom) -> bool:
        """Adds all equations that compute a value; returns False if one of them mixes rows."""
        if not isinstance(atom, Var):
            return False
        if atom in self.flat.inputs:
            self.inputs[atom] = None
            return True
        eqn = self.makers.get(atom)
        if eqn is None or eqn.effects or eqn.is_placed_operator:
            return False
        if eqn in self.eqns:
            return self.eqns[eqn].out_axes[eqn.outputs.index(atom)] == 0
        rule = rules.invert(eqn, eqn.outputs.index(atom), 0, self.size)
        if rule is None:
            return False
        for operand, axis in zip(eqn.inputs, rule.in_axes, strict=True):
            if axis is None:
                self.served |= {operand: None} if isinstance(operand, Var) else {}
            elif axis != 0 or not self.need(operand):
                return False
        self.eqns[eqn] = rule
        return True

    def replace(
        self,
        cut: Eqn,
        along: MemberAxis,
        placement: str,
        n: int,
        demand: MutableMapping[Var, MemberAxis],
    ) -> None:
        """Replaces the reshape `cut` by a map over reshaped inputs."""
        rows, count = self.size // n, len(self.served)
        body = self.body(cut, rows)

        def moved(*values: Any) -> list[jax.Array]:
            groups = [lax.reshape(x, (n, rows, *x.shape[1:])) for x in values[count:]]
            members = [lax.iota(np.dtype("int32"), n), *groups]
            return primitives.map_members(
                body, values[:count], members, placement=placement, n=n, name="rows", mesh=None
            )

        atoms = [*self.served, *self.inputs]
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in atoms]
        closed = jax.make_jaxpr(moved)(*avals)
        if closed.consts:
            return
        env: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, atoms, strict=True))
        *before, mapped = closed.jaxpr.eqns
        for eqn in before:
            (out,) = eqn.outvars
            env[out] = var = Var(f"{cut.outputs[0].name}.{len(env)}", out.aval)
            inputs = [env[v] for v in eqn.invars]
            self.flat.eqns.insert(0, Eqn(eqn.primitive, eqn.params, inputs, [var], cut.line))
            demand[var] = along
        cut.primitive, cut.params = mapped.primitive, mapped.params
        cut.inputs = [env[v] for v in mapped.invars]

    def body(self, cut: Eqn, rows: int) -> Any:
        """The function of one member, of the `served` values, its index, and its rows."""

        def fn(*values: Any) -> list[jax.Array]:
            served = dict(zip(self.served, values, strict=False))
            index, *groups = values[len(served) :]
            # The rows of one member are a shard of the rows of all: rules see their global indices.
            shard = TracedShard(index * np.int32(rows), rows, jnp.ones(rows, bool))
            env: dict[Var, Any] = dict(zip(self.inputs, groups, strict=True))
            for eqn, rule in self.eqns.items():
                axes = zip(eqn.inputs, rule.in_axes, strict=True)
                args = [read(served if axis is None else env, atom) for atom, axis in axes]
                outs = rule.emit(eqn, args, shard)
                env.update(zip(eqn.outputs, outs, strict=True))
            return [lax.reshape(read(env, cut.inputs[0]), cut.params["new_sizes"][1:])]

        return default_promotion()(fn)
