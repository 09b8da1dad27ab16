"""Elements that hold accumulators.

The bytes of a small accumulator are the element. A large one is spilled to files of the store, and
the element names them, because runners copy elements many times and limit them to 64 MiB. Where one
process runs the whole pipeline, a large accumulator stays in its memory.
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
"""Largest accumulator, in bytes, that is not spilled: with a store in a local folder, and with one
at a URL, where each file costs a request."""

_NAMES_BYTES = 1 << 13
"""An upper bound of the bytes of an element that names files; a larger one is an accumulator."""


def send(store: Store, accumulator: Accumulator) -> bytes:
    """The element for an accumulator; the caller must not use the accumulator afterwards.

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
    return encode_arrays([], {"spilled": names, "nbytes": len(data)})


def receive(store: Store, element: bytes) -> Accumulator:
    """The accumulator of an element; one in memory can be received once.

    Raises:
      SourceError: a file is gone, or can't be read.
      ArrayFormatError: the element or the file is damaged.
    """
    if len(element) > _NAMES_BYTES:
        return decode_accumulator(element)
    meta = decode_arrays(element)[1]
    if "here" in meta:
        return _taken(store, str(meta["here"]))
    if "spilled" not in meta:
        return decode_accumulator(element)
    parts = [_read(store, str(name)) for name in meta["spilled"]]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != meta.get("nbytes"):
        raise ArrayFormatError(
            f"{store.root}: an accumulator has {len(data)} bytes, expected {meta.get('nbytes')}."
        )
    return decode_accumulator(data)


def _new_name() -> str:
    return f"{unique_key()}-sums.arrays"


def _taken(store: Store, name: str) -> Accumulator:
    memory = memory_store_of(store.root)
    found: Accumulator | None = None if memory is None else memory.take(name)
    if found is None:
        raise SourceError(
            f"{store.root}: the partial result {name} is not in this process, or was merged "
            "before; each is merged once, in the process that computed it."
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
            f"{path}: cannot read a partial result ({error}). Is the folder shared by all workers, "
            "and was it not cleaned up?"
        ) from error
