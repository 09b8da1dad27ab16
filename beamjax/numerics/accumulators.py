"""Accumulators: the state of a reduction on the host while the partials of shards arrive.

Partials are flat vectors, one per shard, which come in any order. Accumulators merge, and travel as
bytes. Except in the mode "fast", the final bits depend on the partials alone. The accumulator of
float sums is in `exact_sum`, all others are here.
"""

from __future__ import annotations

import abc
import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import ml_dtypes
import numpy as np

from beamjax.errors import ArrayFormatError, StructureError, WorkerError
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.rounding import round_pair
from beamjax.storage.arrays import Joined, dtype_name, encode_arrays

if TYPE_CHECKING:
    from beamjax.numerics.reducers import Reducer

MAX_SIZE = 1 << 60
"""Largest number of values of an encoded accumulator."""

PART = 1 << 16
"""Length of the parts of a vector that are divided among threads."""

EXACT = ("float32", "float64", "complex64", "complex128")
"""Dtypes of partials for which there are exact sums and ordered products."""
_EXACT_CHARS = [np.dtype(name).char for name in EXACT]

_MAX_LEVEL = 62
"""The highest level of a tree of shards: the numbers of shards are int64."""


class Accumulator(abc.ABC):
    """The reduction of the partials of some shards."""

    # The name of the kind, which is written into the bytes.
    name: ClassVar[str]
    # Whether it only takes partials of the dtypes `EXACT`.
    is_exact: ClassVar[bool] = False

    def __init__(self, reducer: Reducer, dtype: np.dtype, size: int) -> None:
        # The partials are vectors (size,) of `dtype`.
        self.reducer, self.dtype, self.size = reducer, np.dtype(dtype), size
        if self.is_exact and self.dtype.char not in _EXACT_CHARS:
            raise StructureError(
                f"{self.name.replace('_', ' ')}: found partials of dtype {self.dtype}, expected "
                f"{', '.join(EXACT)}."
            )
        # The number of members that are in no partial, and that means do not count.
        self.left_out = 0

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory of the state."""

    def add(self, partial: np.ndarray, shard: int = 0) -> None:
        """Adds the partial of a shard, to which it holds a reference only if it is read-only."""
        if partial.shape != (self.size,) or partial.dtype != self.dtype:
            raise StructureError(
                f"accumulator {self.name!r}: found a partial {partial.dtype}"
                f"{list(partial.shape)}, expected {self.dtype}[{self.size}]."
            )
        self._add(partial, shard)

    def merge(self, other: Self) -> None:
        """Adds the shards of `other`, which does not change."""
        mine, theirs = (
            (type(side).__name__, side.reducer.name, side.dtype, side.size)
            for side in (self, other)
        )
        if mine != theirs:
            raise StructureError(
                f"accumulator {self.name!r}: found {theirs} to merge with, expected {mine}."
            )
        self.left_out += other.left_out
        self._merge(other)

    def encode(self) -> bytes:
        """The state as bytes, for `decode_accumulator`."""
        # Except in the mode "fast", the bytes depend only on the partials, their shards and the
        # members left out. So equal reductions have equal bytes.
        meta: dict[str, Any] = {
            "accumulator": self.name,
            "reduction": self.reducer.name,
            "dtype": dtype_name(self.dtype),
            "size": self.size,
        }
        if self.left_out:
            meta["left_out"] = self.left_out
        return encode_arrays(self._arrays(), meta)

    @classmethod
    def decode(
        cls, reducer: Reducer, dtype: np.dtype, arrays: list[np.ndarray], meta: dict[str, Any]
    ) -> Self:
        """The accumulator from the arrays and the metadata that `encode` wrote."""
        same = cls(reducer, dtype, _count(meta, "size"))
        same.left_out = _count(meta, "left_out", 0)
        same._restore(arrays)
        return same

    @abc.abstractmethod
    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The result at the coordinates [lo, hi); the identity if there are no shards."""

    @staticmethod
    def exactness(dtype: np.dtype) -> str:
        """What the bits of the result depend on, in words."""
        return "exact"

    @staticmethod
    @abc.abstractmethod
    def bytes_each(dtype: np.dtype, most: bool) -> int:
        """Bytes of the state of an ordinary number; with `most`, an upper bound."""
        # The bound is for numbers of like size and a million shards.

    def mean(self, lo: int, hi: int, count: int, dtype: np.dtype) -> np.ndarray:
        """The sums at [lo, hi) over `count`, less the members that were left out."""
        raise NotImplementedError(f"{self.name} has no means")

    @abc.abstractmethod
    def _add(self, partial: np.ndarray, shard: int) -> None: ...

    @abc.abstractmethod
    def _merge(self, other: Self) -> None: ...

    @abc.abstractmethod
    def _arrays(self) -> list[np.ndarray | Joined]:
        """The state, for `_restore`."""

    @abc.abstractmethod
    def _restore(self, arrays: list[np.ndarray]) -> None:
        """Takes the state that `_arrays` gave; raises `ArrayFormatError` for any other."""


