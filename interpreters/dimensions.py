"""Numbers of members that a program reads as values, where they are known only as it runs.

Such a program is staged with a symbolic dimension for the number of members. What reads it as a
value reads a server value instead, one for each symbol, which no equation makes.
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


def is_unknown(dim: Any) -> bool:
    """Whether a dimension, or the size of a placement, is symbolic."""
    return jax.export.is_symbolic_dim(dim)


def known_size(shape: Iterable[Any]) -> int:
    """The number of entries, of which an axis of unknown length counts as one."""
    return math.prod(int(dim) for dim in shape if not is_unknown(dim))


@functools.cache
def members_of_streams() -> Any:
    """The dimension that stands for the number of members of sources of unknown length.

    It is one for all of them: those of a call that are not as long as each other are told apart
    once they have been read.
    """
    (n,) = jax.export.symbolic_shape("n")
    return n


def size_of(eqn: Any) -> Any | None:
    """The symbolic dimension that an equation gives as a number, if that is what it does."""
    if eqn.primitive.name == _compat.DIM_AS_VALUE:
        return eqn.params["dim"]
    if eqn.primitive.name == "bj_size" and is_unknown(eqn.params["n"]):
        return eqn.params["n"]
    return None


def size_function(
    dim: Any, dtype: Any, sizes: dict[str, Var]
) -> tuple[Callable[..., jax.Array], list[Var]]:
    """How a symbolic dimension follows from the values of its symbols.

    Args:
      dim: the dimension.
      dtype: of its value.
      sizes: the variable of each symbol; those that are new get one.

    Returns:
      A function of arrays, and the variables that are its operands.
    """
    names = sorted(_compat.symbols_of(dim))

    def evaluate(*values: jax.Array) -> jax.Array:
        wide = [value.astype(dtype) for value in values]
        with jax.numpy_dtype_promotion("standard"):
            found = _compat.evaluate_dim(dim, dict(zip(names, wide, strict=True)))
        return jax.lax.convert_element_type(found, dtype)

    return evaluate, [sizes.setdefault(name, Var(f"size of {name}", SIZE)) for name in names]


def share_sizes(eqn: Eqn, number: Callable[[Any, Any, str], Atom]) -> None:
    """Gives the body of a map, as further server values, the unknown sizes that it reads.

    Args:
      eqn: the map, which is changed.
      number: gives the value of a dimension, for its dtype and the user's line.
    """
    body, dims = _compat.hoist_dims(eqn.params["jaxpr"])
    if dims:
        eqn.inputs = [*(number(dim, aval.dtype, eqn.line) for dim, aval in dims), *eqn.inputs]
        served = eqn.params["num_broadcast"] + len(dims)
        eqn.params = {**eqn.params, "jaxpr": body, "num_broadcast": served}
