"""Taylor series of programs by `jax.experimental.jet`: those that it gives with `jax.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet
from jax.extend import core as jex

from beamjax import _compat
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import REDUCE_PRIMITIVES, broadcast_p, map_members, map_p

Series = Sequence[Sequence[Any]]
"""For each operand or result, the terms of its series from the first order on."""


def _series_of(
    function: Callable[..., Any], primals: Sequence[Any], series: Series
) -> tuple[Any, Any]:
    """The value and the terms of a function of arrays; those that are not floats do not change."""
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
    """The series of a reduction as of the function of arrays that it is without beamjax."""
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
