"""Placed inputs of the launching machine, as files of a store that workers elsewhere reach."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.store import Store
from beamjax.sources.canonical import check_members
from beamjax.sources.ragged_source import ShortSource
from beamjax.sources.source_base import Source
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays

FILE_BYTES = 16 * 2**20
"""Of one file: what a worker reads for a shard, at least."""


def stays_here(source: Source, store: Store) -> bool:
    """Whether a source reads what only this machine has, though the store is elsewhere."""
    if any(stays_here(part, store) for part in source.inner):
        return True
    return files.is_url(store.root) and source.is_local


def upload(source: Source, store: Store, x64: bool) -> list[MembersSource]:
    """Writes all members of a source to a store.

    Args:
      source: to be read.
      store: to be written to.
      x64: whether JAX computes with 64-bit types.

    Returns:
      A source for each leaf.

    Raises:
      SourceError: they can't be read, or written, or an integer does not fit the dtype that JAX
        has for it.
    """
    if isinstance(source, ShortSource):  # Files hold members of one shape.
        (source,) = source.inner
    stem = f"source-{uuid.uuid4().hex}"
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
