"""Counters that each thread has of its own work, which meters read."""

from __future__ import annotations

import threading


class Counts(threading.local):
    """The counters of one thread. Only differences mean anything.

    Attributes:
      bodies_loaded: bodies of steps that were read from their bytes.
      bodies_reused: those that the process had.
      broadcasts: server values that were put on a device.
      shards_cached: shards that were found in the cache of partials, and not computed.
    """

    bodies_loaded = 0
    bodies_reused = 0
    broadcasts = 0
    shards_cached = 0


counts = Counts()
