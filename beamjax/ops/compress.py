"""Compressed values: integers of a few levels and a scale in place of floats.

`int8` and `ternary` compress a tree of arrays to `Codes`, `decompress` undoes it. `reduce_mean` is
`beamjax.reduce_mean` of compressed members. Rounding is one of two:

* stochastic, with a key: a value is rounded up or down at random, so that the expectation is the
  value itself. This is TernGrad (W. Wen et al., "TernGrad: Ternary Gradients to Reduce
  Communication in Distributed Deep Learning", NeurIPS 2017, section 3.1, equations 1 to 3) with
  one level, and QSGD (D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient
  Quantization and Encoding", NeurIPS 2017, section 3.1) with `levels` of them, with the largest
  magnitude as the scale in place of its 2-norm. With `step = scale / levels` and `f` the
  fraction of `|x| / step`, the variance of a value is `step ** 2 * f * (1 - f)`; with one level
  this is `|x| * scale - x ** 2`.
* to the nearest, without a key: biased, and at most half a step away. Means of such values
  need error feedback: what was lost is added to the next value (F. Seide et al., "1-Bit Stochastic
  Gradient Descent and Application to Data-Parallel Distributed Training of Speech DNNs",
  Interspeech 2014; EF-SGD of S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
  Gradient Compression Schemes", ICML 2019). Error feedback needs no unbiased rounding, but one
  that brings the value nearer to what it was. Stochastic rounding to one level does not do that:
  there the error grows.

A leaf of zeros is compressed to zeros, and so is one whose magnitudes are all below the smallest
normal number. A leaf with an inf or a NaN is compressed to NaN, in all of its values: its scale is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.extend import core as jex

from beamjax import _compat
from beamjax._compat import batching
from beamjax.errors import StructureError
from beamjax.ops import operators
from beamjax.ops.leaves import as_array, as_placed
from beamjax.ops.placements import resolve
from beamjax.ops.weights import refuse_weights

__all__ = ["Codes", "Mean", "decompress", "int8", "nbytes", "reduce_mean", "ternary"]

INT8_LEVELS = 127
"""Levels of "int8" on each side of zero; -128 is not used, so that codes are symmetric."""
_TERNARY_BITS = 2


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["codes", "scale"],
    meta_fields=["shape", "dtype", "levels"],
)
@dataclass(frozen=True)
class Codes:
    """One compressed array, a tree of two leaves.

    Attributes:
      codes: int8 of the array's shape; with one level, words `(w,)` of ints with 2 bits a value.
      scale: float32[], or float64[] of a float64 array: the largest magnitude.
      shape: of the array.
      dtype: of the array, by name.
      levels: on each side of zero; codes are from `-levels` to `levels`.
    """

    codes: Any
    scale: Any
    shape: tuple[int, ...]
    dtype: str
    levels: int

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scale."""
        return nbytes((self.codes, self.scale))


class Mean(NamedTuple):
    """The result of `reduce_mean`.

    Attributes:
      mean: a tree like `x` without the first axis.
      error: a placed tree like `x`, float32 or float64: the members minus their codes. With error
        feedback it is the `error` of the next call.
      scale: a tree of server values: the largest magnitude of each leaf, of all members. It may be
        the `scale` of the next call.
    """

    mean: Any
    error: Any
    scale: Any


def int8(x: Any, key: Any = None, *, levels: int = INT8_LEVELS) -> Any:
    """Compresses arrays of floats to a byte a value.

    Args:
      x: a tree of arrays of floats, of any shapes.
      key: a key of `jax.random`, for stochastic rounding; without one, to the nearest.
      levels: on each side of zero, from 1 to 127.

    Returns:
      A tree like `x` with `Codes` for leaves. Its derivative is zero.

    Raises:
      StructureError: a leaf is not an array of real floats, or there can't be so many levels.
    """
    return _compressed("int8", x, key, _checked_levels("int8", levels), packed=False)


def ternary(x: Any, key: Any = None) -> Any:
    """Compresses arrays of floats to -1, 0 and 1 in 2 bits a value, and one scale a leaf.

    Arguments, result and errors are those of `int8`.
    """
    return _compressed("ternary", x, key, 1, packed=True)


