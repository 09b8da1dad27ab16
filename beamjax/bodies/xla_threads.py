"""Fixes the number of threads that XLA and LAPACK use for one computation on a CPU.

XLA divides a long contraction, and LAPACK a factorization, among as many threads as the machine has
cores. Partial sums are rounded, so another number of cores gives other bits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from beamjax import _compat
from beamjax.plan.steps import Body


def available_cores() -> int:
    """The number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


class CpuClients:
    """CPU clients of XLA that each divide a computation among the same number of threads."""

    # JAX fixes the number of threads of its client when it starts, and has no option for it. So
    # beamjax computes with its own CPU clients, beside JAX's client in the same process.
    #
    # XLA hands most of a computation to the threads of its client. One client could therefore keep
    # only as many cores busy, however many threads of Python call it. So there is a client for each
    # `threads` cores. It starts when the clients before it are computing.
    def __init__(self, threads: int):
        self._threads = threads
        self._lock = threading.Lock()
        self._devices: list[tuple[jax.Device, ...]] = []
        self.count = -(-available_cores() // threads)  # of clients, started or not
        self._running = [0] * self.count

    def devices(self, number: int = 0) -> tuple[jax.Device, ...]:
        """The devices of a client, as many as JAX has CPU devices in this process."""
        with self._lock:  # All threads of this process must use the same devices.
            while len(self._devices) <= number:
                client = _compat.cpu_client(self._threads, jax.local_device_count("cpu"))
                self._devices.append(tuple(client.local_devices()))
            return self._devices[number]

    @contextlib.contextmanager
    def least_busy(self) -> Iterator[jax.Device]:
        """A context that computes on the yielded device, of the client that computes the least."""
        with self._lock:
            number = min(range(self.count), key=self._running.__getitem__)
            self._running[number] += 1
        try:
            yield self.devices(number)[0]
        finally:
            with self._lock:
                self._running[number] -= 1


def cpu_devices(threads: int) -> tuple[jax.Device, ...]:
    """CPU devices on which XLA divides a computation among this many threads."""
    # Calls compute in the calling thread, so that Python threads compute in parallel. There are as
    # many devices as JAX has CPU devices in this process.
    return _clients(threads).devices()


def compute_device(threads: int) -> Any:
    """The device to compute on: one of `cpu_devices`, or None for JAX's default accelerator."""
    return cpu_devices(threads)[0] if jax.default_backend() == "cpu" else None


def clients_of(device: jax.Device | None) -> CpuClients | None:
    """The clients of which the first has this device; None if there is just one, or none."""
    of_device = [
        clients for clients in list(_by_threads.values()) if clients.devices()[0] is device
    ]
    return of_device[0] if of_device and of_device[0].count > 1 else None


def _clients(threads: int) -> CpuClients:
    clients = _by_threads.get(threads)
    return clients or _by_threads.setdefault(threads, CpuClients(threads))


_by_threads: dict[int, CpuClients] = {}


LAPACK_THREADS = 1
"""The number of LAPACK's threads while beamjax computes. The bits depend on it, so it is the same
on every machine. More threads save little time for the matrices of one member, and cost much time
if shards are computed in parallel."""


class _Limit:
    """Limits LAPACK and BLAS in this process to `LAPACK_THREADS` while anything holds the limit."""

    def __init__(self) -> None:
        # The limit takes effect when LAPACK is first needed, because it takes long to load, and
        # most programs do not need it.
        self._lock = threading.Lock()
        self._holders = 0
        self._limited: Any = None

    @property
    def held(self) -> bool:
        """Whether anything holds the limit."""
        return self._holders > 0

    def __enter__(self) -> None:
        """Holds the limit; calls nest."""
        with self._lock:
            self._holders += 1

    def __exit__(self, *error: object) -> None:
        """Undoes one `__enter__`; the last one restores the number of threads of the process."""
        with self._lock:
            self._holders -= 1
            if not self._holders and self._limited is not None:
                _let_any_thread_limit()
                self._limited.restore_original_limits()
                self._limited = None
                _let_any_thread_limit()  # also users' own

    def use(self) -> None:
        """Applies the limit if it is held. Call it when LAPACK is needed."""
        with self._lock:
            if self.held and self._limited is None:
                _let_any_thread_limit()
                self._limited = _libraries().limit(limits=LAPACK_THREADS, user_api="blas")


lapack_limit = _Limit()
"""A context that limits LAPACK to `LAPACK_THREADS`, in all threads of this process."""


@functools.cache
def _libraries() -> Any:
    """The loaded libraries with thread pools, including the LAPACK that JAX calls."""
    # Few bodies need them.
    import scipy.linalg.cython_lapack  # noqa: F401  (JAX takes LAPACK from SciPy)
    import threadpoolctl

    return threadpoolctl.ThreadpoolController()


def _let_any_thread_limit() -> None:
    """Lets threadpoolctl take limits from any thread."""
    # Since 3.8 it silently ignores those of all threads but the first one that limited OpenBLAS,
    # which has one limit for the process. The thread that first needs LAPACK differs in each run.
    for library in _libraries().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


def lapack_threads() -> int | None:
    """The number of LAPACK's threads if beamjax limits it in this process, else None."""
    return LAPACK_THREADS if lapack_limit.held else None


def hold_lapack_threads() -> None:
    """Limits LAPACK to `LAPACK_THREADS` for the rest of the process, which is a worker."""
    if not lapack_limit.held:
        lapack_limit.__enter__()


def use_lapack(body: Body) -> None:
    """Applies the limit on LAPACK's threads if a body needs LAPACK."""
    # JAX has loaded LAPACK for a body that runs as Python by now, because the body is lowered when
    # the plan is made.
    if body.calls_lapack if body.python is None else _SCIPY in sys.modules:
        lapack_limit.use()


_SCIPY = "scipy.linalg.cython_lapack"
