"""Changes the layout of convolutions that XLA's CPU backend would compute slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from beamjax import _compat
from beamjax.bodies.jaxprs import changed_params
from beamjax.interpreters.program import Eqn, with_nested

# XLA's CPU backend uses a library for convolutions in the layout (batch, spatial..., channels). It
# changes the layout itself, but not inside of loops. There, convolutions in other layouts, such as
# derivatives in the training steps of a network, are several times slower.

_FLOATS = ("float16", "float32")
_MOST_AXES = 3
"""Largest number of spatial axes that the library supports."""


def with_channels_last(
    function: Callable[..., Sequence[Any]], arguments: Sequence[Any], eqns: Iterable[Eqn]
) -> Callable[..., Sequence[Any]]:
    """The same function of flat arrays, with its convolutions in the layout of the library."""
    # Tracing once more takes long, so only what convolves is traced.
    if not any(map(_convolves, eqns)):
        return function
    return _compat.jaxpr_as_fun(_closed(jax.make_jaxpr(function)(*arguments)))


def _convolves(eqn: Any) -> bool:
    """Whether an equation is a convolution, or holds one."""
    return any(nested.primitive.name == "conv_general_dilated" for nested in with_nested(eqn))


def _closed(closed: _compat.ClosedJaxpr) -> _compat.ClosedJaxpr:
    return _compat.ClosedJaxpr(_open(closed.jaxpr), closed.consts)


def _either(jaxpr: Any) -> Any:
    return _closed(jaxpr) if isinstance(jaxpr, _compat.ClosedJaxpr) else _open(jaxpr)


def _open(jaxpr: _compat.Jaxpr) -> _compat.Jaxpr:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if not _convolves(eqn):
            eqns.append(eqn)
        elif eqn.primitive.name == "conv_general_dilated":
            eqns += _laid_out(eqn) if _is_supported(eqn) else [eqn]
        else:
            eqns.append(eqn.replace(params=changed_params(eqn.params, _either)))
    return jaxpr.replace(eqns=eqns)


def _is_supported(eqn: Any) -> bool:
    """Whether the library can compute a convolution after a change of the layout."""
    groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    floats = all(var.aval.dtype.name in _FLOATS for var in (*eqn.invars, *eqn.outvars))
    return groups == (1, 1) and floats and 3 <= len(eqn.invars[0].aval.shape) <= 2 + _MOST_AXES


def _laid_out(eqn: Any) -> list[Any]:
    """Equations of the same convolution with channels last, with transposes around it."""
    # z = conv[NCHW, OIHW, NCHW] x k  becomes
    # x1 = transpose x; k1 = transpose k; z1 = conv[NHWC, HWIO, NHWC] x1 k1; z = transpose z1
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    batch, features, *axes = numbers.lhs_spec
    out, contracted, *window = numbers.rhs_spec
    lhs_order, rhs_order = (batch, *axes, features), (*window, contracted, out)
    first, channels, *moved = numbers.out_spec
    back = tuple(map(int, np.argsort((first, *moved, channels))))
    last, spatial = len(axes) + 1, range(1, len(axes) + 1)
    spec = (0, last, *spatial)
    expected = lax.ConvDimensionNumbers(spec, (last, last - 1, *(i - 1 for i in spatial)), spec)
    if numbers == expected:
        return [eqn]

    def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        operands = lax.transpose(lhs, lhs_order), lax.transpose(rhs, rhs_order)
        changed = {**params, "dimension_numbers": expected}
        (result,) = _compat.bind(eqn.primitive, operands, changed)
        return lax.transpose(result, back)

    new = jax.make_jaxpr(convolve)(*(var.aval for var in eqn.invars)).jaxpr
    names = dict(zip([*new.invars, *new.outvars], [*eqn.invars, *eqn.outvars], strict=True))

    def rename(atom: Any) -> Any:
        return atom if isinstance(atom, _compat.Literal) else names.get(atom, atom)

    return [
        new_eqn.replace(
            invars=list(map(rename, new_eqn.invars)),
            outvars=list(map(rename, new_eqn.outvars)),
            source_info=eqn.source_info,
        )
        for new_eqn in new.eqns
    ]
