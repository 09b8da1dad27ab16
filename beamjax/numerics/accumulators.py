"""Accumulators: what the host keeps of a reduction while the partials of shards come in.

Partials are flat vectors, one per shard. Accumulators take them in any order, travel as bytes, and
are merged in any tree; but for the mode "fast", the final bits depend on the partials alone. Adding
the same shard twice is an error for products of floats, and not noticed by any other kind.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from beamjax.errors import ArrayFormatError, OptionsError, StructureError
from beamjax.numerics.exact_sum import ExactSum
from beamjax.numerics.extremes import Extreme
from beamjax.numerics.partials import fail
from beamjax.numerics.products import OrderedProduct
from beamjax.numerics.provenance import Provenance
from beamjax.numerics.running import Running
from beamjax.storage.arrays import Buffer, decode_arrays

Mode = Literal["exact", "fast"]
REDUCTIONS = ("sum", "max", "min", "prod", "any", "all")


class Accumulator(Protocol):
    """What every accumulator does.

    Attributes:
        name: of the kind, written into the bytes.
        dtype: of the partials.
        size: length of the partials.
        provenance: with what they were computed; it travels with the numbers, and is merged with
            them.
    """

    name: ClassVar[str]
    dtype: np.dtype
    size: int
    provenance: Provenance

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the numbers take."""
        ...

    def add(self, partial: np.ndarray, shard: int) -> None:
        """Adds the partial of a shard, (size,) in `dtype`; it is not changed, and kept for a while
        only if it is read-only."""
        ...

    def merge(self, other: Any) -> None:
        """Adds what `other`, of the same kind, holds; `other` holds the same afterwards."""
        ...

    def encode(self) -> bytes:
        """The state as bytes, for `decode_accumulator`."""
        ...

    def total(self, lo: int, hi: int, dtype: np.dtype) -> np.ndarray:
        """The result at the coordinates [lo, hi), a vector of `dtype`."""
        ...


class SumAccumulator(Accumulator, Protocol):
    """An accumulator that also gives means.

    Attributes:
        left_out: how many members are in none of the partials; means do not count them.
    """

    left_out: int

    def mean(self, lo: int, hi: int, count: int, dtype: np.dtype) -> np.ndarray:
        """The sums of [lo, hi) over `count`, a vector of `dtype`."""
        ...


def make_accumulator(
    reduction: str, dtype: np.dtype, size: int, *, mode: Mode = "exact"
) -> Accumulator:
    """The empty accumulator of a reduction: it adds nothing when it is merged.

    Args:
        reduction: one of `REDUCTIONS`.
        dtype: of the partials.
        size: their length.
        mode: "exact", or "fast" for float sums and products in one float64 vector whose last bits
            depend on the order.

    Raises:
        OptionsError: for an unknown reduction or mode.
        StructureError: for a dtype that the reduction does not take.
        WorkerError: if this thread flushes subnormal numbers to zero and sums must be exact.
    """
    dtype = np.dtype(dtype)
    if reduction not in REDUCTIONS or mode not in ("exact", "fast"):
        raise OptionsError(
            f"accumulator: found reduction {reduction!r} and mode {mode!r}, expected one of "
            f"{REDUCTIONS} and 'exact' or 'fast'."
        )
    if reduction in ("max", "min"):
        return Extreme(reduction, dtype, size)
    if mode == "exact" and dtype.kind in "fc" and reduction == "sum":
        return ExactSum(dtype, size)
    if mode == "exact" and dtype.kind in "fc" and reduction == "prod":
        return OrderedProduct(dtype, size)
    return Running(reduction, dtype, size)


def decode_accumulator(data: Buffer) -> Accumulator:
    """The accumulator that `encode` wrote.

    Raises:
        ArrayFormatError: if the bytes were not written by an accumulator.
    """
    arrays, meta = decode_arrays(data)
    kinds = {kind.name: kind for kind in (ExactSum, Running, Extreme, OrderedProduct)}
    name = meta.get("accumulator")
    if not isinstance(name, str) or name not in kinds:
        fail(f"kind {name!r}", f"one of {sorted(kinds)}")
    try:
        found: Accumulator = kinds[name].decode(arrays, meta)
        found.provenance = Provenance.from_json(meta.get("provenance"))
        return found
    except StructureError as error:
        raise ArrayFormatError(f"accumulator: {error}") from None
