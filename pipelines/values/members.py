"""Placed values between the pipelines of a run: sources over files of the store.

A file holds consecutive members as one array, and its name says which.
"""

from __future__ import annotations

import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.pipelines.values.store import Store, members_in
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.placed import MemberFiles
from beamjax.sources.canonical import check_members
from beamjax.sources.derived_sources import ShortSource
from beamjax.sources.source_base import Source, spec_of
from beamjax.sources.source_kinds import DerivedSource
from beamjax.sources.streams.spool import spilled
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays

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


Uploads = OrderedDict[str, list[dict[str, Any]]]
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
) -> list[dict[str, Any]]:
    """The specs with which workers in other processes open a source: for all leaves, or each."""
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
        store = _lasting(store)
    if stays_here(source, store):
        specs = [spec_of(leaf) for leaf in upload(source, store, x64, stem)]
    else:
        specs = [spec_of(spilled(source, files.join(store.root, stem)))]
    if known is not None and is_written:
        known[stem] = specs
    return specs


def _lasting(store: Store) -> Store:
    """A store in a subfolder. `Store.sweep` does not remove files there."""
    folder = files.join(store.root, "sources")
    files.make_folder(folder)
    return replace(store, root=folder)


def remove_upload(store: Store, stem: str) -> None:
    """Removes the files of an upload, whose names begin with `stem`."""
    store = _lasting(store)
    if files.is_url(store.root):
        names = [name for name in files.names(store.root) if name.startswith(stem)]
        files.remove_files(store.root, names)
    else:
        shutil.rmtree(files.join(store.root, stem), ignore_errors=True)


def upload(source: Source, store: Store, x64: bool, stem: str) -> list[MembersSource]:
    """Writes all members of a source to a store; returns a source for each leaf."""
    if isinstance(source, ShortSource):  # Files hold members of one shape, with padding.
        (source,) = source.inner
    width = max(1, FILE_BYTES // max(1, *(leaf.nbytes for leaf in source.leaves)))
    parts = list(_parts(len(source), width))
    for start, count in parts:
        for number, array in enumerate(source.read(start, start + count)):
            check_members(source, number, array, start, x64)
            name = MembersSource.file_name(f"{stem}-{number}", start, count)
            store.write(name, encode_arrays([array], {}))
    return [
        MembersSource(store.root, f"{stem}-{number}", parts, leaf, len(source))
        for number, leaf in enumerate(source.leaves)
    ]


def _parts(n: int, width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, width):
        yield start, min(width, n - start)
