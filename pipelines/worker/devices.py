"""Distributes jobs over the devices of a worker, and returns their results in order.

An accelerator has one thread for all bundles of the process. It computes one job at a time, so only
one job has to fit into the memory of the device; other jobs wait in host memory. On a CPU, a bundle
gets its own threads where that is faster, and reads and adds up while they compute.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.runtime.ordered_pool import DaemonThreads, OrderedResults

AHEAD = 2
"""Largest number of jobs for each device: one that it computes, and others that wait."""

T = TypeVar("T")


class DeviceExecutor(Generic[T]):
    """Runs jobs in the threads of devices."""

    def __init__(self, devices: Sequence[Hashable | None]):
        # Keys of threads. None stands for the calling thread, which then computes a job at once.
        # Other threads get its JAX settings.
        self.devices = tuple(devices)
        self._turns = itertools.cycle(range(len(self.devices)))
        self._results: OrderedResults[T] = OrderedResults(AHEAD * len(self.devices))

    def add(self, job: Callable[[int], T]) -> Iterator[T]:
        """Adds a job, a function of the index of a device; yields the oldest results."""
        index = next(self._turns)
        device = self.devices[index]
        if device is None:
            yield job(index)
            return
        call = functools.partial(with_settings_of_here(job), index)
        # Until fewer than `AHEAD` jobs for each device are left.
        yield from self._results.add(_thread(device).submit(call))

    def rest(self) -> Iterator[T]:
        """The results of all jobs that are left; raises their errors."""
        yield from self._results.rest()

    def cancel(self) -> None:
        """Forgets all jobs. Jobs that no thread has started are cancelled."""
        self._results.cancel()


class CpuTurn:
    """The key of a CPU thread that no other bundle uses as long as this object exists."""

    def __init__(self) -> None:
        # The lowest free number, so threads are reused by later bundles.
        with _lock:
            number = next(n for n in itertools.count() if n not in _turns)
            _turns.add(number)
        self.device = "cpu", number
        # `discard` of a set is atomic, so it needs no lock: a finalizer may run in any thread, even
        # in one that holds the lock.
        weakref.finalize(self, _turns.discard, number).atexit = False


_turns: set[int] = set()
"""The numbers of the threads that bundles use."""

_threads: dict[Hashable, DaemonThreads] = {}
"""The threads by key. They are never ended, as the next bundle uses them again."""
_lock = threading.Lock()


def _thread(device: Hashable) -> DaemonThreads:
    with _lock:
        if device not in _threads:
            _threads[device] = DaemonThreads(name="beamjax-device")
        return _threads[device]
