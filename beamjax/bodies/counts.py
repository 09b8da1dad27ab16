"""Counters of each thread's work, which meters read."""

from __future__ import annotations

import threading


class Counts(threading.local):
    """The counters of one thread. Only differences have a meaning.

    Attributes:
      bodies_loaded: bodies of steps that were deserialized.
      bodies_reused: bodies that were loaded before in this process.
      broadcasts: server values that were put on a device.
      shards_cached: shards whose partials were found in the cache, and not computed.
    """

    bodies_loaded = 0
    bodies_reused = 0
    broadcasts = 0
    shards_cached = 0


counts = Counts()
