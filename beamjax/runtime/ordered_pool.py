"""Runs jobs in threads, and returns their results in the order of the jobs.

Meanwhile the caller's thread reads the operands of the next job, and adds up earlier results. As
one thread does both, in order, the results do not depend on the number of threads.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import JobCancelledError
from beamjax.options import Options

MAX_THREADS = 64
"""Most threads: more of them hold more shards in memory, but save no time."""
AHEAD = 1
"""Jobs that wait for a thread, or whose results wait, for each running job."""

LOOK = 0.2
"""Seconds between two looks whether results are still needed."""
SECONDS_TO_END = 20.0
"""Seconds that threads have to finish their jobs when the results are no longer needed."""

T = TypeVar("T")


def most_jobs(threads: int) -> int:
    """Most jobs at once: waiting, running, or done with a result that waits."""
    return (1 + AHEAD) * threads if threads > 1 else 1


def usual_threads() -> int:
    """How many threads compute in this process, unless an option says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(2, min(cores or 2, MAX_THREADS))


def computing_threads(options: Options) -> int:
    """How many threads compute the shards of a bundle that has a machine for itself, at most."""
    return options.local_threads or usual_threads()


class Workers:
    """Threads that take jobs from one queue. Unlike Python's pool, they do not keep the process
    from ending.

    Args:
      threads: how many.
      name: of the threads.
      as_here: whether they have the settings of JAX, and the context variables, of this thread.
    """

    def __init__(self, threads: int = 1, name: str = "beamjax shards", *, as_here: bool = False):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        work = with_settings_of_here(self._work) if as_here else self._work
        self._threads: list[threading.Thread] = []
        for number in range(threads):
            context = contextvars.copy_context() if as_here else contextvars.Context()
            thread = threading.Thread(
                target=context.run, args=(work,), name=f"{name} {number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job for a thread."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the threads, once they have done or seen the end of all jobs."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(SECONDS_TO_END)

    def _work(self) -> None:
        # A watchdog may raise its error in this thread after the late work has ended.
        with contextlib.suppress(JobCancelledError):
            while (item := self._jobs.get()) is not None:
                _do(*item)
                del item  # frees the operands of the job


def _do(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


class OrderedResults(Generic[T]):
    """The results of jobs, in the order in which they are added.

    Args:
      most: jobs that there may be at once.
      check: is called regularly while a result is awaited; raises if no result can come.
    """

    def __init__(self, most: int, check: Callable[[], None] = lambda: None):
        self._most = most
        self._check = check
        self._jobs: collections.deque[Future[T]] = collections.deque()

    def add(self, job: Future[T]) -> Iterator[T]:
        """Takes a job.

        Yields:
          The results of jobs that were added first, until few enough are left.

        Raises:
          Exception: what the first job raises that fails, in the order in which they were added.
        """
        self._jobs.append(job)
        while len(self._jobs) >= self._most:
            yield self._next()

    def rest(self) -> Iterator[T]:
        """The results of all jobs that are left; raises what they raise."""
        while self._jobs:
            yield self._next()

    def cancel(self) -> None:
        """Forgets all jobs; those that no thread has begun never will be."""
        while self._jobs:
            self._jobs.pop().cancel()

    def _next(self) -> T:
        job = self._jobs.popleft()
        while not wait([job], LOOK).done:
            self._check()
        return job.result()
