"""What threads of one process hand to each other in memory, where they run all of a pipeline.

A store that is open here keeps server values, and sums on their way, as the objects that they are:
nothing is encoded, written and read again. Whatever else uses the store finds them by the names
that their files would have.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from typing import Any

import jax
import numpy as np


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
        """Whether so much may come to what is here."""
        return self._nbytes + nbytes <= self.limit

    def put(self, name: str, arrays: list[np.ndarray]) -> None:
        """Stores arrays, which may not change any more."""
        with self._lock:
            self._arrays[name] = arrays
            self._nbytes += sum(array.nbytes for array in arrays)

    def get(self, name: str) -> list[np.ndarray] | None:
        """The arrays of a name, if they are here."""
        return self._arrays.get(name)

    def hand_over(self, name: str, accumulator: Any) -> None:
        """Stores an accumulator for the worker that takes it; the caller gives it up."""
        self._sums[name] = accumulator

    def take(self, name: str) -> Any:
        """The accumulator of a name, which is the caller's from now on; None if it is not here."""
        return self._sums.pop(name, None)

    def release(self, names: Iterable[str]) -> None:
        """Forgets these, as far as they are here."""
        with self._lock:
            for name in names:
                self._sums.pop(name, None)
                self._nbytes -= sum(array.nbytes for array in self._arrays.pop(name, ()))

    def sweep(self, live: Container[str]) -> None:
        """Forgets all but these."""
        self.release([name for name in (*self._arrays, *self._sums) if name not in live])


_memory_stores: dict[str, MemoryStore] = {}


def open_memory_store(root: str, limit: int) -> None:
    """From now on the store in a folder keeps sums, and arrays of so many bytes, in memory."""
    _memory_stores[root] = MemoryStore(limit)


def memory_store_of(root: str) -> MemoryStore | None:
    """That of the store in a folder, if it has one."""
    return _memory_stores.get(root)


def close_memory_store(root: str) -> None:
    """Forgets what a store has in memory, and that it may have any."""
    _memory_stores.pop(root, None)


def is_fixed(array: np.ndarray) -> bool:
    """Whether an array can't be changed: it is a view of a `jax.Array` or of bytes."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, jax.Array | bytes)
