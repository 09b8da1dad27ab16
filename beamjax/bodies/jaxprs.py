"""Functions of jaxprs and of the jaxprs that their equations hold, at any depth."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex


def jaxprs(closed: Any) -> Iterator[Any]:
    """A jaxpr, closed or open, and all jaxprs that its equations hold; all of them as open ones."""
    jaxpr = getattr(closed, "jaxpr", closed)
    yield jaxpr
    for eqn in jaxpr.eqns:
        yield from jaxprs_inside(eqn)


def jaxprs_inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, at any depth."""
    for inner in jex.jaxprs_in_params(eqn.params):
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
        if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
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
    """Evaluates a jaxpr on abstract or concrete values, such as arrays, atoms or booleans.

    Args:
      closed: the jaxpr, closed or open.
      constants: the values of its constants.
      arguments: the values of its inputs.
      apply: takes an equation and the values of its operands to the values of its results.
      literal: returns the value of a literal.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, apply(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


# --- how many bytes are alive at once

_ELEMENTWISE = frozenset(
    """abs add and atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp convert_element_type
    copy cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow iota is_finite
    le log log1p logistic lt max min mul ne neg not nextafter or pow real rem reshape round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()
)
_LIBRARY_CALLS = frozenset(
    "cholesky custom_linear_solve eig eigh fft geqrf householder_product lu qr scatter scatter-add "
    "sort svd triangular_solve tridiagonal_solve".split()
)
"""Primitives that copy their operands or need buffers of their own."""


def working_bytes(closed: Any) -> int:
    """Bytes that a compiled function needs besides its arguments, results included.

    XLA reports its memory only after compiling, and without the memory of its libraries. The result
    of an elementwise operation with one reader does not count, since XLA fuses it into the reader.

    Args:
      closed: the jaxpr, closed or open.
    """
    return peak_bytes(closed, fuses=True)


def peak_bytes(closed: Any, fuses: bool = False) -> int:
    """Peak bytes of the values of a jaxpr that are alive at once, results included.

    Arguments do not count. A value is alive from the equation that computes it to its last reader.

    Args:
      closed: the jaxpr, closed or open.
      fuses: whether to leave out fused values and add buffers of libraries; see `working_bytes`.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    readers = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if _is_var(v))
    readers.update(v for v in jaxpr.outvars if _is_var(v))
    kinds = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.invars if _is_var(v)}
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if _is_var(v)})
    held: dict[Any, int] = {}
    alive = peak = 0
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        parts = [peak_bytes(inner, fuses) for inner in jex.jaxprs_in_params(eqn.params)]
        inner = max(parts, default=0)
        if fuses and name in _LIBRARY_CALLS:
            # A copy of the operands and workspace, by a rule of thumb.
            inner += 3 * sum(nbytes_of(v.aval) for v in eqn.invars)
        for v in eqn.outvars:
            fused = name in _ELEMENTWISE and readers[v] == 1 and _fuses(kinds.get(v))
            held[v] = 0 if fuses and fused else nbytes_of(v.aval)
            alive += held[v]
        peak = max(peak, alive + inner)
        for v in {v for v in (*eqn.invars, *eqn.outvars) if _is_var(v)}:
            if last.get(v, i) == i:
                alive -= held.pop(v, 0)
    return peak


def _fuses(name: str | None) -> bool:
    """Whether XLA fuses the operands of a primitive into it."""
    return name is not None and (name in _ELEMENTWISE or name.startswith(("reduce_", "arg")))


def _is_var(atom: Any) -> bool:
    return not hasattr(atom, "val")


def nbytes_of(aval: Any) -> int:
    """Bytes of a value; axes of unknown size are left out."""
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(d for d in aval.shape if isinstance(d, int)) * aval.dtype.itemsize
