"""Stores values too big for a Beam element as files, in a folder that the launcher and the workers
share.

A value is a list of arrays. `Store.put` writes it as content-hashed files and gives back a `Ref`,
a small plain value that travels in its place; small values travel inside of the `Ref`. `Store.get`
reads it back, once a process: the arrays are cached by hash, for all threads.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import threading
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from beamjax.bodies.transfer_time import transferring
from beamjax.errors import ArrayFormatError, OptionsError, SourceError
from beamjax.pipelines.values.refs import (
    SUFFIX,
    Ref,
    content_key,
    file_name,
    is_name,
    leaves_of,
    ref_to_files,
    unique_key,
)
from beamjax.storage import aligned
from beamjax.storage import arrays as wire
from beamjax.storage import files as file_io
from beamjax.storage.dtypes import dtype_from_name, dtype_name
from beamjax.storage.shared_cache import SharedCache, nbytes
from beamjax.telemetry.meters import Reports

PIECE_BYTES = 64 * 2**20
"""Largest file, in bytes."""
INLINE_BYTES = 64 * 2**10
"""Largest encoded value that travels inside of its `Ref`, in bytes."""

LOCAL_BYTES, REMOTE_BYTES = 1 << 20, 32 << 20
"""Largest accumulator, in bytes, that is not spilled: with a store in a local folder, and with one
at a URL, where each file costs a request."""

_SUFFIXES = (SUFFIX, ".members", ".record")  # of all that is written to the folder of a run


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of values.

    Attributes:
        root: a local path (made absolute), or any URL that Beam's FileSystems knows; the launcher
            and the workers must see the same files there.
        piece_bytes: largest file, in bytes; bigger arrays are cut.
        persistent: whether a folder that is not there is made anew. That of a run is not, so that a
            worker that goes on after its end leaves nothing.
        reports: where users of the store report their progress; None if nothing reads that.
    """

    root: str
    piece_bytes: int = PIECE_BYTES
    persistent: bool = True
    reports: Reports | None = dataclasses.field(default=None, compare=False)

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
        """The values that it keeps in the memory of this process; None if it keeps none."""
        return memory_store_of(self.root)

    @classmethod
    def temporary(cls, parent: str | None = None) -> Store:
        """A store in a new folder, which `cleanup` can remove without touching others' files.

        Args:
            parent: path or URL to make it in; by default the temporary folder of this machine,
                which workers on other machines do not see.

        Raises:
            SourceError: if it cannot be made.
        """
        parent = tempfile.gettempdir() if parent is None else parent
        store = cls(file_io.join(parent, f"beamjax-{uuid.uuid4().hex}"), persistent=False)
        try:
            file_io.make_folder(store.root)
        except OSError as error:
            raise SourceError(
                f"{store.root}: cannot write here ({error}); expected a folder that the launcher "
                "and all workers can write and read."
            ) from error
        return store

    def put(
        self, arrays: Sequence[Any], hint: str = "", *, inline: bool = True, hashed: bool = True
    ) -> Ref:
        """Writes a value, unless the same one is there already.

        Args:
            arrays: arrays of any shapes, with dtypes that `beamjax.storage.arrays` takes.
            hint: a word for people who look into the folder, for example a step's name.
            inline: whether a small value may travel inside of its reference.
            hashed: whether files are named by what they hold. Without that the same value may be
                written twice, but it is not read once more for its name.

        Returns:
            The reference to give to `get`, here or in another process.

        Raises:
            StructureError: if an array is not plain numbers.
            SourceError: if the folder cannot be written.
        """
        with transferring():
            return self._put(arrays, hint, inline, hashed)

    def hold(
        self,
        arrays: Sequence[np.ndarray],
        hint: str = "",
        *,
        own: bool = False,
        inline: bool = True,
        hashed: bool = True,
    ) -> Ref:
        """Like `put`, but if all workers are threads of this process, large arrays stay in memory.

        Args:
            arrays, hint, inline, hashed: as for `put`.
            own: whether only the store has the arrays from now on; others are copied first if
                they could be changed.

        Returns, raises:
            As `put`.
        """
        memory = self._memory_store
        nbytes = sum(array.nbytes for array in arrays)
        if memory is None or nbytes <= INLINE_BYTES or not memory.has_room(nbytes):
            return self.put(arrays, hint, inline=inline, hashed=hashed)
        with transferring():
            arrays = _plain(arrays, hint)
            fixed = [a if own or is_fixed(a) else aligned.copy(a) for a in arrays]
            name = file_name(unique_key(), hint)
            memory.put(name, [_flat_and_fixed(array) for array in fixed if array.nbytes])
        return ref_to_files(leaves_of(arrays), [(name, nbytes)])

    def is_held(self, ref: Ref) -> bool:
        """Whether a value is in the memory of this process, as `hold` may have it."""
        memory = self._memory_store
        return memory is not None and any(memory.get(name) is not None for name, _ in ref.files)

    def release(self, refs: Iterable[Ref]) -> None:
        """Removes held values that no later step reads."""
        memory = self._memory_store
        if memory is not None:
            memory.release(name for ref in refs for name, _ in ref.files)

    def _put(self, arrays: Sequence[Any], hint: str, inline: bool, hashed: bool) -> Ref:
        arrays = _plain(arrays, hint)
        leaves = leaves_of(arrays)
        if inline and sum(a.nbytes for a in arrays) <= INLINE_BYTES:
            data = wire.encode_arrays(arrays)
            if len(data) <= INLINE_BYTES:
                return Ref(content_key([data]), leaves, inline=data)
        files = []
        for chunks in pack(arrays, self.piece_bytes):
            data = wire.encode_arrays(chunks)
            name = file_name(content_key([data]) if hashed else unique_key(), hint)
            self.write(name, data, keep=True)
            files.append((name, len(data)))
        return ref_to_files(leaves, files)

    def joined(self, refs: Sequence[Ref], shape: tuple[int, ...], dtype: np.dtype) -> Ref:
        """One array of parts that follow one another, without moving them.

        Args:
            refs: to values in files, of one array each.
            shape: of the whole array.
            dtype: of it, and of the parts.

        Raises:
            ArrayFormatError: if the parts do not make such an array.
        """
        leaves = [leaf for ref in refs for leaf in ref.leaves]
        found = sum(math.prod(part) for _, part in leaves)
        if {name for name, _ in leaves} != {dtype_name(dtype)} or found != math.prod(shape):
            raise ArrayFormatError(
                f"{self.root}: found {len(leaves)} parts with {found} values, expected "
                f"{dtype}{list(shape)}."
            )
        files = [file for ref in refs for file in ref.files]
        return ref_to_files(((dtype_name(dtype), tuple(shape)),), files)

    def get(self, ref: Ref, *, cache: bool = True) -> list[np.ndarray]:
        """Reads a value.

        Args:
            ref: what `put` returned.
            cache: keep the arrays for the next `get` of this process. A value is loaded once even
                if several threads ask at once.

        Returns:
            The arrays, read-only.

        Raises:
            SourceError: if a file is missing or cannot be read.
            ArrayFormatError: if a file is corrupted or holds something else.
        """
        with transferring():
            if ref.inline:
                return wire.decode_arrays(ref.inline)[0]
            if not cache or self.is_held(ref):
                return self._load(ref)
            return list(_CACHE.get(ref.key, lambda: self._load(ref), owner=self.root))

    def array(self, ref: Ref, *, cache: bool = True) -> np.ndarray:
        """Reads a value of one array; see `get`."""
        (array,) = self.get(ref, cache=cache)
        return array

    def sweep(self, live: Container[str]) -> None:
        """Removes all files but those of these names, while nothing else uses the store.

        Raises:
            SourceError: if they cannot be removed.
        """
        memory = self._memory_store
        if memory is not None:
            memory.sweep(live)
        try:
            gone = [n for n in file_io.names(self.root) if n not in live and n.endswith(_SUFFIXES)]
            file_io.remove_files(self.root, gone)
        except Exception as error:
            raise SourceError(f"{self.root}: cannot remove stored values ({error}).") from error

    def cleanup(self) -> None:
        """Removes the files of the store, and the folder if nothing else is in it.

        Raises:
            SourceError: if they cannot be removed.
        """
        try:
            file_io.remove(self.root, _SUFFIXES)
        except Exception as error:
            raise SourceError(f"{self.root}: cannot remove stored values ({error}).") from error

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Writes a file of any content; `keep` leaves one of this name and size as it is.

        Raises:
            SourceError: if the folder cannot be written.
        """
        try:
            file_io.write(file_io.join(self.root, name), data, keep=keep, make=self.persistent)
        except Exception as error:
            raise SourceError(
                f"{self.root}: cannot write {name} of {len(data)} bytes ({error}); expected a "
                "folder that the launcher and all workers can write and read."
            ) from error

    def _load(self, ref: Ref) -> list[np.ndarray]:
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
    """Sets how many bytes of values this process keeps (1 GiB at first); 0 keeps only the last."""
    _CACHE.limit = limit


def open_cache(store: Store) -> None:
    """Starts to record which cached values of this process a run with this store uses."""
    _CACHE.open(store.root)


def close_cache(store: Store) -> None:
    """Removes the cached values of this process that only this run has used."""
    _CACHE.close(store.root)


def clear_cache() -> None:
    """Removes all cached values of this process."""
    _CACHE.clear()


def _plain(arrays: Iterable[Any], hint: str) -> list[np.ndarray]:
    return [wire.plain_array(a, f"value {hint!r}, array {i}") for i, a in enumerate(arrays)]


def _flat_and_fixed(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    flat.flags.writeable = False
    return flat


class MemoryStore:
    """What a store keeps in the memory of this process, by name; thread-safe.

    Args:
      limit: of the bytes of arrays; further ones are in files.
    """

    def __init__(self, limit: int):
        self.limit = limit
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
        """Stores an accumulator for the worker that takes it; the caller must not use it
        afterwards."""
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
    """Lets the store in a folder keep sums, and arrays of up to so many bytes, in memory."""
    _memory_stores[root] = MemoryStore(limit)


def memory_store_of(root: str) -> MemoryStore | None:
    """The in-memory store of the store in a folder, if it has one."""
    return _memory_stores.get(root)


def close_memory_store(root: str) -> None:
    """Removes the in-memory store of a store."""
    _memory_stores.pop(root, None)


def is_fixed(array: np.ndarray) -> bool:
    """Whether an array can't be changed: it is a view of a `jax.Array` or of bytes."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, jax.Array | bytes)


CHUNK_OVERHEAD = 256
"""Bytes of a chunk in its file besides its values, at most: header and alignment."""


def pack(arrays: Sequence[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Cuts arrays to flat chunks and gathers these to lists that fit a file of `limit` bytes."""
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
    """One array from the flat chunks that come next; without a copy if there is only one."""
    size = math.prod(shape) if dtype.itemsize else 0
    whole, found = None, 0
    while found < size:
        chunk = next(chunks, None)
        if chunk is None or chunk.dtype != dtype or found + chunk.size > size:
            what = "nothing" if chunk is None else f"{chunk.dtype}[{chunk.size}]"
            raise ArrayFormatError(
                f"{where}: found {what} at element {found} of an array, expected {dtype}"
                f"{list(shape)}; another file took the place of this one."
            )
        if chunk.size == size:
            return chunk.reshape(shape)
        if whole is None:
            whole = aligned.empty((size,), dtype)
        whole[found : found + chunk.size] = chunk
        found += chunk.size
    whole = np.empty(shape, dtype) if whole is None else whole
    whole.flags.writeable = False
    return whole.reshape(shape)
