"""What many threads of a process ask for and one of them makes: a cache, bounded in bytes."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class SharedCache(Generic[T]):
    """Least recently used values of this process, up to a number of bytes; thread-safe.

    Args:
      limit: in bytes; the newest value stays even if it alone is over it.
      weigh: gives the bytes of a value, or whatever else is limited.
    """

    def __init__(self, limit: int, weigh: Callable[[T], int]) -> None:
        self.limit = limit
        self._weigh = weigh
        self._lock = threading.Lock()
        self._values: collections.OrderedDict[Hashable, tuple[T, int]] = collections.OrderedDict()
        self._total = 0
        self._pending: dict[Hashable, _Pending[T]] = {}

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """The value of a key; `load` makes it, once for all threads that ask at the same time."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            pending = self._pending.setdefault(key, _Pending())
        with pending.lock:
            if (
                not pending.made
            ):  # By a thread that was before; if it failed, each tries for itself.
                try:
                    value = load()
                    weight = self._weigh(value)
                    pending.made.append(value)
                    with self._lock:
                        self._keep(key, value, weight)
                finally:
                    with self._lock:
                        if self._pending.get(key) is pending:
                            del self._pending[key]
        return pending.made[0]

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._values.clear()
            self._total = 0

    def _keep(self, key: Hashable, value: T, weight: int) -> None:
        _, replaced = self._values.pop(key, (None, 0))
        self._values[key] = value, weight
        self._total += weight - replaced
        # The newest stays even if it is over the limit: it is about to be asked for again.
        while self._total > self.limit and len(self._values) > 1:
            _, (_, gone) = self._values.popitem(last=False)
            self._total -= gone


class _Pending(Generic[T]):
    """A value that one thread makes and others wait for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[T] = []


def nbytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of arrays, for the cache to weigh them."""
    return sum(array.nbytes for array in arrays)
