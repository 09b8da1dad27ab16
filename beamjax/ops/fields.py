"""Small integers side by side in words: sums of words are the sums of all of them.

Every integer has a field of some bits in a word. Where the sum of a field over all members fits in
it, one sum of words adds up all fields, exactly and in any order (C. Zhang et al., "BatchCrypt:
Efficient Homomorphic Encryption for Cross-Silo Federated Learning", USENIX ATC 2020, packs
quantized gradients so, with room for the sum).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from beamjax import _compat
from beamjax._compat import batching

compressed_p = jex.Primitive("compressed_words")
"""Gives placed words as they are. It tells what they are in the place of: `instead` is the bytes of
one member of that."""


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
