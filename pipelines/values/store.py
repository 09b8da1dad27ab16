"""Stores values that are too large for a Beam element, in files that launcher and workers share.

A value is a list of arrays. `Store.put` writes it to files that are named by hashes of their
content, and returns a `StoreRef`, which travels in its place. Small values travel inside of it.
`Store.get` reads a value once in each process, and caches the arrays for all threads. Files are
written under a temporary name and renamed, and never changed, so readers need no locks, and two
workers that write the same value do no harm.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from beamjax.errors import ArrayFormatError, OptionsError, SourceError
from beamjax.pipelines.values.refs import (
    SUFFIX,
    Here,
    StoreRef,
    content_key,
    file_name,
    is_name,
    leaves_of,
    ref_to_files,
    unique_key,
)
from beamjax.spans import transferring
from beamjax.storage import arrays as wire
from beamjax.storage import buffers
from beamjax.storage import files as file_io
from beamjax.storage.arrays import dtype_from_name, dtype_name
from beamjax.storage.shared_cache import SharedCache, nbytes
from beamjax.telemetry.worker_records import Reports

PIECE_BYTES = 64 * 2**20
"""Largest file, in bytes."""
INLINE_BYTES = 64 * 2**10
"""Largest encoded value that travels inside of its `StoreRef`, in bytes."""

LOCAL_BYTES, REMOTE_BYTES = 1 << 20, 32 << 20
"""Largest accumulator, in bytes, that travels as an element and not as a file: with a store in a
local folder, and with one at a URL, where each file costs a request."""

SUFFIXES = (SUFFIX, ".members", ".record")
"""Suffixes of the files that runs write to a store, besides those of inputs."""


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of values, which the launcher and the workers see at the same path or URL."""

    root: str  # an absolute path, or a URL that fsspec knows
    piece_bytes: int = PIECE_BYTES  # of a file at most; larger arrays are cut
    # Whether `write` creates a missing folder. Not for the folder of a run: a worker that continues
    # after the end of the run must not create it again.
    persistent: bool = True
    # Where workers report progress; None for no reports.
    reports: Reports | None = dataclasses.field(default=None, compare=False)
    # The folder with the heartbeats of the launcher of a pipeline; None if its workers end with it
    # anyway.
    launcher: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.piece_bytes < 4 * CHUNK_OVERHEAD:
            raise OptionsError(
                f"store {self.root}: found piece_bytes={self.piece_bytes}, expected at least "
                f"{4 * CHUNK_OVERHEAD}."
            )
        if not file_io.is_url(self.root):
            object.__setattr__(self, "root", os.path.abspath(self.root))

    @property
    def _memory_store(self) -> MemoryStore | None:
        """The part of the store that is in the memory of this process; None if there is none."""
        return memory_store_of(self.root)

    @transferring()
    def put(
        self, arrays: Sequence[Any], hint: str = "", *, inline: bool = True, hashed: bool = True
    ) -> StoreRef:
        """Writes a value, unless the same value is already there."""
        # `hint` is part of the file names, for users who look into the folder. `inline` allows a
        # small value to travel inside of its reference. `hashed` names files by hashes of their
        # content, which takes time and is of no use for a value that is surely new.
        arrays = _plain(arrays, hint)
        leaves = leaves_of(arrays)
        if inline and sum(a.nbytes for a in arrays) <= INLINE_BYTES:
            data = wire.encode_arrays(arrays)
            if len(data) <= INLINE_BYTES:
                return StoreRef(content_key([data]), leaves, inline=data)
        files = []
        for chunks in pack(arrays, self.piece_bytes):
            data = wire.encode_arrays(chunks)
            name = file_name(content_key([data]) if hashed else unique_key(), hint)
            self.write(name, data, keep=True)
            files.append((name, len(data)))
        return ref_to_files(leaves, files)

    def hold(
        self,
        arrays: Sequence[np.ndarray],
        hint: str = "",
        *,
        own: bool = False,
        inline: bool = True,
        hashed: bool = True,
    ) -> StoreRef:
        """Like `put`, but large arrays stay in memory if workers are threads of this process."""
        memory = self._memory_store
        nbytes = sum(array.nbytes for array in arrays)
        if memory is None or nbytes <= INLINE_BYTES or not memory.has_room(nbytes):
            return self.put(arrays, hint, inline=inline, hashed=hashed)
        with transferring():
            arrays = _plain(arrays, hint)
            # `own`: the caller gives the arrays away. Others are copied, unless they can't be
            # changed.
            held = [array if own else fixed(array) for array in arrays]
            name = file_name(unique_key(), hint)
            memory.put(name, [_flat_and_fixed(array) for array in held if array.nbytes])
        return ref_to_files(leaves_of(arrays), [(name, nbytes)])

    def is_held(self, ref: StoreRef) -> bool:
        """Whether `hold` has left a value in the memory of this process."""
        memory = self._memory_store
        return memory is not None and any(memory.get(name) is not None for name, _ in ref.files)

    def release(self, refs: Iterable[StoreRef]) -> None:
        """Removes values from memory that no later step reads."""
        memory = self._memory_store
        if memory is not None:
            memory.release(name for ref in refs for name, _ in ref.files)

    def joined(self, refs: Sequence[StoreRef], shape: tuple[int, ...], dtype: np.dtype) -> StoreRef:
        """A reference to the concatenation of flat arrays in files, which are not read."""
        leaves = [leaf for ref in refs for leaf in ref.leaves]
        size = sum(math.prod(part) for _, part in leaves)
        if {name for name, _ in leaves} != {dtype_name(dtype)} or size != math.prod(shape):
            raise ArrayFormatError(
                f"{self.root}: found {len(leaves)} parts with {size} values, expected "
                f"{dtype}{list(shape)}."
            )
        files = [file for ref in refs for file in ref.files]
        return ref_to_files(((dtype_name(dtype), tuple(shape)),), files)

    @transferring()
    def get(self, ref: StoreRef | Here, *, cache: bool = True) -> list[np.ndarray]:
        """Reads a value; its arrays are read-only."""
        if isinstance(ref, Here):
            return [ref.array]
        if ref.inline:
            return wire.decode_arrays(ref.inline)[0]
        if not cache or self.is_held(ref):
            return self._load(ref)
        # If several threads ask at the same time, one of them loads the value.
        return list(_CACHE.get(ref.key, lambda: self._load(ref), owner=self.root))

    def array(self, ref: StoreRef | Here, *, cache: bool = True) -> np.ndarray:
        """Reads a value of one array; see `get`."""
        (array,) = self.get(ref, cache=cache)
        return array

    def write_members(self, name: str, array: np.ndarray) -> None:
        """Writes members of a placed value to a file, and caches them in this process."""
        # No other file of any run has the name, as other processes may have cached what was in it.
        # A worker computes the same shards in each round, so it mostly reads what it has written.
        self.write(name, wire.encode_arrays([array]))
        array.flags.writeable = False
        _CACHE.put(file_io.join(self.root, name), [array], owner=self.root)

    def sweep(self, live: Container[str]) -> None:
        """Removes all values except those in files of these names."""
        # Only the launcher calls this, between passes, when no worker writes to the store.
        memory = self._memory_store
        if memory is not None:
            memory.sweep(live)
        try:
            gone = [n for n in file_io.names(self.root) if n not in live and n.endswith(SUFFIXES)]
            _CACHE.discard(file_io.join(self.root, name) for name in gone)
            file_io.remove_files(self.root, gone)
        except Exception as error:
            raise SourceError(f"{self.root}: cannot remove stored values ({error}).") from error

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Writes a file. With `keep`, an existing file of this name and size is left as it is."""
        try:
            file_io.write(file_io.join(self.root, name), data, keep=keep, make=self.persistent)
        except Exception as error:
            raise SourceError(
                f"{self.root}: cannot write {name} of {len(data)} bytes ({error}); expected a "
                "folder that the launcher and all workers can write and read."
            ) from error

    def _load(self, ref: StoreRef) -> list[np.ndarray]:
        size = sum(size for _, size in ref.files)
        if size < ref.nbytes:
            raise ArrayFormatError(
                f"{self.root}: value {ref.key}: found files of {size} bytes, expected "
                f"{ref.nbytes} or more for its {len(ref.leaves)} arrays; the reference is damaged."
            )
        chunks = (chunk for name, size in ref.files for chunk in self._read_chunks(name, size))
        loaded = [
            assemble(dtype_from_name(name), shape, chunks, f"{self.root}: value {ref.key}")
            for name, shape in ref.leaves
        ]
        if next(chunks, None) is not None:
            raise ArrayFormatError(
                f"{self.root}: value {ref.key} has more data than its {len(ref.leaves)} arrays."
            )
        return loaded

    def _read_chunks(self, name: str, size: int) -> list[np.ndarray]:
        path = f"{self.root}/{name}"
        if not is_name(name):
            raise ArrayFormatError(f"{path}: not a file name that a store gives.")
        memory = self._memory_store
        held = None if memory is None else memory.get(name)
        if held is not None:
            return held
        try:
            data = file_io.read(file_io.join(self.root, name))
        except Exception as error:
            raise SourceError(
                f"{path}: cannot read a stored value ({error}); expected a file of {size} bytes. "
                "Is the folder shared by the launcher and all workers, and was it not cleaned up?"
            ) from error
        if len(data) != size:
            raise ArrayFormatError(f"{path}: found {len(data)} bytes, expected {size}.")
        try:
            return wire.decode_arrays(data)[0]
        except ArrayFormatError as error:
            raise ArrayFormatError(f"{path}: {error}") from None


_CACHE: SharedCache[list[np.ndarray]] = SharedCache(2**30, nbytes)


def set_cache_bytes(limit: int) -> None:
    """Sets how many bytes of values this process caches, 1 GiB by default; 0 keeps the last."""
    _CACHE.limit = limit


def members_in(path: str, load: Callable[[], np.ndarray]) -> np.ndarray:
    """The members in a file of a store, which `load` reads unless this process still has them."""
    # Members at URLs stay in the cache: the next round would download them again. Local files are
    # mapped.
    if file_io.is_url(path):
        return _CACHE.get(path, lambda: [load()], owner=path.rpartition("/")[0])[0]
    written = _CACHE.find(path)
    return load() if written is None else written[0]


def open_cache(store: Store) -> None:
    """Starts to record which cached values of this process the run with this store uses."""
    _CACHE.open(store.root)


def close_cache(store: Store) -> None:
    """Removes the cached values of this process that no other run uses."""
    _CACHE.close(store.root)


def _plain(arrays: Iterable[Any], hint: str) -> list[np.ndarray]:
    return [wire.plain_array(a, f"value {hint!r}, array {i}") for i, a in enumerate(arrays)]


def _flat_and_fixed(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    flat.flags.writeable = False
    return flat


class MemoryStore:
    """The values that a store keeps in the memory of this process, by name. Thread-safe."""

    def __init__(self, limit: int):
        self.limit = limit  # bytes of arrays; further values are written to files
        # Protects `_nbytes`. Single operations of dicts are atomic.
        self._lock = threading.Lock()
        self._arrays: dict[str, list[np.ndarray]] = {}
        self._sums: dict[str, Any] = {}
        self._nbytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit."""
        return self._nbytes + nbytes <= self.limit

    def put(self, name: str, arrays: list[np.ndarray]) -> None:
        """Stores arrays, which must not be changed afterwards."""
        with self._lock:
            self._arrays[name] = arrays
            self._nbytes += sum(array.nbytes for array in arrays)

    def get(self, name: str) -> list[np.ndarray] | None:
        """The arrays of a name, if they are here."""
        return self._arrays.get(name)

    def hand_over(self, name: str, accumulator: Any) -> None:
        """Stores an accumulator until `take`. The caller must not use it afterwards."""
        self._sums[name] = accumulator

    def take(self, name: str) -> Any:
        """Removes and returns the accumulator of a name; None if it is not here."""
        return self._sums.pop(name, None)

    def release(self, names: Iterable[str]) -> None:
        """Removes the values of these names, if they are here."""
        with self._lock:
            for name in names:
                self._sums.pop(name, None)
                self._nbytes -= sum(array.nbytes for array in self._arrays.pop(name, ()))

    def sweep(self, live: Container[str]) -> None:
        """Removes all values but these."""
        self.release([name for name in (*self._arrays, *self._sums) if name not in live])


