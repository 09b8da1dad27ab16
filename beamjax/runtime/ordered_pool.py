"""Jobs that several threads do side by side, and whose results come in the order of the jobs.

The caller goes on in its own thread in the meantime: it reads what the next job needs, and
adds up what came out of those before. As it alone does both, and in order, nothing shows in what
comes out how many threads there were.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import JobCancelledError
from beamjax.options import Options

MAX_THREADS = 64
"""More have more shards in memory than gain time."""
AHEAD = 1
"""Jobs that wait for a thread, or whose results wait, for each thread that is at one."""

LOOK = 0.2
"""Seconds between two looks whether results are still needed."""
SECONDS_TO_END = 20.0
"""Seconds that threads have to finish their jobs when the results are no longer needed."""

T = TypeVar("T")
_Outcome = tuple[int, BaseException | None, Any]


def most_jobs(threads: int) -> int:
    """Jobs that there are at once: waiting, under way, or done with a result that waits."""
    return (1 + AHEAD) * threads if threads > 1 else 1


def usual_threads() -> int:
    """How many threads compute in this process, unless an option says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(2, min(cores or 2, MAX_THREADS))


class OrderedPool(Generic[T]):
    """Threads that do jobs, for one thread that adds them, and that closes the pool at its end.

    They have the settings of JAX, and the context variables, of the thread that makes the pool.

    Args:
      threads: how many.
      jobs: how many there may be at once; None for `most_jobs`.
      check: is called now and then while a result is waited for, and raises if it is in vain.
    """

    def __init__(
        self,
        threads: int,
        jobs: int | None = None,
        check: Callable[[], None] | None = None,
    ):
        self._most = most_jobs(threads) if jobs is None else jobs
        self._check = check
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], T]] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._early: dict[int, _Outcome] = {}
        self._added = self._taken = 0
        self._in_vain = False
        work = with_settings_of_here(self._work)
        self._threads: list[threading.Thread] = []
        for number in range(threads):
            run = contextvars.copy_context().run
            thread = threading.Thread(
                target=run, args=(work,), name=f"beamjax shards {number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def add(self, job: Callable[[], T]) -> Iterator[T]:
        """Takes a job.

        Yields:
          The results of jobs that were added first, until few enough are left.

        Raises:
          Exception: what the first job raises that fails, in the order in which they were added.
        """
        self._jobs.put((self._added, job))
        self._added += 1
        while self._added - self._taken >= self._most:
            yield self._next()

    def rest(self) -> Iterator[T]:
        """The results of all jobs that are left; raises what they raise."""
        while self._taken < self._added:
            yield self._next()

    def close(self) -> None:
        """Ends the threads; jobs that no thread has begun are forgotten."""
        self._in_vain = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(SECONDS_TO_END)

    def _next(self) -> T:
        while self._taken not in self._early:
            try:
                found = self._outcomes.get(timeout=LOOK)
            except queue.Empty:
                if self._check is not None:
                    self._check()
            else:
                self._early[found[0]] = found
        _, error, result = self._early.pop(self._taken)
        self._taken += 1
        if error is not None:
            raise error
        return result

    def _work(self) -> None:
        # A watchdog may end what takes too long, and come too late for it.
        with contextlib.suppress(JobCancelledError):
            while (job := self._jobs.get()) is not None:
                if not self._in_vain:
                    self._outcomes.put(_done(*job))
                del job  # with what was read for it


def _done(number: int, job: Callable[[], Any]) -> _Outcome:
    try:
        return number, None, job()
    except BaseException as error:
        return number, error, None


def computing_threads(options: Options) -> int:
    """How many threads compute the shards of a bundle that has a machine for itself, at most."""
    return options.local_threads or usual_threads()
