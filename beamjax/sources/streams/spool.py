"""Writes sources that can't be read by index, or only by this process, to .npy files."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from beamjax import _compat
from beamjax.errors import SourceError
from beamjax.options import Options
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.npy_source import (
    NpySource,
    storable,
    stored_dtype,
    written_source,
)
from beamjax.sources.canonical import check_members
from beamjax.sources.source_base import (
    LeafSpec,
    Source,
    StreamSource,
)
from beamjax.sources.source_kinds import DerivedSource
from beamjax.sources.streams.chunks import check_count, checked_chunks
from beamjax.storage import temporary
from beamjax.storage.dtypes import FLOAT0
from beamjax.storage.files import is_url

BLOCK_BYTES = 1 << 22
"""Bytes of members that are read at a time."""


@contextlib.contextmanager
def spooled_here(sources: Sequence[StreamSource], options: Options) -> Iterator[list[NpySource]]:
    """The members of sources in files of a temporary folder, which is removed at the end."""
    parent = options.work_folder
    if parent is not None and is_url(parent):
        parent = None
    try:
        folder = temporary.new_name(parent, "members")
        temporary.make(folder)
    except OSError as error:
        raise SourceError(
            f"{parent}: cannot write here ({error}); expected a folder for the members of sources "
            "of unknown length."
        ) from error
    files: list[NpySource] = []
    try:
        for i, source in enumerate(sources):
            files.append(spool(source, Path(folder) / f"source-{i}"))
        yield files
    finally:
        for written in files:
            written.unmap()
        temporary.remove(folder)


def spool(source: StreamSource, folder: str | os.PathLike[str]) -> NpySource:
    """Writes a source of unknown length to files, one for each leaf."""
    leaves, x64 = range(len(source.leaves)), bool(_compat.config.jax_enable_x64)
    pieces = (checked_chunks(source, piece, leaves, x64) for piece in range(source.pieces))
    chunks = itertools.chain.from_iterable(pieces)
    paths, count = _written(source, chunks, folder)
    check_count(source, count)
    return written_source(paths, source.leaves, count, source.treedef)


def spilled(source: Source, folder: str) -> Source:
    """The same members, with those that only this process can read written to files in a folder."""
    if isinstance(source, ArraySource):
        files = source.spill(folder).files
        return written_source(files, source.leaves, len(source), source.treedef, wraps=True)
    if isinstance(source, DerivedSource):
        parts = [spilled(inner, f"{folder}/{i}") for i, inner in enumerate(source.inner)]
        return source.with_inner(parts)
    return spill(source, folder) if source.spec() is None else source


def spill(source: Source, folder: str | os.PathLike[str]) -> NpySource:
    """Writes a source of known length to files, one for each leaf, a few MiB at a time."""
    paths, count = _written(source, _checked_blocks(source), folder)
    return written_source(paths, source.leaves, count, source.treedef)


def _checked_blocks(source: Source) -> Iterator[list[np.ndarray]]:
    """As `blocks_in_order`; refuses integers that would wrap, with their place in the source."""
    start, x64 = 0, bool(_compat.config.jax_enable_x64)
    for arrays in blocks_in_order(source):
        for leaf, array in enumerate(arrays):
            check_members(source, leaf, array, start, x64)
        start += len(arrays[0])
        yield arrays


def blocks_in_order(source: Source) -> Iterator[list[np.ndarray]]:
    """All members of a source, a few MiB of them at a time."""
    size = max(1, BLOCK_BYTES // max(1, sum(leaf.nbytes for leaf in source.leaves)))
    for start in range(0, len(source), size):
        yield source.read(start, min(start + size, len(source)))


def _written(
    source: Source, chunks: Iterable[Sequence[np.ndarray]], folder: str | os.PathLike[str]
) -> tuple[list[str], int]:
    """Writes members to files, one for each leaf; returns the paths and the number of members."""
    paths = [str(Path(folder).absolute() / f"{i:03d}.npy") for i in range(len(source.leaves))]
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
        raise SourceError(
            f"{folder}: cannot write member {count} of {source!r} ({error})."
        ) from error
    return paths, count


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
