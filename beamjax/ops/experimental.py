"""Rules for two transformations of `jax.experimental`: `checkify` and `jet`.

They give the same errors and the same Taylor series as for `jax.vmap` of the body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, jet
from jax.extend import core as jex

from beamjax import _compat
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import REDUCE_PRIMITIVES, broadcast_p, map_members, map_p

# --- checkify


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
    """Merges the errors of all members into one, as if all members ran each check together.

    It is the earliest check that failed for any member, with the message of the last such member.

    Args:
      failed: bool[n], whether a check failed.
      codes: int[n], the number of the first check that failed, in the order of the checks.
      payload: arrays (n, ...) for the message.

    Returns:
      The same for the merged error, without the axis of members.
    """
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


# --- jet

Series = Sequence[Sequence[Any]]
"""The terms of the series of each operand or result, starting with the first order."""


def _series_of(
    function: Callable[..., Any], primals: Sequence[Any], series: Series
) -> tuple[Any, Any]:
    """Returns the value and the series of a function of arrays; only floats have a series."""
    changes = [jnp.issubdtype(x.dtype, np.inexact) for x in primals]
    moving = [x for x, change in zip(primals, changes, strict=True) if change]
    terms = [list(x) for x, change in zip(series, changes, strict=True) if change]
    if not moving:
        value = function(*primals)
        return value, jax.tree.map(lambda x: [jnp.zeros_like(x)] * len(series[0]), value)

    def of_moving(*values: Any) -> Any:
        rest = iter(values)
        pairs = zip(primals, changes, strict=True)
        return function(*(next(rest) if change else x for x, change in pairs))

    return jet.jet(of_moving, moving, terms, factorial_scaled=False)


def _series_of_map(
    primals: Sequence[Any],
    series: Series,
    *,
    jaxpr: jex.ClosedJaxpr,
    num_broadcast: int,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    del params["spmd_axis_name"]
    operands = [[x, *terms] for x, terms in zip(primals, series, strict=True)]
    length = len(operands[0])
    tree: Any = None

    def body(*flat: Any) -> Sequence[Any]:
        nonlocal tree
        rows = [flat[i : i + length] for i in range(0, len(flat), length)]
        values, terms = [row[0] for row in rows], [row[1:] for row in rows]
        leaves, tree = jax.tree.flatten(_series_of(jex.jaxpr_as_fun(jaxpr), values, terms))
        return leaves

    broadcast = [x for row in operands[:num_broadcast] for x in row]
    placed = [x for row in operands[num_broadcast:] for x in row]
    leaves = map_members(body, broadcast, placed, **params)
    values, terms = jax.tree.unflatten(tree, leaves)
    return values, terms


def _series_of_arrays(
    function: Callable[..., Any], primals: Sequence[Any], series: Series, **params: Any
) -> tuple[Any, Any]:
    """Returns the series of a reduction as an ordinary function of arrays."""
    return _series_of(functools.partial(function, **params), primals, series)


def _series_of_broadcast(
    primals: Sequence[Any], series: Series, **params: Any
) -> tuple[Any, list[Any]]:
    (x,), (terms,) = primals, series
    return broadcast_p.bind(x, **params), [broadcast_p.bind(t, **params) for t in terms]


_compat.register_jet(map_p, _series_of_map)
_compat.register_jet(broadcast_p, _series_of_broadcast)
for _primitive in (*REDUCE_PRIMITIVES.values(), reduce_p):
    _compat.register_jet(_primitive, functools.partial(_series_of_arrays, _primitive.impl))
