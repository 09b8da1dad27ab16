"""How JAX's transformations treat the primitives of a program.

The rules are closed: their results consist of `beamjax.ops.primitives` with bodies for one member,
so `jax.grad(program)` can be planned in the same way as the program itself. Each rule for `bj_map`
applies a public JAX transformation to the body, and traces the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from beamjax import _compat
from beamjax._compat import ad, batching
from beamjax.numerics.reducers import REDUCTIONS, Derivative, Reducer, ReductionKind, wide_dtype
from beamjax.ops import sharding
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import (
    REDUCE_PRIMITIVES,
    bind_map,
    broadcast_p,
    is_differentiable,
    map_members,
    map_p,
    reduce_sum_p,
    size_p,
    trace_body,
)

# --- jaxprs


def depends(jaxpr: _compat.ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output, whether it may depend on one of the marked inputs."""
    marked = {v for v, mark in zip(jaxpr.jaxpr.invars, inputs, strict=True) if mark}
    is_marked = lambda v: not isinstance(v, _compat.Literal) and v in marked
    for eqn in jaxpr.jaxpr.eqns:
        # An effect may read a reference, or the index of an axis that only the caller knows.
        if eqn.effects or any(map(is_marked, eqn.invars)):
            marked.update(eqn.outvars)
    return [is_marked(v) for v in jaxpr.jaxpr.outvars]


def _take(values: Sequence[Any], marks: Sequence[bool]) -> list[Any]:
    return [v for v, mark in zip(values, marks, strict=True) if mark]


