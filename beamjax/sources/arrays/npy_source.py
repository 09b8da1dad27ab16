"""Placed inputs in memory-mapped .npy files.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import collections
import glob
import os
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import DataFile, find_files, is_url, look
from beamjax.sources.block_source import SourceBlock, blocks_of, ends_of, read_blocks
from beamjax.sources.leaf_checks import (
    check_sizes,
    checked_leaf,
    leaf_name,
    native_dtype,
    native_view,
)
from beamjax.sources.source_base import (
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    describe_source,
    field,
    natural,
    row_text,
)
from beamjax.storage.dtypes import FLOAT0

Stamps: TypeAlias = Sequence[DataFile] | None
"""Files as they were when a source was made of them, if that matters."""


class NpySource(HoldsLeaves, kind="npy"):
    """Memory-mapped .npy files, one a leaf. Opened when first read, once a process."""

    def __init__(
        self,
        files: Sequence[str],
        leaves: Sequence[LeafSpec],
        size: int,
        treedef: PyTreeDef | None = None,
        stamps: Stamps = None,
        wraps: bool = False,
    ) -> None:
        """Use `from_npy`, which takes the rest from the files.

        Args:
            files: absolute paths, one a leaf, of arrays of shape (size, *leaf.shape). Dtypes that
                .npy does not know are stored as unsigned integers of the same width.
            leaves: what each file must hold.
            size: the number of members.
            treedef: the tree that they form; a tuple by default.
            stamps: each file as it must be; None for files that no other process writes.
            wraps: whether the files stand for arrays in memory, see `Source.wraps`.
        """
        super().__init__(leaves, treedef)
        self._wraps = wraps
        self._files: tuple[str, ...] = tuple(files)
        self._size = size
        self._stamps = stamps
        if len(self._files) != len(self._leaves) or not self._files:
            raise SourceError(
                f"found {len(self._files)} files for {len(self._leaves)} leaves, expected one file "
                "a leaf."
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The path of each leaf's file."""
        return self._files

    @property
    def is_local(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        _check(self._stamps)
        return [
            restored(_open_checked(file, leaf, self._size)[start:stop], leaf.dtype)
            for file, leaf in zip(self._files, self._leaves, strict=True)
        ]

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        return f"{self._files[leaf]}, {row_text(index)}"

    def wraps(self, leaf: int) -> bool:
        return self._wraps

    def describe(self) -> str:
        first, *rest = self._files
        more = f" and {len(rest)} more" if rest else ""
        return describe_source(self, f"in {first}{more}")

    def identity(self) -> tuple[Any, list[str]]:
        return self.to_spec() | {"files": None, "stamps": None}, list(self._files)

    def to_spec(self) -> dict[str, Any]:
        leaves = [leaf.to_json() for leaf in self._leaves]
        return {
            **self.spec_head(),
            "files": list(self._files),
            "leaves": leaves,
            "size": self._size,
            "stamps": _stamps_to_json(self._stamps),
            "wraps": self._wraps,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> NpySource:
        leaves = [LeafSpec.from_json(record) for record in spec["leaves"]]
        files, stamps = [str(file) for file in spec["files"]], _stamps_of(spec)
        wraps = field(spec, "wraps", bool)
        return cls(files, leaves, natural(spec["size"]), stamps=stamps, wraps=wraps)


class NpySeries(HoldsLeaves, kind="npy-series"):
    """Memory-mapped .npy files, several one after the other for each leaf; see `from_npy`."""

    def __init__(
        self,
        files: Sequence[Sequence[tuple[str, int]]],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef | None = None,
        stamps: Stamps = None,
    ) -> None:
        """Use `from_npy`, which checks.

        Args:
            files: for each leaf absolute paths, and the number of members in each.
            leaves: what a member of each must be.
            treedef: the tree that they form; a tuple by default.
            stamps: as of `NpySource`, of the files of the first leaf, then of the second, ...
        """
        super().__init__(leaves, treedef)
        self._stamps = stamps
        self._known = {} if stamps is None else {stamp.path: stamp for stamp in stamps}
        self._files = [list(series) for series in files]
        self._ends = [ends_of([rows for _, rows in series]) for series in files]

    @property
    def is_local(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self._ends[0][-1])

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        found = []
        for files, ends, leaf in zip(self._files, self._ends, self._leaves, strict=True):

            def load(
                block: SourceBlock, files: Any = files, leaf: LeafSpec = leaf
            ) -> list[np.ndarray]:
                stamp = self._known.get(files[block.number][0])
                _check(None if stamp is None else [stamp])
                array = _open_checked(files[block.number][0], leaf, block.last - block.first)
                return [restored(array, leaf.dtype)]

            found += read_blocks([leaf], blocks_of(ends, start, stop), load, start, stop)
        return found

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        number = int(np.searchsorted(self._ends[leaf], index[0], side="right")) - 1
        row = index[0] - int(self._ends[leaf][number])
        return f"{self._files[leaf][number][0]}, {row_text((row, *index[1:]))}"

    def check_files(self) -> None:
        """SourceError unless each file is there, and holds what it must."""
        for files, leaf in zip(self._files, self._leaves, strict=True):
            for file, rows in files:
                _open_checked(file, leaf, rows)

    def describe(self) -> str:
        more = sum(map(len, self._files)) - 1
        return describe_source(self, f"in {self._files[0][0][0]} and {more} more")

    def identity(self) -> tuple[Any, list[str]]:
        rows = [[rows for _, rows in series] for series in self._files]
        paths = [path for series in self._files for path, _ in series]
        return self.to_spec() | {"files": rows, "stamps": None}, paths

    def to_spec(self) -> dict[str, Any]:
        files = [[list(file) for file in series] for series in self._files]
        leaves = [leaf.to_json() for leaf in self._leaves]
        stamps = _stamps_to_json(self._stamps)
        return {**self.spec_head(), "files": files, "leaves": leaves, "stamps": stamps}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> NpySeries:
        leaves = [LeafSpec.from_json(record) for record in spec["leaves"]]
        files = [[(str(f), natural(n)) for f, n in series] for series in field(spec, "files", list)]
        sizes = {natural(sum(rows for _, rows in series), 1) for series in files}
        if len(files) != len(leaves) or len(sizes) != 1:
            raise TypeError(f"found files {files!r:.80}, expected as many members for each leaf")
        return cls(files, leaves, stamps=_stamps_of(spec))


def _check(stamps: Stamps) -> None:
    """SourceError if a file is another one: a map shows what is written to it, too."""
    for stamp in stamps or ():
        stamp.check()


def _stamp(file: str) -> DataFile:
    """A file as it is now; errors are those of reading it."""
    map_file(file)
    return look(file)


def _stamps_to_json(stamps: Stamps) -> list[Any] | None:
    return None if stamps is None else [stamp.to_json() for stamp in stamps]


def _stamps_of(spec: dict[str, Any]) -> Stamps:
    """Undoes it; KeyError, TypeError or ValueError for anything else."""
    found = spec["stamps"]
    if found is None:
        return None
    stamps = [DataFile.from_json(record) for record in field(spec, "stamps", list)]
    named = [file if type(file) is str else file[0] for files in spec["files"] for file in (
        [files] if type(files) is str else files)]  # fmt: skip
    if [stamp.path for stamp in stamps] != named:
        raise ValueError(f"found stamps of {len(stamps)} files, expected them of {named!r:.80}")
    return stamps


def from_npy(paths: Any) -> NpySource | NpySeries:
    """A placed input from .npy files that the launcher and the workers see under the same path.

    Args:
        paths: a path, or a pytree of paths, of files with arrays of shape (n, ...). A pattern such
            as "data/x-*.npy" is a leaf too: its files, in the order of their names, one after the
            other.

    Raises:
        SourceError: if a file is missing, truncated, or no .npy file. When it is read: it was
            written anew.
        StructureError: if a file holds a scalar, or a dtype that JAX does not know, files of one
            pattern differ in shape or dtype, or a URL is given.
        PlacementError: if n is 0, or not the same for all leaves.
    """
    import jax

    found, treedef = jax.tree_util.tree_flatten_with_path(paths)
    files, sizes, names = [], [], []
    leaves: list[LeafSpec] = []
    stamps: list[DataFile] = []
    for path, given in found:
        name = jax.tree_util.keystr(path)
        series: list[tuple[str, int]] = []
        for file in _listed(given, name):
            stamps.append(_stamp(file))
            leaf, rows = _npy_leaf(file, name)
            if series and leaf != leaves[-1]:
                raise StructureError(
                    f"{leaf_name(name)}: found {leaf} in {file}, expected {leaves[-1]} as in "
                    f"{series[0][0]}."
                )
            leaves += [] if series else [leaf]
            series.append((file, rows))
        files.append(series)
        sizes.append(sum(rows for _, rows in series))
        names.append(f"{name} ({series[0][0]}{f' and {len(series) - 1} more' * (len(series) > 1)})")
    check_sizes(names, sizes)
    if all(len(series) == 1 for series in files):
        return NpySource([series[0][0] for series in files], leaves, sizes[0], treedef, stamps)
    return NpySeries(files, leaves, treedef, stamps)


def _listed(given: Any, name: str) -> list[str]:
    """The files of a leaf."""
    if not isinstance(given, str | os.PathLike):
        raise StructureError(
            f"{leaf_name(name)}: found {type(given).__name__}, expected the path of a .npy file."
        )
    if is_url(os.fspath(given)):
        raise StructureError(
            f"{leaf_name(name)}: found the URL {os.fspath(given)}, expected a local path: .npy "
            "files are mapped. Copy it to a folder that all workers see, or write Parquet or Zarr."
        )
    path = os.path.abspath(given)
    if glob.has_magic(path) and not os.path.lexists(path):
        return find_files(path, "from_npy")
    return [path]


def _npy_leaf(file: str, name: str) -> tuple[LeafSpec, int]:
    """What a file has of a leaf, and how many members."""
    array = map_file(file)
    if array.dtype.kind == "V":
        raise StructureError(
            f"{leaf_name(name)}: found the dtype {array.dtype} in {file}, expected numbers. "
            "np.save loses bfloat16 and its like: write them with from_arrays(...).spill()."
        )
    array = checked_leaf(name, array, f" in {file}")
    return LeafSpec(array.shape[1:], native_dtype(array.dtype), None, name), array.shape[0]


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """What a .npy file holds for a dtype: itself, or raw integers of the same width."""
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"u{max(dtype.itemsize, 1)}")


def storable(array: np.ndarray) -> np.ndarray:
    """An array as a .npy file holds it."""
    native = native_dtype(array.dtype)
    if native == FLOAT0:
        return np.empty((*array.shape, 0), np.uint8)
    if native.isbuiltin == 1:
        return array
    return np.ascontiguousarray(array, native).view(stored_dtype(native))


def restored(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Undoes `storable`."""
    if dtype == FLOAT0:
        return np.empty(stored.shape[:-1], dtype)
    view = native_view(stored)
    return view if view.dtype == dtype else view.view(dtype)


_MAPPED: collections.OrderedDict[tuple[str, int, int], np.ndarray] = collections.OrderedDict()
_MAPPED_LOCK = threading.Lock()
_MAX_MAPPED = 128  # each map keeps a file descriptor open


def map_file(file: str) -> np.ndarray:
    """The mapped array of a file, from the cache while the file has not changed."""
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        raise _cannot_open(file, error) from error
    key = (file, status.st_mtime_ns, status.st_size)
    with _MAPPED_LOCK:
        if key in _MAPPED:
            _MAPPED.move_to_end(key)
            return _MAPPED[key]
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except OSError as error:
        raise _cannot_open(file, error) from error
    except Exception as error:
        raise SourceError(
            f"{file}: found {status.st_size} bytes that are not a whole .npy array ({error}); "
            "expected numbers, as np.save writes them. Was it cut off as it was written or copied?"
        ) from error
    with _MAPPED_LOCK:
        _MAPPED[key] = array
        while len(_MAPPED) > _MAX_MAPPED:
            _MAPPED.popitem(last=False)
    return array


def _cannot_open(file: str, error: OSError | ValueError) -> SourceError:
    reason = getattr(error, "strerror", None) or error
    return SourceError(
        f"{file}: cannot open ({reason}); expected a .npy file that the launcher and all workers "
        "see under this path."
    )


def _open_checked(file: str, leaf: LeafSpec, size: int) -> np.ndarray:
    array = map_file(file)
    expected = (size, *leaf.shape, *([0] if leaf.dtype == FLOAT0 else []))
    dtype = stored_dtype(leaf.dtype)
    if array.shape != expected or array.dtype.newbyteorder("=") != dtype:
        raise SourceError(
            f"{file}: found {array.dtype}{list(array.shape)}, expected {dtype}{list(expected)}"
            f"{f' for leaf {leaf.path}' if leaf.path else ''}; the file was changed after the "
            "source was made from it."
        )
    return array
