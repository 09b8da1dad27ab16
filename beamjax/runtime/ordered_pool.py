"""Runs jobs in threads, and returns their results in the order of the jobs.

Meanwhile the caller's thread reads the operands of the next job and adds up earlier results. Since
this one thread reads and adds up in order, the sums do not depend on the number of threads.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from beamjax.bodies.python_bodies import fulfil, with_settings_of_here
from beamjax.bodies.xla_threads import available_cores
from beamjax.errors import JobCancelledError
from beamjax.options import Options

MAX_THREADS = 64
"""Largest number of threads. More would hold more shards in memory, but save no time."""
AHEAD = 1
"""Jobs for each running job that wait for a thread, or whose results wait for the caller."""

LOOK = 0.2
"""Seconds between two calls of `check` while the caller waits for a result."""
SECONDS_TO_END = 20.0
"""Seconds that threads have to finish their jobs when the results are no longer needed."""

T = TypeVar("T")


def most_jobs(threads: int) -> int:
    """The largest number of jobs that wait, run, or have a result that waits."""
    return (1 + AHEAD) * threads if threads > 1 else 1


def usual_threads() -> int:
    """The number of threads that compute in this process, unless an option sets it."""
    return max(2, min(available_cores(), MAX_THREADS))


def computing_threads(options: Options) -> int:
    """The largest number of threads for the shards of a bundle that has a machine for itself."""
    return options.local_threads or usual_threads()


class DaemonThreads:
    """Threads that take jobs from one queue."""

    # They are daemons, unlike those of `ThreadPoolExecutor`: the process can end while a job
    # hangs.

    def __init__(self, threads: int = 1, name: str = "beamjax shards", *, as_here: bool = False):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        # `as_here`: threads get the JAX settings and the context variables of the calling thread.
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
        """Ends the threads after the queued jobs that are not cancelled."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(SECONDS_TO_END)

    def _work(self) -> None:
        # The watchdog raises JobCancelledError in this thread. That may happen after the late job.
        with contextlib.suppress(JobCancelledError):
            while (item := self._jobs.get()) is not None:
                fulfil(*item)
                del item  # else the operands of the job would stay in memory until the next job


class OrderedResults(Generic[T]):
    """The results of jobs, in the order in which the jobs are added."""

    def __init__(self, most: int, check: Callable[[], None] = lambda: None):
        self._most = most  # jobs at once
        self._check = check  # called while the caller waits; raises if no result can come
        self._jobs: collections.deque[Future[T]] = collections.deque()

    def add(self, job: Future[T]) -> Iterator[T]:
        """Adds a job; yields the results of the oldest ones until fewer than `most` are left."""
        self._jobs.append(job)
        while len(self._jobs) >= self._most:
            yield self._next()

    def rest(self) -> Iterator[T]:
        """The results of all jobs that are left; raises their errors."""
        while self._jobs:
            yield self._next()

    def cancel(self) -> None:
        """Forgets all jobs. Jobs that no thread has started are cancelled."""
        while self._jobs:
            self._jobs.pop().cancel()

    def _next(self) -> T:
        job = self._jobs.popleft()
        while not wait([job], LOOK).done:
            self._check()
        return job.result()
