"""Rules for `jax.experimental.checkify`: the same errors as for `jax.vmap` of the body."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend import core as jex

from beamjax import _compat
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import REDUCE_PRIMITIVES, map_members, map_p


def _checked_map(
    errors: Any, *operands: Any, jaxpr: jex.ClosedJaxpr, num_broadcast: int, **params: Any
) -> tuple[checkify.Error, list[Any]]:
    """Maps the body with its checks, and reports the first check that failed for any member."""
    del params["spmd_axis_name"]
    body = checkify.checkify(jex.jaxpr_as_fun(jaxpr), errors=errors)
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
