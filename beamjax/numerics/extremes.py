"""Maximum and minimum whose bits do not depend on the order.

NumPy's `maximum` returns either zero of +0 and -0, and the NaN that comes first. Here numbers are
compared as integers of the same order (the bits of a float, with the lower 31 or 63 flipped in
negative numbers), so that -0 is below +0, as XLA's CPU and GPU have it, and every NaN is the same
one, above all numbers. Minima are maxima of the complements of these integers.

Complex numbers are compared by the real and then the imaginary part, as `jnp.max` does. There, the
signs of their zeros depend on the order, and so does whether a NaN is kept; here all zeros are +0,
and a NaN is above all numbers in each part.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from beamjax.errors import StructureError
from beamjax.numerics.partials import (
    check_partial,
    check_same,
    describe,
    described,
    fail,
    from_real_parts,
    only_array,
    real_parts,
)
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.storage.arrays import encode_arrays
from beamjax.storage.dtypes import dtype_name


class Extreme:
    """Maximum or minimum of vectors, one per shard.

    Attributes:
        reduction: "max" or "min".
        dtype: of the partials: any bool, integer, float or complex of NumPy or ml_dtypes.
        size: their length.
    """

    name: ClassVar[str] = "extreme"
    provenance: Provenance = UNKNOWN

    def __init__(self, reduction: str, dtype: np.dtype, size: int) -> None:
        """
        Raises:
            StructureError: for a dtype that is no number.
        """
        self.reduction, self.dtype, self.size = reduction, np.dtype(dtype), size
        self._key_dtype = key_dtype(self.dtype)
        self._parts = 2 if self.dtype.kind == "c" else 1
        self._keys: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the keys take."""
        return 0 if self._keys is None else self._keys.nbytes

    def add(self, partial: np.ndarray, shard: int = 0) -> None:
        """Takes the partial of a shard; raises as `check_partial`."""
        check_partial(self, partial)
        self._apply(to_keys(partial, self.reduction))

    def merge(self, other: Extreme) -> None:
        """Takes what `other` holds; raises as `check_same`."""
        check_same(self, other)
        self.provenance |= other.provenance
        if other._keys is not None:
            self._apply(other._keys)

    def encode(self) -> bytes:
        """The state as bytes, which depend on the result alone."""
        keys = [] if self._keys is None else [self._keys]
        return encode_arrays(keys, describe(self, reduction=self.reduction))

    @classmethod
    def decode(cls, arrays: list[np.ndarray], meta: dict[str, Any]) -> Extreme:
        """The accumulator that `encode` wrote.

        Raises:
            ArrayFormatError, StructureError: if there is no such accumulator.
        """
        reduction = meta.get("reduction")
        if reduction not in ("max", "min"):
            fail(f"reduction {reduction!r}", "'max' or 'min'")
        same = cls(reduction, *described(meta))
        same._keys = only_array(arrays, (same._parts, same.size), same._key_dtype)
        return same

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The result at the coordinates [lo, hi) in `dtype`; `lowest_value` without shards."""
        if self._keys is None:
            return np.full(hi - lo, lowest_value(self.reduction, self.dtype)).astype(dtype)
        return from_keys(self._keys[:, lo:hi], self.dtype, self.reduction).astype(dtype, copy=False)

    def _apply(self, keys: np.ndarray) -> None:
        if self._keys is None:
            self._keys = keys.copy()
        elif self._parts == 1:
            np.maximum(self._keys, keys, out=self._keys)
        else:
            above = keys > self._keys
            above[0] |= above[1] & (keys[0] == self._keys[0])
            np.copyto(self._keys, keys, where=above[0])


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a float of NumPy or ml_dtypes.

    Raises:
        StructureError: if it is no bool, integer, float or complex dtype.
    """
    dtype_name(dtype)
    if dtype.kind in "fbiuc":
        return dtype.kind == "f"
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        pass
    else:
        return False
    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, KeyError):
        raise StructureError(f"found dtype {dtype}, expected numbers or bools.") from None
    return True


def lowest_value(reduction: str, dtype: np.dtype) -> Any:
    """The scalar of a dtype that changes no maximum ("max") or minimum ("min").

    Infinite where the dtype has infinities, else its lowest or highest number.
    """
    sign = -1 if reduction == "max" else 1
    if dtype.kind == "b":
        return np.bool_(reduction == "min")
    if dtype.kind == "c":
        return dtype.type(complex(sign * np.inf, sign * np.inf))
    if is_float(dtype):
        infinite = np.array(sign * np.inf, np.float32).astype(dtype)[()]
        if np.isinf(infinite):
            return infinite
    limits: Any = ml_dtypes.finfo(dtype) if is_float(dtype) else ml_dtypes.iinfo(dtype)
    return np.array(limits.min if reduction == "max" else limits.max).astype(dtype)[()]


def key_dtype(dtype: np.dtype) -> np.dtype:
    """The integers as which numbers of a dtype are compared.

    Raises:
        StructureError: if it is no bool, integer, float or complex dtype.
    """
    if is_float(dtype):
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    if dtype.kind == "c":
        return np.dtype(f"i{dtype.itemsize // 2}")
    if dtype.kind in "iu":
        return dtype
    signed = dtype.kind != "b" and ml_dtypes.iinfo(dtype).min < 0
    return np.dtype(np.int8 if signed else np.uint8)


def to_keys(values: np.ndarray, reduction: str) -> np.ndarray:
    """Integers that are ordered as the values ("max") or against them ("min").

    Args:
        values: a vector (size,).
        reduction: "max" or "min".

    Returns:
        (1, size), or (2, size) of the real and imaginary parts; it may share memory with `values`.
    """
    keys = key_dtype(values.dtype)
    if values.dtype.kind == "c":
        return np.stack([to_keys(part + 0, reduction)[0] for part in real_parts(values)])
    if not is_float(values.dtype):
        whole = values.astype(keys, copy=False)
        return (whole if reduction == "max" else ~whole)[None]
    wide = values.astype(f"f{keys.itemsize}", copy=False)
    whole = _flip_negative(wide.view(keys))
    if reduction == "min":
        np.invert(whole, out=whole)
    whole[np.isnan(wide)] = np.iinfo(keys).max
    return whole[None]


def from_keys(keys: np.ndarray, dtype: np.dtype, reduction: str) -> np.ndarray:
    """The vector of `dtype` that has these keys, with NaN as the canonical quiet NaN."""
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return from_real_parts(np.stack([from_keys(part[None], real, reduction) for part in keys]))
    whole = keys[0] if reduction == "max" else ~keys[0]
    if not is_float(dtype):
        return whole.astype(dtype)
    wide = _flip_negative(whole).view(f"f{keys.itemsize}")
    wide[keys[0] == np.iinfo(keys.dtype).max] = np.nan
    return wide.astype(dtype, copy=False)


def _flip_negative(bits: np.ndarray) -> np.ndarray:
    """Float bits to integers of the same order, or back: a new array."""
    highest = np.iinfo(bits.dtype).max
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & highest)
