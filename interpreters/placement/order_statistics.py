"""Rewrites the selection of sorted members, such as `jnp.median(x, 0)`, to passes that count.

A value is found digit by digit, as in a radix sort: each pass counts, by their next digit, the
members whose higher digits are those of the value. The counts are exact, so the result is the
member that sorting would select, for any number of members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax._text import human_bytes
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite, runs_on_server
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.rules.sharding_rules import shape_of

MIN_BYTES = 1 << 20
"""Bytes of all members from which passes count them. It takes less time to gather and sort smaller
arrays."""
MOST_RANKS = 16
"""Largest number of selected members. Each of them is compared with all members, so the work grows
with it."""
WIDE_COUNTS, MOST_COUNTS = 1 << 18, 1 << 20
"""Largest number of counts (int32) that a shard sends in a pass with digits of 16 bits, and in any
pass. Digits of 16 bits halve the number of passes, but need 256 times as many counts."""


def order_statistics(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites an equation that selects few of the sorted members."""
    sort = rewriter.maker(eqn.inputs[0], "sort") if eqn.inputs else None
    if sort is None or not rewriter.rewrites.moves or len(sort.inputs) != 1:
        return None
    if not runs_on_server(rewriter.program, sort):
        return None
    along, axis = rewriter.program.place(sort.inputs[0]), sort.params["dimension"]
    if along is None or along.axis != axis or not _is_possible(sort):
        return None
    function = _picked(eqn, sort, axis)
    if function is None:
        return None
    aval = aval_of(sort.inputs[0])
    if math.prod(aval.shape) * aval.dtype.itemsize < MIN_BYTES:
        rewriter.program.reasons[sort] = (
            f"sort mixes members, and it takes less time to gather and sort less than "
            f"{human_bytes(MIN_BYTES)} than to count members in passes"
        )
        return None
    return Rewrite(function, [*sort.inputs, *eqn.inputs[1:]])


def _is_possible(eqn: Eqn) -> bool:
    aval = aval_of(eqn.inputs[0])
    if any(map(is_unknown, aval.shape)) or not math.prod(aval.shape) > 0:
        return False
    numbers = jnp.issubdtype(aval.dtype, np.integer) or jnp.issubdtype(aval.dtype, np.floating)
    return numbers and jax.dtypes.itemsize_bits(aval.dtype) in (16, 32, 64)


def _picked(user: Eqn, sort: Eqn, axis: int) -> Callable[..., list[Any]] | None:
    """A function of the members, and of the other operands of `user`, with the results of `user`.

    None if `user` does not select sorted members, or selects too many.
    """
    shape, out = shape_of(sort.outputs[0]), shape_of(user.outputs[0])
    n, columns, others = shape[axis], math.prod(shape) // shape[axis], list(shape)
    del others[axis]
    many = math.prod(out) > MOST_RANKS * columns or math.prod(out) * 2**8 > MOST_COUNTS
    if user.inputs[0] is not sort.outputs[0] or many:
        return None
    if user.primitive.name == "gather":
        numbers = user.params["dimension_numbers"]
        batch = [k for k in range(len(out)) if k not in numbers.offset_dims]
        whole = tuple(1 if k == axis else d for k, d in enumerate(shape))
        rows = (axis,) == numbers.start_index_map == numbers.collapsed_slice_dims
        fills = user.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        if not rows or tuple(user.params["slice_sizes"]) != whole or fills:
            return None

        def from_gather(x: Any, indices: Any) -> list[Any]:
            found = _statistics(jnp.moveaxis(x, axis, 0), jnp.clip(indices.reshape(-1), 0, n - 1))
            found = found.reshape(*indices.shape[:-1], *others)
            return [jnp.moveaxis(found, range(len(batch)), batch)]

        return from_gather
    if user.primitive.name != "slice" or math.prod(out) != out[axis] * columns:
        return None
    bounds, strides = ("start_indices", "limit_indices"), user.params["strides"]
    start, limit = (user.params[key][axis] for key in bounds)
    ranks = range(start, limit, strides[axis] if strides else 1)

    def from_slice(x: Any) -> list[Any]:
        found = _statistics(jnp.moveaxis(x, axis, 0), jnp.asarray(ranks, "int32"))
        return [jnp.moveaxis(found, 0, axis)]

    return from_slice


def _statistics(x: jax.Array, ranks: jax.Array) -> jax.Array:
    """`jnp.sort(x, 0)[ranks]`, by passes over x.

    Args:
      x: (n, ...), the members.
      ranks: ints (k,) in [0, n).

    Returns:
      (k, ...), values of x; a NaN is the one of JAX, and a zero is positive.
    """
    keys = _keys(x).reshape(x.shape[0], -1)
    width, count = 8 * keys.dtype.itemsize, len(ranks) * keys.shape[1]
    digit = 16 if count * 2**16 <= WIDE_COUNTS else 8
    # The digits of the values found so far, and the ranks among the members that have them.
    found = jnp.zeros((len(ranks), keys.shape[1]), keys.dtype)
    left = jnp.broadcast_to(ranks.astype(np.int32)[:, None], found.shape)
    # Each value has 2**digit counts of its own; this is the index of its first one.
    table = jnp.arange(count, dtype=np.int32).reshape(found.shape) << digit
    for shift in range(width - digit, -1, -digit):
        rest = keys >> keys.dtype.type(shift)
        place = (rest & keys.dtype.type(2**digit - 1)).astype(np.int32)[:, None] + table[None]
        alike = jnp.ones(place.shape, np.int32)
        if shift + digit < width:  # There are higher digits, which must agree.
            alike = ((rest >> keys.dtype.type(digit))[:, None] == found[None]).astype(np.int32)
        zeros = jnp.zeros(count << digit, np.int32)
        counts = zeros.at[place].add(alike, mode="promise_in_bounds")
        upto = jnp.cumsum(counts.reshape(*found.shape, -1), axis=-1)
        chosen = jnp.sum(upto <= left[..., None], axis=-1, dtype=np.int32)
        before = jnp.take_along_axis(upto, jnp.maximum(chosen - 1, 0)[..., None], -1)[..., 0]
        left = left - jnp.where(chosen > 0, before, 0)
        # In the first pass `found` is 0, and a shift by the whole width would be undefined.
        shifted = found << keys.dtype.type(digit) if shift + digit < width else found
        found = shifted | chosen.astype(keys.dtype)
    return _values(found, x.dtype).reshape(len(ranks), *x.shape[1:])


def _keys(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order in which `lax.sort` puts x: NaN is last."""
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    if jnp.issubdtype(x.dtype, np.unsignedinteger):
        return x
    top = bits.type(1 << (8 * bits.itemsize - 1))  # The sign bit.
    if jnp.issubdtype(x.dtype, np.integer):
        return lax.bitcast_convert_type(x, bits) ^ top
    x = jnp.where(x == 0, jnp.zeros((), x.dtype), x)
    x = jnp.where(x != x, jnp.asarray(np.nan, x.dtype), x)
    raw = lax.bitcast_convert_type(x, bits)
    return jnp.where(raw >= top, ~raw, raw | top)


def _values(keys: jax.Array, dtype: Any) -> jax.Array:
    """The values of these keys; see `_keys`."""
    if jnp.issubdtype(dtype, np.unsignedinteger):
        return keys
    top = keys.dtype.type(1 << (8 * keys.dtype.itemsize - 1))
    if jnp.issubdtype(dtype, np.integer):
        return lax.bitcast_convert_type(keys ^ top, dtype)
    return lax.bitcast_convert_type(jnp.where(keys >= top, keys ^ top, ~keys), dtype)
