"""Server values of a checkpoint as files of its folder, by way of the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.plan.steps import ValueType
from beamjax.runtime.checkpoints import Array, Record, Stored
from beamjax.storage.arrays import decode_arrays
from beamjax.storage.dtypes import dtype_name


@dataclass(frozen=True)
class FolderStore(Store):
    """A store in a folder of checkpoints: it trusts no file that this process has not checked."""

    folder: CheckpointFolder | None = None

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Writes a file, unless this process did or checked it."""
        assert self.folder is not None
        self.folder.write(name, data)


def record_of(ref: Ref) -> Array | Stored:
    """A server value that is in a store, with its files in the folder."""
    if ref.inline:
        (array,) = decode_arrays(ref.inline)[0]
        return Array(array)
    ((dtype, shape),) = ref.leaves
    return Stored(ref.key, dtype, shape, ref.files)


def ref_of(record: Stored) -> Ref:
    """Undoes `record_of`."""
    return Ref(record.key, ((record.dtype, record.shape),), files=record.files)


def entry_type(value: ValueType) -> ValueType:
    """The type of an entry of a stacked result."""
    return replace(value, shape=value.shape[1:])


def check_type(what: str, array: np.ndarray, spec: ValueType, rows: int | None = None) -> None:
    """Compares an array with what a plan says of it.

    Args:
      what: it is, for messages.
      array: as it was read.
      spec: its type, or that of its rows.
      rows: how many it must have, if it has any.

    Raises:
      ArrayFormatError: it has another shape or dtype.
    """
    shape = spec.shape if rows is None else (rows, *spec.shape)
    if array.shape != shape or dtype_name(array.dtype) != spec.dtype:
        raise ArrayFormatError(
            f"{what}: found {array.dtype}{list(array.shape)}, expected {spec.dtype}{list(shape)}"
        )


def check_kind(record: Record, *kinds: type) -> None:
    """Raises ArrayFormatError unless a record is of one of these kinds."""
    if not isinstance(record, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ArrayFormatError(f"found {type(record).__name__}, expected one of {names}")
