"""Rules for server values that a shard can compute for its own members, such as `jnp.arange(n)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax import _compat
from beamjax._compat import threefry2x32_p
from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.operator_rules import broadcast
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    TracedShard,
    bind,
    creation,
    is_threefry,
    replaced,
    shape_of,
)


@creation("bj_broadcast")
def _broadcast(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    return broadcast(eqn, (None,), n) if axis == 0 else None


@creation("stack")
def _stack(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """The same value for all members, as in `jnp.stack([x] * n)`."""
    if eqn.params["axis"] != axis or any(atom is not eqn.inputs[0] for atom in eqn.inputs):
        return None

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        return bind(eqn, [args[0]] * shard.size)

    return MemberwiseRule((None,) * n, (axis,), emit)


@creation("iota")
def _iota(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    if eqn.inputs or eqn.params["shape"][axis] != n:
        return None

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        shape = replaced(eqn.params["shape"], axis, shard.size)
        if eqn.params["dimension"] != axis:
            return bind(eqn, args, shape=shape)
        indices = shard.indices().astype(eqn.params["dtype"])
        return [lax.broadcast_in_dim(indices, shape, (axis,))]

    return MemberwiseRule((), (axis,), emit)


@creation("pad")
def _pad(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    """A server value for some members and a scalar for the others: the derivative of a slice."""
    low, high, interior = eqn.params["padding_config"][axis]
    # The value has `count` rows, row i at member low + i * step.
    count, step = shape_of(eqn.inputs[0])[axis], interior + 1
    if (low, high, interior) == (0, 0, 0) or count == 0:
        return None

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        position = shard.indices() - low
        row = jnp.clip(position // step, 0, count - 1)
        config = replaced(eqn.params["padding_config"], axis, (0, 0, 0))
        rows = jnp.take(args[0], row, axis=axis, mode="clip")
        (padded,) = bind(eqn, [rows, args[1]], padding_config=config)
        inside = (position == row * step) & (position >= 0)
        return [jnp.where(lax.broadcast_in_dim(inside, padded.shape, (axis,)), padded, args[1])]

    return MemberwiseRule((None, None), (axis,), emit)


def _draws_by_index(eqn: Eqn, axis: int, n: Any) -> bool:
    """Whether a shard can draw its own elements: each is a hash of the key and its index alone."""
    # Partitionable threefry draws so. A shard has consecutive elements along the first axis only.
    (key,), shape = eqn.inputs, eqn.params["shape"]
    hashes = is_threefry(key) and bool(_compat.config.jax_threefry_partitionable)
    return hashes and shape_of(key) == () and axis == 0 and shape[:1] == (n,)


@creation("random_split")
def _random_split(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    if not _draws_by_index(eqn, axis, n):
        return None
    shape = eqn.params["shape"]

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        # A key is the two words of a hash; bits below are the words together, or their xor.
        words = _hashed(args[0], shard, math.prod(shape[1:]))
        keys = jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")
        return [keys.reshape(shard.size, *shape[1:])]

    return MemberwiseRule((None,), (0,), emit)


@creation("random_bits")
def _random_bits(eqn: Eqn, axis: int, n: Any) -> MemberwiseRule | None:
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    inner = math.prod(shape[1:])
    # `_element_numbers` multiplies 32-bit words.
    if not _draws_by_index(eqn, axis, n) or inner >= 2**32:
        return None

    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        high, low = _hashed(args[0], shard, inner)
        if width == 64:
            wide = np.dtype("uint64")
            bits = (high.astype(wide) << np.uint64(32)) | low.astype(wide)
        else:
            bits = (high ^ low).astype(np.dtype(f"uint{width}"))
        return [bits.reshape(shard.size, *shape[1:])]

    return MemberwiseRule((None,), (0,), emit)


def _hashed(key: Any, shard: TracedShard, inner: int) -> list[jax.Array]:
    """Threefry of a key and the index of each element: two words, each uint32[size, inner]."""
    first, second = jax.random.key_data(key)
    words = _element_numbers(shard, inner)
    return threefry2x32_p.bind(*jnp.broadcast_arrays(first, second, *words))


def _element_numbers(shard: TracedShard, inner: int) -> tuple[jax.Array, jax.Array]:
    """High and low word of each element's index `row * inner + column`: uint32[size, inner]."""
    # JAX has no uint64 unless x64 is enabled, so the product is computed from halves of 16 bits:
    # (r1 2^16 + r0) (m1 2^16 + m0) = r1 m1 2^32 + (r0 m1 + r1 m0) 2^16 + r0 m0. `middle` sums what
    # lies at 2^16: the low halves of the mixed products and the high half of r0 m0. Its own high
    # half is the carry to the high word. The last line adds the carry of `+ column`.
    word, half, mask = np.dtype("uint32"), np.uint32(16), np.uint32(0xFFFF)
    rows = shard.indices().astype(word)[:, None]
    (r1, r0), (m1, m0) = (rows >> half, rows & mask), map(word.type, divmod(inner, 2**16))
    middle = ((r0 * m0) >> half) + ((r0 * m1) & mask) + ((r1 * m0) & mask)
    start = (middle << half) | ((r0 * m0) & mask)
    low = start + lax.iota(word, inner)[None, :]
    high = r1 * m1 + ((r0 * m1) >> half) + ((r1 * m0) >> half) + (middle >> half)
    return high + (low < start).astype(word), low