_memory_stores: dict[str, MemoryStore] = {}


def open_memory_store(root: str, limit: int) -> None:
    """Lets the store in a folder keep accumulators, and arrays up to a limit, in memory."""
    _memory_stores[root] = MemoryStore(limit)


def memory_store_of(root: str) -> MemoryStore | None:
    """The in-memory store of the store in a folder, if it has one."""
    return _memory_stores.get(root)


def close_memory_store(root: str) -> None:
    """Removes the in-memory store of a store."""
    _memory_stores.pop(root, None)


def fixed(array: np.ndarray) -> np.ndarray:
    """An array, or a copy of one that can be changed."""
    return array if is_fixed(array) else buffers.copy(array)


def is_fixed(array: np.ndarray) -> bool:
    """Whether an array can't be changed: it is a view of a `jax.Array` or of bytes."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, jax.Array | bytes)


CHUNK_OVERHEAD = 256
"""Upper bound of the bytes of a chunk in its file besides its values: header and alignment."""


def pack(arrays: Sequence[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Cuts arrays into flat chunks, and yields lists of them for files of at most `limit` bytes."""
    chunks: list[np.ndarray] = []
    used = CHUNK_OVERHEAD
    for array in arrays:
        flat = array.reshape(-1)
        step = (limit - 2 * CHUNK_OVERHEAD) // max(flat.itemsize, 1)
        for start in range(0, flat.size if flat.nbytes else 0, step):
            chunk = flat[start : start + step]
            cost = chunk.nbytes + CHUNK_OVERHEAD
            if chunks and used + cost > limit:
                yield chunks
                chunks, used = [], CHUNK_OVERHEAD
            chunks.append(chunk)
            used += cost
    if chunks:
        yield chunks


def assemble(
    dtype: np.dtype, shape: tuple[int, ...], chunks: Iterator[np.ndarray], where: str
) -> np.ndarray:
    """Makes one array from the next flat chunks, without a copy if it has only one."""
    size = math.prod(shape) if dtype.itemsize else 0
    whole, filled = None, 0
    while filled < size:
        chunk = next(chunks, None)
        if chunk is None or chunk.dtype != dtype or filled + chunk.size > size:
            what = "nothing" if chunk is None else f"{chunk.dtype}[{chunk.size}]"
            raise ArrayFormatError(
                f"{where}: found {what} at element {filled} of an array, expected {dtype}"
                f"{list(shape)}; another file took the place of this one."
            )
        if chunk.size == size:
            return chunk.reshape(shape)
        if whole is None:
            whole = buffers.empty((size,), dtype)
        whole[filled : filled + chunk.size] = chunk
        filled += chunk.size
    whole = np.empty(shape, dtype) if whole is None else whole
    buffers.freeze(whole)  # JAX then shares its memory
    return whole.reshape(shape)
