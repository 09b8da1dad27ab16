"""Replaces values of dtype float0, the tangents of integers, by bools.

XLA has no float0, and `jax.jit` uses bools as well. These values hold no information: a result of
dtype float0 is a constant.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.bodies.jaxprs import changed_params, jaxprs

FLOAT0 = jax.dtypes.float0
BOOL = np.dtype("bool")


def without_float0(closed: _compat.ClosedJaxpr) -> _compat.ClosedJaxpr:
    """The same function with bools instead of float0, also in the jaxprs of its equations."""
    return _Retyped().either(closed) if _holds_float0(closed) else closed


def _holds_float0(closed: _compat.ClosedJaxpr) -> bool:
    return any(
        _is_float0(var)
        for jaxpr in jaxprs(closed)
        for var in (*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))
    )


def _is_float0(var: Any) -> bool:
    return bool(getattr(var.aval, "dtype", None) == FLOAT0)


class _Retyped:
    """Replaces variables of dtype float0, consistently within one program."""

    def __init__(self) -> None:
        self.new_var = _compat.gensym()
        # For each variable of dtype float0, the one that replaces it.
        self.names: dict[Any, Any] = {}

    def either(self, value: Any) -> Any:
        """A jaxpr, closed or open."""
        if isinstance(value, _compat.ClosedJaxpr):  # Also an open one, in some versions of JAX.
            return _compat.ClosedJaxpr(self.jaxpr(value.jaxpr), list(map(as_bool, value.consts)))
        return self.jaxpr(value)

    def jaxpr(self, jaxpr: Any) -> Any:
        return jaxpr.replace(
            constvars=list(map(self.atom, jaxpr.constvars)),
            invars=list(map(self.atom, jaxpr.invars)),
            outvars=list(map(self.atom, jaxpr.outvars)),
            eqns=list(map(self.eqn, jaxpr.eqns)),
        )

    def eqn(self, eqn: Any) -> Any:
        return eqn.replace(
            invars=list(map(self.atom, eqn.invars)),
            outvars=list(map(self.atom, eqn.outvars)),
            params={k: self.dtype(v) for k, v in changed_params(eqn.params, self.either).items()},
        )

    def atom(self, atom: Any) -> Any:
        if not _is_float0(atom):
            return atom
        aval = jax.core.ShapedArray(atom.aval.shape, BOOL)
        if isinstance(atom, _compat.Literal):
            return _compat.Literal(as_bool(atom.val), aval)
        return self.names.setdefault(atom, self.new_var(aval))

    def dtype(self, value: Any) -> Any:
        """A parameter of an equation; also one of several dtypes."""
        if type(value) in (tuple, list):
            return type(value)(map(self.dtype, value))
        return BOOL if isinstance(value, np.dtype) and value == FLOAT0 else value


def as_bool(value: Any) -> Any:
    """An array of dtype float0 as bools; any other value unchanged."""
    if getattr(value, "dtype", None) != FLOAT0:
        return value
    return np.zeros(np.shape(value), BOOL)
