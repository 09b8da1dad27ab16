"""Reductions by key, and by a function that the user gives."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from beamjax.errors import PlacementError, StructureError
from beamjax.numerics.reducers import BY_KEY, PRODUCT, REDUCERS, REDUCTIONS, Fold, Reducer
from beamjax.ops import sharding
from beamjax.ops.combining import bind_reduce
from beamjax.ops.folds import in_wide_dtype
from beamjax.ops.keyed import Keyed
from beamjax.ops.leaves import as_array, as_placed, name_of
from beamjax.ops.placements import resolve
from beamjax.ops.primitives import default_promotion, map_members, trace_body
from beamjax.ops.weights import refuse_weights, scope_of_operator, weights_for
from beamjax.storage.dtypes import dtype_name

# --- by key


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
    weights = weights_for(name, placement, n)
    of_key = _KeyedPlacement(keys, size, placement, n)
    reduction = REDUCTIONS[op]
    if isinstance(reduction, Fold) and size is not None:
        array = None if weights is None else weights.array
        return tree_util.tree_unflatten(tree, of_key.folded(reduction, values, array))
    if weights is None:
        return of_key.reduced(op, values, tree)
    if size is None and op not in ("sum", "prod"):
        raise StructureError(
            f"{name}: found op {op!r} without num_keys in a function with weights, expected 'sum' "
            "or 'prod'; or give num_keys."
        )
    reducer = REDUCERS[op]
    results = [reducer.result_dtype(value.dtype) for value in values]
    if reducer.adds and not reducer.divides:
        weighed = weights.weighed(reducer, values, results)
        return of_key.reduced(op, weighed.values, tree, weighed.dtypes)
    if reducer.divides:
        weighed = weights.weighed(reducer, values, results)
        both = tree_util.tree_structure([weighed.values, weighed.weights])
        sums = of_key.reduced("sum", [*weighed.values, *weighed.weights], both)
        return tree_util.tree_unflatten(tree, weighed.results(*sums))
    return replace(of_key, keys=weights.keys_of_present(keys)).reduced(op, values, tree)


@dataclass(frozen=True)
class _KeyedPlacement:
    """The members of a placement by key."""

    # A placed array of ints (n,).
    keys: jax.Array
    # None if it is not known.
    num_keys: int | None
    placement: str
    n: Any

    def reduced(
        self, op: str, values: Sequence[jax.Array], tree: Any, dtypes: Sequence[Any] | None = None
    ) -> Any:
        """Reduces a tree of members by key."""
        reduction = REDUCTIONS[op]
        results = dtypes or [reduction.result_dtype(value.dtype) for value in values]
        if self.num_keys is None:
            # A map makes the members results of a pass, which a run writes to files.
            keys, *values = self._mapped(op, lambda *member: list(member), values)
            names = [dtype_name(np.dtype(dtype)) for dtype in results]
            return Keyed(keys, tree_util.tree_unflatten(tree, values), op, names)
        reducer = REDUCERS[op]
        # Needed even if nothing is cast: the map marks its operands as placed.
        keys, ones, *values = self._mapped(
            op, lambda key, *member: [*self._row(key), *map(reducer.prepared, member)], values
        )
        with scope_of_operator():
            totals = [_segments(reducer)(value, keys, self.num_keys) for value in values]
            counts = jax.ops.segment_sum(ones, keys, self.num_keys) if reducer.divides else None
        if counts is not None:
            totals = [t / counts.reshape(-1, *[1] * (t.ndim - 1)).astype(t.dtype) for t in totals]
        totals = [total.astype(dtype) for total, dtype in zip(totals, results, strict=True)]
        return tree_util.tree_unflatten(tree, totals)

    def folded(self, fold: Fold, values: Sequence[jax.Array], weights: Any) -> list[jax.Array]:
        """Reduces members by a fold for each of `num_keys` keys, with a placed array of weights."""

        def prepare(key: jax.Array, *member: jax.Array) -> list[jax.Array]:
            key, weight = self._row(key)
            if weights is not None:
                weight, member = member[0], member[1:]
            cast = [in_wide_dtype(fold, x) for x in member]
            return [key, *cast, *(weight.astype(x.real.dtype) for x in cast)]

        assert fold.of_sums is not None
        placed = values if weights is None else [weights, *values]
        keys, *found = self._mapped(fold.name, prepare, placed)
        add = functools.partial(jax.ops.segment_sum, segment_ids=keys, num_segments=self.num_keys)
        of_member = lambda totals: totals.at[keys].get(mode="fill", fill_value=0)
        rows = zip(found[: len(values)], found[len(values) :], strict=True)
        with scope_of_operator(), default_promotion():
            states = [fold.of_sums(x, weight, add, of_member) for x, weight in rows]
            found = list(map(fold.finish, states))
        pairs = zip(found, values, strict=True)
        return [x.astype(fold.result_dtype(value.dtype)) for x, value in pairs]

    def _row(self, key: jax.Array) -> list[jax.Array]:
        """The key of a member as int32, `num_keys` if it is not in range, and 1."""
        size, wide = self.num_keys, key if key.dtype.itemsize >= 4 else key.astype(np.int32)
        assert size is not None
        key = jnp.where((wide >= 0) & (wide < size), wide, size).astype(np.int32)
        return [key, jnp.ones_like(key)]

    def _mapped(
        self, op: str, fn: Callable[..., list[jax.Array]], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        mesh = sharding.mesh_for("reduce_by_key", self.placement, self.n, None)
        found = map_members(
            fn, [], [self.keys, *values], placement=self.placement, n=self.n,
            name=f"reduce_by_key_{op}", mesh=mesh,
        )  # fmt: skip
        return [sharding.whole(array) for array in found]


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


# --- by a function


def reduce(
    combine: Callable[[Any, Any], Any],
    x: Any,
    identity: Any = None,
    *,
    placement: str | None = None,
) -> Any:
    """Reduces the members of a placement by an associative function, in their order.

    The function need not be commutative: it combines the values of two neighbouring ranges of
    members, the left one first. The calls form a fixed binary tree over the members. So shards
    merge in parallel, and a function that is associative only up to rounding gives the same bits on
    every runner.

    The derivative in forward mode is a reduction of the same kind. In reverse mode, the derivative
    by a member needs the reduction of the members before it and of those after it. So `run` gathers
    to the server the leaves on which the derivative depends: none if the function is linear.

    Args:
      combine: takes two trees like one member of `x` and returns such a tree. It may close over
        server values and over constants.
      x: a tree of placed arrays of shapes `(n, ...)`.
      identity: a tree like one member with which `combine` changes nothing, such as 0 for a sum. It
        is the result if there are no members. Otherwise it is combined once, from the left, with
        the reduction of all members, so any initial value can be given in its place. None means
        that there is no identity.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`, with leaves of shapes `leaf.shape[1:]` and the same dtypes.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, a leaf does not have n members, or
        there are no members and no identity.
      StructureError: a leaf is neither an array nor a scalar; the result of `combine`, or
        `identity`, differs from a member of `x` in structure, or in the shape or dtype of a leaf;
        `combine` has side effects or closes over a mutable reference; or it is called in a function
        with weights (`reweight`).
    """
    placement, n = resolve("reduce", placement)
    name = name_of(combine)
    refuse_weights("reduce", placement, n, f"{name} can't be applied a fractional number of times")
    mesh = sharding.mesh_for("reduce", placement, n, None)
    paths, tree = tree_util.tree_flatten_with_path(x)
    leaves = [as_placed("reduce", "x", path, leaf, placement, n) for path, leaf in paths]
    members = [
        sharding.member_aval(jax.typeof(leaf), placement).update(weak_type=False) for leaf in leaves
    ]

    # Messages of JAX then name the user's function, its file and its parameters.
    @functools.wraps(combine, assigned=(), updated=())
    def joined(left: Any, right: Any) -> list[jax.Array]:
        return _like_member(f"what {name} returns", combine(left, right), x, members)

    member = tree_util.tree_unflatten(tree, members)
    start = []
    if identity is not None:
        start = _like_member("identity", identity, x, members, cast=True)
    jaxpr, served = trace_body(joined, [member, member], f"reduce: the function {name}")
    if jaxpr.effects:
        effects = ", ".join(sorted(map(str, jaxpr.effects)))
        raise StructureError(
            f"reduce: the function {name} has side effects ({effects}), expected none: the order "
            "in which it is called differs from runner to runner."
        )
    for value in served:
        sharding.check_shared(value, placement, mesh)
    if not leaves:
        return tree_util.tree_unflatten(tree, [])
    if isinstance(n, int) and n == 0:
        if not start:
            raise PlacementError(
                f"reduce: found no members in placement {placement!r}, expected at least one, or "
                "the argument identity as the result without any."
            )
        return tree_util.tree_unflatten(tree, start)
    outs = bind_reduce(jaxpr, served, leaves, placement=placement, n=n, name=name)
    result = tree_util.tree_unflatten(tree, outs)
    if not start:
        return result
    return tree_util.tree_unflatten(tree, joined(tree_util.tree_unflatten(tree, start), result))


def _like_member(
    what: str, value: Any, x: Any, members: list[Any], cast: bool = False
) -> list[jax.Array]:
    """Checks that a tree is like one member of `x`, and returns its leaves."""
    paths, tree = tree_util.tree_flatten_with_path(value)
    expected: Any = tree_util.tree_structure(x)
    if tree != expected:
        raise StructureError(f"reduce: {what} is a tree {tree}, expected {expected}, as x is.")
    found = []
    for (path, leaf), member in zip(paths, members, strict=True):
        if cast and isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf, member.dtype)
        array = as_array("reduce", what, path, leaf)
        if (array.shape, array.dtype) != (member.shape, member.dtype):
            raise StructureError(
                f"reduce: {what}{tree_util.keystr(path)} has type "
                f"{array.dtype}{list(array.shape)}, expected {member.dtype}{list(member.shape)}, "
                f"as the members of x{tree_util.keystr(path)} have."
            )
        is_key = jax.dtypes.issubdtype(member.dtype, jax.dtypes.extended)
        found.append(array if is_key else jax.lax.convert_element_type(array, member.dtype))
    return found
