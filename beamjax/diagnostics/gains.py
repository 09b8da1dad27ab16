"""Speed-up by several cores: of one operation that XLA divides, and of threads for shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from beamjax.options.choices import Vectorization
from beamjax.plan.cost import Cost

OWN_CORES = 1e6
"""Operations of a product from which XLA divides it among all cores, about."""
THREAD_GAIN = 0.8
"""The speed-up by each core after the first, for threads and for products that XLA divides."""
DIVIDED = 0.5
"""The speed of a core at operations that XLA divides, relative to the same in a loop. Measured for
sines: 1.7e8 a second on each of two cores, and 3.6e8 on one."""


@dataclass(frozen=True)
class Gain:
    """The speed-up of the shards of a pass, relative to one core.

    Attributes:
      alone: seconds in one thread for each second on one core.
      threads: the speed-up of several threads relative to one.
      busy: the number of cores that one thread keeps busy.
    """

    alone: float = 1.0
    threads: float = 1.0
    busy: float = 1.0


def times_as_fast(cores: float) -> float:
    """The speed of so many cores, relative to one."""
    return 1.0 + THREAD_GAIN * (cores - 1)


def alone(cost: Cost, cores: int) -> float:
    """Seconds in one thread for each second on one core: XLA divides large products."""
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
    """The speed-up by threads for shards, and by the threads of XLA.

    XLA divides large products among all cores, and other large operations that are in no loop.
    Threads for shards use only the cores that are left.

    Args:
      cost: the cost of a member, if it is known.
      vectorization: how the members of a shard are computed.
      size: the number of members in a shard.
      shards: the number of shards in a pass.
      threads: the number of threads for shards.
      cores: the number of cores of the process.
    """
    if cost is None:
        return Gain()
    at_once = {"loop": 1, "vmap": size}.get(vectorization.kind, vectorization.batch)
    operation = cost.weight * at_once / max(cost.calls, 1.0)
    if cost.shared * at_once < OWN_CORES:  # XLA does not divide a product of this size
        cost = replace(cost, shared=0.0)
    if vectorization.kind == "vmap" and not cost.shared and operation >= OWN_CORES:
        return Gain(1 / max(1.0, DIVIDED * times_as_fast(cores)), busy=float(cores))
    one = alone(cost, cores)
    several = min(one, 1 / times_as_fast(side_by_side(shards, threads)))
    return Gain(one, one / several, 1 / one)


def side_by_side(shards: int, threads: int) -> float:
    """The mean number of shards computed at once; the last ones leave threads idle."""
    return shards / math.ceil(shards / max(threads, 1)) if shards else 1.0
