"""Placed inputs of unknown length from the concatenated arrays of .npy files."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import find_files, open_stream, readable
from beamjax.sources.arrays.npy_source import read_header
from beamjax.sources.source_base import (
    HoldsLeaves,
    LeafSpec,
    Leaves,
    PyTreeDef,
    StreamSource,
    describe_source,
    first_of,
    row_text,
)

CHUNK_BYTES = 1 << 22
"""Bytes that are read from a file at a time."""


class NpyParts(HoldsLeaves, StreamSource, kind="npy-parts"):
    """Concatenated arrays of .npy files, each of which is a piece; see `from_npy_parts`."""

    def __init__(
        self,
        files: tuple[tuple[str, ...], ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_npy_parts`, which checks.

        Args:
            files: the absolute paths or URLs of each leaf.
            leaves: one member of each.
            treedef: the tree that they form; a tuple by default.

        Raises:
            TypeError: the leaves have different numbers of files.
        """
        super().__init__(leaves, treedef)
        self._files = tuple(map(tuple, files))
        if len(files) != len(leaves) or not files or len(set(map(len, files))) > 1:
            raise TypeError(f"found files {files!r:.80}, expected as many for each leaf")

    @property
    def pieces(self) -> int:
        return len(self._files[0])

    def chunks(self, piece: int) -> Iterator[Sequence[np.ndarray]]:
        files = [paths[piece] for paths in self._files]
        member = max(sum(leaf.nbytes for leaf in self._leaves), 1)
        streams = [_rows(file, max(CHUNK_BYTES // member, 1)) for file in files]
        for parts in itertools.zip_longest(*streams, fillvalue=()):
            if len({len(rows) for rows in parts}) > 1:
                raise SourceError(
                    f"{', '.join(files)}: found different numbers of rows, expected the same in "
                    "the files of all leaves."
                )
            yield parts

    def where_in(self, piece: int, leaf: int, index: tuple[int, ...]) -> str:
        return f"{self._files[leaf][piece]}, {row_text(index)}"

    def describe(self) -> str:
        return describe_source(self, f"in {first_of(self._files[0])}")


def from_npy_parts(paths: Any) -> NpyParts:
    """A placed input of unknown length from the concatenated arrays of .npy files.

    Workers open the files, several at the same time if the program permits it.

    Args:
      paths: the files of one leaf, or a tree of them: a pattern such as "data/x-*.npy", the files
        of which are read in the order of their names, a URL, or a list of these. Each file is an
        array of shape (rows, ...), with any number of rows, which is the same in file i of each
        leaf. Files ending in .gz, .bz2 or .xz are decompressed as they are read.

    Returns:
      A `StreamSource` with the tree of `paths`.

    Raises:
      SourceError: there is no such file, or the first one of a leaf is no .npy file.
      StructureError: a leaf has elements other than numbers, or fewer files than another.
    """
    import jax

    found, treedef = jax.tree_util.tree_flatten_with_path(paths, is_leaf=_is_list_of_paths)
    files, leaves = [], []
    for path, given in found:
        name = jax.tree_util.keystr(path)
        parts = find_files(given, f"from_npy_parts{name}")
        files.append(parts)
        shape, dtype = _header(parts[0])
        leaves.append(LeafSpec(shape, dtype, None, name))
        if len(parts) != len(files[0]):
            raise StructureError(
                f"from_npy_parts{name}: found {len(parts)} files, expected {len(files[0])} as for "
                f"the first leaf; file i of each leaf has the same members."
            )
    if not files:
        raise StructureError("from_npy_parts: found a tree without leaves, expected a pattern.")
    return NpyParts(tuple(map(tuple, files)), tuple(leaves), treedef)


def _is_list_of_paths(tree: Any) -> bool:
    return isinstance(tree, list) and all(isinstance(x, str | os.PathLike) for x in tree)


def _header(file: str) -> tuple[tuple[int, ...], np.dtype]:
    """The shape of a row and the dtype of an .npy file."""
    with _open_npy(file) as (_, shape, dtype):
        return shape[1:], dtype.newbyteorder("=")


@contextlib.contextmanager
def _open_npy(file: str) -> Iterator[tuple[BinaryIO, tuple[int, ...], np.dtype]]:
    """Opens an .npy file and reads its header.

    Yields:
      The file at the beginning of its data, the shape, and the dtype.

    Raises:
      SourceError: it can't be read, here or in the `with` block, or holds no rows of numbers.
    """  # noqa: DOC501
    with readable(file, "a .npy file"), open_stream(file) as opened:
        try:
            shape, in_columns, dtype = read_header(opened)
        except tokenize.TokenError as error:
            raise ValueError(str(error)) from error
        if dtype.kind not in "biufc" or not shape or (in_columns and len(shape) > 1):
            order = " in Fortran order" if in_columns else ""
            raise SourceError(
                f"{file}: found {dtype}{list(shape)}{order}, expected numbers of shape "
                "(rows, ...) in C order."
            )
        yield opened, shape, dtype


def _read(file: BinaryIO, count: int) -> bytes:
    """Reads `count` bytes, or as many as there are.

    In small steps: a damaged header can't cause an allocation larger than the file.

    Returns:
        The bytes.
    """
    parts = []
    while count > 0 and (part := file.read(min(count, CHUNK_BYTES))):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _rows(file: str, count: int) -> Iterator[np.ndarray]:
    """The rows of an .npy file, `count` at a time."""
    with _open_npy(file) as (opened, shape, dtype):
        each = math.prod(shape[1:]) * dtype.itemsize
        for start in range(0, shape[0], count):
            rows = min(count, shape[0] - start)
            data = _read(opened, rows * each)
            if len(data) != rows * each:
                raise SourceError(
                    f"{file}: ends in row {start + len(data) // max(each, 1)}, expected {shape[0]} "
                    "rows as its header says."
                )
            yield np.frombuffer(data, dtype).reshape(rows, *shape[1:])
