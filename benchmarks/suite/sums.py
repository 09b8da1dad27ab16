"""Sums over shards: what a shard gives on the device, added in float64 on the host."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree
from benchmarks.suite.ways import Job


@functools.cache
def problem_of(case: str, size: tuple[tuple[str, int], ...], folder: str) -> Problem:
    return Job(case, dict(size), folder).open()


@functools.cache
def compiled(problem: Problem, name: str, batched: bool) -> Callable[[Tree, Tree], Tree]:
    """A function of the workload, of a shard or of a member, jitted once a process."""
    return jax.jit(problem.shard_sum(name) if batched else problem.functions[name])


def opened(job: Job) -> Problem:
    """The workload of a job, opened once a process."""
    return problem_of(job.case, tuple(sorted(job.size.items())), job.folder)


def partial_of(job: Job, name: str, server: Tree, start: int, stop: int) -> Tree:
    """The sum over a shard, as NumPy."""
    problem = opened(job)
    found = compiled(problem, name, True)(server, problem.read(start, stop))
    return jax.tree.map(np.asarray, found)


def added(total: Tree, part: Tree) -> Tree:
    """Adds in place to a float64 total; to None, a copy of `part`."""
    if total is None:
        return jax.tree.map(lambda x: np.array(x, np.float64), part)
    return jax.tree.map(operator.iadd, total, part)


def sum_of(job: Job, name: str, server: Tree, shards: Iterable[tuple[int, int]]) -> Tree:
    """The sum over shards, one after the other; float64."""
    server = jax.device_put(server)
    total = None
    for start, stop in shards:
        total = added(total, partial_of(job, name, server, start, stop))
    return total


def sums_in_process(job: Job) -> Sums:
    """The ideal: a loop over the shards."""
    shards = opened(job).shards(job.shard_size)
    return lambda name, server: sum_of(job, name, server, shards)


def dealt(job: Job, parts: int) -> list[list[tuple[int, int]]]:
    """The shards in at most so many runs of like length."""
    shards = opened(job).shards(job.shard_size)
    bounds = np.linspace(0, len(shards), min(parts, len(shards)) + 1).astype(int)
    return [shards[a:b] for a, b in itertools.pairwise(bounds)]


def leaves(answer: Tree) -> list[np.ndarray]:
    """Of a tree, as NumPy."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(answer)]


def difference_from_first(path: Path, found: list[np.ndarray]) -> float:
    """The difference from the answer in a file, which gets the first one."""
    if not path.exists():
        np.savez(path, *found)
        return 0.0
    with np.load(path) as first:
        return difference(found, [first[f"arr_{i}"] for i in range(len(found))])


def difference(found: list[Any], expected: list[Any]) -> float:
    """The largest difference of a leaf, relative to the largest number in it."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        scale = float(np.max(np.abs(b))) or 1.0
        worst = max(worst, float(np.max(np.abs(a.astype(np.float64) - b))) / scale)
    return worst