def decompress(codes: Any) -> Any:
    """The arrays that codes stand for.

    Args:
      codes: a tree with `Codes` for some of its leaves. They may have further axes in front, as
        those of placed values have.

    Returns:
      The tree with arrays in their places, of the shapes and dtypes of what was compressed. Other
      leaves are as they are.
    """

    def one(value: Any) -> Any:
        if not isinstance(value, Codes):
            return value
        axes = value.scale.shape
        found = value.codes
        if found.dtype != np.int8:
            found = unpack(found, _TERNARY_BITS, math.prod(value.shape))
        whole = found.reshape(*axes, *value.shape).astype(value.scale.dtype)
        scale = value.scale.reshape(*axes, *(1 for _ in value.shape))
        return ((whole / value.levels) * scale).astype(value.dtype)

    return tree_util.tree_map(one, codes, is_leaf=lambda x: isinstance(x, Codes))


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of the types of arrays in it."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in tree_util.tree_leaves(tree))


def reduce_mean(
    x: Any,
    keys: Any = None,
    *,
    method: str = "int8",
    levels: int | None = None,
    error: Any = None,
    scale: Any = None,
    placement: str | None = None,
) -> Mean:
    """Averages compressed members: integers with one scale per leaf, so that sums are exact.

    Each member is brought to integers, those of several values are put into one word, and words are
    summed. What leaves a shard is so many bits a value as the sum of all members needs, instead of
    a float: `log2(levels * n) + 2`, rounded up so that words are filled (TernGrad, section 3.1,
    equation 4, shares the scale for this).

    Args:
      x: a tree of placed arrays of floats, `(n, ...)`.
      keys: placed keys `(n,)` of `jax.random`, for stochastic rounding: the expectation of the mean
        is then that of `x`. Without them members are rounded to the nearest, which is biased and
        needs `error`.
      method: "int8" for 127 levels on each side of zero, "ternary" for one.
      levels: another number of levels, from 1 to 127; the fewer, the more values fit in a word.
      error: the error of the last call (`Mean.error`), a placed tree like `x`, zeros at first. It
        is added to the members.
      scale: the largest magnitudes to distinguish (`Mean.scale` of the last call), a tree like `x`
        of server values; larger ones are cut, and what is cut is in the error. Without it the scale
        is found first, by a pass of its own, between whose passes the members are handed on.
      placement: the placement; may be left out where the program has one.

    Returns:
      A `Mean`. Its derivative is that of `beamjax.reduce_mean` of `x` and `error`, as if nothing
      was rounded; errors and scales have none. The mean of a leaf is NaN where any member has an
      inf or a NaN.

    Raises:
      OutsideProgramError: called outside a program.
      PlacementError: the placement is unknown or ambiguous, or a leaf has not n members.
      StructureError: a leaf is not an array of real floats, the trees differ, there is no such
        method or number of levels, or stochastic rounding to one level is to feed back its error.
    """
    op = "compress.reduce_mean"
    placement, n = resolve(op, placement)
    refuse_weights(op, placement, n, "it packs members into integers, which take no weights")
    if method not in _METHODS:
        raise StructureError(f"{op}: found method {method!r}, expected 'int8' or 'ternary'.")
    levels = _METHODS[method] if levels is None else _checked_levels(op, levels)
    if levels == 1 and keys is not None and error is not None:
        raise StructureError(
            f"{op}: found keys and an error with one level: the error of stochastic rounding to "
            "-1, 0 and 1 grows from call to call. Leave out the keys, or take more levels."
        )
    paths, tree = tree_util.tree_flatten_with_path(x)
    values = [as_placed(op, "x", path, leaf, placement, n) for path, leaf in paths]
    for (path, _), value in zip(paths, values, strict=True):
        _check_floats(op, path, value)
    errors = _like(op, "error", error, tree)
    if errors is not None:
        errors = [as_placed(op, "error", (), leaf, placement, n) for leaf in errors]
    scales = _like(op, "scale", scale, tree)
    if keys is not None:
        keys = as_placed(op, "keys", (), keys, placement, n)
    bits = bits_for(levels * n)
    if not fields_of(bits):
        raise StructureError(
            f"{op}: found {n} members with {levels} levels, whose sum does not fit in an integer; "
            "take fewer levels."
        )
    averaged = functools.partial(_averaged, levels=levels, bits=bits, placement=placement)
    means, errors, scales = _straight_through(averaged, placement)(values, errors, keys, scales)
    restored = (tree_util.tree_unflatten(tree, each) for each in (means, errors, scales))
    return Mean(*restored)


_METHODS = {"int8": INT8_LEVELS, "ternary": 1}


