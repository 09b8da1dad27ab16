"""Products of floats in an order that the shard numbers alone fix."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from beamjax.errors import StructureError, WorkerError
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.partials import (
    check_partial,
    check_same,
    describe,
    described,
    fail,
    from_real_parts,
    real_parts,
)
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.numerics.rounding import round_pair
from beamjax.storage.arrays import encode_arrays

_MAX_LEVEL = 62


class OrderedProduct:
    """Product of float vectors in float64 over a `DyadicTree` of shards, rounded once at the end.

    Attributes:
        dtype: of the partials: float32, float64, complex64 or complex128.
        size: their length.
    """

    name: ClassVar[str] = "ordered_product"
    provenance: Provenance = UNKNOWN

    def __init__(self, dtype: np.dtype, size: int) -> None:
        """
        Raises:
            StructureError: for any other dtype.
        """
        self.dtype, self.size = np.dtype(dtype), size
        if self.dtype.name not in ("float32", "float64", "complex64", "complex128"):
            raise StructureError(
                f"product: found partials of dtype {self.dtype}, expected float32, float64, "
                "complex64 or complex128."
            )
        self._parts = 2 if self.dtype.kind == "c" else 1
        self._tree: DyadicTree[np.ndarray] = DyadicTree(_multiply)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the products take."""
        return sum(node.nbytes for node in self._tree.nodes.values())

    def add(self, partial: np.ndarray, shard: int) -> None:
        """Multiplies by the partial of a shard; raises as `check_partial` and `DyadicTree.add`."""
        check_partial(self, partial)
        self._tree.add(real_parts(partial).astype(np.float64), shard)

    def merge(self, other: OrderedProduct) -> None:
        """Multiplies by what `other` holds; raises as `check_same` and `DyadicTree.merge`."""
        check_same(self, other)
        self.provenance |= other.provenance
        self._tree.merge(other._tree)

    def encode(self) -> bytes:
        """The state as bytes, which depend on the partials and their shards alone."""
        nodes = list(self._tree.in_order())
        index = np.array([node[:2] for node in nodes], np.int64).reshape(-1, 2)
        values = np.array([node[2] for node in nodes], np.float64)
        values = values.reshape(len(nodes), self._parts, self.size)
        return encode_arrays([index, values], describe(self))

    @classmethod
    def decode(cls, arrays: list[np.ndarray], meta: dict[str, Any]) -> OrderedProduct:
        """The accumulator that `encode` wrote.

        Raises:
            ArrayFormatError, StructureError: if there is no such accumulator.
        """
        same = cls(*described(meta))
        shape = (same._parts, same.size)
        nodes = len(arrays[0]) if arrays and arrays[0].ndim == 2 else 0
        found = [(array.dtype.name, array.shape) for array in arrays]
        if found != [("int64", (nodes, 2)), ("float64", (nodes, *shape))]:
            fail(f"the arrays {found}", f"as many int64 (2,) as float64 {shape}")
        for (level, index), value in zip(arrays[0].tolist(), arrays[1], strict=True):
            if not 0 <= level <= _MAX_LEVEL or not 0 <= index < 1 << (_MAX_LEVEL - level):
                fail(f"shards {index} of level {level}", f"levels up to {_MAX_LEVEL}")
            try:
                same._tree.add(value.copy(), index, level)
            except WorkerError as error:
                fail(str(error), "every shard once")
        return same

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The products at the coordinates [lo, hi), rounded once to `dtype`; 1 without shards.

        Raises:
            WorkerError: if a shard was added twice.
        """
        dtype = np.dtype(dtype)
        product = self._tree.fold()
        if product is None:
            return np.ones(hi - lo).astype(dtype)
        real = dtype if self._parts == 1 else np.dtype(f"f{dtype.itemsize // 2}")
        return from_real_parts(np.stack([_rounded(part[lo:hi], real) for part in product]))


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Product of float64 (1, size), or of complex numbers as (2, size).

    Complex products are spelt out: NumPy's own use a fused multiply-add on some processors.
    """
    with np.errstate(all="ignore"):
        if len(left) == 1:
            return left * right
        real = left[0] * right[0] - left[1] * right[1]
        return np.stack([real, left[0] * right[1] + left[1] * right[0]])


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        result = round_pair(values.copy(), None, dtype)
        result[np.isnan(values)] = np.float32(np.nan).astype(dtype)
        return result
