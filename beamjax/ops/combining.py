"""`reduce`: reduces the members of a placement by a function of the user.

The function is associative but not necessarily commutative, and with floats it is associative only
up to rounding. So the calls form a fixed binary tree over the members: first pairs of neighbours,
then pairs of these results, and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util

from beamjax import _compat
from beamjax._compat import ad, batching
from beamjax.errors import PlacementError, StructureError
from beamjax.numerics.reducers import Fold, wide_dtype
from beamjax.ops import sharding
from beamjax.ops.leaves import as_array, as_placed, name_of
from beamjax.ops.placements import resolve
from beamjax.ops.primitives import (
    default_promotion,
    is_differentiable,
    map_members,
    operator_primitive,
    reduce_sum_p,
    trace_body,
)
from beamjax.ops.weights import refuse_weights

# The operands of `bj_reduce` are `[*served, *leaves]`: server values that the function closes over,
# then the leaves of a placed tree. It has a result for each leaf. Its parameters are
#
# - `jaxpr`: the function, a closed jaxpr without consts, from `[*served, *left, *right]` to a
# value;
# - `num_served`: the number of its server values;
# - `placement`, `n`: the name and the number of members;
# - `name`: the name of the user's function, with a prefix where it is derived from it.
#
# A range of 2^l members that begins at a multiple of 2^l is a node of the tree for any number of
# members, so shards of such ranges lead to the same calls.

Leaves = Sequence[Any]
Combine = Callable[[Leaves, Leaves], Leaves]

reduce_p = operator_primitive("reduce")
reduce_p.multiple_results = True


def bind_reduce(
    jaxpr: _compat.ClosedJaxpr,
    served: Sequence[Any],
    leaves: Leaves,
    *,
    placement: str,
    n: Any,
    name: str,
) -> list[jax.Array]:
    """Reduces leaves (n, ...) by a function without consts; see the head of this file."""
    return reduce_p.bind(
        *served,
        *leaves,
        jaxpr=jaxpr,
        num_served=len(served),
        placement=placement,
        n=n,
        name=name,
    )


def fold_members(combine: Combine, leaves: Leaves, count: Any = None) -> list[jax.Array]:
    """Combines the first `count` rows, in the order that the head of this file describes."""
    # One level of the tree at a time. A row without a partner stays as it is. `count` may be
    # traced: from a pair that it divides, only the left row counts, and of rows behind it none do.
    both = jax.vmap(lambda left, right: list(combine(left, right)))
    leaves, size = list(leaves), leaves[0].shape[0]
    while size > 1:
        pairs, odd = divmod(size, 2)
        left, right = ([x[i : 2 * pairs : 2] for x in leaves] for i in (0, 1))
        joined = both(left, right)
        if count is not None:
            is_whole = 2 * lax.iota(np.dtype("int32"), pairs) + 1 < count
            joined = [_choose(is_whole, x, y) for x, y in zip(joined, left, strict=True)]
            count = (count + 1) // 2
        if odd:
            tails = [x[2 * pairs :] for x in leaves]
            joined = [jnp.concatenate(pair) for pair in zip(joined, tails, strict=True)]
        leaves, size = joined, pairs + odd
    return [x[0] for x in leaves]


def _choose(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def combine_of(jaxpr: _compat.ClosedJaxpr, served: Sequence[Any]) -> Combine:
    """The function that a jaxpr holds, with its server values."""
    return lambda left, right: _compat.jaxpr_as_fun(jaxpr)(*served, *left, *right)


# --- what users call


def reduce(
    combine: Callable[[Any, Any], Any],
    x: Any,
    identity: Any = None,
    *,
    placement: str | None = None,
) -> Any:
    """Reduces the members of a placement by an associative function, in their order.

    The function need not be commutative: it combines the values of two neighbouring ranges of
    members, the left one first. The calls form a fixed binary tree over the members. So shards
    merge in parallel, and a function that is associative only up to rounding gives the same bits on
    every runner.

    The derivative in forward mode is a reduction of the same kind. In reverse mode, the derivative
    by a member needs the reduction of the members before it and of those after it. So `run` gathers
    to the server the leaves on which the derivative depends: none if the function is linear.

    Args:
      combine: takes two trees like one member of `x` and returns such a tree. It may close over
        server values and over constants.
      x: a tree of placed arrays of shapes `(n, ...)`.
      identity: a tree like one member with which `combine` changes nothing, such as 0 for a sum. It
        is the result if there are no members. Otherwise it is combined once, from the left, with
        the reduction of all members, so any initial value can be given in its place. None means
        that there is no identity.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the same dtypes.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, a leaf does not have n members, or
        there are no members and no identity.
      StructureError: a leaf is neither an array nor a scalar; the result of `combine`, or
        `identity`, differs from a member of `x` in structure, or in the shape or dtype of a leaf;
        `combine` has side effects or closes over a mutable reference; or it is called in a function
        with weights (`reweight`).
    """
    placement, n = resolve("reduce", placement)
    name = name_of(combine)
    refuse_weights("reduce", placement, n, f"{name} can't be applied a fractional number of times")
    mesh = sharding.mesh_for("reduce", placement, n, None)
    paths, tree = tree_util.tree_flatten_with_path(x)
    leaves = [as_placed("reduce", "x", path, leaf, placement, n) for path, leaf in paths]
    members = [
        sharding.member_aval(jax.typeof(leaf), placement).update(weak_type=False) for leaf in leaves
    ]

    # Messages of JAX then name the user's function, its file and its parameters.
    @functools.wraps(combine, assigned=(), updated=())
    def joined(left: Any, right: Any) -> list[jax.Array]:
        return _like_member(f"what {name} returns", combine(left, right), x, members)

    member = tree_util.tree_unflatten(tree, members)
    start = []
    if identity is not None:
        start = _like_member("identity", identity, x, members, cast=True)
    jaxpr, served = trace_body(joined, [member, member], f"reduce: the function {name}")
    if jaxpr.effects:
        effects = ", ".join(sorted(map(str, jaxpr.effects)))
        raise StructureError(
            f"reduce: the function {name} has side effects ({effects}), expected none: the order "
            "in which it is called differs from runner to runner."
        )
    for value in served:
        sharding.check_shared(value, placement, mesh)
    if not leaves:
        return tree_util.tree_unflatten(tree, [])
    if isinstance(n, int) and n == 0:
        if not start:
            raise PlacementError(
                f"reduce: found no members in placement {placement!r}, expected at least one, or "
                "the argument identity as the result without any."
            )
        return tree_util.tree_unflatten(tree, start)
    outs = bind_reduce(jaxpr, served, leaves, placement=placement, n=n, name=name)
    result = tree_util.tree_unflatten(tree, outs)
    if not start:
        return result
    return tree_util.tree_unflatten(tree, joined(tree_util.tree_unflatten(tree, start), result))


def _like_member(
    what: str, value: Any, x: Any, members: list[Any], cast: bool = False
) -> list[jax.Array]:
    """Checks that a tree is like one member of `x`, and returns its leaves."""
    paths, tree = tree_util.tree_flatten_with_path(value)
    expected: Any = tree_util.tree_structure(x)
    if tree != expected:
        raise StructureError(f"reduce: {what} is a tree {tree}, expected {expected}, as x is.")
    arrays = []
    for (path, leaf), member in zip(paths, members, strict=True):
        if cast and isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf, member.dtype)
        array = as_array("reduce", what, path, leaf)
        if (array.shape, array.dtype) != (member.shape, member.dtype):
            raise StructureError(
                f"reduce: {what}{tree_util.keystr(path)} has type "
                f"{array.dtype}{list(array.shape)}, expected {member.dtype}{list(member.shape)}, "
                f"as the members of x{tree_util.keystr(path)} have."
            )
        is_key = jax.dtypes.issubdtype(member.dtype, jax.dtypes.extended)
        arrays.append(array if is_key else jax.lax.convert_element_type(array, member.dtype))
    return arrays


# --- values and types


@reduce_p.def_abstract_eval
def _reduce_abstract_eval(
    *avals: Any, jaxpr: _compat.ClosedJaxpr, num_served: int, placement: str, n: Any, name: str
) -> list[Any]:
    members = jaxpr.in_avals[num_served:]
    for aval, member in zip(avals[num_served:], members[: len(members) // 2], strict=True):
        if not (aval.ndim and aval.shape[0] == n and aval.shape[1:] == member.shape):
            raise PlacementError(
                f"bj_reduce of {name}: found an operand of shape {aval.shape}, expected "
                f"{(n, *member.shape)} for the {n} members of {placement!r}."
            )
    return [sharding.reduced_aval(aval, aval.dtype, False) for aval in avals[num_served:]]


def _fold_arrays(
    *args: jax.Array, jaxpr: _compat.ClosedJaxpr, num_served: int, **_: Any
) -> list[jax.Array]:
    leaves = [sharding.whole(x) for x in args[num_served:]]
    return fold_members(combine_of(jaxpr, args[:num_served]), leaves)


reduce_p.def_impl(_fold_arrays)
_compat.register_lowering(reduce_p, _fold_arrays)


def _reduce_to_lojax(
    *args: Any, jaxpr: _compat.ClosedJaxpr, num_served: int, **params: Any
) -> list[jax.Array]:
    lowered, consts = _compat.lower_high(jaxpr)
    num_served += len(consts)
    return reduce_p.bind(*consts, *args, jaxpr=lowered, num_served=num_served, **params)


_compat.register_to_lojax(reduce_p, _reduce_to_lojax)


# --- forward mode: a reduction of pairs


def _reduce_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Reduces the members, and in a second reduction the members with their tangents."""
    # y = bj_reduce[f] x         becomes   y = bj_reduce[f] x
    #                                      _, ty = bj_reduce[jvp_f] x tx
    # Because they are separate, partial evaluation keeps the first and records the second.
    num_served = params["num_served"]
    outs = reduce_p.bind(*primals, **params)
    results: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if all(type(t) is ad.Zero for t in tangents):
        return outs, results
    served, leaves = primals[:num_served], primals[num_served:]
    is_moving = [
        is_differentiable(jax.typeof(x)) and type(t) is not ad.Zero
        for x, t in zip(served, tangents[:num_served], strict=True)
    ]
    floats = [i for i, x in enumerate(leaves) if is_differentiable(jax.typeof(x))]
    moving = [i for i, mark in enumerate(is_moving) if mark]
    jaxpr, consts = _pair_jaxpr(params["jaxpr"], len(leaves), moving, floats)
    moved = bind_reduce(
        jaxpr,
        [*consts, *served, *(tangents[i] for i in moving)],
        [*leaves, *(ad.instantiate_zeros(tangents[num_served + i]) for i in floats)],
        placement=params["placement"],
        n=params["n"],
        name="jvp_" + params["name"],
    )
    for i, tangent in zip(floats, moved[len(leaves) :], strict=True):
        results[i] = tangent
    return outs, results


