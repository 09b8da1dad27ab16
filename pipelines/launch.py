"""One graph on a Beam runner, to its end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import apache_beam as beam

from beamjax.monitor import Monitor
from beamjax.pipelines import build, waiting
from beamjax.pipelines.connections import Connection
from beamjax.pipelines.failures import own_errors
from beamjax.pipelines.outputs import Outputs
from beamjax.pipelines.store import Ref, Store
from beamjax.pipelines.tasks import StoredBody
from beamjax.pipelines.values import Value
from beamjax.plan import Plan


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      connection: to the runner.
      store: where values are, before and after.
      program: what workers make the bodies from that run as Python.
      bodies: those that are in the store.
      monitor: of the job.
    """

    connection: Connection
    store: Store
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
        connection = self.connection
        with new_pipeline(connection) as pipeline:
            outputs = self.outputs(pipeline, plan, inputs, stem, store)
            names = [step.name for step in plan.steps]
            with own_errors(store, type(connection.runner).__name__, names, connection.shared):
                waiting.run(pipeline, connection.flags, monitor.running)
            found = outputs.find()
            monitor.drop(outputs.dropped(), outputs.sizes(found))
            return found

    def outputs(
        self, pipeline: beam.Pipeline, plan: Plan, inputs: build.Inputs, stem: str, store: Store
    ) -> Outputs:
        """Adds the steps of a plan to a pipeline, which writes their outputs."""
        inputs = replace(inputs, program=self.program)
        graph = build.Graph(pipeline, plan, inputs, store, self.connection, self.bodies)
        graph.build()
        outputs = Outputs(graph, stem)
        outputs.write()
        return outputs


@contextlib.contextmanager
def new_pipeline(connection: Connection) -> Iterator[beam.Pipeline]:
    """A pipeline that leaves no folder behind."""
    pipeline = beam.Pipeline(runner=connection.runner, options=connection.flags)
    try:
        yield pipeline
    finally:
        # Beam makes this folder at once, and removes it only if the pipeline gets to run.
        shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