def _averaged(
    values: list[jax.Array],
    errors: list[jax.Array] | None,
    keys: Any,
    scales: list[jax.Array] | None,
    *,
    levels: int,
    bits: int,
    placement: str,
) -> tuple[list[Any], list[Any], list[Any]]:
    """The means, errors and scales of the leaves."""
    if not values:
        return [], [], []

    def full(members: list[jax.Array], before: list[jax.Array] | None) -> Any:
        wide = [value.astype(_wide(value.dtype)) for value in members]
        if before is not None:
            wide = [
                value + old.astype(value.dtype) for value, old in zip(wide, before, strict=True)
            ]
        return wide, [_magnitude(value) for value in wide]

    members, largest = operators.map_fn(full, (values, errors), placement=placement)
    largest = operators.reduce_max(largest, placement=placement)
    shared = largest if scales is None else _cast(scales, largest)

    def coded(member: list[jax.Array], key: Any) -> Any:
        found, lost = [], []
        for i, (value, scale) in enumerate(zip(member, shared, strict=True)):
            draw = None if key is None else jax.random.fold_in(key, i)
            codes = _rounded(value, scale, levels, draw)
            found.append(pack(codes, bits))
            lost.append(value - _restored(codes, scale, levels))
        return found, lost, np.int32(1)

    words, lost, ones = operators.map_fn(coded, (members, keys), placement=placement)
    words = [
        compressed_p.bind(word, instead=nbytes(jax.ShapeDtypeStruct(value.shape[1:], value.dtype)))
        for word, value in zip(words, members, strict=True)
    ]
    # Members may be dropped, so they are counted.
    sums, count = operators.reduce_sum((words, ones), placement=placement)
    means = []
    for word, value, scale, seen in zip(sums, values, shared, largest, strict=True):
        total = unpack(word, bits, math.prod(value.shape[1:])).reshape(value.shape[1:])
        share = total.astype(scale.dtype) / (levels * count.astype(scale.dtype))
        whole = jnp.where(jnp.isfinite(seen), scale, jnp.nan)
        means.append((share * whole).astype(value.dtype))
    return means, lost, largest


def _straight_through(averaged: Any, placement: str) -> Any:
    """`_averaged`, with the derivative of a mean."""
    call = jax.custom_jvp(averaged)

    @call.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        found = call(*primals)
        values, errors = tangents[:2]
        if errors is not None:
            values = [v + e.astype(v.dtype) for v, e in zip(values, errors, strict=True)]
        slopes = operators.reduce_mean(values, placement=placement)
        return found, (slopes, *(list(map(jnp.zeros_like, each)) for each in found[1:]))

    return call


# --- one array


def _compressed(op: str, x: Any, key: Any, levels: int, packed: bool) -> Any:
    paths, tree = tree_util.tree_flatten_with_path(x)
    found = []
    for i, (path, leaf) in enumerate(paths):
        value = as_array(f"compress.{op}", "x", path, leaf)
        _check_floats(f"compress.{op}", path, value)
        wide = jax.lax.stop_gradient(value).astype(_wide(value.dtype))
        scale = _magnitude(wide)
        codes = _rounded(wide, scale, levels, None if key is None else jax.random.fold_in(key, i))
        codes = pack(codes, _TERNARY_BITS) if packed else codes
        found.append(Codes(codes, scale, tuple(value.shape), value.dtype.name, levels))
    return tree_util.tree_unflatten(tree, found)


def _magnitude(value: jax.Array) -> jax.Array:
    """The largest magnitude; NaN if one is not finite, 0 if they are subnormal."""
    largest = jnp.max(jnp.abs(value), initial=0)
    largest = jnp.where(largest < jnp.finfo(value.dtype).tiny, 0, largest)
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan).astype(value.dtype)


def _rounded(value: jax.Array, scale: jax.Array, levels: int, key: Any) -> jax.Array:
    """Codes (int8) of a value, up to `scale` in magnitude, by its nearest or at random."""
    good = jnp.isfinite(scale) & (scale > 0)
    levelled = jnp.where(good, value / jnp.where(good, scale, 1), 0) * levels
    levelled = jnp.nan_to_num(levelled, nan=0).clip(-levels, levels)
    if key is None:
        return jnp.round(levelled).astype(np.int8)
    low = jnp.floor(levelled)
    up = jax.random.uniform(key, value.shape, value.dtype) < levelled - low
    return (low + up.astype(low.dtype)).astype(np.int8)


def _restored(codes: jax.Array, scale: jax.Array, levels: int) -> jax.Array:
    return (codes.astype(scale.dtype) / levels) * scale


