"""The primitives of a program: what they compute, and on which types.

`bj_map` applies a body, written for one member, to all members of a placement. `bj_broadcast` turns
a server value into a placed value, `bj_size` gives the number of members at run time, and the
reductions turn a placed value into a server value. `transformations` has their rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax.errors import PlacementError, StructureError
from beamjax.numerics.reducers import REDUCTIONS, Fold
from beamjax.ops import placements, sharding
from beamjax.ops.tracer_errors import add_advice

# There is one primitive of each kind; placements are parameters. The operands of `bj_map` are
# `[*broadcast, *placed]`: server values, the same for each member, then placed values, with the
# member axis in front. Its parameters are
#
# - `jaxpr`: the body, a closed jaxpr without consts, from `[*broadcast, *member]` to member
# results;
# - `num_broadcast`: the number of broadcast operands;
# - `placement`, `n`: the name and the number of members;
# - `name`: the name of the user's function, with a prefix where the body is derived from it;
# - `mesh`: the mesh along which members are laid out, or None;
# - `spmd_axis_name`: the mesh axis of the members where its type is Auto, otherwise None.

OPERATORS: set[str] = set()
"""The names of all primitives of placed operators."""


def operator_primitive(name: str) -> _compat.Primitive:
    """A new primitive of a placed operator; its name begins with `bj_`."""
    primitive = _compat.Primitive(f"bj_{name}")
    OPERATORS.add(primitive.name)
    return primitive


map_p = operator_primitive("map")
map_p.multiple_results = True
broadcast_p = operator_primitive("broadcast")
size_p = operator_primitive("size")

REDUCE_PRIMITIVES = {
    op: operator_primitive(f"reduce_{op}")
    for op, reduction in REDUCTIONS.items()
    if not isinstance(reduction, Fold)  # `bj_reduce` does those.
}
reduce_sum_p = REDUCE_PRIMITIVES["sum"]


def is_differentiable(aval: Any) -> bool:
    """Whether values of this type have tangents."""
    return jnp.issubdtype(aval.dtype, np.inexact)


# --- bodies


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """JAX's default promotion of types and ranks, as a context."""
    # beamjax's code relies on it, and a user may have set stricter ones.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def trace_body(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    what: str = "map_fn: the mapped function",
) -> tuple[_compat.ClosedJaxpr, list[jax.Array]]:
    """The jaxpr of `fn`, and the values that it closes over, which are its leading inputs."""
    # JAX caches the trace of a function object, so `fn` must be a new one in each call.
    try:
        with placements.body():
            closed, consts = _compat.hoist_consts(jax.make_jaxpr(fn)(*avals))
    except Exception as error:
        add_advice(error, f"{what} is a body that is traced once for all members")
        raise
    for const in consts:
        if not isinstance(jax.typeof(const), jax.core.ShapedArray):
            raise StructureError(
                f"{what} closes over a value of type {jax.typeof(const)}, "
                f"but members can share arrays only. Pass the contents of the reference instead."
            )
    return closed, [c if isinstance(c, jax.Array) else jnp.asarray(c) for c in consts]


def bind_map(
    jaxpr: _compat.ClosedJaxpr,
    broadcast: Sequence[Any],
    placed: Sequence[Any],
    *,
    placement: str,
    n: Any,
    name: str,
    mesh: sharding.AnyMesh | None,
) -> list[jax.Array]:
    """Maps a body without consts over the members of `placed`; see the head of this file."""
    auto = mesh is not None and not sharding.is_explicit(mesh, placement)
    return map_p.bind(
        *broadcast,
        *placed,
        jaxpr=jaxpr,
        num_broadcast=len(broadcast),
        placement=placement,
        n=n,
        name=name,
        mesh=mesh,
        spmd_axis_name=placement if auto else None,
    )


def map_members(
    fn: Callable[..., Any],
    broadcast: Sequence[Any],
    placed: Sequence[Any],
    *,
    placement: str,
    n: Any,
    name: str,
    mesh: sharding.AnyMesh | None,
) -> list[jax.Array]:
    """Traces `fn`, from `[*broadcast, *member]` to a flat list, and maps it over `placed`."""
    avals = [jax.typeof(x) for x in broadcast]
    avals += [sharding.member_aval(jax.typeof(x), placement) for x in placed]
    jaxpr, consts = trace_body(fn, avals)
    for const in consts:
        sharding.check_shared(const, placement, mesh)
    # What `fn` closes over becomes further broadcast operands, before the given ones.
    broadcast = [*consts, *broadcast]
    return bind_map(jaxpr, broadcast, placed, placement=placement, n=n, name=name, mesh=mesh)


# --- map


