"""Apache Beam by hand on FnApiRunner: an element is the number of a member, or a batch of them.

Server values are side inputs, or names of files where they are large: Beam compresses what `Create`
is given, which took 100 MB a minute and a half. DoFns find the members in files, which costs an
element nothing but the look.
"""

from __future__ import annotations

import functools
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import jax
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from benchmarks.suite.problem import Problem, Tree
from benchmarks.suite.sums import added, compiled, opened
from benchmarks.suite.ways import Call, Job

_found: list[Tree] = []  # the runner's workers are threads of this process


class Compute(beam.DoFn):
    """A function of the workload, of each number of a member or of each list of them."""

    def __init__(self, job: Job, name: str, batched: bool):
        self.job, self.name, self.batched = job, name, batched

    def setup(self) -> None:
        self.problem: Problem = opened(self.job)
        self.function = compiled(self.problem, self.name, self.batched)

    def process(self, element: Any, server: Tree) -> Iterator[Tree]:
        if self.batched:
            members = self.problem.read(element[0], element[-1] + 1)
        else:
            members = self.problem.one(element)
        values = loaded(server) if isinstance(server, str) else server
        yield jax.tree.map(np.asarray, self.function(values, members))


LARGE = 1 << 20  # bytes


def given(job: Job, server: Tree) -> Tree | str:
    """Server values as a side input."""
    if sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(server)) < LARGE:
        return server
    path = Path(job.folder) / f"server-{uuid.uuid4().hex}"
    path.write_bytes(pickle.dumps(server, protocol=5))
    return str(path)


@functools.lru_cache(maxsize=1)
def loaded(path: str) -> Tree:
    return pickle.loads(Path(path).read_bytes())


class SumFn(beam.CombineFn):
    """Adds trees in float64."""

    def create_accumulator(self) -> Tree:
        return None

    def add_input(self, accumulator: Tree, element: Tree) -> Tree:
        return added(accumulator, element)

    def merge_accumulators(self, accumulators: Any) -> Tree:
        total = None
        for accumulator in accumulators:
            if accumulator is not None:
                total = added(total, accumulator)
        return total

    def extract_output(self, accumulator: Tree) -> Tree:
        return accumulator


def per_element(job: Job) -> Call:
    return _call(job, None)


def batch_elements(job: Job) -> Call:
    return _call(job, job.shard_size)


def _call(job: Job, batch: int | None) -> Call:
    problem = opened(job)

    def sums(name: str, server: Tree) -> Tree:
        _found.clear()
        side = given(job, server)
        with beam.Pipeline(FnApiRunner(), PipelineOptions([])) as pipeline:
            values = beam.pvalue.AsSingleton(pipeline | "Server" >> beam.Create([side]))
            members = pipeline | beam.Create(range(problem.n))
            if batch is not None:
                members |= beam.BatchElements(min_batch_size=batch, max_batch_size=batch)
            results = members | beam.ParDo(Compute(job, name, batch is not None), values)
            results | beam.CombineGlobally(SumFn()).without_defaults() | beam.Map(keep)
        if isinstance(side, str):
            Path(side).unlink()
        return _found.pop()

    return lambda: problem.solve(sums)


def keep(total: Tree) -> None:
    _found.append(total)
