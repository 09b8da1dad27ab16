"""Runs a plan on the resident workers of a job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from beamjax.pipelines.checkpoints.checkpointer import Checkpointer
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.executor import Resident
from beamjax.pipelines.resident.resident_job import ResidentJob
from beamjax.pipelines.values.members import Uploads
from beamjax.pipelines.values.refs import Here
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import Stored
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker_inputs import source_specs
from beamjax.runtime.driver import Driver, Schedule, starts_anew
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.values import Part, Ref, Values, server
from beamjax.sources.arrays.placed import Placed


def drive(
    schedule: Schedule,
    inputs: Inputs,
    values: Values,
    launcher: Launcher,
    job: ResidentJob,
    results: MaterializedOutputs = NOTHING,
) -> dict[str, np.ndarray | Placed]:
    """Runs a plan on resident workers; see `run_plan`. `values` are those of `values_for`."""
    store, monitor, options = launcher.store, launcher.monitor, launcher.connection.options
    checkpointer = None
    if options.checkpoint is not None:
        checkpointer = Checkpointer(schedule.plan, inputs, options, values)
    if options.dead_letters is not None:
        monitor.letters.begin(anew=starts_anew(checkpointer))
    lost_workers.begin_pipeline(store, launcher.connection.shared)
    resident = Resident(schedule.plan, launcher, job, results)
    outputs = Driver(schedule, values, resident, monitor, checkpointer).run()
    return {name: resident.result(name, value) for name, value in outputs.items()}


def values_for(
    inputs: Inputs, store: Store, shared: bool, known: Uploads | None = None
) -> dict[str, Ref]:
    """The inputs of a plan by name, of which workers can read the placed ones."""
    if shared and not inputs.plan.picks_rows:  # which are read a shard at a time from a source
        return {name: _here(ref, store) for name, ref in inputs.refs.items()}
    reader = inputs.reader() if shared else source_specs(inputs, store, shared, known).open()
    served = {name: server(array) for name, array in inputs.server().items()}
    return served | inputs.placed(reader)


def _here(ref: Ref, store: Store) -> Ref:
    """An input, of which workers of this process read the members in place."""
    if ref.n is None or not isinstance(ref.data, np.ndarray):
        return ref
    return replace(ref, parts=(Part(0, ref.n, Stored(store, Here(ref.data))),))
