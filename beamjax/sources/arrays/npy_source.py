"""Placed inputs in memory-mapped files of NumPy: one or more .npy files a leaf, or an .npz file.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import io
import math
import os
import struct
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import (
    DataFile,
    find_files,
    is_url,
    look,
    readable,
)
from beamjax.sources.blocks import SourceBlock, blocks_of, ends_of, read_blocks
from beamjax.sources.leaf_checks import (
    check_sizes,
    checked_dtype,
    checked_leaf,
    leaf_name,
    native_dtype,
    native_view,
)
from beamjax.sources.source_base import (
    ByIndex,
    Count,
    HoldsLeaves,
    LeafSpec,
    Leaves,
    PyTreeDef,
    Source,
    Which,
    cuts_at,
    describe_source,
    first_of,
    row_text,
    spec_of,
)
from beamjax.sources.source_kinds import FileSource
from beamjax.storage.arrays import FLOAT0
from beamjax.storage.files import local_path, read
from beamjax.storage.shared_cache import BLOCKS, Arrays, SharedCache


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """An array of consecutive members of a leaf: an .npy file, or an array in an .npz file."""

    path: str  # absolute
    rows: Count
    name: str = ""  # the name of the array in an .npz file; "" for an .npy file
    stamp: DataFile | None = None  # None for files of this run, which do not change

    def array(self, leaf: LeafSpec, checked: set[str]) -> np.ndarray:
        """All its members, mapped."""
        if self.stamp is not None and self.path not in checked:
            # On every read: a memory map shows what is written to the file later.
            self.stamp.check()
            checked.add(self.path)
        array = map_file(self.path, self.name, self.stamp)
        expected = (self.rows, *leaf.shape, *([0] if leaf.dtype == FLOAT0 else []))
        dtype = stored_dtype(leaf.dtype)
        same = array.dtype == dtype or array.dtype.newbyteorder("=") == dtype
        if array.shape != expected or not same:
            raise SourceError(
                f"{self.path}: found {array.dtype}{list(array.shape)}, expected {dtype}"
                f"{list(expected)}{f' for leaf {leaf.path}' if leaf.path else ''}; the file was "
                "changed after the source was made from it."
            )
        return restored(array, leaf.dtype)


class NpySource(HoldsLeaves, ByIndex, FileSource):
    """Memory-mapped arrays: for each leaf one, or several that are concatenated."""

    def __init__(
        self,
        files: tuple[tuple[ArrayFile, ...], ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
        wraps: bool = False,
    ) -> None:
        """Use `from_npy` or `from_npz`, which check."""
        super().__init__(leaves, treedef)
        self._files = tuple(map(tuple, files))
        self.wraps = wraps
        self._ends = [ends_of([file.rows for file in series]) for series in self._files]
        if not self._files or not all(self._files) or len(self._files) != len(self._leaves):
            counts = list(map(len, self._files))
            raise SourceError(
                f"source of .npy files: found {counts} files for {len(self._leaves)} leaves, "
                "expected at least one file for each leaf."
            )
        sizes = [int(ends[-1]) for ends in self._ends]
        if len(set(sizes)) > 1:
            raise SourceError(
                f"source of .npy files: found {sizes} members in the files of the leaves, expected "
                "the same number for each leaf."
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of all files: those of the first leaf, then those of the second, ..."""
        return tuple(file.path for series in self._files for file in series)

    @property
    def local(self) -> bool:
        return not any(map(is_url, self.files))

    @functools.cached_property
    def cuts(self) -> Mapping[int, str]:
        # A run divides its own files, which have no stamps, in a way that depends on the run.
        stamped = [series for series in self._files if all(file.stamp for file in series)]
        starts = (cuts_at([(f.path, f.rows) for f in series]) for series in stamped)
        return dict(collections.ChainMap(*starts))

    def __len__(self) -> int:
        return int(self._ends[0][-1])

    def _at(self, which: Which) -> list[np.ndarray]:
        members, checked = [], set[str]()
        for files, ends, leaf in zip(self._files, self._ends, self._leaves, strict=True):
            if len(files) == 1:  # The usual case; small reads take half the time without blocks.
                members.append(files[0].array(leaf, checked)[which])
                continue

            def load(block: SourceBlock, files: Any = files, leaf: Any = leaf) -> Arrays:
                return [files[block.number].array(leaf, checked)]

            members += read_blocks([leaf], functools.partial(blocks_of, ends), load, which)
        return members

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        number = int(np.searchsorted(self._ends[leaf], index[0], side="right")) - 1
        file, row = self._files[leaf][number], index[0] - int(self._ends[leaf][number])
        array = f", array {file.name!r}" if file.name else ""
        return f"{file.path}{array}, {row_text((row, *index[1:]))}"

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        if len(leaves) == len(self._leaves):
            return self, leaves
        files, types = zip(*((self._files[i], self._leaves[i]) for i in leaves), strict=True)
        return NpySource(files, types, None, self.wraps), leaves

    def unmap(self) -> None:
        """Drops the maps of its files before they are removed: a map holds their disk space."""
        for file in self.files:
            unmap(file)

    def check_files(self) -> None:
        """Raises SourceError unless each file is there and has the expected type."""
        checked = set[str]()
        for files, leaf in zip(self._files, self._leaves, strict=True):
            for file in files:
                file.array(leaf, checked)

    def __str__(self) -> str:
        return describe_source(self, f"in {first_of(list(dict.fromkeys(self.files)))}")

    def identity(self) -> tuple[Any, list[str]]:
        names = [[(file.name, file.rows) for file in series] for series in self._files]
        return spec_of(self) | {"files": names}, list(dict.fromkeys(self.files))


