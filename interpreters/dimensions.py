"""Symbolic dimensions: numbers of members that are unknown until the program runs.

A program is staged with a symbolic dimension for an unknown number of members. Equations that read
the number as a value read a server value instead: one for each symbol, which no equation defines.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.interpreters.program import Atom, Eqn, Var

SIZE = jax.core.ShapedArray((), np.dtype("int32"))
"""The type of an unknown number of members as a server value."""


def is_unknown(dim: Any) -> bool:
    """Whether a dimension, or the size of a placement, is symbolic."""
    return jax.export.is_symbolic_dim(dim)


def known_size(shape: Iterable[Any]) -> int:
    """The number of entries of a shape, where an axis of unknown length counts as 1."""
    return math.prod(int(dim) for dim in shape if not is_unknown(dim))


@functools.cache
def members_of_streams() -> Any:
    """The dimension that stands for the number of members of sources of unknown length."""
    # All such sources share it. That the sources of one call have the same length is checked once
    # they have been read.
    (n,) = jax.export.symbolic_shape("n")
    return n


def size_of(eqn: Any) -> Any | None:
    """The symbolic dimension whose value an equation returns, None for other equations."""
    if eqn.primitive.name == _compat.DIM_AS_VALUE:
        return eqn.params["dim"]
    if eqn.primitive.name == "bj_size" and is_unknown(eqn.params["n"]):
        return eqn.params["n"]
    return None


def size_function(
    dim: Any, dtype: Any, sizes: dict[str, Var]
) -> tuple[Callable[..., jax.Array], list[Var]]:
    """The function of a symbolic dimension, and the variables of its symbols, its operands."""
    # The same dimension always has its symbols in the same order. `sizes` gets those that are new.
    names = sorted(_compat.symbols_of(dim))

    def evaluate(*values: jax.Array) -> jax.Array:
        wide = [value.astype(dtype) for value in values]
        # JAX evaluates dimensions with mixed dtypes, which the user may have forbidden.
        with jax.numpy_dtype_promotion("standard"):
            size = _compat.evaluate_dim(dim, dict(zip(names, wide, strict=True)))
        return jax.lax.convert_element_type(size, dtype)

    return evaluate, [sizes.setdefault(name, Var(f"size of {name}", SIZE)) for name in names]


def share_sizes(eqn: Eqn, number: Callable[[Any, Any, str], Atom]) -> None:
    """Makes the unknown sizes that the body of a map reads server operands, in place."""
    # y = bj_map[x -> x / dim_as_value(n)] xs  becomes  s = <value of n>; y = bj_map[s, x -> x / s]
    # s xs
    body, dims = _compat.hoist_dims(eqn.params["jaxpr"])
    if dims:
        eqn.inputs = [*(number(dim, aval.dtype, eqn.line) for dim, aval in dims), *eqn.inputs]
        served = eqn.params["num_broadcast"] + len(dims)
        eqn.params = {**eqn.params, "jaxpr": body, "num_broadcast": served}
