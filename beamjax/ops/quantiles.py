"""Quantiles of members, of all or by key, by passes that count.

A value is found digit by digit, as in a radix sort: each pass counts, for each value that is looked
for, the members by their next digit whose higher digits are those of the value. The counts are
exact, so the value is the member that sorting would select.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util

from beamjax.errors import StructureError
from beamjax.ops import sharding
from beamjax.ops.keyed import MembersByKey, check_keys, check_num_keys
from beamjax.ops.leaves import as_placed
from beamjax.ops.placements import resolve
from beamjax.ops.weights import refuse_weights

# A shard sends a table of counts, whose size depends on neither the members nor the shards.
#
# For example, the median of 0x12, 0x15, 0x31, 0x32, 0x38, of rank 2 from 0, with digits of 4 bits.
# The first pass counts 2 members with the digit 1 and 3 with the digit 3. So the member of rank 2
# has the digit 3, and the rank 2 - 2 = 0 among those. The second pass counts only members that
# begin with 3: one each with 1, 2 and 8. The one of rank 0 ends with 1: the median is 0x31.

MAX_COUNTS = 1 << 20
"""Largest number of counts (int32) of a pass, if digits of `LEAST_BITS` allow it. Twice as many
seldom save a pass, and merging the tables of shards would take as long as counting."""
LEAST_BITS = 4


def quantile(
    x: Any,
    q: Any,
    *,
    keys: Any = None,
    num_keys: int | None = None,
    placement: str | None = None,
) -> Any:
    """Exact quantiles of the members, as `jnp.quantile(x, q, axis=0)`, or of those of each key.

        bj.quantile(x, 0.5)  # the median
        bj.quantile(x, [0.25, 0.5, 0.75], keys=customer, num_keys=1000)

    Each quantile is interpolated between the two members next to it. Passes over the members count
    them by their digits, so no member leaves its worker. The number of passes is that of the bits
    of the dtype over the bits of a digit. One quantile of one column takes 1 pass for 8 and 16
    bits, 2 for 32 and 4 for 64; by 1,000 keys, it takes 2, 4 and 7. Digits are as wide as a table
    of 2**20 counts allows: a count for each key, column, value and digit. `explain` lists the
    passes.

    If a column has NaN, its quantile is NaN. Without members, that of a key or of all is NaN. Ranks
    are exact for any number of members; `jnp.quantile` computes them in the dtype of `q`.

    The derivative by the members is that of the two members that a quantile is interpolated
    between. Members that are equal share it equally; JAX gives it to the one that its sort puts in
    that place. The derivative by `q` is the difference of the two members, times their number less
    one. Each derivative takes one more pass.

    Args:
      x: a tree of placed arrays of real numbers or bools, of shapes `(n, ...)`.
      q: a number between 0 and 1, or an array `(m,)` of them; others count as 0 or 1.
      keys: a placed array of ints `(n,)`: the key of each member; None for the quantiles of all.
        Members whose key is not in `[0, num_keys)` are left out.
      num_keys: the number of keys, an int >= 1; only with `keys`.
      placement: the placement; None if the program has only one.

    Returns:
      A tree like `x`. Its leaves have the shapes `(*q.shape, *leaf.shape[1:])`, or with keys
      `(num_keys, *q.shape, *leaf.shape[1:])`, and the dtype that `jnp.quantile` gives.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf or the keys do not have n
        members.
      StructureError: a leaf or `q` does not have real numbers, `q` has more than one axis, the keys
        are not ints `(n,)`, only one of `keys` and `num_keys` is given, or it is called in a
        function with weights (`reweight`), for which there are several definitions of a quantile.
    """
    placement, n = resolve("quantile", placement)
    refuse_weights(
        "quantile", placement, n, "there are several definitions of a quantile with weights"
    )
    if (keys is None) != (num_keys is None):
        raise StructureError(
            f"quantile: found {'num_keys' if keys is None else 'keys'} alone, expected both keys "
            "and num_keys, or neither: the number of keys is a part of the shape of the result."
        )
    size = 1 if num_keys is None else check_num_keys("quantile", num_keys)
    if keys is not None:
        keys = check_keys("quantile", as_placed("quantile", "keys", (), keys, placement, n), True)
    quantiles = _as_quantiles(q)
    mesh = sharding.mesh_for("quantile", placement, n, None)
    leaves, tree = tree_util.tree_flatten_with_path(x)
    results = []
    for path, leaf in leaves:
        value = as_placed("quantile", "x", path, leaf, placement, n)
        _check_real(f"x{tree_util.keystr(path)}", value.dtype)
        result = _quantiles(MembersByKey(keys, size, placement, n, mesh), value, quantiles)
        results.append(result if keys is not None else result[0])
    return tree_util.tree_unflatten(tree, results)


def _check_real(where: str, dtype: Any) -> None:
    real = dtype == np.bool_ or jnp.issubdtype(dtype, np.integer)
    if not real and not jnp.issubdtype(dtype, np.floating):
        raise StructureError(
            f"quantile: {where} has dtype {dtype}, expected real numbers or bools, which have an "
            "order."
        )


# --- which members: ranks without rounding


@dataclass(frozen=True)
class _Quantiles:
    """Numbers from 0 to 1 as fixed-point numbers of 64 bits, so that ranks are exact."""

    # () or (m,).
    shape: tuple[int, ...]
    # The numbers as a float array of this shape, if JAX traces them; else None.
    traced: jax.Array | None
    # uint32 (m,): the first and the next 32 bits behind the point.
    high: Any
    low: Any
    # bool (m,): whether the number is 1 (or more), which has no such bits.
    is_one: Any
    # bool (m,).
    is_nan: Any


def _as_quantiles(q: Any) -> _Quantiles:
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in tree_util.tree_leaves(q))
    numbers = jnp.asarray(q) if is_traced else np.asarray(q)
    _check_real("q", numbers.dtype)
    if numbers.ndim > 1:
        raise StructureError(
            f"quantile: found q of shape {numbers.shape}, expected a number or an array (m,)."
        )
    if is_traced:
        wide = jnp.asarray(numbers, _wide(numbers.dtype)).reshape(-1)
        part = jnp.clip(jnp.nan_to_num(wide, nan=0.0), 0, 1)
        is_one = part >= 1
        part = jnp.where(is_one, 0, part) * 2.0**32
        high = jnp.floor(part)
        low = jnp.floor((part - high) * 2.0**32)
        words = high.astype(np.uint32), low.astype(np.uint32)
        return _Quantiles(
            numbers.shape, wide.reshape(numbers.shape), *words, is_one, jnp.isnan(wide)
        )
    # Numbers of the user have more bits than the float32 that JAX makes of them.
    exact = numbers.astype(np.float64).reshape(-1)
    is_nan = np.isnan(exact)
    clipped = np.clip(np.where(is_nan, 0, exact), 0, 1)
    bits = [int(Fraction(number) * 2**64) if number < 1 else 0 for number in clipped.tolist()]
    upper, lower = (np.array([(b >> k) & 0xFFFFFFFF for b in bits], np.uint32) for k in (32, 0))
    return _Quantiles(numbers.shape, None, upper, lower, clipped >= 1, is_nan)


def _ranks(q: _Quantiles, counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The ranks (k, m) of the members beside each quantile, and how far it is between them."""
    # The rank is q * (count - 1) for each of k counts and m quantiles. It is the product of a
    # fixed-point number of 64 bits and one of 32, by words of 32 bits, since JAX has no wider ints
    # by default. The bits behind the point say how far the quantile is between two members, as
    # uint32.
    last = jnp.maximum(counts - 1, 0).astype(np.uint32)[:, None]
    whole, fraction = _product(jnp.asarray(q.high)[None], last)
    more, _ = _product(jnp.asarray(q.low)[None], last)
    total = fraction + more
    whole = whole + (total < fraction).astype(np.uint32)
    # 0.3 * 10 is 3 for every user, although the float 0.3 is a little less than 3 / 10.
    near = np.uint32(2**32 - 4)
    whole = whole + (total >= near).astype(np.uint32)
    total = jnp.where((total >= near) | (total < 4), np.uint32(0), total)
    is_one = jnp.asarray(q.is_one)[None]
    lower = jnp.where(is_one, last, whole)
    total = jnp.where(is_one, np.uint32(0), total)
    upper = lower + (total > 0).astype(np.uint32)
    return lower.astype(np.int32), upper.astype(np.int32), total


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of the product of two uint32."""
    # By halves of 16 bits, as in multiplication on paper.
    low, half = np.uint32(0xFFFF), np.uint32(16)
    parts = [(a >> half, a & low), (b >> half, b & low)]
    (ah, al), (bh, bl) = parts
    middle = ((al * bl) >> half) + ((al * bh) & low) + ((ah * bl) & low)
    high = ah * bh + ((al * bh) >> half) + ((ah * bl) >> half) + (middle >> half)
    return high, a * b


# --- the passes


def _quantiles(members: MembersByKey, x: jax.Array, q: _Quantiles) -> jax.Array:
    """The quantiles of one leaf, (num_keys, *q.shape, *x.shape[1:])."""
    shape = members.num_keys, *q.shape, *x.shape[1:]
    is_float = jnp.issubdtype(x.dtype, np.floating)
    result = x.dtype if is_float else jax.dtypes.canonicalize_dtype(float)
    if 0 in shape:
        return jnp.zeros(shape, result)
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(_ordered(x.dtype))
    counts, is_nan, values, weight = _selected(members, lax.stop_gradient(flat), q)
    wide = _wide(result)
    if is_float:
        values = _with_derivative(members, flat, values)
    lower, upper = jnp.split(values.astype(wide), 2, axis=1)
    weight = weight.astype(wide) * 2.0**-32
    if q.traced is not None:
        last = jnp.maximum(counts - 1, 0).astype(wide)[:, None]
        weight = _with_rate(weight, q.traced.reshape(1, -1).astype(wide), last)
    weight = weight[..., None]
    # A weight of 0 is that of one member, which may be infinite; equal values are not rounded.
    between = (1 - weight) * lower + weight * upper
    value = jnp.where(lower == upper, lower, between)
    nothing = (counts == 0)[:, None, None] | is_nan[:, None]
    nothing = nothing | jnp.asarray(q.is_nan)[None, :, None]
    return jnp.where(nothing, jnp.asarray(np.nan, wide), value).astype(result).reshape(shape)


def _selected(
    members: MembersByKey, x: jax.Array, q: _Quantiles
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The members that quantiles lie between, by passes over the members."""
    # `x` is (n, columns). The results are the number of members of each key (num_keys,); whether a
    # column has NaN (num_keys, columns); the m lower and then the m upper values (num_keys, 2 * m,
    # columns); and how far quantiles lie between them, uint32 (num_keys, m).
    size, columns, bits = members.num_keys, x.shape[1], 8 * x.dtype.itemsize
    digits = _digits(bits, size * columns, 2 * len(q.high))
    codes = jnp.zeros((size, 1, columns), f"uint{bits}")
    shift = bits
    for number, digit in enumerate(digits):
        shift -= digit
        table = _counted(members, x, codes, _Digit(number, len(digits), shift, digit))
        if number == 0:
            # The first table counts all members, so it has the ranks, and one entry more, for NaN.
            counts, is_nan = table[:, 0, 0].sum(axis=-1), table[:, 0, :, -1] > 0
            lower, upper, weight = _ranks(q, counts)
            left = jnp.concatenate([lower, upper], axis=1)[..., None]
            left = jnp.broadcast_to(left, (*left.shape[:2], columns))
            table, codes = table[..., :-1], jnp.zeros(left.shape, codes.dtype)
            table = jnp.broadcast_to(table, (size, left.shape[1], *table.shape[2:]))
        else:
            # Values with the same higher digits share the counts of the first of them.
            same = codes[:, :, None] == codes[:, None]
            table = jnp.take_along_axis(table, jnp.argmax(same, axis=2)[..., None], axis=1)
        chosen, left = _next_digit(table, left)
        higher = codes << codes.dtype.type(digit) if number else codes
        codes = higher | chosen.astype(codes.dtype)
    return counts, is_nan, _values(codes, x.dtype), weight