def _put(values: Sequence[Any], marks: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """Merges two lists: `values` at the marked places and `others` at the unmarked ones."""
    marked, unmarked = iter(values), iter(others)
    return [next(marked) if mark else next(unmarked) for mark in marks]


def _derived(params: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The parameters of a map derived from the map with `params`."""
    kept = {key: params[key] for key in ("placement", "n", "mesh")}
    return {**kept, "name": prefix + params["name"]}


def _map_linear(
    jaxpr: _compat.ClosedJaxpr,
    consts: Sequence[Any],
    broadcast: Sequence[Any],
    placed: Sequence[Any],
    is_linear: Sequence[bool],
    params: dict[str, Any],
) -> list[Any]:
    """Maps a traced body for the outputs that depend on its linear operands."""
    nonzero = depends(jaxpr, [*[False] * len(consts), *is_linear])
    if not any(nonzero):
        return [None] * len(nonzero)
    jaxpr, used = _compat.dce(jaxpr, nonzero)
    broadcast = [*consts, *broadcast]
    kept = _take(broadcast, used[: len(broadcast)]), _take(placed, used[len(broadcast) :])
    return _put(bind_map(jaxpr, *kept, **params), nonzero, [None] * len(nonzero))


# --- map: forward mode


def _map_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Binds two maps: the given one, and one that computes the tangents."""
    # y = bj_map[f] x            becomes   y = bj_map[f] x
    #                                      ty = bj_map[jvp_f] x tx
    #
    # Because they are separate, partial evaluation keeps the first and records the second, which
    # recomputes from the primal operands. Residuals of the first would each be a placed value that
    # has to be stored.
    jaxpr, num_broadcast = params["jaxpr"], params["num_broadcast"]
    outs = map_p.bind(*primals, **params)
    moving = [
        type(t) is not ad.Zero and is_differentiable(aval)
        for t, aval in zip(tangents, jaxpr.in_avals, strict=True)
    ]
    moving_out = [
        mark and is_differentiable(aval)
        for mark, aval in zip(depends(jaxpr, moving), jaxpr.out_avals, strict=True)
    ]
    results = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if not any(moving_out):
        return outs, results

    tangents = _take(tangents, moving)
    split = sum(moving[:num_broadcast])
    broadcast = [*primals[:num_broadcast], *tangents[:split]]
    placed = [*primals[num_broadcast:], *tangents[split:]]
    is_tangent = [False] * num_broadcast + [True] * split
    is_tangent += [False] * (len(primals) - num_broadcast) + [True] * (len(tangents) - split)
    traced = _jvp_jaxpr(jaxpr, moving, moving_out, is_tangent)
    moved = _map_linear(*traced, broadcast, placed, is_tangent, _derived(params, "jvp_"))
    for i, out in zip(_take(range(len(outs)), moving_out), moved, strict=True):
        results[i] = results[i] if out is None else out
    return outs, results


def _jvp_jaxpr(
    jaxpr: _compat.ClosedJaxpr, moving: list[bool], moving_out: list[bool], is_tangent: list[bool]
) -> tuple[_compat.ClosedJaxpr, list[Any]]:
    """Traces the tangents of the outputs `moving_out`, for inputs `moving`."""
    # Its inputs are the primals, then the tangents of those that move; broadcast operands are
    # before placed ones, so `is_tangent` says which are which.
    body = _compat.jaxpr_as_fun(jaxpr)
    is_primal = [not mark for mark in is_tangent]

    def tangent(*args: Any) -> list[Any]:
        primals = _take(args, is_primal)
        still = _take(primals, [not mark for mark in moving])

        def outputs(*inputs: Any) -> list[Any]:
            return _take(body(*_put(inputs, moving, still)), moving_out)

        return jax.jvp(outputs, _take(primals, moving), _take(args, is_tangent))[1]

    tangent_avals = [aval.to_tangent_aval() for aval in _take(jaxpr.in_avals, moving)]
    closed, consts = trace_body(tangent, _put(tangent_avals, is_tangent, jaxpr.in_avals))
    # The effects, such as printing, have already happened in the map for the primal results.
    return _compat.without_side_effects(closed), consts


ad.primitive_jvps[map_p] = _map_jvp


# --- map: transpose


def _map_transpose(cts: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    jaxpr, num_broadcast = params["jaxpr"], params["num_broadcast"]
    # y = bj_map[f] b x, linear in b and x, becomes, for a cotangent cy,
    # cbs, cx = bj_map[transpose_f] cy
    # cb = bj_reduce_sum cbs
    # as all members share the broadcast operand b.
    linear = [ad.is_undefined_primal(arg) for arg in args]
    results: list[Any] = [
        ad.Zero(arg.aval.to_ct_aval()) if lin else None
        for arg, lin in zip(args, linear, strict=True)
    ]
    used = [type(ct) is not ad.Zero for ct in cts]
    cts = _take(cts, used)
    if not cts:
        return results

    known = [not lin for lin in linear]
    broadcast = _take(args[:num_broadcast], known[:num_broadcast])
    placed = [*_take(args[num_broadcast:], known[num_broadcast:]), *cts]
    is_ct = [False] * sum(known) + [True] * len(cts)
    traced = _transposed_jaxpr(jaxpr, linear, used)
    outs = _map_linear(*traced, broadcast, placed, is_ct, _derived(params, "transpose_"))
    for i, out in zip(_take(range(len(args)), linear), outs, strict=True):
        if out is None:
            continue
        if i < num_broadcast:
            out = reduce_sum_p.bind(out, placement=params["placement"])
        results[i] = sharding.lay_out_like(out, args[i].aval)
    return results


def _transposed_jaxpr(
    jaxpr: _compat.ClosedJaxpr, linear: list[bool], used: list[bool]
) -> tuple[_compat.ClosedJaxpr, list[Any]]:
    """Traces the cotangents of the inputs `linear`."""
    # Its inputs are the other inputs and the cotangents of the outputs `used`.
    body = _compat.jaxpr_as_fun(jaxpr)
    linear_avals = _take(jaxpr.in_avals, linear)
    known_avals = _take(jaxpr.in_avals, [not lin for lin in linear])
    ct_avals = [aval.to_ct_aval() for aval in _take(jaxpr.out_avals, used)]

    def transposed(*args: Any) -> Sequence[Any]:
        known, cts = args[: len(known_avals)], args[len(known_avals) :]
        outputs = lambda *inputs: _take(body(*_put(inputs, linear, known)), used)
        return jax.linear_transpose(outputs, *linear_avals)(list(cts))

    return trace_body(transposed, [*known_avals, *ct_avals])


ad.primitive_transposes[map_p] = _map_transpose


# --- map: batching and dead code


def _map_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int | None]]:
    """Batches the body; results that don't depend on a batched operand are not batched."""
    jaxpr, num_broadcast = params["jaxpr"], params["num_broadcast"]
    batched = depends(jaxpr, [dim is not None for dim in dims])
    if all(dim is None for dim in dims) and not any(batched):
        return map_p.bind(*args, **params), [None] * len(batched)

    # The body sees one member, so a batch axis of placed operands moves behind that of the members.
    args, dims = list(args), list(dims)
    for i in range(num_broadcast, len(args)):
        dim = dims[i]
        if dim is not None:
            args[i] = args[i] if dim else jnp.moveaxis(args[i], 0, 1)
            dims[i] = max(dim, 1) - 1
    body = jax.vmap(
        _compat.jaxpr_as_fun(jaxpr),
        in_axes=dims,
        out_axes=[0 if mark else None for mark in batched],
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )
    broadcast, placed = args[:num_broadcast], args[num_broadcast:]
    outs = map_members(lambda *a: body(*a), broadcast, placed, **_derived(params, ""))
    return outs, [1 if mark else None for mark in batched]


batching.fancy_primitive_batchers[map_p] = _map_batch


def _map_dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    params = eqn.params
    if not any(used) and not params["jaxpr"].effects:
        return [False] * len(eqn.invars), None
    jaxpr, used_inputs = _compat.dce(params["jaxpr"], used)
    num_broadcast = sum(used_inputs[: params["num_broadcast"]])
    new_eqn = eqn.replace(
        invars=_take(eqn.invars, used_inputs),
        outvars=_take(eqn.outvars, used),
        params={**params, "jaxpr": jaxpr, "num_broadcast": num_broadcast},
        effects=_compat.outer_effects(jaxpr.effects),
    )
    return used_inputs, new_eqn


_compat.register_dce(map_p, _map_dce)


# --- broadcast


def _broadcast_transpose(ct: jax.Array, x: Any, *, placement: str, **_: Any) -> list[Any]:
    return [sharding.lay_out_like(reduce_sum_p.bind(ct, placement=placement), x.aval)]


ad.deflinear2(broadcast_p, _broadcast_transpose)


def _broadcast_batch(args: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    return broadcast_p.bind(*args, **params), dims[0] + 1


batching.primitive_batchers[broadcast_p] = _broadcast_batch


# --- reductions


def _define_batch(primitive: _compat.Primitive) -> None:
    def batch(args: Sequence[Any], dims: Sequence[int], *, placement: str) -> tuple[Any, int]:
        (x,), (dim,) = args, dims
        x = x if dim else jnp.moveaxis(x, 0, 1)
        return primitive.bind(x, placement=placement), max(dim, 1) - 1

    batching.primitive_batchers[primitive] = batch


def _define_linear(primitive: _compat.Primitive, reduction: ReductionKind) -> None:
    def transpose(ct: Any, x: Any, *, placement: str) -> list[Any]:
        n, dtype = x.aval.shape[0], x.aval.dtype
        ct = jnp.asarray(ct, dtype)  # A user's cotangent may be a Python scalar.
        if isinstance(reduction, Reducer) and reduction.divides:
            # In float16, more than 65,504 members would be inf. jnp.mean divides in float32, too.
            wide = wide_dtype(dtype)
            size = jax.lax.convert_element_type(size_p.bind(placement=placement, n=n), wide)
            ct = (ct.astype(wide) / size).astype(dtype)
        mesh = sharding.active_mesh(placement)
        ct = broadcast_p.bind(ct, placement=placement, n=n, mesh=mesh)
        return [sharding.lay_out_like(ct, x.aval)]

    ad.deflinear2(primitive, transpose)


def _define_jvp(primitive: _compat.Primitive, reduction: ReductionKind) -> None:
    derivative = reduction.derivative

    # y = bj_reduce_max x        becomes   y = bj_reduce_max x
    #                                      p, = bj_map[parts] y x        (p = (x == y))
    #                                      s = bj_reduce_sum p           (how many tie)
    #                                      t, = bj_map[moved] y s x tx   (t = p * tx)
    #                                      ty = (bj_reduce_sum t) / s
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, placement: str) -> tuple[Any, Any]:
        (x,), (t,) = primals, tangents
        out = primitive.bind(x, placement=placement)
        if not isinstance(derivative, Derivative) or type(t) is ad.Zero:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        wide = wide_dtype(x.dtype)
        ops: list[str] = []

        def parts(out: jax.Array, x: jax.Array) -> list[jax.Array]:
            ops[:], values = zip(*derivative.parts(x, out), strict=True)
            return list(values)

        def moved(*args: jax.Array) -> list[jax.Array]:
            *totals, x, t = args
            return [derivative.factor(x, *totals).astype(wide) * t.astype(wide)]

        rest = {"placement": placement, "n": x.shape[0], "mesh": sharding.active_mesh(placement)}
        of_members = map_members(parts, [out], [x], name=f"parts_of_{reduction.name}", **rest)
        totals = [
            REDUCE_PRIMITIVES[op].bind(part, placement=placement)
            for op, part in zip(ops, of_members, strict=True)
        ]
        (terms,) = map_members(moved, [out, *totals], [x, t], name=f"jvp_{reduction.name}", **rest)
        total = reduce_sum_p.bind(terms, placement=placement)
        return out, (total / totals[0] if derivative.divides else total).astype(out.dtype)

    ad.primitive_jvps[primitive] = jvp


for _op, _primitive in REDUCE_PRIMITIVES.items():
    _define_batch(_primitive)
    if REDUCTIONS[_op].derivative == "linear":
        _define_linear(_primitive, REDUCTIONS[_op])
    else:
        _define_jvp(_primitive, REDUCTIONS[_op])


# --- checkify: the same errors as for `jax.vmap` of the body


def _checked_map(
    errors: Any, *operands: Any, jaxpr: _compat.ClosedJaxpr, num_broadcast: int, **params: Any
) -> tuple[checkify.Error, list[Any]]:
    """Maps the body with its checks, and reports the first check that failed for any member."""
    del params["spmd_axis_name"]
    body = checkify.checkify(_compat.jaxpr_as_fun(jaxpr), errors=errors)
    tree: Any = None

    def checked(*args: Any) -> Sequence[Any]:
        nonlocal tree
        leaves, tree = jax.tree.flatten(body(*args))
        return list(map(jnp.asarray, leaves))

    broadcast, placed = operands[:num_broadcast], operands[num_broadcast:]
    leaves = map_members(checked, broadcast, placed, **params)
    error, results = jax.tree.unflatten(tree, leaves)
    return _compat.map_errors(_of_members, error), results


def _of_members(
    failed: jax.Array, codes: jax.Array, payload: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Merges the errors of all members into one, as if all members ran each check together."""
    # It is the earliest check that failed for any member, with the message of the last such member.
    none = np.asarray(np.iinfo(codes.dtype).max, codes.dtype)
    code = jnp.min(jnp.where(failed, codes, none), axis=0)
    members = jnp.arange(failed.shape[0], dtype=np.int32)
    last = jnp.max(jnp.where(failed & (codes == code), members, 0), axis=0)
    return jnp.any(failed, axis=0), code, [x[last] for x in payload]


def _checked_as_arrays(
    function: Callable[..., Any], errors: Any, *operands: Any, **params: Any
) -> tuple[checkify.Error, Any]:
    """Checks a reduction as an ordinary function of arrays."""
    return checkify.checkify(functools.partial(function, **params), errors=errors)(*operands)


_compat.register_error_check(map_p, _checked_map)
for _primitive in (*REDUCE_PRIMITIVES.values(), reduce_p):
    _rule = functools.partial(_checked_as_arrays, _primitive.impl)
    _compat.register_error_check(_primitive, _rule)
