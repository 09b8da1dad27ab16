"""Jobs distributed over the devices of a worker in turn, their results in order.

An accelerator has one thread, for all bundles of this process: it computes one job at a time, so
that one job has to fit into its memory, and others wait for it with what they read. On a CPU each
bundle has a thread of its own, where that pays, so that it reads and adds up while it computes.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.runtime.ordered_pool import OrderedResults, Workers

AHEAD = 2
"""Jobs that a device has at most: one that it computes, and others that wait."""

T = TypeVar("T")


class DeviceExecutor(Generic[T]):
    """Runs jobs for devices.

    Args:
      devices: one or more; None stands for the thread that adds the jobs, for any number of them.
        Other threads have its settings of JAX.
    """

    def __init__(self, devices: Sequence[Hashable | None]):
        self.devices = tuple(devices)
        self._turns = itertools.cycle(range(len(self.devices)))
        self._results: OrderedResults[T] = OrderedResults(AHEAD * len(self.devices))

    def add(self, job: Callable[[int], T]) -> Iterator[T]:
        """Takes a job, a function of the index of a device.

        Yields:
          The results of jobs that were added first, until few enough are left to wait.

        Raises:
          Exception: whatever a job raises.
        """
        index = next(self._turns)
        device = self.devices[index]
        if device is None:
            yield job(index)
            return
        call = functools.partial(with_settings_of_here(job), index)
        yield from self._results.add(_thread(device).submit(call))

    def rest(self) -> Iterator[T]:
        """The results of all jobs that are left; raises what they raise."""
        yield from self._results.rest()

    def cancel(self) -> None:
        """Forgets all jobs; those that have not started never will."""
        self._results.cancel()


class CpuTurn:
    """Names a thread for the jobs of a bundle on a CPU: no other has it as long as this lives."""

    def __init__(self) -> None:
        with _lock:
            number = next(n for n in itertools.count() if n not in _turns)
            _turns.add(number)
        self.device = "cpu", number
        weakref.finalize(self, _turns.discard, number).atexit = False


_turns: set[int] = set()


_threads: dict[Hashable, Workers] = {}
_lock = threading.Lock()


def _thread(device: Hashable) -> Workers:
    with _lock:
        if device not in _threads:
            _threads[device] = Workers(name="beamjax-device")
        return _threads[device]
