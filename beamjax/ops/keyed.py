"""Reductions of members by key: `reduce_by_key`, and its result where the keys are not known."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from beamjax.errors import StructureError
from beamjax.numerics.reducers import BY_KEY, PRODUCT, REDUCERS, REDUCTIONS, Fold, Reducer
from beamjax.ops import sharding
from beamjax.ops.combining import in_wide_dtype
from beamjax.ops.leaves import as_placed
from beamjax.ops.placements import Size, resolve
from beamjax.ops.primitives import default_promotion, map_members
from beamjax.ops.weights import MemberWeights, scope_of_operator, weights_for
from beamjax.storage.arrays import dtype_from_name, dtype_name

if TYPE_CHECKING:
    from beamjax.numerics.by_key import ByKey


def reduce_by_key(
    x: Any,
    keys: Any,
    num_keys: int | None = None,
    *,
    op: str = "sum",
    placement: str | None = None,
) -> Any:
    """Reduces the members of each key, like `jax.ops.segment_sum` and related functions.

    With `num_keys`, a key without members gives the same as in `jax.ops`: 0 for "sum", 1 for
    "prod", the lowest and the highest value of the dtype for "max" and "min", False for "any" and
    True for "all"; its "mean", "var" and "std" are NaN. Floats of 16 bits are summed and multiplied
    in float32. Members that tie for a maximum or minimum share the derivative equally; that of a
    product is as for `reduce_prod`. "var" and "std" take two passes over the members.

    Without `num_keys`, any real number or text is a key, sums, means and variances of floats are
    rounded once, and the program can only return the result. Texts are arrays of bytes, with zeros
    at their ends: the columns of sources that read text with `text_bytes`. -0 and 0 are one key,
    and so are all NaN.

    Args:
      x: a tree of placed arrays of numbers or bools, of shapes `(n, ...)`.
      keys: a placed array: the key of each member. With `num_keys`, ints of shape `(n,)`; members
        whose key is not in `[0, num_keys)` are left out. Without, real numbers of shape `(n,)`, or
        texts as uint8 of shape `(n, width)`.
      num_keys: the number of keys, an int >= 1; None if it is not known.
      op: "sum", "mean", "var", "std", "max", "min", "prod", "any" or "all". "var" divides by the
        number of members.
      placement: the placement; None if the program has only one.

    Returns:
      With `num_keys`, a tree like `x` with leaves of shapes `(num_keys, *leaf.shape[1:])`. Their
      dtypes are those of the `jnp` function of the name `op`: bools and small ints are summed and
      multiplied as the default int of the same signedness, "mean", "var" and "std" of bools and
      ints are floats, and "any" and "all" give bools. Without `num_keys`, a `Keyed`. `beamjax.run`
      returns it as a `KeyedTable` on disk; under `jax.jit`, its method `reduced()` gives the same
      rows in memory.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf or the keys do not have n
        members.
      StructureError: a leaf is not an array of numbers or bools, the keys have another
        type, `num_keys` is not an int >= 1, or there is no such `op`.
    """
    name = "reduce_by_key"
    placement, n = resolve(name, placement)
    if op not in BY_KEY:
        raise StructureError(f"{name}: found op {op!r}, expected one of {', '.join(BY_KEY)}.")
    size = None if num_keys is None else check_num_keys(name, num_keys)
    keys = check_keys(name, as_placed(name, "keys", (), keys, placement, n), size is not None)
    leaves, tree = tree_util.tree_flatten_with_path(x)
    values = [as_placed(name, "x", path, leaf, placement, n) for path, leaf in leaves]
    for (path, _), value in zip(leaves, values, strict=True):
        if not _is_number(value.dtype):
            raise StructureError(
                f"{name}: x{tree_util.keystr(path)} has dtype {value.dtype}, expected numbers or "
                "bools."
            )
    weights, reduction = weights_for(name, placement, n), REDUCTIONS[op]
    where = {"placement": placement, "n": n, "mesh": sharding.mesh_for(name, placement, n, None)}
    if size is None:
        return _of_unknown_keys(op, keys, values, tree, weights, where)
    members = MembersByKey(keys, size, **where)
    if isinstance(reduction, Fold):
        array = None if weights is None else weights.array
        totals = members.folded(reduction, values, array)
    elif weights is None:
        totals = members.reduced(op, values)
    else:
        totals = weights.reduced(op, values, members.reduced)
    return tree_util.tree_unflatten(tree, totals)


def _of_unknown_keys(
    op: str,
    keys: jax.Array,
    values: Sequence[jax.Array],
    tree: Any,
    weights: MemberWeights | None,
    where: dict[str, Any],
) -> Keyed:
    """Members, times their weights, with their keys."""
    dtypes = [REDUCTIONS[op].result_dtype(value.dtype) for value in values]
    if weights is not None:
        if op not in ("sum", "prod"):
            raise StructureError(
                f"reduce_by_key: found op {op!r} without num_keys in a function with weights, "
                "expected 'sum' or 'prod'; or give num_keys."
            )
        values, _, dtypes = weights.weighed(REDUCERS[op], values)
    # A map makes the members results of a pass, which a run writes to files.
    members = map_members(
        lambda *member: list(member), [], [keys, *values], name=f"reduce_by_key_{op}", **where
    )
    keys, *values = map(sharding.whole, members)
    return Keyed(keys, tree_util.tree_unflatten(tree, values), op, list(map(dtype_name, dtypes)))


class MembersByKey(NamedTuple):
    """The members of a placement, which lie along `mesh`, with their keys."""

    # A placed array (n,); None if there is only one key.
    keys: jax.Array | None
    num_keys: int
    placement: str
    n: Size
    mesh: sharding.AnyMesh | None

    def mapped(
        self, name: str, fn: Callable[..., Any], served: Sequence[Any], placed: Sequence[Any]
    ) -> list[jax.Array]:
        """Maps a function of (the key of a member; served values; values of the member)."""

        def with_key(*args: Any) -> list[Any]:
            shared, member = args[: len(served)], args[len(served) :]
            if self.keys is None:
                return fn(np.int32(0), *shared, *member)
            return fn(self._in_range(member[0]), *shared, *member[1:])

        results = map_members(
            with_key, served, [*(() if self.keys is None else (self.keys,)), *placed],
            placement=self.placement, n=self.n, name=name, mesh=self.mesh,
        )  # fmt: skip
        return [sharding.whole(array) for array in results]

    def _in_range(self, key: jax.Array) -> jax.Array:
        """A key as int32; `num_keys`, which scatters drop, if it is not in range."""
        wide = key if key.dtype.itemsize >= 4 else key.astype(np.int32)
        is_in_range = (wide >= 0) & (wide < self.num_keys)
        return jnp.where(is_in_range, wide, self.num_keys).astype(np.int32)

    def reduced(self, op: str, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Reduces placed arrays for each of `num_keys` keys."""
        reducer = REDUCERS[op]
        results = [reducer.result_dtype(value.dtype) for value in values]
        # Needed even if nothing is cast: the map marks its operands as placed.
        keys, ones, *values = self.mapped(
            f"reduce_by_key_{op}",
            lambda key, *member: [key, jnp.ones_like(key), *map(reducer.prepared, member)],
            [],
            values,
        )
        with scope_of_operator():
            totals = [_segments(reducer)(value, keys, self.num_keys) for value in values]
            counts = jax.ops.segment_sum(ones, keys, self.num_keys) if reducer.divides else None
        if counts is not None:
            totals = [t / counts.reshape(-1, *[1] * (t.ndim - 1)).astype(t.dtype) for t in totals]
        return [total.astype(dtype) for total, dtype in zip(totals, results, strict=True)]

    def folded(self, fold: Fold, values: Sequence[jax.Array], weights: Any) -> list[jax.Array]:
        """Reduces placed arrays by a fold for each of `num_keys` keys; `weights` are placed."""

        def prepare(key: jax.Array, *member: jax.Array) -> list[jax.Array]:
            weight, *values = member if weights is not None else (jnp.ones_like(key), *member)
            cast = [in_wide_dtype(fold, x) for x in values]
            return [key, *cast, *(weight.astype(x.real.dtype) for x in cast)]

        assert fold.of_sums is not None
        placed = values if weights is None else [weights, *values]
        keys, *prepared = self.mapped(f"reduce_by_key_{fold.name}", prepare, [], placed)
        add = functools.partial(jax.ops.segment_sum, segment_ids=keys, num_segments=self.num_keys)
        of_member = lambda totals: totals.at[keys].get(mode="fill", fill_value=0)
        rows = zip(prepared[: len(values)], prepared[len(values) :], strict=True)
        with scope_of_operator(), default_promotion():
            states = [fold.of_sums(x, weight, add, of_member) for x, weight in rows]
            prepared = list(map(fold.finish, states))
        pairs = zip(prepared, values, strict=True)
        return [x.astype(fold.result_dtype(value.dtype)) for x, value in pairs]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _segment_prod(x: jax.Array, keys: jax.Array, num_keys: int) -> jax.Array:
    return jax.ops.segment_prod(x, keys, num_keys)