def _next_digit(table: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The digits of the members with the ranks `left`, and their ranks among those with it."""
    upto = jnp.cumsum(table, axis=-1)
    chosen = jnp.sum(upto <= left[..., None], axis=-1, dtype=np.int32)
    chosen = jnp.minimum(chosen, table.shape[-1] - 1)  # A key without members has no digit.
    before = jnp.take_along_axis(upto, jnp.maximum(chosen - 1, 0)[..., None], -1)[..., 0]
    return chosen, left - jnp.where(chosen > 0, before, 0)


@dataclass(frozen=True)
class _Digit:
    """The digit that a pass counts."""

    # The number of the pass, of the `total`.
    number: int
    total: int
    # The number of bits below the digit, and of its own.
    shift: int
    bits: int


def _counted(members: MembersByKey, x: jax.Array, codes: jax.Array, digit: _Digit) -> jax.Array:
    """One pass: counts the members by a digit."""
    # `codes` (num_keys, values, columns) are the higher digits of the values that are looked for,
    # and the result is int32 (num_keys, values, columns, 2**bits). In the first pass, one more
    # entry counts NaN.
    size, values, columns = codes.shape
    entries = (1 << digit.bits) + (digit.number == 0)
    cells = size * values * columns

    def place(key: Any, codes: Any, x: Any) -> list[Any]:
        rest = _codes(x) >> np.dtype(codes.dtype).type(digit.shift)
        entry = (rest & ((1 << digit.bits) - 1)).astype(np.int32)
        is_nan = x != x
        if digit.number == 0:
            slot, counts = jnp.int32(0), key < size
            entry = jnp.where(is_nan, entries - 1, entry)
        else:
            # Values that are alike so far share the counts in the slot of the first of them.
            alike = codes[key] == (rest >> digit.bits)[None]
            slot = jnp.argmax(alike, axis=0).astype(np.int32)
            counts = jnp.any(alike, axis=0) & ~is_nan & (key < size)
        cell = (key * values + slot) * columns + np.arange(columns, dtype=np.int32)
        # An index behind the table drops the member.
        index = jnp.where(counts, cell * entries + entry, cells * entries)
        return [index, jnp.ones_like(index)]

    name = f"quantile_pass_{digit.number + 1}_of_{digit.total}"
    index, ones = members.mapped(name, place, [codes], [x])
    table = jnp.zeros(cells * entries, np.int32).at[index].add(ones, mode="drop")
    return table.reshape(size, values, columns, entries)


def _digits(bits: int, cells: int, values: int) -> list[int]:
    """The bits of the digit of each pass, the highest digit first."""

    # `cells` are the keys times the columns, and `values` the values that are looked for in each.
    # The first pass has one table for all of them, since no digits are known, so its digit may be
    # wider.
    def most(tables: int) -> int:
        return min(max((MAX_COUNTS // tables).bit_length() - 1, LEAST_BITS), 16, bits)

    first, later = most(cells), most(cells * values)
    passes = 1 + max(-(-(bits - first) // later), 0)
    # As many bits for each as possible without another pass, spread evenly.
    first = max(bits - (passes - 1) * later, -(-bits // passes))
    others = [(bits - first + i) // (passes - 1) for i in range(passes - 1)]
    return [first, *reversed(others)]


# --- values as integers


def _ordered(dtype: Any) -> np.dtype:
    """The dtype in which values are ordered, of 8, 16, 32 or 64 bits."""
    if dtype == np.bool_:
        return np.dtype(np.uint8)
    if jnp.issubdtype(dtype, np.floating):
        return np.dtype(dtype if jnp.finfo(dtype).bits >= 16 else np.float32)
    if jnp.iinfo(dtype).bits >= 8:
        return np.dtype(dtype)
    return np.dtype(np.uint8 if jnp.issubdtype(dtype, np.unsignedinteger) else np.int8)


def _wide(dtype: Any) -> np.dtype:
    """The dtype in which quantiles and derivatives of a dtype are computed."""
    return np.dtype(dtype if dtype == np.float64 else np.float32)


def _codes(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of numbers; -0 and 0 are one."""
    if jnp.issubdtype(x.dtype, np.unsignedinteger):
        return x
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    top = bits.type(1 << (8 * bits.itemsize - 1))  # The sign bit.
    if jnp.issubdtype(x.dtype, np.integer):
        return lax.bitcast_convert_type(x, bits) ^ top
    # The bits of a float are in its order if it is positive, and in the reverse order if not.
    raw = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), bits)
    return jnp.where(raw >= top, ~raw, raw | top)


