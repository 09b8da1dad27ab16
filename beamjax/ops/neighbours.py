"""`neighbours`: gives each member the members before and after it.

Two primitives of arrays of members compute it and its derivatives. Both are linear, and each is the
transpose of the other. Members beyond the ends are zero, or those at the other end.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from beamjax import _compat
from beamjax._compat import ad, batching
from beamjax.errors import StructureError
from beamjax.ops import primitives, sharding
from beamjax.ops.leaves import as_array, as_placed
from beamjax.ops.placements import Size, resolve
from beamjax.ops.sharding import AnyMesh
from beamjax.ops.weights import refuse_weights

# With k = before + 1 + after,
#
# - `bj_neighbours` maps x (n, ...) to y (n, k, ...): `y[i, j] = x[i - before + j]`;
# - `bj_sum_of_neighbours` maps y (n, k, ...) to x (n, ...): `x[i] = sum_j y[i + before - j, j]`.

neighbours_p = primitives.operator_primitive("neighbours")
sum_of_neighbours_p = primitives.operator_primitive("sum_of_neighbours")

MAX_SLICES = 16
"""Largest number of slices of which windows are made. XLA fuses slices with what reads a window,
but takes long to compile many."""


def neighbours(
    x: Any,
    before: int = 0,
    after: int = 0,
    fill: Any = 0,
    wrap: bool = False,
    *,
    placement: str | None = None,
) -> Any:
    """Gives each member of a placement the members before and after it, in order.

    On a runner, shards exchange the members at their borders, and no members are gathered.
    Differences, lags, moving averages and convolutions are one line on top of it.

    Args:
      x: a tree of placed arrays of shapes `(n, ...)`.
      before: how many members before a member to take, an int >= 0.
      after: how many members after a member to take, an int >= 0.
      fill: the value of members before the first and after the last one: a scalar or an array that
        broadcasts against the members of each leaf. It becomes of the dtype of the leaf. Leaves
        with typed keys need a key, if they need a value.
      wrap: whether to continue at the other end instead, as `jnp.roll` does.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`, with leaves of shapes `(n, before + 1 + after, ...)` and the same dtypes.
      Member i of a leaf is the stack of its members `i - before` to `i + after`.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf does not have n members.
      StructureError: `before` or `after` is not an int >= 0; a leaf is not an array; `fill` does
        not fit a leaf, or is given together with `wrap`; or it is called in a function with weights
        (`reweight`).
      StagingError: from a run: `before` or `after` is larger than a shard.

    Example:
      The change from the day before::

        >>> changes = bj.program(days="x")(
        ...     lambda x: bj.map_fn(lambda v: v[1] - v[0], bj.neighbours(x, before=1, wrap=True))
        ... )
        >>> changes(jnp.array([1.0, 4.0, 9.0])).tolist()
        [-8.0, 3.0, 5.0]
    """
    op = "neighbours"
    placement, n = resolve(op, placement)
    before, after = _count("before", before), _count("after", after)
    is_default = isinstance(fill, int) and fill == 0
    if wrap and not is_default:
        raise StructureError(
            f"{op}: found both wrap=True and fill={fill!r:.80}, expected one of them: with wrap, "
            "no members are missing."
        )
    leaves, tree = tree_util.tree_flatten_with_path(x)
    values = [as_placed(op, "x", path, leaf, placement, n) for path, leaf in leaves]
    refuse_weights(
        op, placement, n,
        "a weight says how often a member counts in reductions, not which members are beside it; "
        "call neighbours outside of that function, and pass it the result",
    )  # fmt: skip
    if before + after == 0:
        return tree_util.tree_unflatten(tree, [jnp.expand_dims(value, 1) for value in values])
    fills = [
        None if wrap else _fill(path, value, fill)
        for (path, _), value in zip(leaves, values, strict=True)
    ]
    mesh = sharding.mesh_for(op, placement, n, None)
    around = _Around(placement, n, before, after, bool(wrap), mesh)
    results = [around.of(value, end) for value, end in zip(values, fills, strict=True)]
    return tree_util.tree_unflatten(tree, results)


def _count(name: str, value: Any) -> int:
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < 0:
        raise StructureError(f"neighbours: found {name}={value!r:.80}, expected an int >= 0.")
    return count


def _fill(path: Any, leaf: jax.Array, fill: Any) -> jax.Array | None:
    """The value of missing members of a leaf, in its dtype; None for zeros."""
    is_number = isinstance(fill, bool | int | float | complex)  # As NumPy has it, of any size.
    array: Any = np.asarray(fill) if is_number else as_array("neighbours", "fill", (), fill)
    member = leaf.shape[1:]
    where = f"neighbours: found fill={fill!r:.80} of dtype {array.dtype} and shape {array.shape}"
    what = f"x{tree_util.keystr(path)}, whose members have dtype {leaf.dtype} and shape {member}"
    if not _holds(leaf.dtype, array, fill):
        raise StructureError(
            f"{where} for {what}; expected a value that this dtype holds, or wrap=True."
        )
    if not _broadcasts(array.shape, member):
        raise StructureError(f"{where} for {what}; expected a shape that broadcasts to it.")
    if isinstance(fill, int) and fill == 0:
        return None
    same = array.dtype == leaf.dtype
    return jnp.broadcast_to(array if same else array.astype(leaf.dtype), member)


def _holds(dtype: Any, array: Any, fill: Any) -> bool:
    """Whether a dtype has the value `fill`, which `array` holds, but for rounding."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return array.dtype == dtype
    if isinstance(fill, int) and dtype == np.bool_:
        return fill in (0, 1)
    if isinstance(fill, int) and jnp.issubdtype(dtype, np.integer):
        return int(jnp.iinfo(dtype).min) <= fill <= int(jnp.iinfo(dtype).max)
    kinds = np.bool_, np.integer, np.floating, np.complexfloating
    kind = lambda dtype: [jnp.issubdtype(dtype, kind) for kind in kinds]
    # Later kinds hold the values of earlier ones; a key is of no kind.
    return any(kind(array.dtype)) and kind(array.dtype) >= kind(dtype)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


class _Around(NamedTuple):
    """The neighbours of the n members of a placement, which lie along `mesh`; see `neighbours`."""

    placement: str
    n: Size
    before: int
    after: int
    wrap: bool
    mesh: AnyMesh | None

    def of(self, x: jax.Array, fill: jax.Array | None) -> jax.Array:
        """The neighbours of the members of one array; without `fill`, zeros beyond the ends."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
            rows = wrap(self.of(jax.random.key_data(x), None))
        elif jnp.issubdtype(x.dtype, np.complexfloating):
            rows = jax.lax.complex(self._bind(jnp.real(x)), self._bind(jnp.imag(x)))
        else:
            rows = self._bind(x)
        return rows if fill is None else self._filled(rows, fill)

    def _bind(self, x: jax.Array) -> jax.Array:
        return neighbours_p.bind(
            x, placement=self.placement, before=self.before, after=self.after, wrap=self.wrap,
            mesh=self.mesh,
        )  # fmt: skip

    def _filled(self, rows: jax.Array, fill: jax.Array) -> jax.Array:
        """The neighbours with another value beyond the ends than zero."""
        size = primitives.size_p.bind(placement=self.placement, n=self.n)

        def body(fill: jax.Array, size: jax.Array, index: jax.Array, rows: jax.Array) -> Any:
            member = index + jnp.arange(-self.before, self.after + 1, dtype=np.int32)
            outside = ((member < 0) | (member >= size)).reshape(-1, *(1 for _ in fill.shape))
            return [jnp.where(outside, fill[None], rows)]

        indices = jnp.arange(self.n, dtype=np.int32)
        (filled,) = primitives.map_members(
            body, [fill, size], [indices, rows],
            placement=self.placement, n=self.n, name="fill", mesh=self.mesh,
        )  # fmt: skip
        return filled


# --- the primitives


def windows(x: Any, before: int, after: int, wrap: bool) -> jax.Array:
    """What `bj_neighbours` computes, for an array of all members."""
    return windows_of(_extended(x, before, after, wrap), x.shape[0], before + 1 + after)


def sums(y: Any, before: int, after: int, wrap: bool) -> jax.Array:
    """What `bj_sum_of_neighbours` computes, for an array of all members."""
    return sums_of(_extended(y, after, before, wrap), y.shape[0], before + 1 + after)


def _extended(x: Any, before: int, after: int, wrap: bool) -> jax.Array:
    """All members, with zeros or those at the other end before and after them."""
    n = x.shape[0]
    if wrap and not _is_empty(n):
        index = jnp.arange(-before, n + after, dtype=np.int32) % jnp.asarray(n, np.int32)
        return jnp.take(x, index, axis=0, mode="clip")
    padding = [(before, after, 0), *[(0, 0, 0)] * (x.ndim - 1)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), padding)


def windows_of(rows: Any, count: Any, width: int) -> jax.Array:
    """(count, width, ...): the windows of consecutive rows that start at the first `count` rows."""
    if width <= MAX_SLICES:
        slices = [jax.lax.slice_in_dim(rows, j, j + count) for j in range(width)]
        return jnp.stack(slices, axis=1)
    index = jnp.arange(count, dtype=np.int32)[:, None] + jnp.arange(width, dtype=np.int32)[None]
    return jnp.take(rows, index, axis=0, mode="clip")


def sums_of(rows: Any, count: Any, width: int) -> jax.Array:
    """(count, ...): the transpose of `windows_of` for rows (count + width - 1, width, ...)."""
    # out[i] = sum_j rows[i + width - 1 - j, j]. Floats of 16 bits are added up in float32.
    narrow = jnp.issubdtype(rows.dtype, np.inexact) and rows.dtype.itemsize < 4
    total = jnp.zeros((count, *rows.shape[2:]), np.float32 if narrow else rows.dtype)

    def add(j: Any, total: Any) -> Any:
        column = jax.lax.dynamic_index_in_dim(rows, j, axis=1, keepdims=False)
        part = jax.lax.dynamic_slice_in_dim(column, width - 1 - j, count)
        return total + part.astype(total.dtype)

    if width <= MAX_SLICES:
        for j in range(width):
            part = jax.lax.slice_in_dim(rows[:, j], width - 1 - j, width - 1 - j + count)
            total = total + part.astype(total.dtype)
    else:
        total = jax.lax.fori_loop(0, width, add, total)
    return total.astype(rows.dtype)


def _is_empty(n: Any) -> bool:
    return isinstance(n, int) and n == 0


def _define(primitive: _compat.Primitive, function: Callable[..., jax.Array], removes: int) -> None:
    """Defines a primitive; the members of its operand lose `removes` axes for its results."""

    def abstract_eval(
        x: Any, *, placement: str, before: int, after: int, wrap: bool, mesh: AnyMesh | None
    ) -> Any:
        member = sharding.member_aval(x, placement)
        spec = (*(() if removes else (None,)), *member.sharding.spec[removes:])
        shape = (*(() if removes else (before + 1 + after,)), *member.shape[removes:])
        layout = member.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
        stack = member.update(shape=shape, sharding=layout, weak_type=False)
        return sharding.placed_aval(stack, placement, x.shape[0], mesh)

    def of_arrays(
        x: jax.Array, *, placement: str, before: int, after: int, wrap: bool, mesh: AnyMesh | None
    ) -> jax.Array:
        return sharding.lay_out(function(sharding.whole(x), before, after, wrap), placement, mesh)

    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(of_arrays)
    _compat.register_lowering(primitive, of_arrays)


_define(neighbours_p, windows, 0)
_define(sum_of_neighbours_p, sums, 1)


# --- derivatives and batches


def _define_derivatives(primitive: _compat.Primitive, other: _compat.Primitive, axes: int) -> None:
    """Defines a transpose, and batches whose axis follows the first `axes` axes of an operand."""

    def transpose(ct: jax.Array, x: Any, **params: Any) -> list[Any]:
        mesh = sharding.active_mesh(params["placement"])
        result = other.bind(jnp.asarray(ct, x.aval.dtype), **{**params, "mesh": mesh})
        return [sharding.lay_out_like(result, x.aval)]

    def batch(args: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
        (x,), (dim,) = args, dims
        return primitive.bind(jnp.moveaxis(x, dim, axes), **params), 3 - axes

    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch


_define_derivatives(neighbours_p, sum_of_neighbours_p, 1)
_define_derivatives(sum_of_neighbours_p, neighbours_p, 2)
