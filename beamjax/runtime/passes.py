"""A pass over shards in this process: computes shards concurrently, and adds them up in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.options import Options
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Plan
from beamjax.runtime import shard_times
from beamjax.runtime.failing_members import Computed
from beamjax.runtime.ordered_pool import OrderedResults, Workers, most_jobs
from beamjax.runtime.shard_executor import (
    add_computed,
    finish_buffer,
    finish_tree,
    new_accumulators,
)
from beamjax.telemetry.meters import Meter


class Sums:
    """Adds up the partials of the shards of a pass.

    Args:
      plan: the plan of the pass.
      step: the pass.
      trees: an empty tree for each combine of the pass.
      options: the options of the run.
    """

    def __init__(
        self, plan: Plan, step: Map, trees: Sequence[DyadicTree[list[np.ndarray]]], options: Options
    ):
        self.step = step
        self.trees = trees
        self.accumulators = new_accumulators(step, options.reduction)

    def add(self, shard: Shard, found: Computed) -> None:
        """Adds the results of a shard. Shards must be added in order."""
        buffers = len(self.step.buffers)
        partials, rest = found.partials[:buffers], found.partials[buffers:]
        parts = list(zip(self.step.buffers, self.accumulators, partials, strict=True))
        add_computed(parts, list(zip(self.trees, rest, strict=True)), shard, found.left_out)

    def results(self, plan: Plan) -> dict[str, np.ndarray]:
        """The server values that the pass reduces to, by name.

        Args:
          plan: the plan, with the number of members that were read.
        """
        step = self.step
        found: dict[str, np.ndarray] = {}
        for buffer, accumulator in zip(step.buffers, self.accumulators, strict=True):
            for name, _, values in finish_buffer(plan, step, buffer, accumulator, (0, buffer.size)):
                found[name] = values.reshape(plan.values[name].shape)
        for combine, tree in zip(step.combines, self.trees, strict=True):
            found.update(finish_tree(combine, tree))
        return found


@dataclass(frozen=True)
class Done:
    """A shard and its results."""

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
    """Computes shards, in several threads where that is faster.

    The first shards of a body are computed in the calling thread, where JAX compiles the body and
    the time of a shard is measured.

    Args:
      jobs: each computes a shard. The calling thread iterates over them, which reads the shards.
      count: the number of shards, if it is known.
      threads: the largest number of threads.
      body: the key of the body of the pass.
      check: raises if no result can come.

    Yields:
      The results, in the order of the jobs.

    Raises:
      Exception: the error of the first job, in order, that fails.
    """
    if threads == 1:
        for job in jobs:
            yield job()
        return
    jobs, left = iter(jobs), count
    while not shard_times.pays(body, left, threads):
        first = next(jobs, None)
        if first is None:
            return
        begun = time.process_time()
        done = first()
        shard_times.learn(body, done.meter, begun)
        yield done
        left = None if left is None else left - 1
    threads = shard_times.threads(body, threads)
    workers = Workers(threads, as_here=True)
    results: OrderedResults[Done] = OrderedResults(most_jobs(threads), check)
    try:
        for job in jobs:
            yield from results.add(workers.submit(job))
        yield from results.rest()
    finally:
        results.cancel()
        workers.close()
