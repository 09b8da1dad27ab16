"""JAX collectives in the body of a map, with the placement as the name of the axis.

`lax.psum(v, "clients")` in a body is a reduction over the members. JAX could batch it when it
computes the map, but only with all members in one process. So a body with collectives becomes
several maps: the equations between two collectives become a map, a collective becomes a reduction
of beamjax, and equations that depend only on reduced values are computed once, outside of the maps.
A `lax.scan` around collectives, such as rounds of training, becomes a scan over placed and server
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from beamjax import _compat
from beamjax.errors import StructureError
from beamjax.ops import primitives
from beamjax.ops.weights import refuse_weights

_REDUCTIONS = {
    "psum": (primitives.reduce_sum_p, lax.psum),
    "pmax": (primitives.reduce_max_p, lax.pmax),
    "pmin": (primitives.reduce_min_p, lax.pmin),
}
"""For each collective, the reduction over the members, and the collective over further axes."""
_CALLS = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2"})


def bind_map(
    jaxpr: jex.ClosedJaxpr, broadcast: Sequence[Any], placed: Sequence[Any], **params: Any
) -> list[jax.Array]:
    """Like `primitives.bind_map`, for a body that may hold collectives over its placement.

    Args:
      jaxpr: as for `primitives.bind_map`.
      broadcast: as for `primitives.bind_map`.
      placed: as for `primitives.bind_map`.
      **params: as for `primitives.bind_map`.

    Returns:
      The placed results.

    Raises:
      StructureError: a collective is none of `lax.psum`, `pmean`, `pmax`, `pmin`, `all_gather`,
        `axis_index` and `axis_size`, is in control flow other than `lax.scan`, or is called in a
        function with weights (`reweight`).
    """
    placement, n = params["placement"], params["n"]
    if not any_of(jaxpr, placement):
        return primitives.bind_map(jaxpr, broadcast, placed, **params)
    why = "lax.pmean divides by the number of members, not by their weights; use the reductions"
    refuse_weights(f"map_fn of {params['name']}: a collective", placement, n, why)
    arguments = [*(_Value(x, False) for x in broadcast), *(_Value(x, True) for x in placed)]
    body = _Body(placement, n, params)
    return [body.spread(value) for value in body.run(jaxpr, arguments)]


def any_of(jaxpr: jex.ClosedJaxpr, placement: str) -> bool:
    """Returns whether a body holds collectives over its placement."""
    return any(_uses(eqn, placement) for eqn in jaxpr.jaxpr.eqns)


@dataclass(frozen=True)
class _Value:
    """An array that all members share, or a placed array with all members along axis 0."""

    array: Any
    is_placed: bool


def _literal(atom: Any) -> _Value:
    value = np.asarray(atom.val, atom.aval.dtype)
    scalar = value.item()
    is_weak = atom.aval.weak_type and jnp.result_type(type(scalar)) == value.dtype
    # From a Python scalar, JAX makes an array of weak type.
    return _Value(jnp.asarray(scalar) if is_weak else value, False)


class _Body:
    """Evaluates a body for all members at once, by maps and reductions."""

    def __init__(self, placement: str, n: Any, params: dict[str, Any]):
        self.placement = placement
        self.n = n
        self.params = params

    def run(self, closed: jex.ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """The results of a jaxpr for these arguments."""
        jaxpr = closed.jaxpr
        constants = [_Value(jnp.asarray(value), False) for value in closed.consts]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
        waiting: list[Any] = []  # Equations that the next map will compute.

        def is_placed(atom: Any) -> bool:
            return not isinstance(atom, jex.Literal) and (atom not in env or env[atom].is_placed)

        def read(atoms: Sequence[Any], later: Sequence[Any]) -> list[_Value]:
            variables = _variables(atoms)
            if any(var not in env for var in variables):
                env.update(self.map(jaxpr, waiting, env, later))
                waiting.clear()
            return [_literal(a) if isinstance(a, jex.Literal) else env[a] for a in atoms]

        for number, eqn in enumerate(jaxpr.eqns):
            if self.is_collective(eqn):
                values = read(eqn.invars, [*jaxpr.eqns[number:], jaxpr])
                env.update(zip(eqn.outvars, self.collective(eqn, values), strict=True))
            elif eqn.effects or any(map(is_placed, eqn.invars)):
                waiting.append(eqn)
            else:
                arrays = [value.array for value in read(eqn.invars, [])]
                with _compat.context_of(eqn):
                    results = _compat.bind(eqn.primitive, arrays, eqn.params)
                env.update(
                    (var, _Value(result, False))
                    for var, result in zip(eqn.outvars, results, strict=True)
                )
        if any(eqn.effects for eqn in waiting):
            env.update(self.map(jaxpr, waiting, env, [jaxpr]))
        return read(jaxpr.outvars, [jaxpr])

    def map(
        self, jaxpr: Any, eqns: Sequence[Any], env: dict[Any, _Value], later: Sequence[Any]
    ) -> dict[Any, _Value]:
        """Maps some equations; the map returns the values that `later` reads."""
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars) if v not in made)
        outs = dict.fromkeys(v for each in later for v in _read_by(each) if v in made)
        for var in outs:
            if not isinstance(var.aval, jax.core.ShapedArray):
                self.refuse("a mutable reference that is used before and after a collective")
        shared = [var for var in read if not env[var].is_placed]
        placed = [var for var in read if env[var].is_placed]
        body = jaxpr.replace(
            constvars=[],
            invars=[*shared, *placed],
            outvars=[*outs],
            eqns=[*eqns],
            effects=set().union(*(eqn.effects for eqn in eqns)),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        operands = [[env[var].array for var in group] for group in (shared, placed)]
        results = primitives.bind_map(jex.ClosedJaxpr(body, []), *operands, **self.params)
        return {var: _Value(x, True) for var, x in zip(outs, results, strict=True)}

    def spread(self, value: _Value) -> Any:
        """A value as an array of all members."""
        if value.is_placed:
            return value.array
        mesh = self.params["mesh"]
        return primitives.broadcast_p.bind(
            jnp.asarray(value.array), placement=self.placement, n=self.n, mesh=mesh
        )

    def is_collective(self, eqn: Any) -> bool:
        return _uses(eqn, self.placement)

    def collective(self, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        """The results of an equation that is a collective, or holds one."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.run(_closed(params["jaxpr"]), values)
        if name == "scan":
            return self.scan(eqn, values)
        if name == "axis_index":
            return [_Value(lax.iota(np.dtype("int32"), self.n), True)]
        if params.get("axis_index_groups") is not None:
            self.refuse(f"{name} with axis_index_groups")
        if name == "all_gather":
            return [_Value(self.gather(eqn, values), False)]
        if name not in _REDUCTIONS:
            self.refuse("a nested map_fn" if name == primitives.map_p.name else name)
        return [self.reduce(eqn, *pair) for pair in zip(values, eqn.outvars, strict=True)]

    def reduce(self, eqn: Any, value: _Value, out: Any) -> _Value:
        reduction, over_others = _REDUCTIONS[eqn.primitive.name]
        result = reduction.bind(self.spread(value), placement=self.placement)
        if result.dtype != out.aval.dtype:  # Collectives keep small integers.
            result = lax.convert_element_type(result, out.aval.dtype)
        others = tuple(axis for axis in eqn.params["axes"] if axis != self.placement)
        return _Value(over_others(result, others) if others else result, False)

    def gather(self, eqn: Any, values: Sequence[_Value]) -> Any:
        params = eqn.params
        if params["axis_name"] not in (self.placement, (self.placement,)):
            self.refuse("all_gather over several axes")
        members, axis = self.spread(*values), params["all_gather_dimension"]
        found = jnp.moveaxis(members, 0, axis)
        return found.reshape(eqn.outvars[0].aval.shape) if params["tiled"] else found

    # ---------------------------------------------------------------- scans

    def scan(self, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        """A scan around collectives. A carried value is placed if it may differ by member."""
        constants, carried = _compat.scan_counts(eqn)
        closed, params = eqn.params["jaxpr"], eqn.params
        fixed, start = values[:constants], values[constants : constants + carried]
        stacks = values[constants + carried :]
        placed = self.placed_carries(eqn, [value.is_placed for value in values])
        placed_outs = list[bool]()

        def round_(carry: Any, entries: Any) -> Any:
            carries = [_Value(x, mark) for x, mark in zip(carry, placed, strict=True)]
            xs = [_Value(x, stack.is_placed) for x, stack in zip(entries, stacks, strict=True)]
            found = self.run(closed, [*fixed, *carries, *xs])
            placed_outs[:] = [value.is_placed for value in found[carried:]]
            ends = zip(found[:carried], placed, strict=True)
            after = [self.spread(value) if mark else value.array for value, mark in ends]
            return after, [value.array for value in found[carried:]]

        begin = [self.spread(v) if m else v.array for v, m in zip(start, placed, strict=True)]
        xs = [jnp.moveaxis(v.array, 1, 0) if v.is_placed else v.array for v in stacks]
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        last, ys = lax.scan(round_, begin, xs, **options)
        outs = [_Value(x, mark) for x, mark in zip(last, placed, strict=True)]
        for y, mark in zip(ys, placed_outs, strict=True):
            outs.append(_Value(jnp.moveaxis(y, 0, 1) if mark else y, mark))
        return outs

    def placed_carries(self, eqn: Any, marks: Sequence[bool]) -> list[bool]:
        """For each carried value of a scan, whether it may differ by member: a fixed point."""
        constants, carried = _compat.scan_counts(eqn)
        last = constants + carried
        found = list(marks[constants:last])
        while True:
            inside = [*marks[:constants], *found, *marks[last:]]
            outs = self.placed_results(eqn.params["jaxpr"], inside)[:carried]
            grown = [a or b for a, b in zip(found, outs, strict=True)]
            if grown == found:
                return found
            found = grown

    def placed_results(self, closed: Any, marks: Sequence[bool]) -> list[bool]:
        """For each result of a jaxpr, whether it may differ by member, for marked arguments."""
        jaxpr = closed.jaxpr
        placed = {var for var, mark in zip(jaxpr.invars, marks, strict=True) if mark}
        is_placed = lambda atom: not isinstance(atom, jex.Literal) and atom in placed
        for eqn in jaxpr.eqns:
            inside, name = list(map(is_placed, eqn.invars)), eqn.primitive.name
            if not self.is_collective(eqn):
                outs = [bool(eqn.effects) or any(inside)] * len(eqn.outvars)
            elif name in _CALLS:
                outs = self.placed_results(_closed(eqn.params["jaxpr"]), inside)
            elif name == "scan":
                constants, carried = _compat.scan_counts(eqn)
                carries = self.placed_carries(eqn, inside)
                inside[constants : constants + carried] = carries
                outs = self.placed_results(eqn.params["jaxpr"], inside)
            else:
                outs = [name == "axis_index"] * len(eqn.outvars)
            placed.update(var for var, mark in zip(eqn.outvars, outs, strict=True) if mark)
        return list(map(is_placed, jaxpr.outvars))

    def refuse(self, found: str) -> NoReturn:
        raise StructureError(
            f"map_fn: the body {self.params['name']} uses the members of {self.placement!r} as an "
            f"axis: found {found}, expected lax.psum, pmean, pmax, pmin, all_gather or axis_index, "
            "in straight code or in a lax.scan. Return the values from the body, and exchange "
            "them outside of it."
        )


def _uses(eqn: Any, axis: str) -> bool:
    """Whether an equation names an axis. In a shard_map, names are those of its mesh instead."""
    named = eqn.params.get("axis_name", eqn.params.get("axes"))
    if named == axis or (isinstance(named, tuple) and axis in named):
        return True
    inner = () if eqn.primitive.name == "shard_map" else jex.jaxprs_in_params(eqn.params)
    return any(_uses(each, axis) for sub in inner for each in sub.eqns)


def _closed(jaxpr: Any) -> jex.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, [])


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def _read_by(each: Any) -> list[Any]:
    """Returns the variables that an equation, or the results of a jaxpr, read."""
    return _variables(each.outvars if isinstance(each, jex.Jaxpr) else each.invars)
