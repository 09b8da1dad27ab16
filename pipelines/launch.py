"""One graph on a Beam runner, to its end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax.options import Options
from beamjax.pipelines import build, waiting
from beamjax.pipelines.store import Ref, Store
from beamjax.pipelines.tasks import StoredBody
from beamjax.pipelines.values import Value
from beamjax.plan import Plan


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
    """

    runner: Any
    flags: PipelineOptions
    store: Store
    options: Options
    shared: bool
    spread: bool
    program: Ref | None = None
    bodies: dict[str, StoredBody] = field(default_factory=dict)

    def run(self, plan: Plan, inputs: build.Inputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the steps, and as outputs the values that are wanted.
          inputs: what the steps read.
          stem: of the names of the files with the results.

        Returns:
          The outputs that steps compute, by name.

        Raises:
          WorkerError: a body failed.
        """
        inputs = replace(inputs, program=self.program)
        pipeline = beam.Pipeline(runner=self.runner, options=self.flags)
        try:
            graph = build.Graph(
                pipeline, plan, inputs, self.store, self.options, self.spread, self.bodies
            )
            graph.build()
            graph.write_results(stem)
            waiting.run(pipeline, self.flags)
            return graph.find_results(stem)
        finally:
            # Beam makes this folder at once, and removes it only if the pipeline gets to run.
            shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