def written_source(
    paths: Sequence[str],
    leaves: Sequence[LeafSpec],
    size: int,
    treedef: PyTreeDef | None = None,
    wraps: bool = False,
) -> NpySource:
    """The source of files that this run has written, one for each leaf."""
    files = tuple((ArrayFile(path, size),) for path in paths)
    return NpySource(files, tuple(leaves), treedef, wraps)


# --- sources from files


def from_npy(paths: Any) -> NpySource:
    """A placed input from .npy files that the launcher and the workers see under the same path.

    Args:
        paths: a path, or a pytree of paths, of files with arrays of shape (n, ...). A pattern such
            as "data/x-*.npy" is one leaf: the arrays in its files, concatenated in the order of
            their names.

    Returns:
        A `Source` with n members and the tree of `paths`.

    Raises:
        SourceError: a file is missing, truncated, or no .npy file. A .npy file has no checksum, so
            other damage is not found. When the source is read: a file
            has changed.
        StructureError: a file holds a scalar, or a dtype that JAX does not know, files of one
            pattern differ in shape or dtype, or a URL is given.
        PlacementError: n is not the same for all leaves.
    """
    import jax

    located, treedef = jax.tree_util.tree_flatten_with_path(paths)
    files, sizes, names = [], [], []
    leaves: list[LeafSpec] = []
    for path, pattern in located:
        name = jax.tree_util.keystr(path)
        series: list[ArrayFile] = []
        for file in _listed(pattern, name):
            array = map_file(file)
            if array.dtype.kind == "V":
                raise StructureError(f"{leaf_name(name)}: {_unknown(array.dtype)} ({file})")
            array = checked_leaf(name, array, f" in {file}")
            leaf = LeafSpec(array.shape[1:], native_dtype(array.dtype), None, name)
            if series and leaf != leaves[-1]:
                raise StructureError(
                    f"{leaf_name(name)}: found {leaf} in {file}, expected {leaves[-1]} as in "
                    f"{series[0].path}."
                )
            leaves += [] if series else [leaf]
            series.append(ArrayFile(file, array.shape[0], stamp=look(file)))
        files.append(tuple(series))
        sizes.append(sum(file.rows for file in series))
        names.append(f"{name} ({first_of([file.path for file in series])})")
    check_sizes(names, sizes)
    return NpySource(tuple(files), tuple(leaves), treedef)


def from_npz(path: str | os.PathLike[str]) -> NpySource:
    """A placed input from the arrays in an .npz file, which the launcher and all workers see.

    A member is a dictionary of a row of each array, by their names. The file is mapped, like those
    of `from_npy`, so it must not be compressed, as `np.savez_compressed` writes it. This call reads
    the file once, to compare the checksums in it with its contents.

    Args:
      path: the path of the file.

    Returns:
      A `Source` of dictionaries whose keys are the names of the arrays.

    Raises:
      SourceError: it is missing, damaged, compressed, or no .npz file. When it is read: it has
        changed.
      StructureError: an array is a scalar, or has elements other than numbers; or `path` is no path
        of a local file.
      PlacementError: the arrays have different numbers of members.
    """
    import jax

    if not isinstance(path, str | os.PathLike):
        raise StructureError(f"from_npz: found {type(path).__name__}, expected the path of a file.")
    file = look(_absolute(path, "from_npz"))
    arrays = _zipped_arrays(file.path)
    _compare_checksums(file.path)
    leaves, files, names = [], [], []
    for name, array in sorted(arrays.items()):
        where, key = f"{file.path}, array {name!r}", f"[{name!r}]"
        if array.dtype.kind == "V":
            raise StructureError(f"{where}: {_unknown(array.dtype)}")
        dtype = checked_dtype(key, array.shape, array.dtype, where)
        leaves.append(LeafSpec(array.shape[1:], dtype, None, key))
        files.append((ArrayFile(file.path, array.shape[0], name, file),))
        names.append(f"{key} ({file.path})")
    check_sizes(names, [file.rows for (file,) in files])
    treedef = jax.tree_util.tree_structure(dict.fromkeys(arrays, 0))
    return NpySource(tuple(files), tuple(leaves), treedef)


