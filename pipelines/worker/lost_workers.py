"""Finds out what a worker process was doing when it died, from the file that it left.

Each worker process on this machine has a file in the store that says what its threads are doing
(`telemetry.working_files`). A dead process whose file does not say that it ended normally was lost.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from beamjax.errors import BeamjaxError, Failure, WorkerError
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.reporting import CRASH, forget_watchdog, watchdog_here
from beamjax.pipelines.worker.worker_errors import OFTEN, RepeatedError
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Step
from beamjax.storage import files, trust
from beamjax.telemetry import signs_of_life, working_files
from beamjax.telemetry.watchdog import placed_error
from beamjax.telemetry.working_files import WorkEntry, WorkingProcess

MAX_TRACE = 16_000
"""Largest number of bytes that are read of the stack trace of a crash."""
_TRACE_LINES = 8


def begin_pipeline(store: Store, here: bool) -> None:
    """Asks workers to record what they do, and removes the files of dead workers."""
    forget_watchdog(store)
    # Workers that are threads of this process need no files.
    if not here and not files.is_url(store.root):
        working_files.invite(store.root)
        for path, _ in _dead(store):
            with contextlib.suppress(OSError):
                os.unlink(path)


def end_pipeline(store: Store) -> None:
    """Stops threads of this process that still work after a pipeline has ended."""
    watchdog = watchdog_here(store)
    if watchdog is not None:
        watchdog.give_up()


def lost_worker(store: Store, steps: Sequence[Step]) -> BeamjaxError | None:
    """The error of a worker process on this machine that was lost; None if none was."""
    lost = _lost(store)
    if not lost:
        return None
    # The last one: after its death, a runner that retries has given up.
    working = max(lost, key=lambda working: max((e.since for e in working.entries), default=0))
    trace = _read_trace(store, working)
    error = _error_of(working, trace, steps)
    failure = error.failure or Failure()
    process = working.process
    error.failure = replace(
        failure,
        worker=f"{process['host']}, process {process['pid']}",
        traceback=trace,
        others=len(lost) - 1,
        time=max((entry.since for entry in working.entries), default=0.0),
    )
    return error


class Look:
    """Checks the workers of a running pipeline, see `launch.Look`."""

    def __init__(self, store: Store, steps: Sequence[Step], keeps: bool):
        self.store = store
        self.steps = steps
        # Whether the runner keeps its first workers, and does not replace dead ones. One dead
        # worker is then an error; otherwise `OFTEN` deaths at the same shard are.
        self.keeps = keeps
        self._lost = False
        self._repeated = RepeatedError(store)

    def __call__(self) -> BeamjaxError | None:
        """The error of the workers, if there is one."""
        watchdog = watchdog_here(self.store)
        if watchdog is not None and watchdog.late is not None:
            return watchdog.late
        repeated = self._repeated()
        if repeated is not None:
            return repeated
        if not self.keeps:
            return lost_worker(self.store, self.steps) if _deaths(self.store) >= OFTEN else None
        error = lost_worker(self.store, self.steps)
        # Only at the second look, so that a runner that notices the death can report it first.
        lost, self._lost = self._lost, error is not None
        return error if lost else None


def end_workers(store: Store) -> None:
    """Kills the worker processes with files in the store that descend from this process."""
    for _, working in _processes(store):
        pid = working.process["pid"]
        if signs_of_life.is_alive(working.process) and signs_of_life.descends(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _dead(store: Store) -> list[tuple[str, WorkingProcess]]:
    return [
        (path, working)
        for path, working in _processes(store)
        if signs_of_life.is_alive(working.process) is False
    ]


def _lost(store: Store) -> list[WorkingProcess]:
    """The dead processes that did not end normally."""
    return [working for _, working in _dead(store) if not working.left]


def _deaths(store: Store) -> int:
    """The largest number of worker processes that died at one shard."""
    places = [(e.step, e.shard) for working in _lost(store) for e in working.entries]
    return max(collections.Counter(places).values(), default=0)


def _processes(store: Store) -> list[tuple[str, WorkingProcess]]:
    if files.is_url(store.root):
        return []
    processes = []
    with contextlib.suppress(OSError):
        for name in files.names(store.root):
            path = os.path.join(store.root, name)
            if name.startswith(working_files.PREFIX) and (working := working_files.read_file(path)):
                processes.append((path, working))
    return processes


def _read_trace(store: Store, working: WorkingProcess) -> str:
    """The stack that Python wrote when a process crashed; "" if there is none."""
    path = os.path.join(store.root, f"{CRASH}{working.process['pid']}")
    with contextlib.suppress(OSError), open(trust.open_regular(path), "rb") as file:
        return file.read(MAX_TRACE).decode(errors="replace")
    return ""


def _error_of(working: WorkingProcess, trace: str, steps: Sequence[Step]) -> BeamjaxError:
    entry = _culprit(working.entries, trace)
    others = [f"{other.step!r} shard {other.shard}" for other in working.entries if other != entry]
    text = f"the worker process {working.process['pid']} on {working.process['host']} "
    text += "crashed" if trace else "died without a trace"
    if entry is None:
        text += ", at no shard"
    if others:
        text += f" (its other threads were at {', '.join(others[:8])})"
    if trace:
        text += ": " + "\n".join(_crashed_thread(trace).splitlines()[:_TRACE_LINES])
    else:
        text += (
            ", as a killed process does. The usual reason is lack of memory: the system log then "
            "says so, and a smaller shard_size or fewer workers help"
        )
    if entry is None:
        return WorkerError(text)
    return _placed(entry, steps, WorkerError(f"while {entry.doing}, {text}"))


def _placed(entry: WorkEntry, steps: Sequence[Step], error: WorkerError) -> BeamjaxError:
    for step in steps:
        if step.name == entry.step and isinstance(step, Map) and entry.members is not None:
            first, last = entry.members
            shard = Shard(entry.shard or 0, first, last - first + 1)
            return placed_error(step, step.name, shard, error)
    where = f"step {entry.step!r}"
    if entry.members is not None:
        where += f", shard {entry.shard}, members {entry.members[0]} to {entry.members[1]}"
    located = WorkerError(f"{where}: {error}")
    located.failure = Failure(entry.step, entry.shard, entry.members)
    return located


_CURRENT = re.compile(r"(?s)^(Fatal[^\n]*)?.*?^Current thread (0x[0-9a-f]+)[^\n]*\n(.*?)(?=^\S|\Z)",
                      re.M)  # fmt: skip


def _crashed_thread(trace: str) -> str:
    """The reason of a crash, and the stack of the crashed thread if Python knows it."""
    current = _CURRENT.search(trace)
    return trace if current is None else f"{current[1] or 'a fatal error'}\n{current[3]}"


def _culprit(entries: Sequence[WorkEntry], trace: str) -> WorkEntry | None:
    """The work of the thread that crashed, or if it is unknown, the work that began first."""
    current = _CURRENT.search(trace)
    if current is not None:
        for entry in entries:
            if entry.thread == int(current[2], 16):
                return entry
    return entries[0] if entries else None
