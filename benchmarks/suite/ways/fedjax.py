"""FedJAX's for-each-client: a jitted step for each batch of each client, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import fedjax as package
import jax
import numpy as np

from benchmarks.suite.problem import ClientProblem, Tree
from benchmarks.suite.sums import opened
from benchmarks.suite.ways import Call, Job


def call(job: Job) -> Call:
    problem = opened(job)
    if not isinstance(problem, ClientProblem):
        raise TypeError(f"FedJAX: found the workload {job.case}, expected one of clients")
    train = package.for_each_client(
        lambda shared, _: shared,
        lambda state, batch: (problem.client_step(state, batch), ()),
        lambda _, state: state,
        with_step_result=True,
    )

    def mean_model(server: Tree, cohort: Sequence[int]) -> Tree:
        clients = ((i, problem.batches(package, i), ()) for i in cohort)
        total, weights = None, 0.0
        for i, model, _ in train(server, clients):
            weight = problem.weight(i)
            part = package.tree_util.tree_weight(model, weight)
            total = part if total is None else package.tree_util.tree_add(total, part)
            weights += weight
        return package.tree_util.tree_inverse_weight(total, weights)

    def run() -> Tree:
        model = functools.reduce(mean_model, problem.cohorts(), jax.device_put(problem.server))
        return jax.tree.map(np.asarray, model)

    return run
