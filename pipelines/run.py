"""Runs a plan on a Beam runner: as one pipeline, or on resident workers."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.options import Options
from beamjax.pipelines.graph import build
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.values.run_stores import new_store, remove_store
from beamjax.pipelines.values.store import Store, close_memory_store, open_memory_store
from beamjax.pipelines.worker.tasks import SourceSpecs, StoredBodies, caching_for
from beamjax.pipelines.worker_inputs import source_specs
from beamjax.plan.steps import Output, Plan
from beamjax.runtime.driver import Schedule
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import HANDED_BYTES, NOTHING, MaterializedOutputs
from beamjax.sources.arrays.placed import Placed
from beamjax.storage import files
from beamjax.storage.shared_cache import store_budget
from beamjax.telemetry.monitor import Monitor


def run_plan(
    plan: Plan,
    inputs: Inputs,
    runner: Any,
    options: Options,
    monitor: Monitor | None = None,
    results: MaterializedOutputs = NOTHING,
) -> dict[str, np.ndarray | Placed]:
    """Runs a plan on a Beam runner; returns the raw arrays of its outputs, or handles to files."""
    # Placed values have their members along axis 0.
    connection = connect(runner, options)
    monitor = monitor or Monitor(plan)
    folder = monitor.folder.path if monitor.folder else None
    with checkpoints_of(connection.options), run_store(connection, folder) as store:
        bodies = stored_bodies(plan, store, connection.shared)
        # With checkpoints, which link files of the store, placed results are first written to the
        # store, and from there to the files of results at the end. Otherwise directly.
        direct = NOTHING if options.checkpoint else results
        launcher = Launcher(connection, store, monitor, bodies, direct)
        if not is_one_pipeline(plan, connection):
            # Most plans are one pipeline.
            from beamjax.pipelines.resident.drive import drive, values_for
            from beamjax.pipelines.resident.resident_job import resident_job

            values = values_for(inputs, store, connection.shared)
            with resident_job(connection, store) as job:
                return drive(Schedule(plan), inputs, values, launcher, job, results)
        monitor.letters.begin(anew=True)
        with source_specs(inputs, store, connection.shared) as sources:
            bound = graph_inputs(inputs, sources, store)
            refs = launcher.run(as_one_pipeline(plan), bound, "result")
        return {
            name: results.finish(results.find(plan, name))
            if name in results.folders
            else value.array()
            for name, value in refs.items()
        }


def is_one_pipeline(plan: Plan, connection: Connection) -> bool:
    """Whether a plan runs as one pipeline, and not on resident workers."""
    # Some runners hold the output of a step in memory, so large results go through files there.
    hands_on_much = connection.spec.holds_elements and plan.handed_bytes > HANDED_BYTES
    return plan.is_one_graph and connection.options.checkpoint is None and not hands_on_much


def as_one_pipeline(plan: Plan) -> Plan:
    """The plan with the outputs of its pipeline: values only."""
    outputs = tuple(Output(value=name) for name in plan.returned())
    return replace(plan, inputs=(), outputs=outputs, constants=())


def graph_inputs(inputs: Inputs, sources: SourceSpecs, store: Store) -> build.GraphInputs:
    """The inputs of a plan that runs as one pipeline."""
    static = {name: store.hold([a], name) for name, a in inputs.server().items()}
    return build.GraphInputs(static, sources)


def checkpoints_of(options: Options) -> contextlib.AbstractContextManager[None]:
    """A context in which the run has exclusive use of its folder of checkpoints, if any."""
    if options.checkpoint is None:
        return contextlib.nullcontext()
    from beamjax.pipelines.checkpoints.folder import held

    return held(options.checkpoint)


@contextlib.contextmanager
def temporary_store(options: Options, job_folder: str | None = None) -> Iterator[Store]:
    """A store in a new folder for one run, removed at its end."""
    parent = options.work_folder
    if parent is None and options.checkpoint is not None:
        # In the file system of the checkpoints, which link files of the store.
        from beamjax.pipelines.checkpoints.folder import work_folder

        parent = work_folder(options.checkpoint)
    store = new_store(parent or job_folder)
    remove = functools.partial(remove_store, store)
    atexit.register(remove)  # for a process that does not wait for the end of the run
    try:
        yield store
    except BaseException as error:
        try:
            remove_store(store)
        except SourceError as other:  # report the earlier failure instead
            error.add_note(str(other))
        raise
    finally:
        atexit.unregister(remove)
    remove_store(store)


@contextlib.contextmanager
def run_store(connection: Connection, job_folder: str | None = None) -> Iterator[Store]:
    """A context with a temporary store, the in-memory store and the caches of its run."""
    parent = connection.options.work_folder
    patient: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if parent is not None and not connection.shared:
        from beamjax.pipelines.resident.resident_job import remove_orphans

        remove_orphans(parent)
        patient = files.patient()
    with (
        patient,
        temporary_store(connection.options, job_folder) as store,
        in_memory(store, connection),
        caching_for(store),
    ):
        yield store


@contextlib.contextmanager
def in_memory(store: Store, connection: Connection) -> Iterator[None]:
    """A context in which the store keeps values in memory, where a run need not write them."""
    options = connection.options
    if not connection.is_one_process or options.checkpoint is not None:
        # Checkpoints link files of the store.
        yield
        return
    open_memory_store(store.root, store_budget(options.memory_bytes))
    try:
        yield
    finally:
        close_memory_store(store.root)


def stored_bodies(plan: Plan, store: Store, shared: bool) -> StoredBodies:
    """The bodies of a plan in the store, with the pickled program if workers run some as Python."""
    if plan.recipe is None or shared:
        return StoredBodies(store)
    program = store.put([np.frombuffer(plan.recipe.pickled(), np.uint8)], "program")
    return StoredBodies(store, program)
