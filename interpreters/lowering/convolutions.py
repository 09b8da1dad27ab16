"""Changes convolutions to the layout for which XLA's CPU backend uses a library.

XLA changes the layout itself, but not inside of loops. There, convolutions in other layouts, such
as derivatives in the training steps of a network, are several times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from beamjax import _compat
from beamjax.interpreters.program import Eqn, MemberEqn

_FLOATS = ("float16", "float32")
_MOST_AXES = 3
"""Largest number of spatial axes that the library supports."""


def with_channels_last(
    function: Callable[..., Sequence[Any]], arguments: Sequence[Any], eqns: Iterable[Eqn]
) -> Callable[..., Sequence[Any]]:
    """The same function with its convolutions in the layout (batch, spatial..., channels).

    Args:
      function: takes flat arrays and returns a flat sequence of arrays.
      arguments: types of these arrays.
      eqns: the equations that the function evaluates.
    """
    if not any(map(_convolves, eqns)):
        return function
    return jex.jaxpr_as_fun(_closed(jax.make_jaxpr(function)(*arguments)))


def _convolves(eqn: Any) -> bool:
    """Whether an equation is a convolution, or holds one."""
    if eqn.primitive.name == "conv_general_dilated":
        return True
    structure = eqn.structure if isinstance(eqn, MemberEqn) else eqn
    blocks = [block.eqns for block in getattr(structure, "blocks", ())]
    inner = [getattr(each, "jaxpr", each).eqns for each in jex.jaxprs_in_params(eqn.params)]
    return any(map(_convolves, (each for some in [*blocks, *inner] for each in some)))


def _closed(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(_open(closed.jaxpr), closed.consts)


def _open(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if not _convolves(eqn):
            eqns.append(eqn)
        elif eqn.primitive.name == "conv_general_dilated":
            eqns += _laid_out(eqn) if _can_be(eqn) else [eqn]
        else:
            eqns.append(eqn.replace(params={k: _param(v) for k, v in eqn.params.items()}))
    return jaxpr.replace(eqns=eqns)


def _param(value: Any) -> Any:
    match value:
        case jex.ClosedJaxpr():
            return _closed(value)
        case jex.Jaxpr():
            return _open(value)
        case tuple():
            return type(value)(map(_param, value)) if _holds_jaxprs(value) else value
    return value


def _holds_jaxprs(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, jex.ClosedJaxpr | jex.Jaxpr) for value in values)


def _can_be(eqn: Any) -> bool:
    """Whether the library can compute a convolution after a change of the layout."""
    groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    floats = all(var.aval.dtype.name in _FLOATS for var in (*eqn.invars, *eqn.outvars))
    return groups == (1, 1) and floats and 3 <= len(eqn.invars[0].aval.shape) <= 2 + _MOST_AXES


def _laid_out(eqn: Any) -> list[Any]:
    """Equations for a convolution in the other layout, with transposes around it."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    batch, features, *axes = numbers.lhs_spec
    out, contracted, *window = numbers.rhs_spec
    lhs_order, rhs_order = (batch, *axes, features), (*window, contracted, out)
    first, channels, *moved = numbers.out_spec
    back = tuple(map(int, np.argsort((first, *moved, channels))))
    last, places = len(axes) + 1, range(1, len(axes) + 1)
    spec = (0, last, *places)
    wanted = lax.ConvDimensionNumbers(spec, (last, last - 1, *(i - 1 for i in places)), spec)
    if numbers == wanted:
        return [eqn]

    def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        operands = lax.transpose(lhs, lhs_order), lax.transpose(rhs, rhs_order)
        changed = {**params, "dimension_numbers": wanted}
        (result,) = _compat.bind(eqn.primitive, operands, changed)
        return lax.transpose(result, back)

    new = jax.make_jaxpr(convolve)(*(var.aval for var in eqn.invars)).jaxpr
    names = dict(zip([*new.invars, *new.outvars], [*eqn.invars, *eqn.outvars], strict=True))

    def rename(atom: Any) -> Any:
        return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)

    return [
        each.replace(
            invars=list(map(rename, each.invars)),
            outvars=list(map(rename, each.outvars)),
            source_info=eqn.source_info,
        )
        for each in new.eqns
    ]
