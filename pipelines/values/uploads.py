"""Placed inputs of the launching machine, as files of a store that workers elsewhere reach."""

from __future__ import annotations

import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.store import Store
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.sources.array_source import ArraySource
from beamjax.sources.canonical import check_members
from beamjax.sources.derived_sources import ShortSource
from beamjax.sources.source_base import Source
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays

Uploads = OrderedDict[str, list[dict[str, Any]]]
"""The specs of sources that are in a store, the one that was used last at the end; each by the name
with which those of its files begin."""

FILE_BYTES = 16 * 2**20
"""Bytes of one file. A worker reads whole files for a shard."""


def stays_here(source: Source, store: Store) -> bool:
    """Whether a source reads what only this machine has, though the store is elsewhere."""
    if any(stays_here(part, store) for part in source.inner):
        return True
    return files.is_url(store.root) and source.is_local


def in_files(
    source: Source, store: Store, x64: bool, number: int, known: Uploads | None = None
) -> list[dict[str, Any]]:
    """The specs by which workers in other processes open a source.

    What this process has in memory, or only this machine has, is written to the store.

    Args:
      source: placed inputs.
      store: of the run.
      x64: whether JAX computes with 64-bit types.
      number: of the source in the run.
      known: what earlier runs wrote to the store.

    Returns:
      One spec for all leaves, or one for each leaf.
    """
    stem = f"source-{number}-{uuid.uuid4().hex}"
    is_written = stays_here(source, store) or isinstance(source, ArraySource)
    if known is not None and is_written:
        stem = f"source-{source_fingerprint(source).removeprefix('#')}"
        if stem in known:
            known.move_to_end(stem)
            return known[stem]
        store = _lasting(store)
    if stays_here(source, store):
        specs = [leaf.to_spec() for leaf in upload(source, store, x64, stem)]
    else:
        specs = [source.spilled(files.join(store.root, stem)).to_spec()]
    if known is not None and is_written:
        known[stem] = specs
    return specs


def _lasting(store: Store) -> Store:
    """The part of a store that is not swept between segments and runs."""
    folder = files.join(store.root, "sources")
    files.make_folder(folder)
    return replace(store, root=folder)


def remove(store: Store, stem: str) -> None:
    """Removes the files of a source that outlive a run, whose names begin with `stem`."""
    store = _lasting(store)
    if files.is_url(store.root):
        names = [name for name in files.names(store.root) if name.startswith(stem)]
        files.remove_files(store.root, names)
    else:
        shutil.rmtree(files.join(store.root, stem), ignore_errors=True)


def upload(source: Source, store: Store, x64: bool, stem: str) -> list[MembersSource]:
    """Writes all members of a source to a store.

    Args:
      source: to be read.
      store: to be written to.
      x64: whether JAX computes with 64-bit types.
      stem: the names of the files begin with it.

    Returns:
      A source for each leaf.

    Raises:
      SourceError: they can't be read, or written, or an integer does not fit the dtype that JAX
        has for it.
    """
    if isinstance(source, ShortSource):  # Files hold members of one shape.
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