def _unknown(dtype: np.dtype) -> str:
    return (
        f"found the dtype {dtype}, expected numbers. Files of NumPy lose bfloat16 and its like: "
        "write them with from_arrays(...).spill()."
    )


def _listed(pattern: Any, name: str) -> list[str]:
    """The files of a leaf."""
    if not isinstance(pattern, str | os.PathLike):
        raise StructureError(
            f"{leaf_name(name)}: found {type(pattern).__name__}, expected the path of a .npy file."
        )
    path = _absolute(pattern, leaf_name(name))
    if glob.has_magic(path) and not os.path.lexists(path):
        return find_files(path, "from_npy")
    return [path]


def _absolute(path_or_url: str | os.PathLike[str], caller: str) -> str:
    path = local_path(os.fspath(path_or_url))
    if is_url(path):
        raise StructureError(
            f"{caller}: found the URL {path}, expected a local path: files of NumPy are mapped. "
            "Copy it to a folder that all workers see, or write Parquet or Zarr."
        )
    return os.path.abspath(path)


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in a .npy file that stores a dtype: itself, or raw integers of the same width."""
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"u{max(dtype.itemsize, 1)}")


def storable(array: np.ndarray) -> np.ndarray:
    """An array as it is stored in a .npy file."""
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
    if stored.dtype == dtype and not stored.flags.writeable:
        return stored
    view = native_view(stored)
    return view if view.dtype == dtype else view.view(dtype)


# --- maps of files

_MAPPED: SharedCache[np.ndarray] = SharedCache(128, lambda _: 1)
"""Mapped files, at most 128. Each map holds a file descriptor."""


def map_file(file: str, name: str = "", stamp: DataFile | None = None) -> np.ndarray:
    """The mapped array of a file, from the cache while the file has not changed."""
    if is_url(file):  # one of a run, which does not change
        return BLOCKS.get(file, lambda: [_read_array(file)], None)[0]
    if stamp is None:
        try:
            status = os.stat(file)
        except (OSError, ValueError) as error:
            raise _cannot_open(file, error) from error
        nbytes, changed = status.st_size, str(status.st_mtime_ns)
    else:
        nbytes, changed = stamp.nbytes, stamp.stamp
    load = lambda: _zipped_array(file, name) if name else _npy_array(file, nbytes)
    return _MAPPED.get((file, name, nbytes, changed), load)


def unmap(file: str) -> None:
    """Drops the map of a local .npy file before it is removed: a map holds its disk space."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(file)
        _MAPPED.discard([(file, "", status.st_size, str(status.st_mtime_ns))])


def _read_array(file: str) -> np.ndarray:
    with readable(file, "an .npy file"):
        data = read(file)
        opened = io.BytesIO(data)
        try:
            shape, in_columns, dtype = read_header(opened)
        except HEADER_ERRORS as error:
            raise ValueError(str(error)) from error
        offset, nbytes = opened.tell(), math.prod(shape) * dtype.itemsize
        if dtype.hasobject or in_columns or len(data) != offset + nbytes:
            raise ValueError(f"found {len(data)} bytes, expected {dtype}{list(shape)} in C order")
        return np.frombuffer(data, dtype, offset=offset).reshape(shape)


def _npy_array(file: str, nbytes: int) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(file, mode="r").view(np.ndarray)  # indexes faster
    except OSError as error:
        raise _cannot_open(file, error) from error
    except Exception as error:
        _refuse_objects(file)
        raise SourceError(
            f"{file}: found {nbytes} bytes that are not a whole .npy array ({error}); "
            "expected numbers, as np.save writes them. Was it cut off as it was written or copied?"
        ) from error