def _values(codes: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `_codes`."""
    if jnp.issubdtype(dtype, np.unsignedinteger):
        return codes
    top = codes.dtype.type(1 << (8 * codes.dtype.itemsize - 1))
    if jnp.issubdtype(dtype, np.integer):
        return lax.bitcast_convert_type(codes ^ top, dtype)
    return lax.bitcast_convert_type(jnp.where(codes >= top, codes ^ top, ~codes), dtype)


# --- derivatives


def _with_derivative(members: MembersByKey, x: jax.Array, values: jax.Array) -> jax.Array:
    """`values`, (num_keys, values, columns), with the derivatives of the members equal to them."""

    @jax.custom_jvp
    def selected(x: jax.Array, keys: jax.Array | None, values: jax.Array) -> jax.Array:
        return values

    @selected.defjvp
    def _selected_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        x, keys, values = primals
        wide = _wide(x.dtype)

        def equals(key: Any, values: Any, x: Any) -> Any:
            return (values[key] == x[None]) & (key < len(values))

        def row(key: Any, values: Any, x: Any) -> list[Any]:
            return [jnp.asarray(key), equals(key, values, x).astype(wide)]

        def share(key: Any, values: Any, x: Any, t: Any) -> list[Any]:
            return [jnp.where(equals(key, values, x), t.astype(wide)[None], 0)]

        # Two maps, since only the second one is linear in the tangents. A pass computes both.
        keyed, name = members._replace(keys=keys), "quantile_derivative"
        index, equal = keyed.mapped(name, row, [values], [x])
        (shares,) = keyed.mapped(name, share, [values], [x, tangents[0]])
        none = jnp.zeros(values.shape, wide)
        count, total = (none.at[index].add(addend, mode="drop") for addend in (equal, shares))
        tangent = (total / jnp.maximum(count, 1)).astype(values.dtype)
        return selected(x, keys, values), tangent

    return selected(x, members.keys, values)


@jax.custom_jvp
def _with_rate(weight: jax.Array, q: jax.Array, last: jax.Array) -> jax.Array:
    """How far quantiles lie between two members, with the derivative by `q`: ranks are q * last."""
    return weight


@_with_rate.defjvp
def _with_rate_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    weight, _, last = primals
    return _with_rate(*primals), jnp.broadcast_to(tangents[1] * last, weight.shape)
