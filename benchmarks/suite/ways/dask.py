"""Dask: worker processes on this machine, runs of shards as futures, a sum of what they give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.suite.problem import Tree
from benchmarks.suite.sums import added, dealt, opened, sum_of
from benchmarks.suite.ways import Call, Job

TASKS = 4
"""For each worker in a pass: few, so that what a task costs does not matter."""


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[Any]:
    from dask import config
    from distributed import Client, LocalCluster

    config.set({"distributed.worker.daemon": True})
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1",
            dashboard_address=None, worker_dashboard_address=None,
        ) as running,
        Client(running) as client,
    ):  # fmt: skip
        yield client, workers


def call(job: Job, started: Any) -> Call:
    client, workers = started
    problem = opened(job)
    if hasattr(problem, "by_dask"):  # with Dask's own arrays or data frames
        return problem.by_dask(max(job.shard_size, 1 << 18))
    runs = dealt(job, TASKS * workers)

    def sums(name: str, server: Tree) -> Tree:
        values = client.scatter(server, broadcast=True, hash=False)
        parts = [client.submit(sum_of, job, name, values, run, pure=False) for run in runs]
        return client.submit(sum_of_parts, parts, pure=False).result()

    return lambda: problem.solve(sums)


def dask_ml(job: Job, started: Any) -> Call:
    """An estimator of Dask-ML."""
    return opened(job).by_dask_ml()


def sum_of_parts(parts: list[Tree]) -> Tree:
    total = None
    for part in parts:
        total = added(total, part)
    return total
