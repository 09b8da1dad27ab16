"""The result of a reduction by key for an unknown number of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from beamjax.errors import StructureError
from beamjax.numerics.by_key import ByKey, reduced, text_of
from beamjax.storage.dtypes import dtype_from_name


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
      keys: the key of each member: numbers (n,), or texts as uint8 (n, width).
      values: a tree of arrays of shapes (n, ...).
      op: the reduction, as in `reduce_by_key`.
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
          A dictionary of NumPy arrays. "key" has the distinct keys in ascending order, (k,), and
          "value" a tree of arrays of shapes (k, ...).
        """
        leaves, tree = jax.tree_util.tree_flatten(self.values)
        keys, *members = map(np.asarray, [self.keys, *leaves])
        names, *found = reduced(self.by_key(keys, members), keys, members)
        return {"key": text_of(names), "value": jax.tree_util.tree_unflatten(tree, found)}

    def by_key(self, keys: Any, leaves: Sequence[Any]) -> ByKey:
        """The reduction of members with keys and leaves of the types of arrays."""
        types = [(x.shape[1:], np.dtype(x.dtype)) for x in (keys, *leaves)]
        return ByKey(self.op, types[0], tuple(types[1:]), tuple(map(dtype_from_name, self.dtypes)))

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
            "known only after the run; expected the program to return the result as it is. Give "
            "num_keys to compute with it in the program. Or compute after the run: beamjax.run "
            "returns a table (table.arrays(), table.to_arrow(), or the input of another program), "
            "and for a result of jax.jit there is reduced()."
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
