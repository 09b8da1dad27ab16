"""Measures shards in this process, and decides whether to compute them in other threads."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass

from beamjax.spans import timed

LONG = 2e-4
"""Seconds of a shard from which threads are faster: several times the cost of passing it to one."""
LONG_IN_BUNDLE = 2e-3
"""Seconds of a shard from which a further thread in a bundle is faster: it computes while the other
one reads and merges."""
WORTH_STARTING = 2e-3
"""Seconds that threads must save at least in the remaining shards, so that they are started."""
SURELY_LONG = 2e-2
"""Seconds of the first shard of a body from which later shards are surely long too. A first run
takes longer than later ones."""
HELD = 1e-3
"""Seconds of a shard for each thread: a thread holds the GIL for a part of its shard, so short
shards do not keep many threads busy."""
FEW = 8
"""Number of threads that even the shortest shards above `LONG` may use."""
_MAX_KNOWN = 1024
"""Number of bodies whose times are remembered."""


@dataclass
class _ShardTime:
    """The time of a shard of a body.

    Attributes:
      seconds: the shortest time so far.
      cores: the number of cores that a shard kept busy.
      known: whether these are measured well enough to decide by.
    """

    seconds: float
    cores: float
    known: bool


_times: dict[Hashable, _ShardTime] = {}


def learn(body: Hashable, span: timed, begun: float) -> None:
    """Records the time of a shard that was computed in one thread.

    Args:
      body: the key of its body. If its time is known already, nothing is recorded.
      span: the span in which the shard was computed.
      begun: `time.process_time()` before it was computed.
    """
    before = _times.get(body)
    if before is not None and before.known:
        return
    if before is None and len(_times) >= _MAX_KNOWN:
        _times.pop(next(iter(_times)))
    if span.compiling:
        # A first call counts as compilation as a whole, and says nothing about the body.
        _times[body] = before or _ShardTime(math.inf, 1.0, False)
        return
    seconds = max(span.seconds, 1e-6)
    cores = (time.process_time() - begun) / seconds
    if before is None:
        _times[body] = _ShardTime(seconds, cores, seconds >= SURELY_LONG)
    else:
        _times[body] = _ShardTime(min(seconds, before.seconds), cores, True)


def pays(body: Hashable, left: int | None, most: int) -> bool:
    """Whether threads speed up further shards of a body.

    Args:
      body: the key of the body.
      left: the number of shards; None if it is unknown.
      most: the largest number of threads. Shards that keep as many cores busy by themselves are not
        computed faster by threads.
    """
    found = _times.get(body)
    if found is None or not found.known or found.seconds < LONG:
        return False
    saved = found.seconds * max(1 - found.cores / most, 0.0)
    return left is None or (left > 1 and left * saved >= WORTH_STARTING)


def pays_in_bundle(body: Hashable) -> bool:
    """Whether it is faster to compute in another thread than the one that reads and merges."""
    found = _times.get(body)
    return found is not None and found.known and found.seconds >= LONG_IN_BUNDLE


def threads_in_bundle(body: Hashable, most: int) -> int:
    """The number of threads for a bundle, besides the one that reads and merges.

    One is enough for a body that uses many cores.
    """
    return max(1, _share(body, most))


def threads(body: Hashable, most: int) -> int:
    """The number of threads for a body that keep as many cores busy as `most` one-core threads.

    At least two, so that one can compute while the other waits for its shard.
    """
    return max(2, _share(body, most))


def _share(body: Hashable, most: int) -> int:
    found = _times[body]
    most = min(most, max(FEW, int(found.seconds / HELD)))
    return min(most, round(most / max(found.cores, 1.0)))
