"""Reductions by key for an unknown number of keys.

Rows are reduced in their order: first within each block of rows, then across blocks. Floats are
added and multiplied in float64. So the result depends only on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 and friends with numpy.dtype)
import numpy as np

from beamjax.errors import StructureError
from beamjax.numerics.reducers import REDUCERS

_ROUNDS = ("sum", "mean", "prod")
"""Reductions that round floats, and so compute in float64."""


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """The result of `reduce_by_key` without a number of keys: members, each with its key.

    The number of keys can't be part of a shape in JAX, so a program can only return a `Keyed`, not
    compute with it. `beamjax.run` replaces it with a `KeyedTable`. For a `Keyed` that `jax.jit`
    returns, `reduced()` gives the same rows as arrays.

    Args:
      keys: as the attribute.
      values: as the attribute.
      op: as the attribute.
      dtypes: as the attribute.

    Attributes:
      keys: int[n], the key of each member.
      values: a tree of arrays of shapes (n, ...).
      op: the reduction: "sum", "mean", "max", "min", "prod", "any" or "all".
      dtypes: the dtype of each reduced leaf, by name.
    """

    def __init__(self, keys: Any, values: Any, op: str, dtypes: Sequence[str]) -> None:
        self.keys = keys
        self.values = values
        self.op = op
        self.dtypes = tuple(dtypes)

    def reduced(self) -> dict[str, Any]:
        """Reduces the members of each key, in memory.

        Returns:
          A dictionary of NumPy arrays. "key" has the distinct keys in ascending order, int[k], and
          "value" a tree of arrays of shapes (k, ...).
        """
        keys = np.asarray(self.keys)
        leaves, tree = jax.tree_util.tree_flatten(self.values)
        order = np.argsort(keys, kind="stable")
        names, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
        found = []
        for leaf, name in zip(leaves, self.dtypes, strict=True):
            wide = widened(self.op, np.asarray(leaf), np.dtype(name))
            total = folded(self.op, wide[order], first)
            found.append(finished(self.op, total, counts, np.dtype(name)))
        return {"key": names, "value": jax.tree_util.tree_unflatten(tree, found)}

    def tree_flatten_with_keys(self) -> Any:
        """Returns the children with their names, for JAX."""
        names = jax.tree_util.GetAttrKey("keys"), jax.tree_util.GetAttrKey("values")
        children = zip(names, (self.keys, self.values), strict=True)
        return tuple(children), (self.op, self.dtypes)

    @classmethod
    def tree_unflatten(cls, how: tuple[str, tuple[str, ...]], children: Any) -> Keyed:
        """Returns a `Keyed` from its children, for JAX."""
        keys, values = children
        return cls(keys, values, *how)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise StructureError(
            f"reduce_by_key: found {name} of its result without num_keys, whose number of rows is "
            "known only after the run; expected the program to return the result as "
            "it is. Give num_keys to compute with it in the program. Or compute after the run: "
            "beamjax.run returns a table (table.arrays(), or the input of "
            "another program), and for a result of jax.jit there is reduced()."
        )

    return refuse


# Comparisons for equality stay: trees that hold a `Keyed` may be compared.
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_ARITHMETIC = [
    *(prefix + name for name in _BINARY for prefix in ("", "r")),
    *"lt le gt ge neg pos abs invert round".split(),
]
_CONVERSIONS = {
    "getitem": "an item", "len": "the length", "iter": "the items", "bool": "the truth value",
    "float": "a number", "int": "a number", "array": "an array", "jax_array": "an array",
}  # fmt: skip
for _name, _use in {**dict.fromkeys(_ARITHMETIC, "arithmetic"), **_CONVERSIONS}.items():
    setattr(Keyed, f"__{_name}__", _refusal(_use))


def widened(op: str, values: np.ndarray, result: np.dtype) -> np.ndarray:
    """Casts values to the dtype in which they are reduced to the dtype `result`."""
    if op in ("any", "all"):
        return values != 0
    if values.dtype.kind == "c":
        return values.astype(np.complex128) if op in _ROUNDS else values
    if _is_float(values.dtype) or op == "mean":
        if op in _ROUNDS:
            return values.astype(np.float64)
        return values if values.dtype.isbuiltin == 1 else values.astype(np.float32)
    return values.astype(result)


def folded(op: str, values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Reduces each run of rows with equal keys; `first` has the first row of each run."""
    with np.errstate(all="ignore"):
        return REDUCERS[op].ufunc.reduceat(values, first, axis=0, dtype=values.dtype)


def finished(op: str, totals: np.ndarray, counts: np.ndarray, result: np.dtype) -> np.ndarray:
    """Turns the totals of keys with `counts` members into results of the dtype `result`."""
    with np.errstate(all="ignore"):
        if op == "mean":
            totals = totals / counts.reshape(-1, *[1] * (totals.ndim - 1))
        return totals.astype(result)


def _is_float(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)
