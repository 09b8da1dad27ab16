"""Encoded accumulators on their way from worker to worker.

A small one is the element itself. A large one is in files of the store, and the element says which:
runners copy elements many times, and none may be over 64 MiB.
"""

from __future__ import annotations

from beamjax.arrays import Buffer, decode_arrays, encode_arrays
from beamjax.errors import ArrayFormatError, SourceError
from beamjax.pipelines import files
from beamjax.pipelines.store import Store, is_name, unique_key

LOCAL_BYTES, REMOTE_BYTES = 1 << 20, 32 << 20
"""Largest element, in bytes: where the store is a local folder, and where files are at URLs, each
of which takes a request."""

_NOTE_BYTES = 1 << 13
"""Names of files take less."""


def send(store: Store, data: bytes) -> bytes:
    """The element for an encoded accumulator.

    Raises:
      SourceError: the store can't be written.
    """
    limit = REMOTE_BYTES if files.is_url(store.root) else LOCAL_BYTES
    if len(data) <= limit:
        return data
    names = []
    for start in range(0, len(data), store.piece_bytes):
        names.append(f"{unique_key()}-sums.arrays")
        store.write(names[-1], data[start : start + store.piece_bytes])
    return encode_arrays([], {"parcel": names, "nbytes": len(data)})


def receive(store: Store, element: bytes) -> Buffer:
    """The encoded accumulator of an element.

    Raises:
      SourceError: its file is gone, or can't be read.
      ArrayFormatError: the element or the file is damaged.
    """
    if len(element) > _NOTE_BYTES:
        return element
    meta = decode_arrays(element)[1]
    if "parcel" not in meta:
        return element
    parts = [_read(store, str(name)) for name in meta["parcel"]]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != meta.get("nbytes"):
        raise ArrayFormatError(
            f"{store.root}: a sum on its way has {len(data)} bytes, expected {meta.get('nbytes')}."
        )
    return data


def _read(store: Store, name: str) -> Buffer:
    if not is_name(name):
        raise ArrayFormatError(f"{store.root}: {name!r} is not a file name that a store gives.")
    path = files.join(store.root, name)
    try:
        return files.read(path)
    except Exception as error:
        raise SourceError(
            f"{path}: cannot read a sum on its way ({error}). Is the folder shared by all workers, "
            "and was it not cleaned up?"
        ) from error
