"""One graph on a Beam runner, to its end."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.runners.portability.spark_runner import SparkRunner

from beamjax.monitor import Monitor
from beamjax.options import Options
from beamjax.pipelines import build, lost_workers, waiting
from beamjax.pipelines.failures import own_errors
from beamjax.pipelines.store import Ref, Store
from beamjax.pipelines.tasks import StoredBody
from beamjax.pipelines.values import Value
from beamjax.plan import Plan

_KEEP_WORKERS = (FnApiRunner, PrismRunner, SparkRunner)
"""Runners that wait for a worker process that died, and start no other one for it."""


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      runner: of Beam.
      flags: Beam's options.
      store: where values are, before and after.
      options: `reduction`.
      shared: whether workers are threads of this process.
      spread: whether there are several workers to which shards must be dealt.
      program: what workers make the bodies from that run as Python.
      bodies: those that are in the store.
      monitor: of the job.
    """

    runner: Any
    flags: PipelineOptions
    store: Store
    options: Options
    shared: bool
    spread: bool
    program: Ref | None = None
    bodies: dict[str, StoredBody] = field(default_factory=dict)
    monitor: Monitor | None = None

    def run(self, plan: Plan, inputs: build.Inputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the steps, and as outputs the values that are wanted.
          inputs: what the steps read.
          stem: of the names of the files with the results.

        Returns:
          The outputs that steps compute, by name.

        Raises:
          WorkerError: a body failed, or the runner did.
          JobCancelledError: the job was cancelled.
        """
        monitor = self.monitor or Monitor(plan)
        with monitor.pipeline(stem) as reports:
            return self._run(plan, inputs, stem, replace(self.store, reports=reports), monitor)

    def _run(
        self, plan: Plan, inputs: build.Inputs, stem: str, store: Store, monitor: Monitor
    ) -> dict[str, Value]:
        with new_pipeline(self.runner, self.flags) as pipeline:
            graph = self.graph(pipeline, plan, inputs, stem, store)
            names = [step.name for step in plan.steps]
            lost = functools.partial(lost_workers.lost_worker, store, plan.steps)
            lost_workers.begin_pipeline(store, self.shared)
            try:
                with own_errors(store, type(self.runner).__name__, names, self.shared, lost):
                    self._wait(pipeline, store, plan, monitor)
            finally:
                lost_workers.end_pipeline(store)
            return graph.find_results(stem)

    def _wait(self, pipeline: beam.Pipeline, store: Store, plan: Plan, monitor: Monitor) -> None:
        look = lost_workers.Look(store, plan.steps, isinstance(self.runner, _KEEP_WORKERS))
        in_memory = isinstance(self.runner, FnApiRunner)
        if not in_memory:
            waiting.run(pipeline, self.flags, monitor.running, look)
        elif self.shared and self.options.shard_timeout is None:
            waiting.run(pipeline, self.flags, monitor.running)
        else:
            end = functools.partial(lost_workers.end_workers, store)
            waiting.run_apart(pipeline, look, None if self.shared else end)

    def graph(
        self, pipeline: beam.Pipeline, plan: Plan, inputs: build.Inputs, stem: str, store: Store
    ) -> build.Graph:
        """Adds the steps of a plan to a pipeline, and writes their results."""
        inputs = replace(inputs, program=self.program)
        graph = build.Graph(pipeline, plan, inputs, store, self.options, self.spread, self.bodies)
        graph.build()
        graph.write_results(stem)
        return graph


@contextlib.contextmanager
def new_pipeline(runner: Any, flags: PipelineOptions) -> Iterator[beam.Pipeline]:
    """A pipeline that leaves no folder behind."""
    pipeline = beam.Pipeline(runner=runner, options=flags)
    try:
        yield pipeline
    finally:
        # Beam makes this folder at once, and removes it only if the pipeline gets to run.
        shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
