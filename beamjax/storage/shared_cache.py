"""Bounded caches of values that the threads of a process share; each value is computed once.

All caches of the process are registered here, so that `reset` forgets what earlier runs left.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")

MAX_READERS = 64
"""Readers of a thread of which the last value stays in the cache."""
ARRAY_BYTES, VALUE_BYTES = 256, 1 << 11
"""Bytes that an array takes besides its numbers, and a cached value besides its arrays."""


class Clearable(Protocol):
    """A cache, or anything else that holds what runs leave for later runs."""

    def clear(self) -> None:
        """Forgets all of it."""


_registered: weakref.WeakSet[Clearable] = weakref.WeakSet()


def register(cache: Clearable) -> None:
    """Adds a cache to those that `reset` clears."""
    _registered.add(cache)


def reset() -> None:
    """Clears all caches of this process, for tests: the next run finds what a new process finds."""
    for cache in list(_registered):
        cache.clear()


class SingleFlight(Generic[T]):
    """Runs one load per key at a time; threads that ask meanwhile share its value."""

    # Loads of different keys run concurrently. Nothing is cached, so an error isn't either: each
    # thread that waited for a load that failed tries again.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Hashable, _Flight[T]] = {}

    def get(self, key: Hashable, find: Callable[[], T | None], load: Callable[[], T]) -> T:
        """The value that `find` looks up in constant time, or that `load` makes and stores."""
        with self._lock:
            # `find` runs under the lock: a load that ends between `find` and the look at the
            # flights would be started a second time.
            value = find()
            if value is not None:
                return value
            flight = self._flights.setdefault(key, _Flight())
        # The first thread to get this lock loads; the others wait for it here. After an error the
        # next thread loads.
        with flight.lock:
            if not flight.loaded:
                try:
                    flight.loaded.append(load())
                finally:
                    with self._lock:
                        # After an error, another thread may have begun a new flight of this key.
                        if self._flights.get(key) is flight:
                            del self._flights[key]
        return flight.loaded[0]


class _Flight(Generic[T]):
    """A value that one thread loads while others wait for it. `loaded` holds it, if it is there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loaded: list[T] = []


@dataclass
class _Entry(Generic[T]):
    """A cached value, its weight, and the open owners that have requested it."""

    value: T
    weight: int
    owners: set[Hashable] = field(default_factory=set)


class SharedCache(Generic[T]):
    """Least recently used values of this process, up to `limit` bytes or the like; thread-safe."""

    # The newest value stays even if it alone exceeds the limit, and so does the last one of each
    # reader of each live thread.

    def __init__(self, limit: int, weigh: Callable[[T], int]) -> None:
        self.limit = limit
        self._weigh = weigh
        self._lock = threading.Lock()
        self._values: collections.OrderedDict[Hashable, _Entry[T]] = collections.OrderedDict()
        self._total = 0
        self._loads: SingleFlight[_Entry[T]] = SingleFlight()
        self._owners: set[Hashable] = set()
        # The last key of each reader, by thread.
        self._last: weakref.WeakKeyDictionary[
            threading.Thread, collections.OrderedDict[Hashable, Hashable]
        ] = weakref.WeakKeyDictionary()
        register(self)

    def get(
        self,
        key: Hashable,
        load: Callable[[], T],
        reader: Hashable = None,
        owner: Hashable = None,
    ) -> T:
        """The value of a key, which `load` computes once for all threads that ask at once."""
        # The last value of each `reader`, such as a source, stays in the cache; for `owner` see
        # `open`.
        entry = self._loads.get(key, lambda: self._find(key, reader), lambda: self._load(key, load))
        if owner is not None:
            with self._lock:
                if owner in self._owners:
                    entry.owners.add(owner)
        return entry.value

    def find(self, key: Hashable) -> T | None:
        """The value of a key; None if it is not cached."""
        entry = self._find(key, None)
        return None if entry is None else entry.value

    def put(self, key: Hashable, value: T, owner: Hashable = None) -> None:
        """Caches a value that was made elsewhere; arguments as for `get`."""
        self.discard([key])
        self.get(key, lambda: value, owner=owner)

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Removes the values of these keys, where they are cached."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._drop(key)

    def open(self, owner: Hashable) -> None:
        """Starts to track which values an owner, such as a run, requests."""
        with self._lock:
            self._owners.add(owner)

    def close(self, owner: Hashable) -> None:
        """Removes the values that an owner has requested, unless another open owner has as well."""
        with self._lock:
            self._owners.discard(owner)
            for key, entry in list(self._values.items()):
                if owner in entry.owners:
                    entry.owners.discard(owner)
                    if not entry.owners:
                        self._drop(key)

    def clear(self) -> None:
        """Removes all values."""
        with self._lock:
            self._values.clear()
            self._last.clear()
            self._total = 0

    def _find(self, key: Hashable, reader: Hashable) -> _Entry[T] | None:
        with self._lock:
            # Before the load, so that the value that this reader had last may be dropped for it.
            if reader is not None:
                self._note(key, reader)
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def _load(self, key: Hashable, load: Callable[[], T]) -> _Entry[T]:
        value = load()
        entry = _Entry(value, self._weigh(value))
        with self._lock:
            self._insert(key, entry)
        return entry

    def _note(self, key: Hashable, reader: Hashable) -> None:
        """Records the last key of a reader of this thread."""
        last = self._last.setdefault(threading.current_thread(), collections.OrderedDict())
        last[reader] = key
        last.move_to_end(reader)
        if len(last) > MAX_READERS:
            last.popitem(last=False)

    def _insert(self, key: Hashable, entry: _Entry[T]) -> None:
        if key in self._values:
            self._drop(key)
        self._values[key] = entry
        self._total += entry.weight
        if self._total <= self.limit:
            return
        # Readers request these again soon.
        staying = {key}.union(*(last.values() for last in self._last.values()))
        oldest = (other for other in self._values if other not in staying)
        # Looks at the oldest alone: a cache may hold very many small values.
        left, gone = self._total, []
        while left > self.limit and (other := next(oldest, None)) is not None:
            left -= self._values[other].weight
            gone.append(other)
        for other in gone:
            self._drop(other)

    def _drop(self, key: Hashable) -> None:
        self._total -= self._values.pop(key).weight


def nbytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of arrays and of what belongs to them, as the weight of a value."""
    return VALUE_BYTES + sum(ARRAY_BYTES + array.nbytes for array in arrays)


# --- decoded blocks of sources

Arrays = list[np.ndarray]

PASSING_BYTES = 2**25
"""Bytes of recent blocks, for threads that lag behind. The last blocks of each thread stay in any
case."""
LASTING_BYTES = 2**29
"""Bytes of blocks that are read repeatedly."""
LASTING_READS = 3
"""Reads after which a block counts as read repeatedly: more reads than most programs have
passes."""
_MAX_COUNTED = 1 << 16
"""Blocks of which the reads are counted."""
SHARE_OF_BLOCKS, SHARE_OF_VALUES = 4, 8
"""Divisors of the memory limit: a quarter is for decoded blocks, an eighth for server values."""
STORE_BYTES = 1 << 30
"""Bytes of server values that a process caches if there is no memory limit."""


class BlockCache:
    """Decoded blocks; thread-safe. `passing` has recent ones, `lasting` those read repeatedly."""

    def __init__(self) -> None:
        self.passing: SharedCache[Arrays] = SharedCache(PASSING_BYTES, nbytes)
        self.lasting: SharedCache[Arrays] = SharedCache(LASTING_BYTES, nbytes)
        self._reads: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
        register(self)

    def get(self, key: Hashable, load: Callable[[], Arrays], reader: Hashable) -> Arrays:
        """A block; see `SharedCache.get`."""
        if self._reads.get(key, 0) >= LASTING_READS - 1:
            return self.lasting.get(key, load, reader)

        def counted() -> Arrays:
            arrays = load()
            # Without a lock: a lost count only delays the move to `lasting`.
            self._reads[key] = self._reads.get(key, 0) + 1
            if len(self._reads) > _MAX_COUNTED:
                self._reads.popitem(last=False)
            return arrays

        return self.passing.get(key, counted, reader)

    def set_limit(self, nbytes: int | None) -> None:
        """Sets the bytes of both caches together; None for the default."""
        self.passing.limit = PASSING_BYTES if nbytes is None else min(PASSING_BYTES, nbytes // 2)
        self.lasting.limit = LASTING_BYTES if nbytes is None else min(LASTING_BYTES, nbytes // 2)

    def clear(self) -> None:
        """Forgets all blocks."""
        self.passing.clear()
        self.lasting.clear()
        self._reads.clear()


BLOCKS = BlockCache()
"""Decoded blocks of this process."""


def block_budget(limit: int | None) -> int:
    """Bytes of decoded blocks that a process with this memory limit caches."""
    return 2 * LASTING_BYTES if limit is None else limit // SHARE_OF_BLOCKS


def store_budget(limit: int | None) -> int:
    """Bytes of server values that a process with this memory limit caches from files."""
    # The launching process may use as many again for values that it passes between workers in
    # memory.
    return STORE_BYTES if limit is None else limit // SHARE_OF_VALUES
