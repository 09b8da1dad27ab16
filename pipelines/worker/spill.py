"""Accumulators on their way from worker to worker.

A small one is the element itself. A large one is in files of the store, and the element says which:
runners copy elements many times, and none may be over 64 MiB. Where one process runs all of the
pipeline, a large one is handed over as it is.
"""

from __future__ import annotations

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.numerics.accumulators import Accumulator
from beamjax.numerics.reducers import decode_accumulator
from beamjax.pipelines.values.in_memory import memory_store_of
from beamjax.pipelines.values.refs import is_name, unique_key
from beamjax.pipelines.values.store import Store
from beamjax.storage import files
from beamjax.storage.arrays import Buffer, decode_arrays, encode_arrays

LOCAL_BYTES, REMOTE_BYTES = 1 << 20, 32 << 20
"""Largest element, in bytes: where the store is a local folder, and where files are at URLs, each
of which takes a request."""

_NOTE_BYTES = 1 << 13
"""Names of files take less."""


def send(store: Store, accumulator: Accumulator) -> bytes:
    """The element for an accumulator, which is the receiver's from now on.

    Raises:
      SourceError: the store can't be written.
    """
    memory = memory_store_of(store.root)
    if memory is not None and accumulator.nbytes > LOCAL_BYTES:
        name = _new_name()
        memory.hand_over(name, accumulator)
        return encode_arrays([], {"here": name})
    data = accumulator.encode()
    limit = REMOTE_BYTES if files.is_url(store.root) else LOCAL_BYTES
    if len(data) <= limit:
        return data
    names = []
    for start in range(0, len(data), store.piece_bytes):
        names.append(_new_name())
        store.write(names[-1], data[start : start + store.piece_bytes])
    return encode_arrays([], {"part_in_memory": names, "nbytes": len(data)})


def receive(store: Store, element: bytes) -> Accumulator:
    """The accumulator of an element, which is the caller's; one that is here is so once.

    Raises:
      SourceError: it is gone, or can't be read.
      ArrayFormatError: the element or the file is damaged.
    """
    if len(element) > _NOTE_BYTES:
        return decode_accumulator(element)
    meta = decode_arrays(element)[1]
    if "here" in meta:
        return _taken(store, str(meta["here"]))
    if "part_in_memory" not in meta:
        return decode_accumulator(element)
    parts = [_read(store, str(name)) for name in meta["part_in_memory"]]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != meta.get("nbytes"):
        raise ArrayFormatError(
            f"{store.root}: a sum on its way has {len(data)} bytes, expected {meta.get('nbytes')}."
        )
    return decode_accumulator(data)


def _new_name() -> str:
    return f"{unique_key()}-sums.arrays"


def _taken(store: Store, name: str) -> Accumulator:
    memory = memory_store_of(store.root)
    found: Accumulator | None = None if memory is None else memory.take(name)
    if found is None:
        raise SourceError(
            f"{store.root}: a sum on its way ({name}) is not in this process, or was merged "
            "before; expected each to be merged once, where it was made."
        )
    return found


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