def _pair_jaxpr(
    jaxpr: _compat.ClosedJaxpr, size: int, moving: list[int], floats: list[int]
) -> tuple[_compat.ClosedJaxpr, list[Any]]:
    """The function on pairs of a value and its tangent."""
    # It takes `[*served, *their tangents, *left, *its tangents, *right, *its tangents]`, where the
    # server values `moving` and the leaves `floats` have tangents.
    function = _compat.jaxpr_as_fun(jaxpr)
    num_served = len(jaxpr.in_avals) - 2 * size
    inputs = [*moving, *(num_served + k * size + i for k in (0, 1) for i in floats)]
    lengths = [num_served, len(moving), size, len(floats), size, len(floats)]

    def pair(*args: Any) -> list[Any]:
        parts, rest = [], list(args)
        for length in lengths:
            parts.append(rest[:length])
            rest = rest[length:]
        still = [*parts[0], *parts[2], *parts[4]]

        def outputs(*moved: Any) -> list[Any]:
            values = list(still)
            for i, value in zip(inputs, moved, strict=True):
                values[i] = value
            return function(*values)

        starts = [still[i] for i in inputs]
        outs, tangents = jax.jvp(outputs, starts, [*parts[1], *parts[3], *parts[5]])
        return [*outs, *(tangents[i] for i in floats)]

    served, left = jaxpr.in_avals[:num_served], jaxpr.in_avals[num_served:][:size]
    member = [*left, *(left[i].to_tangent_aval() for i in floats)]
    tangents = [served[i].to_tangent_aval() for i in moving]
    return trace_body(pair, [*served, *tangents, *member, *member])


