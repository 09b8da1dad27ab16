"""Distances of floats in units in the last place (ULP)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NAN_DISTANCE = int(np.iinfo(np.uint64).max)
"""The distance of NaN to a number."""


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The number of steps between representable numbers from `a` to `b`, as uint64."""
    # Both zeros count as one number, and infinity follows the largest finite number. Two NaNs are 0
    # apart, whatever their payloads. The distance of complex numbers is that of their parts that
    # are further apart.
    x, y = real_parts(a), real_parts(b)
    distance = unsigned_difference(_ordered(x), _ordered(y))
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
        nan_x, nan_y = np.isnan(x), np.isnan(y)
    distance[nan_x | nan_y] = NAN_DISTANCE
    distance[nan_x & nan_y] = 0
    return distance.max(axis=-1)


def real_parts(x: np.ndarray) -> np.ndarray:
    """The parts of an array along a new last axis: one of a real array, two of a complex one."""
    return (
        np.stack([np.real(x), np.imag(x)], axis=-1) if x.dtype.kind == "c" else x[..., np.newaxis]
    )


def _ordered(x: np.ndarray) -> np.ndarray:
    """int64 numbers in the order of the floats, without gaps; both zeros are 0."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    if x.dtype.name == "float8_e8m0fnu":  # has no sign
        return bits.astype(np.int64)
    sign = np.uint64(1 << (ml_dtypes.finfo(x.dtype).bits - 1))
    magnitude = (bits & (sign - np.uint64(1))).astype(np.int64)
    return np.where(bits & sign != 0, -magnitude, magnitude)


def unsigned_difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| of 64-bit integers as uint64, in which it can't overflow."""
    larger = np.maximum(x, y).astype(np.uint64)
    return larger - np.minimum(x, y).astype(np.uint64)
