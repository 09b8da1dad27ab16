"""Ray Data: a row is the number of a shard, `map_batches` sums those of a block."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.suite.problem import Tree
from benchmarks.suite.sums import added, opened, sum_of
from benchmarks.suite.ways import Call, Job

BLOCKS = 4
"""For each worker in a pass."""


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[int]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                num_cpus=workers, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
                logging_level="ERROR", _node_ip_address="127.0.0.1", object_store_memory=3 << 30,
            )  # fmt: skip
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            yield workers
        finally:
            ray.shutdown()


def call(job: Job, workers: int) -> Call:
    import ray

    problem = opened(job)
    if hasattr(problem, "by_ray"):  # with Ray Data's own groups
        return problem.by_ray(ray)
    shards = problem.shards(job.shard_size)
    blocks = min(BLOCKS * workers, len(shards))

    def sums(name: str, server: Tree) -> Tree:
        numbers = ray.data.range(len(shards), override_num_blocks=blocks)
        given = {"job": job, "name": name, "server": ray.put(server)}
        parts = numbers.map_batches(
            sum_of_block, batch_size=None, batch_format="numpy", fn_kwargs=given
        )
        total: Tree = None
        for part in parts.iter_batches(batch_size=None, batch_format="numpy"):
            for row in zip(*(part[key] for key in sorted(part)), strict=True):
                total = added(total, list(row))
        structure = jax.tree.structure(
            jax.eval_shape(problem.shard_sum(name), server, problem.read(*shards[0]))
        )
        return jax.tree.unflatten(structure, total)

    return lambda: problem.solve(sums)


def sum_of_block(batch: Any, job: Job, name: str, server: Any) -> dict[str, np.ndarray]:
    """One row, with a column for each leaf of the sum."""
    import ray

    shards = opened(job).shards(job.shard_size)
    total = sum_of(job, name, ray.get(server), [shards[i] for i in batch["id"]])
    return {f"{i:03}": np.asarray(x)[None] for i, x in enumerate(jax.tree.leaves(total))}
