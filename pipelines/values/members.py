"""Placed values between the pipelines of a run: sources over files of the store.

A file holds consecutive members as one array, and its name says which.
"""

from __future__ import annotations

import shutil
import uuid
from collections import OrderedDict
from typing import Any

import numpy as np

from beamjax.pipelines.values.store import Store, members_in
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.npy_source import ArrayFile, NpySource
from beamjax.sources.arrays.placed import MemberFiles, encode_part
from beamjax.sources.canonical import check_members
from beamjax.sources.derived_sources import ShortSource
from beamjax.sources.source_base import Source, spec_of
from beamjax.sources.source_kinds import DerivedSource
from beamjax.sources.streams.spool import spilled
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays

SUFFIX = ".members"


class MembersSource(MemberFiles):
    """One placed value in files of the store, in the format of `beamjax.storage.arrays`."""

    suffix = SUFFIX
    wraps = True  # integers were checked when the files were written

    def load(self, path: str) -> np.ndarray:
        def read() -> np.ndarray:
            (array,) = decode_arrays(files.read(path))[0]
            return array

        return members_in(path, read)


Uploads = OrderedDict[str, dict[str, Any]]
"""The specs of sources that were written to a store, by the prefix of their files, from the least
recently used."""

FILE_BYTES = 16 * 2**20
"""Approximate bytes of one file. For a shard, a worker reads all files that have members of it."""


def stays_here(source: Source, store: Store) -> bool:
    """Whether only this machine can read the source, while workers on others can read the store."""
    inner = source.inner if isinstance(source, DerivedSource) else ()
    if any(stays_here(part, store) for part in inner):
        return True
    return files.is_url(store.root) and source.local


def in_files(
    source: Source, store: Store, x64: bool, number: int, known: Uploads | None = None
) -> dict[str, Any]:
    """The spec with which workers in other processes open a source."""
    # `number` is that of the source in the run. Data that is in the memory of this process, or on
    # this machine only, is written to the store.
    stem = f"source-{number}-{uuid.uuid4().hex}"
    is_written = stays_here(source, store) or isinstance(source, ArraySource)
    # Uploads of earlier runs of a session: a source with equal content is not written again.
    if known is not None and is_written:
        stem = f"source-{source_fingerprint(source).removeprefix('#')}"
        if stem in known:
            known.move_to_end(stem)
            return known[stem]
    if stays_here(source, store):
        spec = spec_of(upload(source, store, x64, stem))
    else:
        spec = spec_of(spilled(source, files.join(store.root, stem)))
    if known is not None and is_written:
        known[stem] = spec
    return spec


def remove_upload(store: Store, stem: str) -> None:
    """Removes the files of an upload, whose names begin with `stem`."""
    if files.is_url(store.root):
        names = [name for name in files.names(store.root) if name.startswith(stem)]
        files.remove_files(store.root, names)
    else:
        shutil.rmtree(files.join(store.root, stem), ignore_errors=True)


def upload(source: Source, store: Store, x64: bool, stem: str) -> NpySource:
    """Writes all members of a source to a store, in files of a few MiB."""
    if isinstance(source, ShortSource):  # Files hold members of one shape, with padding.
        (source,) = source.inner
    width = max(1, FILE_BYTES // max(1, *(leaf.nbytes for leaf in source.leaves)))
    written: list[list[ArrayFile]] = [[] for _ in source.leaves]
    for start in range(0, max(len(source), 1), width):  # a source without members has a file, too
        count = min(width, len(source) - start)
        for number, array in enumerate(source.read(start, start + count)):
            check_members(source, number, array, start, x64)
            # `Store.sweep` does not remove files of this name.
            name = f"{stem}-{number}-{start}.npy"
            store.write(name, encode_part(array))
            written[number].append(ArrayFile(files.join(store.root, name), count))
    return NpySource(tuple(map(tuple, written)), source.leaves, wraps=True)
