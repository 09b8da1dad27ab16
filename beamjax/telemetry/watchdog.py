"""Records what the threads of this process do for a run, and stops work that takes too long.

A worker that is killed can't report anything, so the record is also in a small file in the folder
of the run; see `working_files`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import jax

from beamjax import _compat
from beamjax.bodies import compile_time as _compile_time  # noqa: F401  (counts compilations)
from beamjax.bodies.counts import counts
from beamjax.bodies.python_bodies import fulfil, with_settings_of_here
from beamjax.errors import BeamjaxError, Failure, JobCancelledError, WorkerError
from beamjax.plan.shard import Shard, shard_errors
from beamjax.plan.steps import Map, Server
from beamjax.telemetry.working_files import WorkEntry, WorkingFile

SECONDS_TO_STOP = 1.0
"""Seconds to wait for a thread of this process to stop after a timeout."""

_NOBODY_LOOKS = contextlib.nullcontext()
T = TypeVar("T")


class WorkTable:
    """A table of what the threads of this process do for one run.

    Args:
      folder: the folder of the file; None, or a folder that does not exist, for no file.
      on_late: called with the error of work that takes too long.
    """

    def __init__(
        self, folder: str | None = None, on_late: Callable[[BeamjaxError], None] | None = None
    ):
        self.late: BeamjaxError | None = None
        self._on_late = on_late
        self._given_up = False
        self._file: WorkingFile | None = None
        if folder is not None:
            with contextlib.suppress(OSError):
                self._file = WorkingFile(folder)

    def at(
        self, doing: str, step: Map | Server, shard: Shard | None = None, limit: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A context for one activity of this thread.

        Args:
          doing: one of `DOING`.
          step: the step of the plan.
          shard: the shard of the step, if it has any.
          limit: largest number of seconds, without compilation.

        Raises at its start or end:
          WorkerError: it took longer.
          JobCancelledError: the run has ended.
        """
        if limit is None and self._file is None:  # no process reads the file
            if self._given_up or self.late is not None:
                self.check()
            return _NOBODY_LOOKS
        return AtWork(self, doing, step, shard, limit)

    def give_up(self) -> None:
        """Stops threads when they next begin or end an activity."""
        self._given_up = True

    def check(self) -> None:
        """Raises `JobCancelledError` if the run has ended."""
        if self._given_up or self.late is not None:
            raise JobCancelledError("the run has ended before this work did")

    @property
    def has_file(self) -> bool:
        """Whether other processes can read the table."""
        return self._file is not None

    def leave(self) -> None:
        """Records that the process ends normally."""
        if self._file is not None:
            self._file.leave()

    def note_late(self, error: BeamjaxError) -> None:
        """Stores the error of work that takes too long."""
        self.late = error
        if self._on_late is not None:
            self._on_late(error)

    def begin(self, work: AtWork) -> int | None:
        """Records the start of an activity; returns its slot in the file, if there is a file."""
        if self._file is None:
            return None
        shard = work.shard
        members = (shard.start, shard.start + shard.count - 1) if shard else None
        entry = WorkEntry(
            work.doing, work.thread, time.time(), work.step.name, work.number, members
        )
        return self._file.begin(entry)

    def end(self, slot: int | None) -> None:
        """Frees a slot."""
        if self._file is not None:
            self._file.end(slot)


