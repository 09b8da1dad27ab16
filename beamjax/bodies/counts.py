"""What each thread has done, which meters read."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass
class Counts:
    """The work of one thread since it started. Only differences have a meaning.

    Attributes:
      transfer: seconds of moving values: to devices and back, and through the store.
      compile: seconds of tracing, lowering and compiling. Nested traces count twice, so a
        difference may exceed the elapsed time.
      bytes_padding: bytes of padding that were read.
      executables: executables that were compiled, or found in the cache on disk.
      cache_hits: executables that were found in the cache.
      cache_misses: executables that were not, and so were compiled.
      bodies_loaded: bodies of steps that were deserialized.
      bodies_reused: bodies that were loaded before in this process.
      broadcasts: server values that were put on a device.
      shards_cached: shards whose partials were found in the cache, and not computed.
      compiles_since: start of the current compilation, by `time.monotonic`; None if there is none.
    """

    transfer: float = 0.0
    compile: float = 0.0
    bytes_padding: int = 0
    executables: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    bodies_loaded: int = 0
    bodies_reused: int = 0
    broadcasts: int = 0
    shards_cached: int = 0
    compiles_since: float | None = None

    def compile_so_far(self) -> float:
        """`compile`, with the seconds of the current compilation; any thread may call this."""
        since = self.compiles_since
        return self.compile + (0.0 if since is None else time.monotonic() - since)


class _Local(threading.local):
    def __init__(self) -> None:
        self.counts = Counts()


_local = _Local()


def counts() -> Counts:
    """The counts of this thread."""
    return _local.counts