ad.primitive_jvps[reduce_p] = _reduce_jvp


# --- transpose, batching, dead code


def _reduce_transpose(cts: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    """Transposes the tree of calls itself."""
    # The cotangent of a member needs the reduction of all members before it and of all members
    # after it. In a pass a shard has only its own members and server values, so a plan can't
    # compute this as a pass. It gathers the leaves on which the derivative depends: none if the
    # function is linear.
    linear = [ad.is_undefined_primal(arg) for arg in args]
    avals = [arg.aval for arg in args if ad.is_undefined_primal(arg)]
    used = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    results: list[Any] = [ad.Zero(a.aval.to_ct_aval()) if m else None
                          for a, m in zip(args, linear, strict=True)]  # fmt: skip
    if not used:
        return results

    def outputs(*moving: Any) -> list[Any]:
        rest = iter(moving)
        outs = _fold_arrays(*(next(rest) if m else a for a, m in zip(args, linear, strict=True)),
                            **params)  # fmt: skip
        return [outs[i] for i in used]

    moved = jax.linear_transpose(outputs, *avals)([cts[i] for i in used])
    places = [i for i, mark in enumerate(linear) if mark]
    for i, aval, ct in zip(places, avals, moved, strict=True):
        results[i] = sharding.lay_out_like(ct, aval)
    return results


ad.primitive_transposes[reduce_p] = _reduce_transpose


def _reduce_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int | None]]:
    """Batches the function."""
    if all(dim is None for dim in dims):
        outs = reduce_p.bind(*args, **params)
        return outs, [None] * len(outs)
    # All leaves are batched, since each result may depend on each leaf.
    num_served, size = params["num_served"], axis_data.size
    served, leaves = args[:num_served], [
        jnp.broadcast_to(x[:, None], (x.shape[0], size, *x.shape[1:])) if dim is None
        else jnp.moveaxis(x, dim, 1)
        for x, dim in zip(args[num_served:], dims[num_served:], strict=True)
    ]  # fmt: skip
    function = jax.vmap(
        _compat.jaxpr_as_fun(params["jaxpr"]),
        in_axes=[*dims[:num_served], *[0] * (2 * len(leaves))],
        axis_size=size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )
    members = [sharding.member_aval(jax.typeof(x), params["placement"]) for x in leaves]
    avals = [*map(jax.typeof, served), *members, *members]
    jaxpr, consts = trace_body(lambda *values: function(*values), avals)
    kept = {key: params[key] for key in ("placement", "n", "name")}
    outs = bind_reduce(jaxpr, [*consts, *served], leaves, **kept)
    return outs, [0] * len(outs)


