"""Resident workers of a session, which serve several runs and keep their inputs and bodies."""

from __future__ import annotations

import collections
import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from beamjax.errors import JobCancelledError, OptionsError
from beamjax.options import Options
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.resident.drive import drive, values_for
from beamjax.pipelines.resident.resident_job import resident_job
from beamjax.pipelines.run import run_store, stored_bodies
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.values.members import Uploads, remove_upload
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StoredBodies
from beamjax.plan.steps import Plan
from beamjax.runtime.driver import Schedule
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.sources.arrays.placed import Placed
from beamjax.telemetry.monitor import Monitor

MOST_UPLOADS = 16
"""Largest number of placed inputs from memory whose files stay in the store of a session."""

MOST_PLANS = 32
"""Largest number of plans whose bodies stay in the store of a session."""


@dataclass
class _Known:
    """The parts of a plan that stay in the store and on the workers between runs."""

    # While its plan is held, no other one can have the same `id`, which is part of the key.
    schedule: Schedule
    connection: Connection  # with the options of the runs
    # For both, see `Launcher`.
    bodies: StoredBodies
    programs: dict[Any, Any] = field(default_factory=dict)


class SessionWorkers:
    """A Beam job whose workers run several plans. It starts with the first run."""

    def __init__(self, runner: Any, options: Options, idle_seconds: float):
        self.connection = connect(runner, options)
        self._options = options
        # Without a run for so long, the job ends. The next run starts another.
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._stack: contextlib.ExitStack | None = None
        self._timer: threading.Timer | None = None
        self._monitor: Monitor | None = None
        self._runs = 0
        self._is_closed = False

    def run(
        self,
        plan: Plan,
        inputs: Inputs,
        options: Options,
        monitor: Monitor,
        results: MaterializedOutputs = NOTHING,
    ) -> dict[str, np.ndarray | Placed]:
        """Runs a plan; arguments, results and errors are those of `run_plan`."""
        # Runs of a session are sequential: they share the store, which is swept between them.
        with self._lock:
            if self._is_closed:
                raise OptionsError("session: found a run after its end; open another session")
            self._runs += 1
            if self._timer is not None:
                self._timer.cancel()
            try:
                if self._stack is None:
                    self._start()
                self._monitor = monitor
                return self._run(plan, inputs, options, monitor, results)
            except JobCancelledError:
                # The workers may still compute tasks of the run; the next one has others.
                stack, self._stack = self._stack, None
                with stack or contextlib.nullcontext():
                    raise
            finally:
                self._timer = threading.Timer(self._idle_seconds, self._end_idle, [self._runs])
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Ends the job."""
        self._is_closed = True
        while not self._lock.acquire(timeout=0.1):
            if self._monitor is not None and self._monitor.is_cancelled:
                return  # the run, which was interrupted, ends the job itself
        try:
            if self._timer is not None:
                self._timer.cancel()
            self._end()
        finally:
            self._lock.release()

    def _start(self) -> None:
        # If the job can't be set up, the inner stack removes the store.
        with contextlib.ExitStack() as stack:
            self._store: Store = stack.enter_context(run_store(self.connection))
            self._job = stack.enter_context(resident_job(self.connection, self._store))
            self._known: collections.OrderedDict[Any, _Known] = collections.OrderedDict()
            self._uploads: Uploads = collections.OrderedDict()
            self._stack = stack.pop_all()

    def _end(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def _end_idle(self, runs: int) -> None:
        """Ends the job, unless there was another run since the timer was started."""
        with self._lock:
            if runs == self._runs:
                self._end()

    def _run(
        self,
        plan: Plan,
        inputs: Inputs,
        options: Options,
        monitor: Monitor,
        results: MaterializedOutputs,
    ) -> dict[str, np.ndarray | Placed]:
        store, shared = self._store, self.connection.shared
        key = id(plan), options
        if key not in self._known:
            connection = replace(self.connection, options=replace(options, beam=self._options.beam))
            bodies = stored_bodies(plan, store, shared)
            self._known[key] = _Known(Schedule(plan), connection, bodies)
        known = self._known[key]
        self._known.move_to_end(key)
        if len(self._known) > MOST_PLANS:
            self._known.popitem(last=False)
        # As in `run_plan`.
        direct = NOTHING if options.checkpoint else results
        lasting = frozenset(self._files())
        launcher = Launcher(
            known.connection, store, monitor, known.bodies, direct, known.programs, lasting
        )
        values = values_for(inputs, store, shared, self._uploads)
        try:
            return drive(known.schedule, inputs, values, launcher, self._job, results)
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Removes the values of a run. Bodies and the latest uploads stay."""
        while len(self._uploads) > MOST_UPLOADS:
            stem, _ = self._uploads.popitem(last=False)
            remove_upload(self._store, stem)
        self._store.sweep(self._files())

    def _files(self) -> set[str]:
        """The names of the files in the store that hold bodies."""
        return set().union(*(known.bodies.files() for known in self._known.values()))
