"""Makes the job that Dataflow would receive, without using the network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from apache_beam.options.pipeline_options import GoogleCloudOptions, TestOptions

from beamjax import _beam_compat
from beamjax.errors import OptionsError
from beamjax.options import Options
from beamjax.pipelines.launch import Launcher, new_pipeline
from beamjax.pipelines.resident.resident_job import add_workers
from beamjax.pipelines.resident.worker import ServeTasks
from beamjax.pipelines.run import (
    as_one_pipeline,
    graph_inputs,
    is_one_pipeline,
    stored_bodies,
)
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker_inputs import source_specs
from beamjax.plan.steps import Gather, Map, Plan, Server, walk
from beamjax.runtime.inputs import Inputs
from beamjax.storage import files, temporary
from beamjax.telemetry.monitor import Monitor


@dataclass(frozen=True)
class DryStore(Store):
    """A store that records files instead of writing them."""

    # The bytes of each file, by name.
    written: dict[str, int] = field(default_factory=dict, compare=False)

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        self.written[name] = len(data)

    def sweep(self, live: Any) -> None:
        """Does nothing."""

    def cleanup(self) -> None:
        """Does nothing."""

    def __reduce__(self) -> Any:
        # The steps of the job are pickled with the plain store that workers need.
        return Store, (self.root, self.piece_bytes, self.persistent)


def described(job: Any) -> dict[str, Any]:
    """The description of a job that Dataflow receives, besides its pipeline."""
    staging = temporary.new_name(None, "dry-run")
    temporary.make(staging)
    try:
        # Beam's client stages files while it makes the description, here into a local folder.
        cloud = job.options.view_as(GoogleCloudOptions)
        staging_location, cloud.staging_location = cloud.staging_location, staging
        job.google_cloud_options.staging_location = staging
        client = _beam_compat.DataflowApplicationClient(job.options, staging)
        client.create_job_description(job)
        cloud.staging_location = staging_location
        return json.loads(job.json())
    finally:
        temporary.remove(staging)


def first_job(plan: Plan, inputs: Inputs, options: Options) -> tuple[Any, dict[str, int]]:
    """The job of the first pipeline of a plan, and the sizes of the files that it reads."""
    connection = connect("DataflowRunner", options, dry=True)
    connection.flags.view_as(TestOptions).dry_run = True
    connection.flags.view_as(GoogleCloudOptions).no_auth = True
    folder = str(connection.options.work_folder)
    store = DryStore(files.join(folder, "beamjax-dry-run"), persistent=False)
    if not any(isinstance(step, Map | Gather | Server) for step in walk(plan.steps)):
        raise OptionsError(f"{plan.name}: nothing in it is computed on workers, so there is no job")
    with new_pipeline(connection) as pipeline:
        if not is_one_pipeline(plan, connection):
            add_workers(pipeline, connection, ServeTasks(store.root, b""))
        else:
            sources = source_specs(inputs, store, connection.shared)
            bodies = stored_bodies(plan, store, connection.shared)
            launcher = Launcher(connection, store, Monitor(plan), bodies)
            bound = graph_inputs(inputs, sources, store)
            launcher.outputs(pipeline, as_one_pipeline(plan), bound, "result", store)
        result: Any = pipeline.run()
    return result.job, store.written
