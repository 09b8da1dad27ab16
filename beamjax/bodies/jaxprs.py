"""Functions of jaxprs and of the jaxprs that their equations hold, at any depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from beamjax import _compat


def jaxprs(closed: Any) -> Iterator[Any]:
    """A jaxpr, closed or open, and all jaxprs that its equations hold; all of them as open ones."""
    jaxpr = getattr(closed, "jaxpr", closed)
    yield jaxpr
    for eqn in jaxpr.eqns:
        yield from jaxprs_inside(eqn)


def jaxprs_inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, at any depth."""
    for inner in _compat.jaxprs_in_params(eqn.params):
        yield from jaxprs(inner)


def equations(closed: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs in it."""
    return (eqn for jaxpr in jaxprs(closed) for eqn in jaxpr.eqns)


def equations_inside(eqn: Any) -> Iterator[Any]:
    """All equations of the jaxprs that an equation holds."""
    return (inner for jaxpr in jaxprs_inside(eqn) for inner in jaxpr.eqns)


def changed_params(params: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Parameters of an equation with `change(jaxpr)` in place of each jaxpr, closed or open."""

    def changed(value: Any) -> Any:
        if isinstance(value, _compat.ClosedJaxpr | _compat.Jaxpr):
            return change(value)
        if hasattr(value, "_make"):  # A named tuple, as `custom_linear_solve` has.
            return value._make(map(changed, value))
        return type(value)(map(changed, value)) if type(value) in (tuple, list) else value

    return {name: changed(value) for name, value in params.items()}


def evaluate(
    closed: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any],
) -> list[Any]:
    """Evaluates a jaxpr on abstract or concrete values, such as arrays, atoms or booleans."""
    # `apply` takes an equation and the values of its operands to the values of its results.
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, apply(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def nbytes_of(aval: Any) -> int:
    """Bytes of a value; axes of unknown size are left out."""
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(d for d in aval.shape if isinstance(d, int)) * aval.dtype.itemsize
