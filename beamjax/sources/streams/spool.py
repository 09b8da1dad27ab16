"""Writes sources that can't be read by index, or only by this process, to .npy files."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from beamjax import _compat
from beamjax.errors import SourceError
from beamjax.options import Options
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.npy_source import NpySource, written_source
from beamjax.sources.arrays.npy_writing import blocks_in_order, write_members
from beamjax.sources.canonical import check_members
from beamjax.sources.source_base import Source, StreamSource
from beamjax.sources.source_kinds import DerivedSource
from beamjax.sources.streams.chunks import check_count, checked_chunks
from beamjax.storage import temporary
from beamjax.storage.files import is_url


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
    written = write_members(source, chunks, folder)
    check_count(source, len(written))
    return written


def spilled(source: Source, folder: str) -> Source:
    """The same members, with those that only this process can read written to files in a folder."""
    if isinstance(source, ArraySource):
        files = source.spill(folder).files
        return written_source(files, source.leaves, len(source), source.treedef, wraps=True)
    if isinstance(source, DerivedSource):
        parts = [spilled(inner, f"{folder}/{i}") for i, inner in enumerate(source.inner)]
        return source.with_inner(parts)
    if source.spec() is not None:
        return source
    return write_members(source, _checked_blocks(source), folder)


def _checked_blocks(source: Source) -> Iterator[list[np.ndarray]]:
    """As `blocks_in_order`; refuses integers that would wrap, with their place in the source."""
    start, x64 = 0, bool(_compat.config.jax_enable_x64)
    for arrays in blocks_in_order(source):
        for leaf, array in enumerate(arrays):
            check_members(source, leaf, array, start, x64)
        start += len(arrays[0])
        yield arrays
