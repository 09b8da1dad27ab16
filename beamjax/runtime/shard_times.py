"""Times shards in this process, and decides whether computing them in other threads pays."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from beamjax.telemetry.meters import Meter

LONG = 2e-4
"""Seconds of a shard above which a thread pays: several times the seconds of handing a shard
over."""
LONG_IN_BUNDLE = 2e-3
"""Seconds of a shard above which one computing thread pays, as it overlaps reading and merging."""
LONG_PASS = 4e-3
"""Seconds of all shards together above which starting threads pays."""
SURELY_LONG = 2e-2
"""Seconds of a first shard above which it is not a short one, though a first run takes longer."""
HELD = 1e-3
"""Seconds of a shard in which its thread may hold the GIL, so that other threads wait."""
FEW = 8
"""Threads for shards whose time is above the limit, however short."""
_MAX_KNOWN = 1024


@dataclass
class _ShardTime:
    """Seconds of a shard at least, the cores that it kept busy, and whether these are known."""

    seconds: float
    cores: float
    known: bool


_times: dict[Hashable, _ShardTime] = {}


def learn(body: Hashable, meter: Meter, begun: float) -> None:
    """Records that a shard was read and computed in one thread.

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
        # Compiling uses all cores, which makes the CPU time of the process useless here.
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
    """How many threads of this body keep as many cores busy as `most` threads of one core each.

    At least two, so that one can compute while the other waits for its shard.
    """
    return max(2, _share(body, most))


def _share(body: Hashable, most: int) -> int:
    found = _times[body]
    most = min(most, max(FEW, int(found.seconds / HELD)))
    return min(most, round(most / max(found.cores, 1.0)))