@map_p.def_effectful_abstract_eval
def _map_abstract_eval(
    *avals: Any,
    jaxpr: _compat.ClosedJaxpr,
    num_broadcast: int,
    placement: str,
    n: Any,
    name: str,
    mesh: sharding.AnyMesh | None,
    spmd_axis_name: str | None,
) -> tuple[list[Any], Any]:
    for aval, member in zip(avals[num_broadcast:], jaxpr.in_avals[num_broadcast:], strict=True):
        if not (aval.ndim and aval.shape[0] == n and aval.shape[1:] == member.shape):
            raise PlacementError(
                f"bj_map of {name}: found an operand of shape {aval.shape}, expected "
                f"{(n, *member.shape)} for the {n} members of {placement!r}."
            )
    outs = [sharding.placed_aval(aval, placement, n, mesh) for aval in jaxpr.out_avals]
    return outs, _compat.outer_effects(jaxpr.effects)


def _map_over_axis(
    *args: jax.Array,
    jaxpr: _compat.ClosedJaxpr,
    num_broadcast: int,
    placement: str,
    n: Any,
    name: str,
    mesh: sharding.AnyMesh | None,
    spmd_axis_name: str | None,
) -> list[jax.Array]:
    del name
    # JAX batches a shard_map over an Explicit mesh axis only if that axis is not in use.
    whole = sharding.is_explicit(mesh, placement) and _contains_shard_map(jaxpr.jaxpr)
    broadcast = args[:num_broadcast]
    placed = [sharding.lay_out(x, placement, mesh, whole) for x in args[num_broadcast:]]
    body = jax.vmap(
        _compat.jaxpr_as_fun(jaxpr),
        in_axes=[None] * len(broadcast) + [0] * len(placed),
        axis_size=n,
        spmd_axis_name=spmd_axis_name,
    )
    return [sharding.lay_out(out, placement, mesh) for out in body(*broadcast, *placed)]


def _contains_shard_map(jaxpr: _compat.Jaxpr) -> bool:
    return any(eqn.primitive.name == "shard_map" for eqn in jaxpr.eqns) or any(
        map(_contains_shard_map, _compat.subjaxprs(jaxpr))
    )


# Evaluated operation by operation, like `jax.vmap`. Compiling the body would cost more than it
# saves, since each call of an operator traces a new jaxpr, which is in no cache.
map_p.def_impl(_map_over_axis)
_compat.register_lowering(map_p, _map_over_axis)


def _map_to_lojax(
    *args: Any, jaxpr: _compat.ClosedJaxpr, num_broadcast: int, **params: Any
) -> list[jax.Array]:
    """JAX asks for this before it compiles a map whose body holds primitives of hijax."""
    lowered, consts = _compat.lower_high(jaxpr)
    num_broadcast += len(consts)
    return map_p.bind(*consts, *args, jaxpr=lowered, num_broadcast=num_broadcast, **params)


_compat.register_to_lojax(map_p, _map_to_lojax)


# --- broadcast and size


@broadcast_p.def_abstract_eval
def _broadcast_abstract_eval(
    x: Any, *, placement: str, n: Any, mesh: sharding.AnyMesh | None
) -> Any:
    return sharding.placed_aval(x, placement, n, mesh)


def _broadcast_array(
    x: jax.Array, *, placement: str, n: Any, mesh: sharding.AnyMesh | None
) -> jax.Array:
    return sharding.lay_out(jnp.broadcast_to(x, (n, *x.shape)), placement, mesh)


broadcast_p.def_impl(_broadcast_array)
_compat.register_lowering(broadcast_p, _broadcast_array)


@size_p.def_abstract_eval
def _size_abstract_eval(*, placement: str, n: Any) -> Any:
    return jax.core.ShapedArray((), np.dtype("int32"))


def _size_array(*, placement: str, n: Any) -> jax.Array:
    return jax.lax.convert_element_type(n, np.dtype("int32"))


size_p.def_impl(_size_array)
_compat.register_lowering(size_p, _size_array)


# --- reductions


def _define_reduction(op: str) -> None:
    primitive, function = REDUCE_PRIMITIVES[op], REDUCTIONS[op].function

    def abstract_eval(x: Any, *, placement: str) -> Any:
        result = REDUCTIONS[op].result_type(x.dtype, x.weak_type)
        return sharding.reduced_aval(x, result.dtype, result.weak_type)

    def reduce_array(x: jax.Array, *, placement: str) -> jax.Array:
        return function(x, axis=0)

    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(reduce_array)
    _compat.register_lowering(primitive, reduce_array)


for _op in REDUCE_PRIMITIVES:
    _define_reduction(_op)
