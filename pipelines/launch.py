"""One graph on a Beam runner, to its end."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import apache_beam as beam

from beamjax._beam_compat import FnApiRunner, PrismRunner, SparkRunner, temporary_folder
from beamjax.pipelines import waiting
from beamjax.pipelines.graph import build
from beamjax.pipelines.graph.outputs import Outputs
from beamjax.pipelines.runners import submission_files
from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.runners.loopback import loopback_only
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.values import Value
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker.errors import own_errors
from beamjax.pipelines.worker.tasks import StoredBody
from beamjax.plan.steps import Plan
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    from beamjax.pipelines.resident.messages import Program

KEEP_WORKERS = (FnApiRunner, PrismRunner, SparkRunner)
"""Runners that wait for a worker process that died, and start no other one for it."""


@dataclass
class Launcher:
    """Runs plans without control flow, each as one pipeline.

    Attributes:
      connection: to the runner.
      store: where values are, before and after.
      monitor: of the job.
      results: placed values that go where the results of the run are kept.
      program: what workers make the bodies from that run as Python.
      bodies: those that are in the store.
      programs: those that resident workers have of this run, by what they do.
      lasting: names of the files in the store that outlive the run.
    """

    connection: Connection
    store: Store
    monitor: Monitor
    program: Ref | None = None
    results: MaterializedOutputs = NOTHING
    bodies: dict[str, StoredBody] = field(default_factory=dict)
    programs: dict[Any, Program] = field(default_factory=dict)
    lasting: frozenset[str] = frozenset()

    def files(self) -> set[str]:
        """The names of the files in the store that further passes need."""
        return files_of(self.bodies, self.program) | self.lasting

    def run(self, plan: Plan, inputs: build.GraphInputs, stem: str) -> dict[str, Value]:
        """Runs a pipeline and waits for it.

        Args:
          plan: the steps, and as outputs the values that are requested.
          inputs: what the steps read.
          stem: of the names of the files with the results.

        Returns:
          The outputs that steps compute, by name.

        Raises:
          WorkerError: a body failed, or the runner did.
          JobCancelledError: the job was cancelled.
        """
        connection = self.connection
        with self.monitor.pipeline(stem) as reports, new_pipeline(connection) as pipeline:
            store = replace(self.store, reports=reports)
            outputs = self.outputs(pipeline, plan, inputs, stem, store)
            names = [step.name for step in plan.steps]
            lost = functools.partial(lost_workers.lost_worker, store, plan.steps)
            lost_workers.begin_pipeline(store, connection.shared)
            name = type(connection.runner).__name__
            try:
                with own_errors(store, name, names, connection.shared, lost):
                    self._wait(pipeline, store, plan)
            finally:
                lost_workers.end_pipeline(store)
            found = outputs.find()
            self.monitor.computed(outputs.provenance)
            self.monitor.drop(outputs.dropped(), outputs.sizes(found))
            return found

    def _wait(self, pipeline: beam.Pipeline, store: Store, plan: Plan) -> None:
        connection, running = self.connection, self.monitor.running
        runner, flags, shared = connection.runner, connection.flags, connection.shared
        look = lost_workers.Look(store, plan.steps, isinstance(runner, KEEP_WORKERS))
        with loopback_only():
            if not isinstance(runner, FnApiRunner):
                waiting.run(pipeline, flags, running, look)
            elif shared and connection.options.shard_timeout is None:
                waiting.run(pipeline, flags, running)
            else:
                end = functools.partial(lost_workers.end_workers, store)
                waiting.run_apart(pipeline, look, None if shared else end)

    def outputs(
        self,
        pipeline: beam.Pipeline,
        plan: Plan,
        inputs: build.GraphInputs,
        stem: str,
        store: Store,
    ) -> Outputs:
        """Adds the steps of a plan to a pipeline, which writes their outputs."""
        inputs = replace(inputs, program=self.program)
        graph = build.Graph(pipeline, plan, inputs, store, self.connection, self.bodies)
        graph.build()
        outputs = Outputs(graph, stem, self.results)
        outputs.write()
        return outputs


def files_of(bodies: Mapping[str, StoredBody], program: Ref | None) -> set[str]:
    """The names of the files of bodies, and of what workers make bodies from, in a store."""
    refs = [ref for body in bodies.values() for ref in body.artefacts.values()]
    refs += [program] if program else []
    return {name for ref in refs for name, _ in ref.files}


def run_steps(
    pipeline: beam.Pipeline,
    connection: Connection,
    store: Store,
    steps: list[str],
    errors: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Runs a pipeline that is no plan, and waits for it.

    Args:
      pipeline: what to run.
      connection: to its runner.
      store: where workers leave records of errors.
      steps: labels of those of beamjax.
      errors: makes errors of beamjax of those that a runner raises, see `transform_errors`.

    Raises:
      BeamjaxError: what one of these steps, by their labels, raised on a worker.
      WorkerError: the runner failed.
    """
    name = type(connection.runner).__name__
    own = own_errors(store, name, steps, connection.shared)
    with own, errors or contextlib.nullcontext(), loopback_only():
        waiting.run(pipeline, connection.flags)


@contextlib.contextmanager
def new_pipeline(connection: Connection, runner: Any = None) -> Iterator[beam.Pipeline]:
    """A pipeline that leaves no folder behind; `runner` in place of that of the connection."""
    pipeline = beam.Pipeline(runner=runner or connection.runner, options=connection.flags)
    try:
        with submission_files.made_in(temporary_folder(pipeline)):
            yield pipeline
    finally:
        # Beam makes this folder at once, and removes it only if the pipeline gets to run.
        shutil.rmtree(temporary_folder(pipeline), ignore_errors=True)
