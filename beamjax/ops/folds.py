"""Reductions by a state that `bj_reduce` merges, such as a variance."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from beamjax.numerics.reducers import Fold, wide_dtype
from beamjax.ops import sharding
from beamjax.ops.combining import bind_reduce
from beamjax.ops.primitives import default_promotion, map_members, reduce_sum_p, trace_body


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

    found = map_members(
        terms, state, [*placed, *moving],
        name=f"jvp_{fold.name}", **_of_members(placement, placed),
    )  # fmt: skip
    sums = [reduce_sum_p.bind(term, placement=placement) for term in found]
    return state, fold.moved(state, sums)


def _of_members(placement: str, placed: tuple[jax.Array, ...]) -> dict[str, Any]:
    mesh = sharding.active_mesh(placement)
    return {"placement": placement, "n": placed[0].shape[0], "mesh": mesh}
