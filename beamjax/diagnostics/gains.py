"""What several cores gain: those that XLA takes for one operation, and threads of shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from beamjax.options.choices import Vectorization
from beamjax.plan.cost import Cost

OWN_CORES = 1e6
"""Operations of a matrix product that take as long as one which XLA gives all cores, about."""
THREAD_GAIN = 0.8
"""The part of a core that each one but the first gains, of threads and of those in a product."""
DIVIDED = 0.5
"""How fast a core is at what XLA divides itself, next to what it does in a loop: timed of sines,
which came at 1.7e8 a second on each of two cores, and at 3.6e8 on one."""


@dataclass(frozen=True)
class Gain:
    """How shards of a pass come faster than on one core.

    Attributes:
      alone: seconds of shards in one thread, for each second of one core.
      threads: how many times as fast as one thread they are in several.
      busy: cores that one thread keeps so.
    """

    alone: float = 1.0
    threads: float = 1.0
    busy: float = 1.0


def times_as_fast(cores: float) -> float:
    """As one core."""
    return 1.0 + THREAD_GAIN * (cores - 1)


def alone(cost: Cost, cores: int) -> float:
    """Seconds in one thread for each of one core: XLA's libraries divide large products."""
    share = min(cost.shared / cost.weight, 1.0) if cost.weight else 0.0
    return 1.0 - share + share / times_as_fast(cores)


def gain(
    cost: Cost | None,
    vectorization: Vectorization,
    size: int,
    shards: int,
    threads: int,
    cores: int,
) -> Gain:
    """That of threads of a process, and of XLA, which computes in as many of its own.

    XLA has all cores work on large products wherever they stand, and on other large operations
    where these are not in a loop. Threads gain only what is left.

    Args:
      cost: of a member, if it is known.
      vectorization: of the members of a shard.
      size: of a shard.
      shards: of a pass.
      threads: for shards.
      cores: of a process.
    """
    if cost is None:
        return Gain()
    at_once = {"loop": 1, "vmap": size}.get(vectorization.kind, vectorization.batch)
    operation = cost.weight * at_once / max(cost.calls, 1.0)
    if cost.shared * at_once < OWN_CORES:  # of a product over members, what a shard has of it
        cost = replace(cost, shared=0.0)
    if vectorization.kind == "vmap" and not cost.shared and operation >= OWN_CORES:
        return Gain(1 / max(1.0, DIVIDED * times_as_fast(cores)), busy=float(cores))
    one = alone(cost, cores)
    several = min(one, 1 / times_as_fast(side_by_side(shards, threads)))
    return Gain(one, one / several, 1 / one)


def side_by_side(shards: int, threads: int) -> float:
    """Shards that are computed at once, where the last ones leave threads idle."""
    return shards / math.ceil(shards / max(threads, 1)) if shards else 1.0