def _wide(dtype: Any) -> np.dtype:
    return np.dtype("float64" if dtype == np.float64 else "float32")


def _cast(scales: list[Any], like: list[jax.Array]) -> list[jax.Array]:
    return [
        jnp.asarray(scale).astype(one.dtype).reshape(())
        for scale, one in zip(scales, like, strict=True)
    ]


def _like(op: str, name: str, given: Any, tree: Any) -> list[Any] | None:
    """The leaves of an optional tree that has to be like `x`."""
    if given is None:
        return None
    leaves, found = tree_util.tree_flatten(given)
    if found != tree:
        raise StructureError(f"{op}: found {name} of the tree {found}, expected that of x: {tree}.")
    return leaves


def _checked_levels(op: str, levels: int) -> int:
    if type(levels) is not int or not 1 <= levels <= INT8_LEVELS:
        raise StructureError(
            f"compress.{op}: found levels={levels!r}, expected an int from 1 to {INT8_LEVELS}."
        )
    return levels


def _check_floats(op: str, path: Any, value: jax.Array) -> None:
    if not jnp.issubdtype(value.dtype, np.floating):
        raise StructureError(
            f"{op}: x{tree_util.keystr(path)} has dtype {value.dtype}, expected real floats."
        )


# --- fields: small integers side by side in words
#
# Every integer has a field of some bits in a word. Where the sum of a field over all members fits
# in it, one sum of words adds up all fields, exactly and in any order (C. Zhang et al.,
# "BatchCrypt: Efficient Homomorphic Encryption for Cross-Silo Federated Learning", USENIX ATC
# 2020, packs quantized gradients so, with room for the sum).


def word_dtype() -> np.dtype:
    """The widest integer that JAX sums as it is: int32, or int64 with 64-bit types enabled."""
    return np.dtype(jnp.result_type(int))


def bits_for(largest: int) -> int:
    """Bits of a field that holds integers from `-largest` to `largest`."""
    return int(largest).bit_length() + 1


def fields_of(bits: int) -> int:
    """How many fields a word has; 0 if one is too wide for a word."""
    return 8 * word_dtype().itemsize // bits


def num_words(size: int, bits: int) -> int:
    """How many words hold `size` integers."""
    return -(-size // fields_of(bits))


def pack(values: jax.Array, bits: int) -> jax.Array:
    """Puts integers into words.

    Args:
      values: ints of any shape, each in a field of `bits`, its sign included.
      bits: at most those of a word.

    Returns:
      Words `(num_words(values.size, bits),)`, the first integer in the lowest bits.
    """
    dtype, fields = word_dtype(), fields_of(bits)
    flat = values.astype(dtype).reshape(-1)
    flat = jnp.pad(flat, (0, num_words(flat.size, bits) * fields - flat.size))
    shifts = jnp.arange(fields, dtype=dtype) * bits
    return jnp.sum(flat.reshape(-1, fields) << shifts[None], axis=1, dtype=dtype)


def unpack(words: jax.Array, bits: int, size: int) -> jax.Array:
    """Undoes `pack`, also on sums of words, if each field still holds its sum.

    Args:
      words: `(..., num_words(size, bits))`.
      bits: of a field.
      size: how many integers there are.

    Returns:
      Ints `(..., size)` of the dtype of the words.
    """
    width, found = 8 * words.dtype.itemsize, []
    for _ in range(fields_of(bits)):
        # The sign of a field is in its highest bit; what it lent to those above is given back.
        low = (words << (width - bits)) >> (width - bits)
        found.append(low)
        words = (words - low) >> bits if bits < width else words
    parts = jnp.stack(found, axis=-1)
    return parts.reshape(*words.shape[:-1], -1)[..., :size]


# --- the primitive, which has no derivatives: words are ints

compressed_p = jex.Primitive("compressed_words")
"""Returns placed words unchanged, and records what they replace: `instead` is the bytes of one
member of that."""


@compressed_p.def_abstract_eval
def _compressed_abstract_eval(x: Any, *, instead: int) -> Any:
    return x


def _compressed_array(x: jax.Array, *, instead: int) -> jax.Array:
    return x


compressed_p.def_impl(_compressed_array)
_compat.register_lowering(compressed_p, _compressed_array)


def _compressed_batch(
    args: Sequence[Any], dims: Sequence[int], *, instead: int
) -> tuple[jax.Array, int]:
    (x,), (dim,) = args, dims
    return compressed_p.bind(x, instead=instead * x.shape[dim]), dim


batching.primitive_batchers[compressed_p] = _compressed_batch
