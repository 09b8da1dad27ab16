"""Threads that compute the shards of a pass, and return the results in the order of the shards.

Meanwhile the caller's thread reads the operands of the next shard and adds up earlier results. As
this one thread reads and adds up in order, the sums do not depend on the number of threads.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeAlias, TypeVar

from beamjax.bodies.jax_settings import fulfil, in_thread
from beamjax.bodies.xla_threads import available_cores
from beamjax.plan.steps import Cost, Map, Plan

MAX_THREADS = 64
"""Largest number of threads. More would hold more shards in memory, but save no time."""
AHEAD = 1
"""Jobs for each running job that wait for a thread, or whose results wait for the caller."""

LOOK = 0.2
"""Seconds between two calls of `check` while the caller waits for a result."""
SECONDS_TO_END = 20.0
"""Seconds that threads have to finish their jobs when the results are no longer needed."""

SHARD_OPERATIONS = 1e7
"""Operations of a shard from which it pays to pass it to another thread, which takes 0.1 ms."""
PASS_OPERATIONS = 1e8
"""Operations of a pass from which it pays to start threads."""
THREAD_OPERATIONS = 5e7
"""Operations of a shard for each thread: a thread holds the GIL for a part of its shard, so short
shards do not keep many threads busy."""
FEW = 8
"""Number of threads that even the shortest shards above `SHARD_OPERATIONS` may use."""
OPERATIONS_PER_BYTE = 5.0
"""Operations that take as long as to move a byte between memory and the processor."""

T = TypeVar("T")


def most_jobs(threads: int) -> int:
    """The largest number of jobs that wait, run, or have a result that waits."""
    return (1 + AHEAD) * threads if threads > 1 else 1


def usual_threads() -> int:
    """The number of threads that compute in this process, unless an option sets it."""
    return max(2, min(available_cores(), MAX_THREADS))


def computing_threads(local_threads: int | None) -> int:
    """The largest number of threads for the shards of a bundle that has a machine for itself."""
    # The argument is the option of this name.
    return local_threads or usual_threads()


def threads_for(plan: Plan, step: Map, most: int) -> int:
    """The number of threads that compute the shards of a pass; 0 if the calling thread does."""
    return chosen_threads(plan, step, most)[0]


def chosen_threads(plan: Plan, step: Map, most: int) -> tuple[int, str]:
    """The number of threads of `threads_for`, and why it is that."""
    # By the work that is counted in the plan, so nothing is measured, and each run does the same.
    if plan.bodies[step.body].python is not None:
        return 0, "the body calls functions on the host"
    cost, size = plan.costs.get(step.name, Cost()), plan.shard_sizes[step.placement]
    count = plan.shards(step.placement).count
    shard = size * (cost.weight + OPERATIONS_PER_BYTE * cost.nbytes)
    if count == 1:
        return 0, "there is one shard"
    if count is not None and count * shard < PASS_OPERATIONS:
        return 0, "the pass has little work, by counted operations"
    if shard < SHARD_OPERATIONS:
        return 0, "a shard has little work, by counted operations"
    fitting = max(FEW, int(shard / THREAD_OPERATIONS))
    if fitting < most:
        return fitting, "as many as short shards keep busy, by counted operations"
    return most, "as many as compute in this process"


_Jobs: TypeAlias = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThreads:
    """Threads that take jobs from one queue."""

    # They are daemons, unlike those of `ThreadPoolExecutor`: the process can end while a job hangs.
    # They have the JAX settings and the context variables of the thread that makes this object.

    def __init__(self, threads: int = 1):
        self.threads = threads
        self._jobs: _Jobs = queue.SimpleQueue()
        work = functools.partial(_work, self._jobs)
        self._ends = [in_thread(work) for _ in range(threads)]
        # Also if nobody calls `close`, as for a bundle that failed.
        self._end = weakref.finalize(self, _end, self._jobs, threads)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job for a thread."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the work of the threads after the queued jobs that are not cancelled."""
        self._end()
        wait(self._ends, SECONDS_TO_END)


# Not methods: a thread must not keep the object alive.


def _work(jobs: _Jobs) -> None:
    while (item := jobs.get()) is not None:
        fulfil(*item)
        del item  # else the operands of the job would stay in memory until the next job


def _end(jobs: _Jobs, threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)


def device_threads(device: Hashable) -> DaemonThreads:
    """The thread of an accelerator, which computes one job at a time for all bundles here."""
    # So only one job has to fit into the memory of the device; others wait in host memory.
    with _lock:
        if device not in _by_device:
            # Without the context variables of the first bundle: the thread outlives it.
            _by_device[device] = contextvars.Context().run(DaemonThreads)
        return _by_device[device]


_by_device: dict[Hashable, DaemonThreads] = {}
_lock = threading.Lock()


class OrderedJobs(Generic[T]):
    """Runs jobs in pools of threads in turn, and returns their results in the order of the jobs."""

    # A job gets the index of its pool, each of which has a device. Without a pool, the calling
    # thread runs a job at once.

    def __init__(
        self, pools: Sequence[DaemonThreads] = (), check: Callable[[], None] = lambda: None
    ):
        self.pools = pools
        self._most = (1 + AHEAD) * sum(pool.threads for pool in pools)  # jobs at once
        self._check = check  # called while the caller waits; raises if no result can come
        self._turns = itertools.cycle(range(len(pools)))
        self._jobs: collections.deque[Future[T]] = collections.deque()

    def add(self, job: Callable[[int], T]) -> Iterator[T]:
        """Adds a job; yields the results of the oldest ones until fewer than `most` are left."""
        if not self.pools:
            yield job(0)
            return
        index = next(self._turns)
        self._jobs.append(self.pools[index].submit(functools.partial(job, index)))
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
