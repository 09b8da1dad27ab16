"""Placed inputs in an .npz file as np.savez writes it: the arrays in it are mapped.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import DataFile, is_url, look, readable
from beamjax.sources.arrays.npy_header import HEADER_ERRORS, read_header
from beamjax.sources.leaf_checks import check_sizes, checked_dtype, native_view
from beamjax.sources.source_base import (
    MAX_VALUES,
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    describe_source,
    field,
    natural,
    row_text,
)
from beamjax.storage.shared_cache import SharedCache

_EXPECTED = "an .npz file of np.savez"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip; then its name and extra data
_MAPS: SharedCache[np.memmap] = SharedCache(128, lambda _: 1)
"""So many files are kept mapped."""


@dataclasses.dataclass(frozen=True)
class StoredMember:
    """Where an array is in the file.

    Attributes:
      offset: of its first byte.
      dtype: as it is there, with its byte order.
      in_columns: whether it is stored in Fortran order.
    """

    offset: int
    dtype: np.dtype
    in_columns: bool

    def to_json(self) -> list[Any]:
        """Plain JSON values."""
        return [self.offset, self.dtype.str, self.in_columns]

    @classmethod
    def from_json(cls, record: Any) -> StoredMember:
        """Undoes `to_json`; TypeError or ValueError for anything else."""
        offset, dtype, in_columns = record
        if type(dtype) is not str or type(in_columns) is not bool:
            raise TypeError(f"found the array {record!r:.80}, expected offset, dtype and order")
        return cls(natural(offset), np.dtype(dtype), in_columns)


class NpzSource(HoldsLeaves, kind="npz"):
    """Arrays in an .npz file; see `from_npz`."""

    def __init__(
        self,
        file: DataFile,
        arrays: Sequence[StoredMember],
        leaves: Sequence[LeafSpec],
        size: int,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_npz`, which checks.

        Args:
            file: that has them.
            arrays: where each leaf is.
            leaves: what a member of each is.
            size: the number of members.
            treedef: the tree that they form; a tuple by default.
        """
        super().__init__(leaves, treedef)
        self._file = file
        self._arrays = tuple(arrays)
        self._size = size

    @property
    def is_local(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        self._file.check()
        data = _MAPS.get(self._file, lambda: _mapped(self._file.path))
        pairs = zip(self._arrays, self._leaves, strict=True)
        return [native_view(self._whole(data, *pair)[start:stop]) for pair in pairs]

    def _whole(self, data: np.ndarray, array: StoredMember, leaf: LeafSpec) -> np.ndarray:
        shape = (self._size, *leaf.shape)
        if array.offset + math.prod(shape) * array.dtype.itemsize > data.nbytes:
            raise SourceError(
                f"{self._file.path}: found {data.nbytes} bytes, expected {array.dtype}"
                f"{list(shape)} at byte {array.offset}."
            )
        order: Literal["F", "C"] = "F" if array.in_columns else "C"
        return np.ndarray(shape, array.dtype, data, array.offset, order=order)

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        name = ast.literal_eval(self._leaves[leaf].path[1:-1])
        return f"{self._file.path}, array {name!r}, {row_text(index)}"

    def describe(self) -> str:
        return describe_source(self, f"in {self._file.path}")

    def identity(self) -> tuple[Any, list[str]]:
        return self.to_spec() | {"file": None}, [self._file.path]

    def to_spec(self) -> dict[str, Any]:
        return {
            **self.spec_head(),
            "file": self._file.to_json(),
            "arrays": [array.to_json() for array in self._arrays],
            "leaves": [leaf.to_json() for leaf in self._leaves],
            "size": self._size,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> NpzSource:
        leaves = [LeafSpec.from_json(record) for record in field(spec, "leaves", list)]
        arrays = [StoredMember.from_json(record) for record in field(spec, "arrays", list)]
        for array, leaf in zip(arrays, leaves, strict=True):
            if array.dtype.newbyteorder("=") != leaf.dtype:
                raise TypeError(f"found an array of {array.dtype} for a leaf of {leaf.dtype}")
        if not leaves:
            raise TypeError("found no leaves")
        return cls(DataFile.from_json(spec["file"]), arrays, leaves, natural(spec["size"], 1))


def _mapped(path: str) -> np.memmap:
    with readable(path, _EXPECTED):
        return np.memmap(path, np.uint8, "r")


def from_npz(path: str | os.PathLike[str]) -> NpzSource:
    """A placed input from the arrays in an .npz file, which the launcher and all workers see.

    A member is a dictionary of a row of each array, by their names. The file is mapped, as those of
    `from_npy`; np.savez_compressed writes what can't be.

    Args:
      path: of the file.

    Raises:
      SourceError: it is missing, damaged, compressed, or no .npz file.
      StructureError: an array is a scalar, or has other than numbers.
      PlacementError: there are no members, or not as many in all arrays.
    """
    import jax

    if not isinstance(path, str | os.PathLike):
        raise StructureError(f"from_npz: found {type(path).__name__}, expected the path of a file.")
    if is_url(os.fspath(path)):
        raise StructureError(
            f"from_npz: found the URL {os.fspath(path)}, expected a local path: .npz files are "
            "mapped. Copy it to a folder that all workers see, or write Parquet or Zarr."
        )
    file = look(os.path.abspath(path))
    stored, leaves, sizes, names = [], [], [], []
    found = _arrays(file)
    for name, (shape, array) in sorted(found.items()):
        where = f"{file.path}, array {name!r}"
        if array.dtype.kind == "V":
            raise StructureError(
                f"{where}: found the dtype {array.dtype}, expected numbers; np.savez loses "
                "bfloat16 and its like: write them with from_arrays(...).spill()."
            )
        key = f"[{name!r}]"
        leaves.append(LeafSpec(shape[1:], checked_dtype(key, shape, array.dtype, where), None, key))
        stored.append(array)
        sizes.append(shape[0])
        names.append(f"{key} ({file.path})")
    check_sizes(names, sizes)
    treedef = jax.tree_util.tree_structure(dict.fromkeys(found, 0))
    return NpzSource(file, stored, leaves, sizes[0], treedef)


def _arrays(file: DataFile) -> dict[str, tuple[tuple[int, ...], StoredMember]]:
    """Shape and place of each array of a file, by name."""
    found: dict[str, tuple[tuple[int, ...], StoredMember]] = {}
    with readable(file.path, _EXPECTED), open(file.path, "rb") as opened:
        try:
            entries = zipfile.ZipFile(opened).infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise ValueError(str(error)) from error
        for entry in entries:
            name = entry.filename.removesuffix(".npy")
            where = f"{file.path}, {entry.filename!r}"
            if name == entry.filename or name in found:
                raise SourceError(f"{where}: expected arrays only, each of its own name.")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise SourceError(
                    f"{where}: is compressed, expected an array as np.savez writes it, which can "
                    f"be mapped: np.savez('new.npz', **np.load({os.path.basename(file.path)!r}))."
                )
            try:
                found[name] = _array(opened, entry)
            except HEADER_ERRORS as error:
                raise SourceError(f"{where}: found no whole array ({error}).") from error
    return found


def _array(opened: BinaryIO, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], StoredMember]:
    opened.seek(entry.header_offset)
    data = opened.read(_LOCAL_HEADER.size)
    if len(data) < _LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        raise ValueError(f"nothing at byte {entry.header_offset}")
    _, name, extra = _LOCAL_HEADER.unpack(data)
    start = opened.seek(name + extra, os.SEEK_CUR)
    shape, in_columns, dtype = read_header(opened)
    offset = opened.tell()
    if dtype.hasobject:
        raise ValueError(f"objects of Python{list(shape)}, expected numbers")
    nbytes = math.prod(shape) * dtype.itemsize
    if offset - start + nbytes != entry.file_size or any(size >= MAX_VALUES for size in shape):
        raise ValueError(f"{entry.file_size} bytes, expected {dtype}{list(shape)} after a header")
    if offset + nbytes > opened.seek(0, os.SEEK_END):
        raise ValueError("the file ends before it")
    return shape, StoredMember(offset, dtype, in_columns)
