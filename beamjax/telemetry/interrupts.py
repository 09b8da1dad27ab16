"""Ctrl-C and SIGTERM cancel the jobs of this process.

A job runs in a thread of its own while its caller waits, so that a signal, which Python handles in
the main thread, interrupts the wait and never the code of the job, of Beam or of JAX. The caller
cancels the job, gives it `SECONDS_TO_END`, and raises `KeyboardInterrupt` or, after SIGTERM,
`Terminated`.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

from beamjax._compat import skip_exit_handlers
from beamjax.bodies.jax_settings import fulfil, in_thread

SECONDS_TO_END = 1.5
"""Seconds in which a cancelled job ends. A job whose thread is in native code for longer goes on
without its caller, or is ended with the process."""
SECONDS_AT_EXIT = 20.0
"""Seconds that a process waits at its exit for such jobs. Native code that returned later, while
Python is being finalized, would abort the process."""
_LONGEST_WAIT_SECONDS = 0.2

T = TypeVar("T")
Outcome = concurrent.futures.Future[Any]


class Terminated(SystemExit):
    """Raised in the main thread by SIGTERM while a job runs."""


class Work(Generic[T]):
    """A job, and the thread that runs it."""

    def __init__(self, cancel: Callable[[], None], abandon: Callable[[], None]):
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.cancel = cancel  # requests the end of the job, and returns at once
        self._abandon = abandon  # called once if the job does not end in time
        self.is_abandoned = False  # it was cancelled, and did not end in time
        # Locked until the end. `concurrent.futures.wait` takes several times as long.
        self._gate = threading.Lock()
        self._gate.acquire()

    def start(self, function: Callable[[], T]) -> None:
        """Starts the job in a thread, with the JAX settings and context variables of this one."""
        self._begin()
        in_thread(function, self.outcome)

    def run(
        self,
        function: Callable[[], T],
        every: float | None = None,
        say: Callable[[], None] | None = None,
    ) -> T:
        """Runs the job, and returns its result or raises its error; see `wait`."""
        if self._begin():
            self.wait(every, function, say)
        else:  # which no signal interrupts
            fulfil(self.outcome, function)
        # Not kept: the traceback of an error leads to this frame, and so to all data of the job.
        outcome = self.outcome
        del self.outcome
        try:
            return outcome.result()
        finally:
            del outcome

    def wait(
        self,
        timeout: float | None = None,
        start: Callable[[], T] | None = None,
        say: Callable[[], None] | None = None,
    ) -> bool:
        """Waits for the end of the job, and cancels it if a signal interrupts the wait."""
        # With `say`, which is called after each timeout, the wait goes on until the end.
        try:
            if start is not None:  # here, so that no signal comes between the start and the wait
                in_thread(start, self.outcome)
            while not self._ends(timeout) and say is not None:
                say()
        except BaseException:
            _end([self])
            raise
        finally:
            restore()
        return self.outcome.done()

    def abandon(self) -> None:
        """Lets the thread of the job go on by itself."""
        self.is_abandoned = True
        abandon(self.outcome)
        with contextlib.suppress(Exception):
            self._abandon()

    def _begin(self) -> bool:
        """Registers the job; returns whether this is the main thread, which gets the signals."""
        global _owner
        is_main = _is_main()
        # Users may have a handler of their own.
        if is_main and not _terminated and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _handle)
            _owner = os.getpid()
        _running[self.outcome] = self
        self.outcome.add_done_callback(self._ended)
        return is_main

    def _ended(self, outcome: Outcome) -> None:
        _running.pop(outcome, None)
        self._gate.release()

    def _ends(self, timeout: float | None) -> bool:
        """Waits for the end of the job for at most `timeout` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.outcome.done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            # A signal does not end a wait if another thread receives it, or it comes just before.
            if self._gate.acquire(timeout=min(left, _LONGEST_WAIT_SECONDS)):
                self._gate.release()  # for other threads that wait
        return True


def _end(works: Sequence[Work[Any]]) -> None:
    """Cancels jobs and waits for their end. Another signal ends the wait."""
    try:
        for work in works:
            with contextlib.suppress(Exception):
                work.cancel()
        concurrent.futures.wait([work.outcome for work in works], SECONDS_TO_END)
    finally:
        for work in works:
            if not work.outcome.done():
                work.abandon()


_running: dict[Outcome, Work[Any]] = {}
_abandoned: collections.deque[Outcome] = collections.deque(maxlen=64)


def abandon(outcome: Outcome) -> None:
    """Lets a thread of `in_thread` go on by itself; only the exit of the process waits for it."""
    _abandoned.append(outcome)


def _forget_jobs() -> None:
    for known in (_running, _abandoned):
        known.clear()


os.register_at_fork(after_in_child=_forget_jobs)


# --- SIGTERM, with which Kubernetes and systemd end a process

_owner = 0
_terminated = False


def terminated() -> bool:
    """Whether this process got SIGTERM. Jobs that fail after that count as cancelled."""
    return _terminated


def restore() -> None:
    """Restores the default handler of SIGTERM, if this is the main thread and no job runs."""
    if not _running and _is_main() and signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _terminated
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getpid() != _owner:  # a forked process, which has no jobs of its own
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _terminated = True
    raise Terminated(128 + signal.SIGTERM)


# --- the exit of the process

_status: int | None = None
_exiting = False


def exiting() -> bool:
    """Whether the main program has ended."""
    return _exiting


def exit_with(status: int) -> None:
    """Sets the exit status of a command that was interrupted, and ignores further interrupts."""
    global _status
    _status = status
    if _is_main():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave() -> None:
    """Waits for the jobs that still run when the main program ends, or cancels them."""
    global _exiting
    _exiting = True
    try:
        if not _is_interrupted():
            concurrent.futures.wait(list(_running))
            concurrent.futures.wait(_abandoned, SECONDS_AT_EXIT)
            _postpone_interrupts()
            return
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end(list(_running.values()))
    _end_process()


def _postpone_interrupts() -> None:
    """Lets exit handlers remove what they have to: the first interrupt has no effect any more."""
    # The main program has ended with its result. Another interrupt ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))


def _is_interrupted() -> bool:
    """Whether a signal has ended the main program."""
    uncaught = getattr(sys, "last_type", None) or Exception
    by_ctrl_c = issubclass(uncaught, KeyboardInterrupt) and not hasattr(sys, "ps1")
    return _terminated or _status is not None or by_ctrl_c


def _end_process() -> None:
    """Runs the exit handlers, and ends the process without finalizing Python."""
    # Threads that are in native code would abort the process if they returned while Python is
    # being finalized.
    skip_exit_handlers()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    atexit._run_exitfuncs()
    if _status is not None:
        os._exit(_status)
    number = signal.SIGTERM if _terminated else signal.SIGINT
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# Before Python waits for threads that are no daemons, such as those of a ThreadPoolExecutor, which
# may wait for a job.
threading._register_atexit(_leave)  # type: ignore[attr-defined]
