"""How long shards take in this process, and whether it pays to compute them in other threads."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from beamjax.telemetry.meters import Meter

LONG = 2e-4
"""Seconds of a shard that are worth a thread: several times what it takes to hand a shard over."""
LONG_IN_BUNDLE = 2e-3
"""Seconds of a shard from which on a thread of its own pays: it overlaps reading and merging."""
LONG_PASS = 4e-3
"""Seconds of shards that are worth starting threads for."""
SURELY_LONG = 2e-2
"""Seconds of the first shard that are more than those of a short one that is run the first time."""
HELD = 1e-3
"""Seconds of a shard in which its thread may hold Python's lock, so that other threads wait."""
FEW = 8
"""Threads that compute shards of any length that are worth threads at all."""
_MAX_KNOWN = 1024


@dataclass
class _ShardTime:
    """Seconds of a shard at least, the cores that it kept busy, and whether these are known."""

    seconds: float
    cores: float
    known: bool


_times: dict[Hashable, _ShardTime] = {}


def learn(body: Hashable, meter: Meter, begun: float) -> None:
    """A shard was read and computed in one thread.

    Args:
      body: what was computed; a key of it. Nothing is to be learned of one that is known.
      meter: what measured it.
      begun: `time.process_time()` before it was computed.
    """
    before = _times.get(body)
    if before is not None and before.known:
        return
    seconds = max(meter.seconds, 1e-6)
    cores = (time.process_time() - begun) / seconds
    if before is None:
        if len(_times) >= _MAX_KNOWN:
            _times.pop(next(iter(_times)))
        # Compiling uses all cores: the times of the process mean nothing then.
        _times[body] = _ShardTime(seconds, cores, seconds >= SURELY_LONG and not meter.compiling)
    else:
        _times[body] = _ShardTime(min(seconds, before.seconds), cores, True)


def pays(body: Hashable, left: int | None) -> bool:
    """Whether threads gain anything for so many shards of a body; None for any number."""
    found = _times.get(body)
    if found is None or not found.known or found.seconds < LONG:
        return False
    return left is None or (left > 1 and left * found.seconds >= LONG_PASS)


def pays_in_bundle(body: Hashable) -> bool:
    """Whether a thread that computes pays while another one reads and merges."""
    found = _times.get(body)
    return found is not None and found.known and found.seconds >= LONG_IN_BUNDLE


def threads_in_bundle(body: Hashable, most: int) -> int:
    """The same where another thread reads and adds up: one is enough for a body of many cores."""
    return max(1, _share(body, most))


def threads(body: Hashable, most: int) -> int:
    """How many threads keep the same cores busy with a body that `most` of one core each do.

    No less than two, of which one can go on while the other is not yet at its work.
    """
    return max(2, _share(body, most))


def _share(body: Hashable, most: int) -> int:
    found = _times[body]
    most = min(most, max(FEW, int(found.seconds / HELD)))
    return min(most, round(most / max(found.cores, 1.0)))
