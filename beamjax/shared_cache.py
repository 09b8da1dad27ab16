"""What many threads of a process ask for and one of them makes: a cache, bounded in bytes."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

MAX_READERS = 64
"""Of a thread, whose last values stay."""


class SharedCache(Generic[T]):
    """Least recently used values of this process, up to a number of bytes; thread-safe.

    Args:
      limit: in bytes; the newest value stays even if it alone is over it, and so does the last one
        of each reader of each thread that is alive.
      weigh: gives the bytes of a value, or whatever else is limited.
    """

    def __init__(self, limit: int, weigh: Callable[[T], int]) -> None:
        self.limit = limit
        self._weigh = weigh
        self._lock = threading.Lock()
        self._values: collections.OrderedDict[Hashable, tuple[T, int]] = collections.OrderedDict()
        self._total = 0
        self._pending: dict[Hashable, _Pending[T]] = {}
        # The last key of each reader, by thread.
        self._last: weakref.WeakKeyDictionary[
            threading.Thread, collections.OrderedDict[Hashable, Hashable]
        ] = weakref.WeakKeyDictionary()

    def get(self, key: Hashable, load: Callable[[], T], reader: Hashable = None) -> T:
        """The value of a key; `load` makes it, once for all threads that ask at the same time.

        Args:
          key: of the value.
          load: makes it.
          reader: who asks, and for several values one after the other; None if nobody does.
        """
        with self._lock:
            if reader is not None:
                self._note(key, reader)
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
            self._last.clear()
            self._total = 0

    def _note(self, key: Hashable, reader: Hashable) -> None:
        last = self._last.setdefault(threading.current_thread(), collections.OrderedDict())
        last[reader] = key
        last.move_to_end(reader)
        if len(last) > MAX_READERS:
            last.popitem(last=False)

    def _keep(self, key: Hashable, value: T, weight: int) -> None:
        _, replaced = self._values.pop(key, (None, 0))
        self._values[key] = value, weight
        self._total += weight - replaced
        if self._total <= self.limit:
            return
        # They are about to be asked for again.
        staying = {key}.union(*(last.values() for last in self._last.values()))
        for other in [other for other in self._values if other not in staying]:
            self._total -= self._values.pop(other)[1]
            if self._total <= self.limit:
                return


class _Pending(Generic[T]):
    """A value that one thread makes and others wait for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[T] = []


def nbytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of arrays, for the cache to weigh them."""
    return sum(array.nbytes for array in arrays)
