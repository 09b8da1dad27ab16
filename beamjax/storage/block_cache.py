"""A cache of the blocks of sources that a process has decoded.

A pass reads blocks in order and needs each only for a while, so the cache of a pass does not grow
with the number of blocks. Blocks that the rounds of a loop read again are cached for longer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable

import numpy as np

from beamjax.storage.shared_cache import SharedCache, nbytes

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
    """Decoded blocks; thread-safe.

    Attributes:
      passing: the recent blocks.
      lasting: the blocks that were decoded `LASTING_READS` times.
    """

    def __init__(self) -> None:
        self.passing: SharedCache[Arrays] = SharedCache(PASSING_BYTES, nbytes)
        self.lasting: SharedCache[Arrays] = SharedCache(LASTING_BYTES, nbytes)
        self._reads: collections.OrderedDict[Hashable, int] = collections.OrderedDict()

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


def block_budget(limit: int | None) -> int:
    """Bytes of decoded blocks that a process with this memory limit caches."""
    return 2 * LASTING_BYTES if limit is None else limit // SHARE_OF_BLOCKS


def store_budget(limit: int | None) -> int:
    """Bytes of server values that a process with this memory limit caches from files.

    The launching process may use as many again for values that it passes between workers in memory.
    """
    return STORE_BYTES if limit is None else limit // SHARE_OF_VALUES