@_segment_prod.defjvp
def _segment_prod_jvp(
    num_keys: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    # JAX does not define the derivative of segment_prod where members are zero.
    (x, keys), t = primals, tangents[0]
    out = _segment_prod(x, keys, num_keys)

    def of_member(totals: jax.Array) -> jax.Array:
        return totals.at[keys].get(mode="fill", fill_value=0)

    parts = PRODUCT.parts(x, of_member(out))
    totals = [of_member(_segments(REDUCERS[op])(part, keys, num_keys)) for op, part in parts]
    factor = PRODUCT.factor(x, of_member(out), *totals)
    return out, jax.ops.segment_sum(factor * t, keys, num_keys)


def _segments(reducer: Reducer) -> Callable[..., jax.Array]:
    """The function of (values, keys, num_keys) that reduces the values of each key."""
    return _segment_prod if reducer.scatter == "mul" else reducer.segments


def check_num_keys(op: str, num_keys: Any) -> int:
    """The number of keys; StructureError if it is not an int >= 1."""
    try:
        size = 0 if isinstance(num_keys, bool) else operator.index(num_keys)
    except TypeError:
        size = 0
    if size < 1:
        raise StructureError(
            f"{op}: found num_keys {num_keys!r}, expected the number of keys as an int >= "
            "1. It is a part of the shape of the result, so it can't be traced."
        )
    return size


def check_keys(op: str, keys: jax.Array, known: bool) -> jax.Array:
    """The keys; StructureError if they have another type than `reduce_by_key` takes."""
    if keys.ndim == 1 and jnp.issubdtype(keys.dtype, np.integer):
        return keys
    if known:
        raise StructureError(
            f"{op}: found keys of type {keys.dtype}{list(keys.shape)}, expected ints of "
            f"shape ({keys.shape[0]},), one for each member."
        )
    is_real = keys.dtype == np.bool_ or jnp.issubdtype(keys.dtype, np.floating)
    if (keys.ndim == 1 and is_real) or (keys.ndim == 2 and keys.dtype == np.uint8):
        return keys
    raise StructureError(
        f"{op}: found keys of type {keys.dtype}{list(keys.shape)}, expected one for each "
        f"member: real numbers of shape ({keys.shape[0]},), or texts as uint8 of shape "
        f"({keys.shape[0]}, width), as the option text_bytes of sources reads them."
    )


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


# --- keys that are not known in advance


@tree_util.register_pytree_with_keys_class
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
        from beamjax.numerics.by_key import reduced, text_of  # few programs have a `Keyed`

        leaves, tree = tree_util.tree_flatten(self.values)
        keys, *members = map(np.asarray, [self.keys, *leaves])
        names, *totals = reduced(self.by_key(keys, members), keys, members)
        return {"key": text_of(names), "value": tree_util.tree_unflatten(tree, totals)}

    def by_key(self, keys: Any, leaves: Sequence[Any]) -> ByKey:
        """The reduction of members with keys and leaves of the types of arrays."""
        from beamjax.numerics.by_key import ByKey  # few programs have a `Keyed`

        types = [(x.shape[1:], np.dtype(x.dtype)) for x in (keys, *leaves)]
        return ByKey(self.op, types[0], tuple(types[1:]), tuple(map(dtype_from_name, self.dtypes)))

    def tree_flatten_with_keys(self) -> Any:
        """Returns the children with their names, for JAX."""
        names = tree_util.GetAttrKey("keys"), tree_util.GetAttrKey("values")
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
