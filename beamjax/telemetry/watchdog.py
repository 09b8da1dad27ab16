"""Records what the threads of this process do for a run, and stops work that takes too long.

A worker that is killed can't report anything, so the record is also in a small file in the folder
of the run; see `working_files`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TypeVar

import jax

from beamjax import _compat
from beamjax.bodies.jax_settings import in_thread
from beamjax.errors import BeamjaxError, Failure, JobCancelledError, WorkerError
from beamjax.plan.shard import Shard, shard_error
from beamjax.plan.steps import Map, Step
from beamjax.spans import timed
from beamjax.telemetry.working_files import WorkEntry, WorkingFile

SECONDS_TO_STOP = 1.0
"""Seconds to wait for a thread of this process to stop after a timeout."""
DOING = {"read": "reading", "compute": "computing", "merge": "merging"}
"""What messages call the kinds of spans that have a limit."""
T = TypeVar("T")


class Watchdog:
    """Watches the spans of this process in one run; see `spans.Watch`."""

    def __init__(
        self, steps: Iterable[Step] = (), limit: float | None = None, folder: str | None = None,
        on_late: Callable[[BeamjaxError], None] | None = None,
    ):  # fmt: skip
        self.steps = {step.name: step for step in steps}  # for messages
        self.limit = limit  # seconds of a span, without compilation
        self.late: BeamjaxError | None = None  # the error of work that takes too long
        self._on_late = on_late
        self._given_up = False
        self._file: WorkingFile | None = None
        if folder is not None:
            with contextlib.suppress(OSError):  # such as in a folder without the mark of `invite`
                self._file = WorkingFile(folder)

    def begin(self, span: timed) -> None:
        """Watches a span until it ends; JobCancelledError if the run has ended."""
        self.check()
        if span.kind not in DOING or (self.limit is None and self._file is None):
            return
        span.thread = threading.get_ident()
        if self._file is not None:
            span.slot = self._file.begin(_entry(span))
        if self.limit is not None:
            _watch(self, span)

    def end(self, span: timed, error: BaseException | None) -> None:
        """Ends to watch a span; WorkerError if it took longer than the limit."""
        if span.kind not in DOING:
            return
        if self._file is not None:
            self._file.end(span.slot)
            span.slot = None
        if self.limit is not None:
            with _ending:
                _watched.pop(id(span), None)
            self.check()
            if error is None and self.is_late(span):
                raise self.error(span)

    def give_up(self) -> None:
        """Stops threads when their next span begins or ends."""
        self._given_up = True

    def check(self) -> None:
        """Raises `JobCancelledError` if the run has ended."""
        if self._given_up or self.late is not None:
            raise JobCancelledError("the run has ended before this work did")

    @property
    def has_file(self) -> bool:
        """Whether other processes can read what this one does."""
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

    def is_late(self, span: timed, share: float = 1.0) -> bool:
        """Whether a span has taken longer than a share of its limit; any thread may call this."""
        now, since = time.perf_counter(), span.compiles_since
        compiling = span.inner.get("compile", 0.0) + (0.0 if since is None else now - since)
        return now - span.start - compiling > share * (self.limit or 0.0)

    def error(self, span: timed, others: Sequence[timed] = ()) -> BeamjaxError:
        """The error that a span takes too long, which also lists other spans."""
        waiting = ""
        if others:
            listed = ", ".join(f"{other.step!r} shard {_number(other)}" for other in others[:8])
            waiting = f" (at the same time, other threads of the process were at {listed})"
        timed_out = WorkerError(
            f"{DOING[span.kind]} took longer than {self.limit:g} s, the option shard_timeout"
            f"{waiting}. Does a loop not end, or a call wait for something? "
            "`error.failure.traceback` shows where it was. If it only needs longer, give a larger "
            "shard_timeout, or a smaller shard_size"
        )
        placed = placed_error(self.steps.get(span.step), span.step, span.shard, timed_out)
        stacks = "\n".join(filter(None, map(_stack, (*others, span))))
        if placed.failure is not None:
            placed.failure = replace(placed.failure, traceback=stacks, time=time.time())
        return placed


def _entry(span: timed) -> WorkEntry:
    shard = span.shard
    members = (shard.start, shard.start + shard.count - 1) if shard else None
    doing = DOING[span.kind]
    return WorkEntry(doing, span.thread, time.time(), span.step, _number(span), members)


def _number(span: timed) -> int | None:
    return span.shard.index if span.shard is not None else None


def _stack(span: timed) -> str:
    """The stack of the thread of a span now; "" if the thread has ended."""
    frame = sys._current_frames().get(span.thread)
    if frame is None:
        return ""
    lines = "".join(traceback.format_stack(frame))
    what = f"{DOING[span.kind]} {span.step!r}, shard {_number(span)}"
    return f"{what} (most recent call last):\n{lines}"


def _in_user_code(span: timed) -> bool:
    """Whether the thread of a span runs Python code of the user, and does not wait for JAX."""
    frame = sys._current_frames().get(span.thread)
    return frame is not None and not frame.f_code.co_filename.startswith(_OURS)


def placed_error(
    step: Step | None, name: str, shard: Shard | None, error: BeamjaxError
) -> BeamjaxError:
    """The error with the step and the shard in its message, and with its `failure`."""
    if isinstance(step, Map) and shard is not None:
        return shard_error(step, shard, error)
    located = type(error)(f"step {name!r}: {error}")
    located.failure = Failure(name)
    return located


def bounded(function: Callable[[], T], watchdog: Watchdog) -> T:
    """Calls a function in a thread, and gives up when one of its spans takes too long."""
    # The thread is stopped when it next runs Python. Code in C can't be stopped, but as the thread
    # is a daemon, it does not keep the process from ending.
    outcome = in_thread(function)
    try:
        while not outcome.done():
            wait([outcome], _LONGEST_PAUSE)
            if watchdog.late is not None:
                wait([outcome], SECONDS_TO_STOP)
                break
    except BaseException:
        watchdog.give_up()
        raise
    if watchdog.late is not None:
        raise watchdog.late
    return outcome.result()


# --- the thread that looks

_watched: dict[int, tuple[Watchdog, timed]] = {}
_starting = threading.Lock()
_ending = threading.Lock()
_looking: threading.Thread | None = None
_LONGEST_PAUSE = 0.5
_OURS = tuple(os.path.dirname(str(module)) for module in (_compat.__file__, jax.__file__))


def _watch(watchdog: Watchdog, span: timed) -> None:
    global _looking
    _watched[id(span)] = watchdog, span
    with _starting:
        if _looking is None or not _looking.is_alive():
            _looking = threading.Thread(target=_look, name="beamjax watchdog", daemon=True)
            _looking.start()


def _look() -> None:
    while True:
        watched = list(_watched.values())
        limits = (watchdog.limit or 0.0 for watchdog, _ in watched)
        time.sleep(max(0.02, min(_LONGEST_PAUSE, *(limit / 4 for limit in limits), 1.0)))
        for watchdog, span in watched:
            if watchdog.late is None and id(span) in _watched and watchdog.is_late(span):
                with contextlib.suppress(Exception):
                    own = [other for of, other in watched if of is watchdog]
                    _report(watchdog, span, own)


def _report(watchdog: Watchdog, late: timed, spans: Sequence[timed]) -> None:
    """Records the error of work that is late, or of user code that it may wait for through JAX."""
    suspects = [span for span in spans if watchdog.is_late(span, 0.5)]
    culprit = next(filter(_in_user_code, suspects), late)
    others = [span for span in suspects if span is not culprit]
    watchdog.note_late(watchdog.error(culprit, others))
    # Raises an error in the thread when it next runs Python; C code is not interrupted. The lock
    # keeps the span from ending meanwhile: the thread may do the work of another run after it.
    with _ending:
        if id(culprit) in _watched:
            error = ctypes.py_object(JobCancelledError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(culprit.thread), error)