class AtWork:
    """One activity of a thread, see `WorkTable.at`."""

    def __init__(
        self, table: WorkTable, doing: str, step: Map | Server, shard: Shard | None,
        limit: float | None,
    ):  # fmt: skip
        self.table = table
        self.doing = doing
        self.step = step
        self.shard = shard
        self.limit = limit

    def __enter__(self) -> None:
        self.table.check()
        self.thread = threading.get_ident()
        self._slot = self.table.begin(self)
        if self.limit is not None:
            self._counts = counts()
            self._counts.compiles_since = None
            self._compiled = self._counts.compile
            self._began = time.monotonic()
            _watch(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.table.end(self._slot)
        if self.limit is None:
            return
        _watched.pop(id(self), None)
        self.table.check()
        if error is None and self.is_late():
            raise self.error()

    def is_late(self, share: float = 1.0) -> bool:
        """Whether this has taken longer than a share of its limit; any thread may call this."""
        spent = time.monotonic() - self._began
        return spent - (self._counts.compile_so_far() - self._compiled) > share * (
            self.limit or 0.0
        )

    def error(self, others: Sequence[AtWork] = ()) -> BeamjaxError:
        """The error that this takes too long, which also lists other activities."""
        waiting = ""
        if others:
            listed = ", ".join(f"{other.step.name!r} shard {other.number}" for other in others[:8])
            waiting = f" (at the same time, other threads of the process were at {listed})"
        timed_out = WorkerError(
            f"{self.doing} took longer than {self.limit:g} s, the option shard_timeout{waiting}. "
            "Does a loop not end, or a call wait for something? `error.failure.traceback` shows "
            "where it was. If it only needs longer, give a larger shard_timeout, or a smaller "
            "shard_size"
        )
        found = placed_error(self.step, self.shard, timed_out)
        stacks = "\n".join(filter(None, (work.stack() for work in (*others, self))))
        if found.failure is not None:
            found.failure = replace(found.failure, traceback=stacks, time=time.time())
        return found

    @property
    def number(self) -> int | None:
        """The index of the shard."""
        return self.shard.index if self.shard is not None else None

    def stack(self) -> str:
        """The stack of its thread now; "" if the thread has ended."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return ""
        lines = "".join(traceback.format_stack(frame))
        what = f"{self.doing} {self.step.name!r}, shard {self.number}"
        return f"{what} (most recent call last):\n{lines}"

    def in_user_code(self) -> bool:
        """Whether its thread runs Python code of the user, and does not wait for JAX."""
        frame = sys._current_frames().get(self.thread)
        return frame is not None and not frame.f_code.co_filename.startswith(_OURS)


def placed_error(step: Map | Server, shard: Shard | None, error: BeamjaxError) -> BeamjaxError:
    """The error with the step and the shard in its message, and with its `failure`."""
    if isinstance(step, Map) and shard is not None:
        try:
            with shard_errors(step, shard):
                raise error
        except BeamjaxError as found:
            return found.with_traceback(None)
    located = type(error)(f"step {step.name!r}: {error}")
    located.failure = Failure(step.name)
    return located


def bounded(function: Callable[[], T], table: WorkTable) -> T:
    """Calls a function in a thread, and gives up when an activity in its table takes too long.

    Args:
      function: a function that records its activities in the table. It is called with the JAX
        settings of this thread.
      table: the table, which belongs to this call alone.

    Raises:
      WorkerError: an activity took too long. The thread is stopped when it next runs Python. Code
        in C can't be stopped, but it does not keep the process from ending.
      Exception: what the function raises.
    """
    outcome: Future[T] = Future()
    work = functools.partial(fulfil, outcome, with_settings_of_here(function))
    thread = threading.Thread(target=work, name="beamjax run", daemon=True)
    thread.start()
    try:
        while not outcome.done():
            wait([outcome], _LONGEST_PAUSE)
            if table.late is not None:
                thread.join(SECONDS_TO_STOP)
                break
    except BaseException:
        table.give_up()
        raise
    if table.late is not None:
        raise table.late
    return outcome.result()


# --- the watchdog

_watched: dict[int, AtWork] = {}
_starting = threading.Lock()
_watchdog: threading.Thread | None = None
_LONGEST_PAUSE = 0.5
_OURS = tuple(os.path.dirname(str(module)) for module in (_compat.__file__, jax.__file__))


def _watch(work: AtWork) -> None:
    global _watchdog
    _watched[id(work)] = work
    if _watchdog is None or not _watchdog.is_alive():
        with _starting:
            if _watchdog is None or not _watchdog.is_alive():
                _watchdog = threading.Thread(target=_look, name="beamjax watchdog", daemon=True)
                _watchdog.start()


def _look() -> None:
    while True:
        works = list(_watched.values())
        limits = (work.limit or 0.0 for work in works)
        time.sleep(max(0.02, min(_LONGEST_PAUSE, *(limit / 4 for limit in limits), 1.0)))
        for work in works:
            if work.table.late is None and id(work) in _watched and work.is_late():
                with contextlib.suppress(Exception):
                    _report(work, works)


def _report(late: AtWork, works: Sequence[AtWork]) -> None:
    """Records the error of work that is late, or of user code that it may wait for through JAX."""
    suspects = [work for work in works if work.table is late.table and work.is_late(0.5)]
    found = next((work for work in suspects if work.in_user_code()), late)
    late.table.note_late(found.error([work for work in suspects if work is not found]))
    _interrupt(found)


def _interrupt(work: AtWork) -> None:
    """Raises an error in the thread when it next runs Python; C code is not interrupted."""
    if id(work) in _watched:
        error = ctypes.py_object(JobCancelledError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(work.thread), error)