def _count(meta: dict[str, Any], name: str, default: int | None = None) -> int:
    count = meta.get(name, default)
    if type(count) is not int or not 0 <= count < MAX_SIZE:
        fail(f"{name} {count!r}", f"a number from 0 to {MAX_SIZE - 1}")
    return count


def fail(content: str, expected: str) -> NoReturn:
    """Raises the ArrayFormatError of an accumulator's bytes."""
    raise ArrayFormatError(f"bytes of an accumulator: found {content}, expected {expected}.")


# --- one array, with which a NumPy operation merges each partial


class _OneArray(Accumulator):
    """An accumulator whose state is one array, the last axis of which has the coordinates."""

    # The dtype and the first axes of the state.
    _held: np.dtype
    _axes: tuple[int, ...] = ()
    _state: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._state is None else self._state.nbytes

    def _merge(self, other: Self) -> None:
        if other._state is not None:
            self._apply(other._state)

    def _arrays(self) -> list[np.ndarray | Joined]:
        return [] if self._state is None else [self._state]

    def _restore(self, arrays: list[np.ndarray]) -> None:
        types = [(array.shape, array.dtype) for array in arrays]
        shape = (*self._axes, self.size)
        if types and types != [(shape, self._held)]:
            fail(f"the arrays {types}", f"one {self._held}{list(shape)}")
        self._state = arrays[0].copy() if arrays else None

    def _apply(self, other: np.ndarray) -> None:
        """Merges a partial, in the form of the state, or the state of other partials."""
        if self._state is None:
            self._state = other.astype(self._held)
            return
        state = self._state

        def apply(first: int, last: int) -> None:
            part = ..., slice(first * PART, last * PART)
            with np.errstate(all="ignore"):
                self._combine(state[part], other[part])

        in_parts(-(-self.size // PART), self.size, apply)

    @abc.abstractmethod
    def _combine(self, state: np.ndarray, other: np.ndarray) -> None:
        """Merges `other` into `state`, at some of the coordinates."""


# --- integers, booleans, and floats in the mode "fast"


def _widest(dtype: np.dtype) -> np.dtype:
    """The dtype in which partials are added one by one."""
    # Integers wrap around, which is associative. Float64 hides most of the rounding of floats, but
    # their last bits depend on the order.
    return np.dtype({"f": np.float64, "c": np.complex128}.get(dtype.kind, dtype))


class Running(_OneArray):
    """One vector, to which a NumPy operation adds every partial."""

    name = "running"

    def __init__(self, reducer: Reducer, dtype: np.dtype, size: int) -> None:
        super().__init__(reducer, dtype, size)
        kinds, expected = ("b", "bool") if reducer.is_logical else ("iufc", "a native number")
        if self.dtype.kind not in kinds:
            raise StructureError(
                f"reduction {reducer.name!r}: found partials of dtype {self.dtype}, expected "
                f"{expected}."
            )
        self._held = _widest(self.dtype)

    @staticmethod
    def exactness(dtype: np.dtype) -> str:
        is_exact = dtype.kind not in "fc"
        return "exact" if is_exact else "fast: in float64, the last bits depend on the order"

    @staticmethod
    def bytes_each(dtype: np.dtype, most: bool) -> int:
        return _widest(dtype).itemsize

    def _add(self, partial: np.ndarray, shard: int) -> None:
        self._apply(partial)

    def _combine(self, state: np.ndarray, other: np.ndarray) -> None:
        self.reducer.ufunc(state, other, out=state)

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        if self._state is None:
            return np.full(hi - lo, self.reducer.ufunc.identity).astype(dtype)
        with np.errstate(all="ignore"):
            return self._state[lo:hi].astype(dtype)

    def mean(self, lo: int, hi: int, count: int, dtype: np.dtype) -> np.ndarray:
        """As `Accumulator.mean`, rounded to float64 and then to `dtype`."""
        with np.errstate(all="ignore"):
            count -= self.left_out
            return (self.total(lo, hi, self._held) / np.float64(count)).astype(dtype)


# --- products of floats, in an order that depends on the shard numbers alone


def real_parts(vector: np.ndarray) -> np.ndarray:
    """A vector (size,) as (1, size), or as (2, size), real and imaginary, if it is complex."""
    if vector.dtype.kind != "c":
        return vector[None]
    parts = np.ascontiguousarray(vector).view(f"f{vector.dtype.itemsize // 2}")
    return parts.reshape(-1, 2).T


def from_real_parts(parts: np.ndarray) -> np.ndarray:
    """Undoes `real_parts`."""
    if len(parts) == 1:
        return parts[0]
    pairs = np.ascontiguousarray(parts.T)
    return pairs.reshape(-1).view(f"c{2 * parts.dtype.itemsize}")


class OrderedProduct(Accumulator):
    """The product of floats, multiplied over a `DyadicTree` of shards and rounded once."""

    # Products of floats round, so the order of multiplications is fixed: that of the tree.
    # Unlike other accumulators, the tree notices a shard that is added twice.
    name = "ordered_product"
    is_exact = True

    def __init__(self, reducer: Reducer, dtype: np.dtype, size: int) -> None:
        super().__init__(reducer, dtype, size)
        self._parts = 2 if self.dtype.kind == "c" else 1
        self._tree: DyadicTree[np.ndarray] = DyadicTree(_multiply)

    @staticmethod
    def exactness(dtype: np.dtype) -> str:
        return "in the order of the shards, the same bits on any runner"

    @staticmethod
    def bytes_each(dtype: np.dtype, most: bool) -> int:
        # Each product in the tree covers a power of two of shards: 20 are enough for a million.
        return _widest(dtype).itemsize * (20 if most else 1)

    @property
    def nbytes(self) -> int:
        return sum(node.nbytes for node in self._tree.nodes.values())

    def _add(self, partial: np.ndarray, shard: int) -> None:
        self._tree.add(real_parts(partial).astype(np.float64), shard)

    def _merge(self, other: OrderedProduct) -> None:
        self._tree.merge(other._tree)

    def _arrays(self) -> list[np.ndarray | Joined]:
        nodes = list(self._tree.in_order())
        index = np.array([node[:2] for node in nodes], np.int64).reshape(-1, 2)
        values = np.array([node[2] for node in nodes], np.float64)
        return [index, values.reshape(len(nodes), self._parts, self.size)]

    def _restore(self, arrays: list[np.ndarray]) -> None:
        shape = (self._parts, self.size)
        nodes = len(arrays[0]) if arrays and arrays[0].ndim == 2 else 0
        types = [(array.dtype.name, array.shape) for array in arrays]
        if types != [("int64", (nodes, 2)), ("float64", (nodes, *shape))]:
            fail(f"the arrays {types}", f"equally many int64 (2,) and float64 {shape}")
        for (level, index), value in zip(arrays[0].tolist(), arrays[1], strict=True):
            if not 0 <= level <= _MAX_LEVEL or not 0 <= index < 1 << (_MAX_LEVEL - level):
                fail(f"shards {index} of level {level}", f"levels up to {_MAX_LEVEL}")
            try:
                self._tree.add(value.copy(), index, level)
            except WorkerError as error:
                fail(str(error), "every shard once")

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        dtype = np.dtype(dtype)
        product = self._tree.fold()
        if product is None:
            return np.ones(hi - lo).astype(dtype)
        real = dtype if self._parts == 1 else np.dtype(f"f{dtype.itemsize // 2}")
        return from_real_parts(np.stack([_rounded(part[lo:hi], real) for part in product]))


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of float64 (1, size), or of complex numbers as (2, size)."""
    with np.errstate(all="ignore"):
        if len(left) == 1:
            return left * right
        # NumPy's own complex product uses a fused multiply-add on some processors.
        real = left[0] * right[0] - left[1] * right[1]
        return np.stack([real, left[0] * right[1] + left[1] * right[0]])


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        result = round_pair(values.copy(), None, dtype)
        # Of NaN, one pattern of bits stands for all.
        result[np.isnan(values)] = np.float32(np.nan).astype(dtype)
        return result


# --- maxima and minima

# Of +0 and -0, NumPy's `maximum` may return either, and of several NaN it returns the first. So
# numbers are compared as integers with the same order, their keys: the bits of a float, where the
# lower 31 or 63 bits of negative numbers are flipped. Then -0 is below +0, as on XLA's CPU and GPU,
# and every NaN is the same and above all numbers. A minimum is the maximum of the complements.
#
# `jnp.max` compares complex numbers by the real and then the imaginary part, where the signs of
# zeros, and whether a NaN wins, depend on the order. Here all zeros of complex numbers are +0, and
# a NaN is above all numbers in each part.


class Extreme(_OneArray):
    """Maximum or minimum, as the maximum of integers with the same order."""

    name = "extreme"

    def __init__(self, reducer: Reducer, dtype: np.dtype, size: int) -> None:
        super().__init__(reducer, dtype, size)
        self._held = _key_dtype(self.dtype)
        self._axes = (2 if self.dtype.kind == "c" else 1,)

    @staticmethod
    def bytes_each(dtype: np.dtype, most: bool) -> int:
        return _key_dtype(dtype).itemsize * (2 if dtype.kind == "c" else 1)

    def _add(self, partial: np.ndarray, shard: int) -> None:
        self._apply(to_keys(partial, self.reducer.name))

    def _combine(self, state: np.ndarray, other: np.ndarray) -> None:
        if len(state) == 1:
            np.maximum(state, other, out=state)
            return
        # The imaginary parts decide where the real parts are equal.
        above = other > state
        above[0] |= above[1] & (other[0] == state[0])
        np.copyto(state, other, where=above[0])

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        if self._state is None:
            return np.full(hi - lo, lowest_value(self.reducer.name, self.dtype)).astype(dtype)
        values = from_keys(self._state[:, lo:hi], self.dtype, self.reducer.name)
        return values.astype(dtype, copy=False)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a float of NumPy or ml_dtypes."""
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
    """The identity of "max" or "min": infinite if the dtype has infinities."""
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


def _key_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the keys of numbers of a dtype."""
    if is_float(dtype):
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    if dtype.kind == "c":
        return np.dtype(f"i{dtype.itemsize // 2}")
    if dtype.kind in "iu":
        return dtype
    signed = dtype.kind != "b" and ml_dtypes.iinfo(dtype).min < 0
    return np.dtype(np.int8 if signed else np.uint8)


def to_keys(values: np.ndarray, reduction: str) -> np.ndarray:
    """Keys (parts, size) in the order of the values ("max"), or in reverse order ("min")."""
    keys = _key_dtype(values.dtype)
    if values.dtype.kind == "c":
        # -0 + 0 is +0, so zeros of either sign are equal.
        return np.stack([to_keys(part + 0, reduction)[0] for part in real_parts(values)])
    if not is_float(values.dtype):
        whole = values.astype(keys, copy=False)
        return (whole if reduction == "max" else ~whole)[None]
    # All floats of up to 32 bits are exactly float32 numbers.
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
    """Float bits as integers in the order of the floats, or back, as a new array."""
    highest = np.iinfo(bits.dtype).max
    # The shift copies the sign into all bits; `highest` leaves the sign itself as it is.
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & highest)


# --- parts of long vectors in several threads, as NumPy releases the GIL in a call

LONG = 1 << 18
"""Length of a vector from which a second thread saves time."""

MAX_THREADS = 4
"""Largest number of threads. More of them would wait for each other and for memory."""


def in_parts(count: int, values: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(first, last)` on ranges that cover range(count), in several threads."""
    alone = values < LONG or getattr(_local, "divided", False)
    threads = 1 if alone else min(_threads(), count)
    if threads < 2:
        work(0, count)
        return

    def part(first: int, last: int) -> None:
        # A part is not divided again: all threads are busy already.
        _local.divided = True
        try:
            work(first, last)
        finally:
            _local.divided = False

    cuts = [count * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(part, *cut) for cut in itertools.pairwise(cuts[1:])]
    try:
        part(cuts[0], cuts[1])
    finally:
        # Wait for all threads even after an error, since they use the caller's arrays.
        for other in others:
            other.exception()
    for other in others:
        other.result()


_local = threading.local()


@functools.cache
def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS) if hasattr(os, "sched_getaffinity") else 2


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked process needs its own."""
    return ThreadPoolExecutor(MAX_THREADS, f"beamjax-{process}")
