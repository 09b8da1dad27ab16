"""How many bytes a compiled function needs besides its arguments, counted from its equations.

What XLA itself reports is known only once it has compiled, and leaves out what its libraries take.
So values are counted from where they are made to where they are last used. Those of elementwise
operations with one reader are not, since XLA makes them as they are read.
"""

from __future__ import annotations

import collections
import math
from typing import Any

from jax.extend import core as jex

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
    """Peak bytes of the values that are alive at once, results included and arguments not.

    Args:
      closed: a jaxpr, closed or not.
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
        inner = max(map(working_bytes, jex.jaxprs_in_params(eqn.params)), default=0)
        if eqn.primitive.name in _LIBRARY_CALLS:
            inner += 3 * sum(_nbytes(v.aval) for v in eqn.invars)
        for v in eqn.outvars:
            fuses = eqn.primitive.name in _ELEMENTWISE and readers[v] == 1 and _reads(kinds.get(v))
            held[v] = 0 if fuses else _nbytes(v.aval)
            alive += held[v]
        peak = max(peak, alive + inner)
        for v in {v for v in (*eqn.invars, *eqn.outvars) if _is_var(v)}:
            if last.get(v, i) == i:
                alive -= held.pop(v, 0)
    return peak


def _reads(name: str | None) -> bool:
    """Whether an equation reads values as they are made."""
    return name is not None and (name in _ELEMENTWISE or name.startswith(("reduce_", "arg")))


def _is_var(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _nbytes(aval: Any) -> int:
    """Bytes of a value; axes of unknown size are left out."""
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(d for d in aval.shape if isinstance(d, int)) * aval.dtype.itemsize
