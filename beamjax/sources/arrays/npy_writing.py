"""Writes members to .npy files, one for each leaf, a few MiB at a time."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.npy_source import (
    NpySource,
    storable,
    stored_dtype,
    written_source,
)
from beamjax.sources.source_base import LeafSpec, Source
from beamjax.storage.arrays import FLOAT0

BLOCK_BYTES = 1 << 22
"""Bytes of members that are read at a time."""


def blocks_in_order(source: Source) -> Iterator[list[np.ndarray]]:
    """All members of a source, a few MiB of them at a time."""
    size = max(1, BLOCK_BYTES // max(1, sum(leaf.nbytes for leaf in source.leaves)))
    for start in range(0, len(source), size):
        yield source.read(start, min(start + size, len(source)))


def write_members(
    source: Source, chunks: Iterable[Sequence[np.ndarray]], folder: str | os.PathLike[str]
) -> NpySource:
    """Writes the members of a source, which come in chunks, to new files, one for each leaf."""
    stem = str(Path(folder).absolute() / uuid.uuid4().hex)
    paths = [f"{stem}-{i:03d}.npy" for i in range(len(source.leaves))]
    count = 0
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(GrowingFile(path, leaf))
                for path, leaf in zip(paths, source.leaves, strict=True)
            ]
            for chunk in chunks:
                for file, array in zip(files, chunk, strict=True):
                    file.append(array)
                count += len(chunk[0])
    except OSError as error:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise SourceError(
            f"{folder}: cannot write member {count} of {source!r} ({error})."
        ) from error
    return written_source(paths, source.leaves, count, source.treedef)


class GrowingFile:
    """An .npy file to which rows are appended."""

    # The header is written again at the end. NumPy leaves space in it for any number of rows.

    def __init__(self, path: str, leaf: LeafSpec) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self.leaf = leaf
        self.rows = 0
        self._write_header()

    def append(self, array: np.ndarray) -> None:
        """Writes rows at the end of the file."""
        self.file.write(np.ascontiguousarray(storable(np.asarray(array, self.leaf.dtype))).data)
        self.rows += len(array)

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *error: object) -> None:
        with self.file:
            self.file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        # See `storable`: a float0 array is stored with a last axis of size 0.
        hidden = [0] if self.leaf.dtype == FLOAT0 else []
        header = {
            "descr": np.lib.format.dtype_to_descr(stored_dtype(self.leaf.dtype)),
            "fortran_order": False,
            "shape": (self.rows, *self.leaf.shape, *hidden),
        }
        np.lib.format.write_array_header_1_0(self.file, header)
