"""One pass over shards in this process: they are computed side by side, and added up in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.dyadic import DyadicTree
from beamjax.fan_out import is_in_files
from beamjax.meters import Meter
from beamjax.options import Options
from beamjax.ordered_pool import OrderedPool
from beamjax.plan import Map, Plan
from beamjax.scratch import Scratch
from beamjax.shards import Shard, add_computed, finish_lane, finish_tree, new_accumulators
from beamjax.survivors import Computed
from beamjax.wide_lanes import WideLanes

LONG = 2e-4
"""Seconds of a shard that are worth a thread: several times what it takes to hand a shard over."""
LONG_PASS = 4e-3
"""Seconds of shards that are worth starting threads for."""
SURELY_LONG = 2e-2
"""Seconds of the first shard that are more than those of a short one that is run the first time."""
_MAX_KNOWN = 1024


class Sums:
    """What the shards of a pass are reduced to.

    Args:
      plan: that the pass is part of.
      step: the pass.
      trees: empty ones for its combines.
      options: of the run.
    """

    def __init__(
        self, plan: Plan, step: Map, trees: Sequence[DyadicTree[list[np.ndarray]]], options: Options
    ):
        self.step = step
        self.trees = trees
        self.wide: WideLanes | None = None
        self.accumulators: list[Any] = []
        if is_in_files(step, options.reduction):
            self.wide = WideLanes(step, options.reduction, Scratch(options.scratch_folder))
        else:
            self.accumulators = new_accumulators(step, options.reduction)

    def add(self, shard: Shard, found: Computed) -> None:
        """Adds what came out of a shard; they come in order."""
        lanes = len(self.step.lanes)
        partials, rest = found.partials[:lanes], found.partials[lanes:]
        parts = []
        if self.wide is not None:
            self.wide.add(shard.index, partials, found.left_out)
        else:
            parts = list(zip(self.step.lanes, self.accumulators, partials, strict=True))
        add_computed(parts, list(zip(self.trees, rest, strict=True)), shard, found.left_out)

    def results(self, plan: Plan) -> dict[str, np.ndarray]:
        """The server values that the pass reduces to, by name.

        Args:
          plan: with the number of the members that were read.
        """
        step = self.step
        found = {} if self.wide is None else self.wide.results(plan)
        for lane, accumulator in zip(step.lanes, self.accumulators, strict=False):
            for name, _, values in finish_lane(plan, step, lane, accumulator, (0, lane.size)):
                found[name] = values.reshape(plan.values[name].shape)
        for combine, tree in zip(step.combines, self.trees, strict=True):
            found.update(finish_tree(combine, tree))
        return found


@dataclass(frozen=True)
class Done:
    """A shard that was computed."""

    shard: Shard
    found: Computed
    meter: Meter


def computed(
    jobs: Iterable[Callable[[], Done]],
    count: int | None,
    threads: int,
    body: Hashable,
    check: Callable[[], None],
) -> Iterator[Done]:
    """Computes shards, in several threads where that pays.

    The first ones of a body are computed in this thread, where JAX compiles it, and measured.

    Args:
      jobs: compute a shard each. They are taken in this thread.
      count: of the shards, if it is known.
      threads: at most.
      body: names what they compute.
      check: raises if it is in vain to wait for them.

    Yields:
      What they give, in their order.

    Raises:
      Exception: what the first one raises that fails.
    """
    jobs, left = iter(jobs), count
    while threads == 1 or not _pays(_paces.get(body), left):
        job = next(jobs, None)
        if job is None:
            return
        spent = time.process_time()
        done = job()
        spent = time.process_time() - spent - done.meter.compiling
        _learn(body, done.meter.seconds, spent)
        yield done
        left = None if left is None else left - 1
    pool: OrderedPool[Done] = OrderedPool(_paces[body].threads(threads), check=check)
    try:
        for job in jobs:
            yield from pool.add(job)
        yield from pool.rest()
    finally:
        pool.close()


@dataclass
class _Pace:
    """How long a shard of a body took in one thread, at least, and how many cores it kept busy."""

    seconds: float
    cores: float
    known: bool

    def threads(self, most: int) -> int:
        """How many of them keep the same cores busy that `most` of one core each do.

        No less than two, of which one can go on while the other is not yet at its work.
        """
        return max(2, min(most, round(most / max(self.cores, 1.0))))


_paces: dict[Hashable, _Pace] = {}


def _learn(body: Hashable, seconds: float, spent: float) -> None:
    seconds = max(seconds, 1e-6)
    pace = _paces.get(body)
    if pace is None:
        if len(_paces) >= _MAX_KNOWN:
            _paces.pop(next(iter(_paces)))
        _paces[body] = _Pace(seconds, spent / seconds, seconds >= SURELY_LONG)
    elif not pace.known or seconds < pace.seconds:
        _paces[body] = _Pace(min(seconds, pace.seconds), spent / seconds, True)


def _pays(pace: _Pace | None, left: int | None) -> bool:
    if pace is None or not pace.known or pace.seconds < LONG:
        return False
    return left is None or (left > 1 and left * pace.seconds >= LONG_PASS)
