"""Handles SIGTERM, with which Kubernetes and systemd end a process: it cancels the jobs of the
process.

By default, SIGTERM ends Python at once. Jobs are then LOST, and their temporary folders remain.
This handler cancels the jobs, runs the exit handlers, and then ends the process by the signal. A
second SIGTERM ends it at once.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SECONDS_TO_CANCEL = 20.0
"""Seconds to wait for launched jobs to end. Kubernetes kills a process after 30."""

Outcome = concurrent.futures.Future[Any]

_owner = 0
_depth = 0
_launched: dict[Outcome, tuple[Callable[[], None], Callable[[], None]]] = {}
_requested = False


class Terminated(SystemExit):
    """Raised in the main thread if it runs a job."""


def requested() -> bool:
    """Whether this process got SIGTERM. Jobs that fail after that count as cancelled."""
    return _requested


@contextlib.contextmanager
def cancelling() -> Iterator[None]:
    """A context in which SIGTERM interrupts this thread, if it is the main one, as Ctrl-C does.

    A handler of the user stays in place.
    """
    global _depth
    if not _install():
        yield
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _requested and not _depth:
            _end()
        restore()


def cancel_at_end(
    outcome: Outcome, cancel: Callable[[], None], abandon: Callable[[], None]
) -> None:
    """Makes SIGTERM cancel a job that another thread runs.

    Args:
      outcome: the outcome of the job.
      cancel: requests the end of the job.
      abandon: called if the job has not ended in time.
    """
    _launched[outcome] = cancel, abandon
    outcome.add_done_callback(lambda outcome: _launched.pop(outcome, None))
    _install()


def restore() -> None:
    """Restores the default handler of SIGTERM, if this is the main thread and no job runs."""
    if _depth or _launched or not _is_main():
        return
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _install() -> bool:
    """Installs the handler if there is no other; returns whether it can interrupt this thread."""
    global _owner
    if not _is_main():
        return False
    found = signal.getsignal(signal.SIGTERM)
    if found is signal.SIG_DFL and not _requested:
        signal.signal(signal.SIGTERM, _handle)
        _owner = os.getpid()
        return True
    return found is _handle


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _requested
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getpid() != _owner:  # a forked process, which has no jobs of its own
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _requested = True
    if _depth:
        raise Terminated(128 + signal.SIGTERM)
    # Not here: this thread may hold locks that the jobs need to end.
    threading.Thread(target=_end, name="beamjax termination").start()


def _end() -> None:
    """Cancels launched jobs, runs the exit handlers, and ends the process by the signal."""
    jobs = dict(_launched)
    for cancel, _ in jobs.values():
        with contextlib.suppress(Exception):
            cancel()
    for outcome in concurrent.futures.wait(jobs, SECONDS_TO_CANCEL).not_done:
        with contextlib.suppress(Exception):
            jobs[outcome][1]()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # The signal would skip the exit handlers, which remove temporary folders and stop job servers.
    atexit._run_exitfuncs()
    os.kill(os.getpid(), signal.SIGTERM)
