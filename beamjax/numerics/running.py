"""Reductions by one NumPy operation on one vector: integers, booleans, and floats in a hurry."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from beamjax.errors import StructureError
from beamjax.numerics.partials import (
    check_partial,
    check_same,
    describe,
    described,
    fail,
    left_out,
    only_array,
)
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.numerics.side_by_side import in_parts
from beamjax.storage.arrays import encode_arrays

PART = 1 << 16
"""Values of a vector that stay on one thread."""

OPERATIONS = {
    "sum": np.add,
    "prod": np.multiply,
    "any": np.logical_or,
    "all": np.logical_and,
}


class Running:
    """A vector to which an operation is applied for every shard.

    Integers wrap around, which is associative. Float sums and products are kept in float64 or
    complex128; their last bits depend on the order (`reduction="fast"`).

    Attributes:
        reduction: one of `OPERATIONS`.
        dtype: of the partials.
        size: their length.
        left_out: how many members are in none of the partials; means do not count them.
    """

    name: ClassVar[str] = "running"
    provenance: Provenance = UNKNOWN

    def __init__(self, reduction: str, dtype: np.dtype, size: int) -> None:
        """
        Raises:
            StructureError: if `dtype` is not bool (any, all) or a native number (sum, prod).
        """
        self.reduction, self.dtype, self.size = reduction, np.dtype(dtype), size
        if self.dtype.kind not in ("b" if reduction in ("any", "all") else "iufc"):
            raise StructureError(
                f"reduction {reduction!r}: found partials of dtype {self.dtype}, expected "
                f"{'bool' if reduction in ('any', 'all') else 'a native number'}."
            )
        held = {"f": np.float64, "c": np.complex128}.get(self.dtype.kind, self.dtype)
        self._held = np.dtype(held)
        self._operation = OPERATIONS[reduction]
        self._state: np.ndarray | None = None
        self.left_out = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the numbers take."""
        return 0 if self._state is None else self._state.nbytes

    def add(self, partial: np.ndarray, shard: int = 0) -> None:
        """Applies the operation to the partial of a shard; raises as `check_partial`."""
        check_partial(self, partial)
        self._apply(partial)

    def merge(self, other: Running) -> None:
        """Applies the operation to what `other` holds; raises as `check_same`."""
        check_same(self, other)
        self.provenance |= other.provenance
        self.left_out += other.left_out
        if other._state is not None:
            self._apply(other._state)

    def encode(self) -> bytes:
        """The state as bytes, for `decode`."""
        state = [] if self._state is None else [self._state]
        more = {"left_out": self.left_out} if self.left_out else {}
        return encode_arrays(state, describe(self, reduction=self.reduction, **more))

    @classmethod
    def decode(cls, arrays: list[np.ndarray], meta: dict[str, Any]) -> Running:
        """The accumulator that `encode` wrote.

        Raises:
            ArrayFormatError, StructureError: if there is no such accumulator.
        """
        reduction = meta.get("reduction")
        if not isinstance(reduction, str) or reduction not in OPERATIONS:
            fail(f"reduction {reduction!r}", f"one of {list(OPERATIONS)}")
        same = cls(reduction, *described(meta))
        same.left_out = left_out(meta)
        same._state = only_array(arrays, (same.size,), same._held)
        return same

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The result at the coordinates [lo, hi), cast to `dtype`; the identity without shards."""
        if self._state is None:
            return np.full(hi - lo, self._operation.identity).astype(dtype)
        with np.errstate(all="ignore"):
            return self._state[lo:hi].astype(dtype)

    def mean(self, lo: int, hi: int, count: int, dtype: np.dtype) -> np.ndarray:
        """The sums of [lo, hi) over `count`, rounded to float64 and then to `dtype`."""
        with np.errstate(all="ignore"):
            count -= self.left_out
            return (self.total(lo, hi, self._held) / np.float64(count)).astype(dtype)

    def _apply(self, vector: np.ndarray) -> None:
        if self._state is None:
            self._state = vector.astype(self._held)
        else:
            state = self._state

            def apply(first: int, last: int) -> None:
                part = slice(first * PART, last * PART)
                with np.errstate(all="ignore"):
                    self._operation(state[part], vector[part], out=state[part])

            in_parts(-(-self.size // PART), self.size, apply)