def _refuse_objects(file: str) -> None:
    """Raises StructureError for a .npy file with objects of Python, which NumPy does not map."""
    with contextlib.suppress(*HEADER_ERRORS), open(file, "rb") as opened:
        shape, _, dtype = read_header(opened)
        if dtype.hasobject:
            raise StructureError(f"{file}: {_objects(shape)}")


def _objects(shape: Sequence[int]) -> str:
    return (
        f"found an array of objects of Python (dtype object{list(shape)}), expected numbers; "
        "convert it with array.astype(...) before it is saved."
    )


def _cannot_open(file: str, error: OSError | ValueError) -> SourceError:
    reason = getattr(error, "strerror", None) or error
    return SourceError(
        f"{file}: cannot open ({reason}); expected a .npy file that the launcher and all workers "
        "see under this path."
    )


HEADER_ERRORS = (OSError, ValueError, EOFError, tokenize.TokenError)
"""Errors from a file that is no .npy file. NumPy parses headers as Python, hence `TokenError`."""
_HEADER_BYTES = 1 << 20
"""Longest header that is read: a damaged file must not cause a large allocation."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of a file in a zip: magic, skipped fields, lengths of the name and of extra data, which
follow it."""


def _zipped_array(file: str, name: str) -> np.ndarray:
    arrays = _zipped_arrays(file)
    if name not in arrays:
        raise SourceError(
            f"{file}: found no array {name!r}, expected it; the file was changed after the source "
            "was made from it."
        )
    return arrays[name]


def _zipped_arrays(file: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, mapped, by name."""
    arrays: dict[str, np.ndarray] = {}
    with readable(file, "an .npz file of np.savez"), open(file, "rb") as opened:
        try:
            entries = zipfile.ZipFile(opened).infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise ValueError(str(error)) from error
        for entry in entries:
            name = entry.filename.removesuffix(".npy")
            where = f"{file}, {entry.filename!r}"
            if name == entry.filename or name in arrays:
                raise SourceError(f"{where}: expected arrays only, each of its own name.")
            is_encrypted = entry.flag_bits & 1
            if entry.compress_type != zipfile.ZIP_STORED or is_encrypted:
                raise SourceError(
                    f"{where}: is compressed, expected an array as np.savez writes it, which can "
                    f"be mapped: np.savez('new.npz', **np.load({os.path.basename(file)!r}))."
                )
            try:
                arrays[name] = _mapped_entry(opened, entry, where)
            except HEADER_ERRORS as error:
                raise SourceError(f"{where}: found no whole array ({error}).") from error
    return arrays


def _compare_checksums(file: str) -> None:
    """Raises SourceError if the contents of a zip differ from their checksums."""
    with readable(file, "an .npz file of np.savez"), zipfile.ZipFile(file) as opened:
        bad = opened.testzip()
    if bad is not None:
        raise SourceError(f"{file}, {bad!r}: found contents that differ from their checksum.")


def _mapped_entry(opened: BinaryIO, entry: zipfile.ZipInfo, where: str) -> np.ndarray:
    """The array of a file in a zip that is not compressed."""
    opened.seek(entry.header_offset)
    data = opened.read(_LOCAL_HEADER.size)
    if len(data) < _LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        raise ValueError(f"nothing at byte {entry.header_offset}")
    _, name, extra = _LOCAL_HEADER.unpack(data)
    start = opened.seek(name + extra, os.SEEK_CUR)
    shape, in_columns, dtype = read_header(opened)
    offset = opened.tell()
    if dtype.hasobject:
        raise StructureError(f"{where}: {_objects(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if offset - start + nbytes != entry.file_size:
        raise ValueError(f"{entry.file_size} bytes, expected {dtype}{list(shape)} after a header")
    if offset + nbytes > opened.seek(0, os.SEEK_END):
        raise ValueError("the file ends before it")
    if not nbytes:
        return np.empty(shape, dtype)  # mmap refuses empty ranges.
    mapped = np.memmap(opened, dtype, "r", offset, shape, "F" if in_columns else "C")
    return mapped.view(np.ndarray)


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of an .npy file."""
    version = np.lib.format.read_magic(file)
    # Version 3 differs from 2 by the encoding of names of fields, which no dtype here has.
    read = {(1, 0): np.lib.format.read_array_header_1_0}
    return read.get(version, np.lib.format.read_array_header_2_0)(_HeaderFile(file))


class _HeaderFile:
    """A file of which NumPy reads the header; refuses headers of impossible length."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def read(self, count: int = -1, /) -> bytes:
        if not 0 <= count <= _HEADER_BYTES:
            raise ValueError(f"a header of {count} bytes")
        return self.file.read(count)