batching.fancy_primitive_batchers[reduce_p] = _reduce_batch


def _reduce_dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


_compat.register_dce(reduce_p, _reduce_dce)


# --- reductions by a state, such as variances


@default_promotion()
def folded(
    fold: Fold, x: jax.Array, weights: jax.Array | None, placement: str, n: Any, **how: Any
) -> jax.Array:
    """Reduces one placed array (n, ...)."""
    result = fold.result_dtype(x.dtype)
    x = in_wide_dtype(fold, x)
    if isinstance(n, int) and n == 0:
        types = jax.eval_shape(fold.begin, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), 1)
        state = [jnp.full(t.shape, v, t.dtype) for t, v in zip(types, fold.nothing, strict=True)]
    else:
        placed = (x,) if weights is None else (x, weights.astype(x.real.dtype))
        state = _state(fold, placement, placed)
    return fold.finish(state, **how).astype(result)


def in_wide_dtype(fold: Fold, x: jax.Array) -> jax.Array:
    """Values in the dtype in which a fold reduces them."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(wide_dtype(x.dtype if is_inexact else fold.result_dtype(x.dtype)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@default_promotion()
def _state(fold: Fold, placement: str, placed: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The state of all members; `placed` are their values, then their weights if they have some."""
    # s = bj_map[begin] x w; y = bj_reduce[merge] s
    rest = _of_members(placement, placed)
    state = map_members(
        lambda x, weight=1: fold.begin(x, weight), [], placed, name=f"{fold.name}_of_member", **rest
    )
    member = [sharding.member_aval(jax.typeof(leaf), placement) for leaf in state]
    merge, consts = trace_body(
        lambda *leaves: fold.merge(leaves[: len(member)], leaves[len(member) :]), [*member, *member]
    )
    del rest["mesh"]
    return bind_reduce(merge, consts, state, **rest, name=f"reduce_{fold.name}")


@_state.defjvp
@default_promotion()
def _state_jvp(fold: Fold, placement: str, primals: Any, tangents: Any) -> Any:
    # The state of all members is known then, so its tangent is linear in sums over the members:
    # u = bj_map[terms] y x w tx tw; ty = moved(y, bj_reduce_sum u)
    (placed,), (moving,) = primals, tangents
    state = _state(fold, placement, placed)

    def terms(*args: jax.Array) -> list[jax.Array]:
        of_members = args[len(state) :]
        half = len(of_members) // 2
        x, weight = (*of_members[:half], 1)[:2]
        t, weight_t = (*of_members[half:], 0)[:2]
        return fold.terms(args[: len(state)], x, weight, t, weight_t)

    members = map_members(
        terms, state, [*placed, *moving],
        name=f"jvp_{fold.name}", **_of_members(placement, placed),
    )  # fmt: skip
    sums = [reduce_sum_p.bind(term, placement=placement) for term in members]
    return state, fold.moved(state, sums)


def _of_members(placement: str, placed: tuple[jax.Array, ...]) -> dict[str, Any]:
    mesh = sharding.active_mesh(placement)
    return {"placement": placement, "n": placed[0].shape[0], "mesh": mesh}
