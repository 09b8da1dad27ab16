"""The blocks of sources that a process has decoded, and for how long it keeps them.

A pass reads blocks in their order and has no use for those that it is through with, so that what it
keeps of them does not grow with their number. The rounds of a loop read the same ones again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable

import numpy as np

from beamjax.storage.shared_cache import SharedCache, nbytes

Arrays = list[np.ndarray]

PASSING_BYTES = 2**25
"""Of blocks that were read, for threads that are not as far; each has its last ones besides."""
LASTING_BYTES = 2**29
"""Of blocks that are read again and again."""
LASTING_READS = 3
"""Times that a block is decoded until it is one of these: more than the passes of most programs."""
_MAX_COUNTED = 1 << 16
SHARE_OF_BLOCKS, SHARE_OF_VALUES = 4, 8
"""Of the limit of a process: a quarter for decoded blocks, an eighth for server values."""
STORE_BYTES = 1 << 30
"""Of server values that a process keeps where there is no limit."""


class BlockCache:
    """Decoded blocks; thread-safe.

    Attributes:
      passing: the blocks that were read last.
      lasting: those that were read `LASTING_READS` times.
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
            self._reads[key] = self._reads.get(key, 0) + 1
            if len(self._reads) > _MAX_COUNTED:
                self._reads.popitem(last=False)
            return arrays

        return self.passing.get(key, counted, reader)

    def set_limit(self, nbytes: int | None) -> None:
        """Sets how many bytes are kept, all together; None for as many as at first."""
        self.passing.limit = PASSING_BYTES if nbytes is None else min(PASSING_BYTES, nbytes // 2)
        self.lasting.limit = LASTING_BYTES if nbytes is None else min(LASTING_BYTES, nbytes // 2)

    def clear(self) -> None:
        """Forgets all blocks."""
        self.passing.clear()
        self.lasting.clear()
        self._reads.clear()


def block_budget(limit: int | None) -> int:
    """Bytes of decoded blocks that a process of so much memory keeps."""
    return 2 * LASTING_BYTES if limit is None else limit // SHARE_OF_BLOCKS


def store_budget(limit: int | None) -> int:
    """Bytes of server values that a process of so much memory keeps of those in files, and again of
    those that workers in the launching process hand on.
    """
    return STORE_BYTES if limit is None else limit // SHARE_OF_VALUES
