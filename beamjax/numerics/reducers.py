"""The reductions of a placed value to a server value.

On the device, a reduction is `partial`, which reduces a shard of members to one array. On the host,
it is an accumulator for its `operation`, from which `finish` computes the result. The results have
the dtypes and the rules for NaN of the `jnp` function of the same name over axis 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax.errors import ArrayFormatError, OptionsError, StructureError
from beamjax.numerics.accumulators import (
    Accumulator,
    Extreme,
    OrderedProduct,
    Running,
    fail,
    lowest_value,
)
from beamjax.numerics.exact_sum import ExactSum
from beamjax.storage.arrays import Buffer, decode_arrays


@dataclass(frozen=True)
class Reducer:
    """A reduction over the members of a placement.

    Attributes:
        name: "sum", "mean", "max", "min", "prod", "any" or "all", as in `jnp`.
        operation: the reduction that its accumulator does, which is "sum" for "mean".
        ufunc: the NumPy function that reduces two values of a `partial_dtype` to one.
    """

    name: str
    operation: str
    ufunc: np.ufunc

    @property
    def fold(self) -> Callable[..., jax.Array]:
        """The `jnp` function that reduces an array."""
        return getattr(jnp, self.operation)

    @property
    def merge(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The `jnp` function that reduces two values to one."""
        return getattr(jnp, self.ufunc.__name__)

    def result_dtype(self, dtype: Any) -> np.dtype:
        """The dtype that the `jnp` function gives for operands of `dtype`.

        It depends on whether 64-bit numbers are enabled in JAX at the moment of the call.

        Raises:
            ValueError, TypeError: `jnp` does not reduce this dtype.
        """
        return _result_dtype(self.name, np.dtype(dtype), _compat.config.jax_enable_x64)

    def partial_dtype(self, dtype: Any) -> np.dtype:
        """The dtype in which the partials of operands of `dtype` leave the device.

        As in `jnp`, floats narrower than float32 are summed and multiplied in float32, and means of
        integers are sums of floats. All other partials have the dtype of the result.
        """
        result = self.result_dtype(dtype)
        if self.operation in ("sum", "prod") and result.kind not in "iuc" and result != np.float64:
            return np.dtype(np.float32)
        return result

    def partial(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Reduces a shard on the device.

        Args:
            x: (members, ...), the members of the shard, padded to its fixed size.
            mask: bool (members,), False for padding, whose values have no effect.

        Returns:
            (...) in `partial_dtype(x.dtype)`; the identity if there are no members.
        """
        dtype = self.partial_dtype(x.dtype)
        x = x != 0 if dtype == np.bool_ and x.dtype != np.bool_ else x.astype(dtype)
        rows = jnp.reshape(mask, (-1,) + (1,) * (x.ndim - 1))
        identity = self.identity(dtype)
        x = jnp.where(rows, x, jnp.asarray(identity))
        if dtype.kind == "c" and self.operation in ("max", "min"):
            return _complex_extreme(self.fold, x, identity.imag)
        if self.operation in ("sum", "prod"):
            return self.fold(x, axis=0, dtype=dtype)
        return self.fold(x, axis=0)

    def identity(self, dtype: np.dtype) -> np.generic:
        """The scalar of `dtype` that changes no result of the reduction."""
        if self.operation in ("max", "min"):
            return lowest_value(self.operation, np.dtype(dtype))
        return np.dtype(dtype).type(self.operation in ("prod", "all"))

    def finish(
        self, accumulator: Accumulator, lo: int, hi: int, count: int, dtype: Any
    ) -> np.ndarray:
        """The result at the coordinates [lo, hi) of an accumulator.

        Args:
            accumulator: the accumulator with the partials of all shards.
            lo, hi: a range of its coordinates.
            count: the number of members, without padding.
            dtype: dtype of the operands, before the reduction.

        Returns:
            (hi - lo,) in `result_dtype(dtype)`.
        """
        result = self.result_dtype(dtype)
        if self.name == "mean":
            return accumulator.mean(lo, hi, count, result)
        return accumulator.total(lo, hi, result)


class Picker(Reducer):
    """Selects single members: a maximum of their bits as integers, where other members give 0."""

    def result_dtype(self, dtype: Any) -> np.dtype:
        return np.dtype(dtype)

    def partial_dtype(self, dtype: Any) -> np.dtype:
        """The unsigned integer with as many bytes."""
        return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")

    def partial(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The bits of `x` where `mask`, which has the first axes of `x`, holds, else zeros."""
        bits = self.partial_dtype(x.dtype)
        x = x.astype(bits) if x.dtype == np.bool_ else jax.lax.bitcast_convert_type(x, bits)
        rows = jnp.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(rows, x, jnp.zeros((), bits))

    def finish(
        self, accumulator: Accumulator, lo: int, hi: int, count: int, dtype: Any
    ) -> np.ndarray:
        bits = accumulator.total(lo, hi, self.partial_dtype(dtype))
        return bits.astype(bool) if np.dtype(dtype) == np.bool_ else bits.view(np.dtype(dtype))

    @staticmethod
    def takes(dtype: Any) -> bool:
        """Whether it can select values of `dtype`: JAX can convert them to unsigned integers."""
        if jax.dtypes.issubdtype(dtype, np.complexfloating):
            return False
        whole = jax.dtypes.issubdtype(dtype, np.bool_) or jax.dtypes.itemsize_bits(dtype) >= 8
        return whole and np.dtype(dtype).itemsize <= 8


def _complex_extreme(
    fold: Callable[..., jax.Array], x: jax.Array, identity: np.generic
) -> jax.Array:
    """The extreme over axis 0 by the real and then the imaginary part, where NaN always wins.

    In `jnp.max` and `jnp.min`, it depends on the position of a complex NaN whether it wins.
    """
    real = fold(x.real, axis=0, keepdims=True)
    first = (x.real == real) | jnp.isnan(x.real)
    imag = fold(jnp.where(first, x.imag, jnp.asarray(identity)), axis=0)
    return jax.lax.complex(real[0], imag)


@functools.cache
def _result_dtype(name: str, dtype: np.dtype, x64: bool) -> np.dtype:
    """The result dtype of a `jnp` function over axis 0.

    `x64`, whether 64-bit numbers are enabled, is a part of the key of the cache.
    """
    # `jnp` does not sum integers below 8 bits, but `lax` does, and with it `jax.ops`.
    if name in ("sum", "prod") and dtype.name in ("int2", "int4", "uint2", "uint4"):
        dtype = np.dtype("uint8" if dtype.name.startswith("u") else "int8")
    operand = jax.ShapeDtypeStruct((1,), dtype)
    fold = functools.partial(getattr(jnp, name), axis=0)
    return np.dtype(jax.eval_shape(fold, operand).dtype)


REDUCERS: dict[str, Reducer] = {
    reducer.name: reducer
    for reducer in (
        Reducer("sum", "sum", np.add),
        Reducer("mean", "sum", np.add),
        Reducer("max", "max", np.maximum),
        Reducer("min", "min", np.minimum),
        Reducer("prod", "prod", np.multiply),
        Reducer("any", "any", np.logical_or),
        Reducer("all", "all", np.logical_and),
    )
}
"""The reductions by name."""

PICK = Picker("pick", "max", np.maximum)
"""Selects members. It is no reduction that a program can name."""


def reducer_of(name: str) -> Reducer:
    """A reduction, or the picker, by name."""
    return PICK if name == PICK.name else REDUCERS[name]


# --- the accumulators of reductions

Mode = Literal["exact", "fast"]
REDUCTIONS = ("sum", "max", "min", "prod", "any", "all")


def make_accumulator(
    reduction: str, dtype: np.dtype, size: int, *, mode: Mode = "exact"
) -> Accumulator:
    """A new accumulator of a reduction, without any partials.

    Args:
        reduction: one of `REDUCTIONS`.
        dtype: dtype of the partials.
        size: length of the partials.
        mode: "exact", or "fast" for float sums and products in one float64 vector, whose last bits
            depend on the order.

    Raises:
        OptionsError: the reduction or the mode is unknown.
        StructureError: the reduction does not take the dtype.
        WorkerError: this thread flushes subnormal numbers to zero, and sums must be exact.
    """
    dtype = np.dtype(dtype)
    if reduction not in REDUCTIONS or mode not in ("exact", "fast"):
        raise OptionsError(
            f"accumulator: found reduction {reduction!r} and mode {mode!r}, expected one of "
            f"{REDUCTIONS} and 'exact' or 'fast'."
        )
    if reduction in Extreme.reductions:
        return Extreme(reduction, dtype, size)
    if mode == "exact" and dtype.kind in "fc" and reduction in ("sum", "prod"):
        exact = ExactSum if reduction == "sum" else OrderedProduct
        return exact(reduction, dtype, size)
    return Running(reduction, dtype, size)


def decode_accumulator(data: Buffer) -> Accumulator:
    """The accumulator that `Accumulator.encode` wrote.

    Raises:
        ArrayFormatError: the bytes were not written by an accumulator.
    """
    arrays, meta = decode_arrays(data)
    kinds: dict[str, type[Accumulator]] = {
        kind.name: kind for kind in (ExactSum, Running, Extreme, OrderedProduct)
    }
    name = meta.get("accumulator")
    if not isinstance(name, str) or name not in kinds:
        fail(f"kind {name!r}", f"one of {sorted(kinds)}")
    try:
        return kinds[name].decode(arrays, meta)
    except StructureError as error:
        raise ArrayFormatError(f"accumulator: {error}") from None
