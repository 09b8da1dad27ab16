"""How many threads XLA divides one computation among on a CPU, as the last bits depend on it.

XLA divides a long contraction, and LAPACK a factorization, among as many threads as the machine has
cores; partial sums are rounded, so another number of cores gives other bits. JAX fixes its number
when it starts and has no option for it. Therefore beamjax computes with a CPU client of its own,
whatever JAX has in the same process. The number is the same on every machine, and not 1: XLA hands
parts of most bodies to these threads, so with one of them shards would wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import threadpoolctl

from beamjax import _compat


def cpu_devices(threads: int) -> tuple[Any, ...]:
    """CPU devices on which XLA divides a computation among this many threads.

    Calls compute in the calling thread, so that Python threads compute side by side. There are as
    many devices as JAX has CPU devices in this process.
    """
    found = _devices.get(threads)
    if found is None:
        count = jax.local_device_count("cpu")
        with _starting:  # All threads of this process need the same ones.
            found = _devices.get(threads)
            if found is None:
                found = tuple(_compat.cpu_client(threads, count).local_devices())
                _devices[threads] = found
    return found


def compute_device(threads: int) -> Any:
    """The device to compute on: one of `cpu_devices`, or None for JAX's default accelerator."""
    return cpu_devices(threads)[0] if jax.default_backend() == "cpu" else None


_devices: dict[int, tuple[Any, ...]] = {}
_starting = threading.Lock()


LAPACK_THREADS = 1
"""More of them gain little for the matrices of one member, and cost much where shards are computed
side by side; their number shows in the bits as well."""

# --- LAPACK, which is SciPy's, and has threads for all of the process


class _Limit:
    """The threads of LAPACK and BLAS in this process, fixed while somebody holds their number.

    It takes effect when LAPACK is first needed: most programs need none, and it takes long to load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[int] = []
        self._limited: Any = None

    @property
    def threads(self) -> int | None:
        """The number, or None while nobody holds it."""
        holders = self._holders
        return holders[0] if holders else None

    def hold(self, threads: int) -> None:
        """Holds a number until `release`; while somebody else holds another one, that one stays."""
        with self._lock:
            self._holders.append(threads)

    def release(self, threads: int) -> None:
        """Undoes `hold`."""
        with self._lock:
            before = self.threads
            self._holders.remove(threads)
            if self._limited is not None and self.threads != before:
                self._limited.restore_original_limits()
                self._limited = None
                self._apply()

    def use(self) -> None:
        """LAPACK is needed now."""
        with self._lock:
            self._apply()

    def _apply(self) -> None:
        if self._limited is None and self.threads is not None:
            self._limited = _libraries().limit(limits=self.threads, user_api="blas")


_limit = _Limit()


@functools.cache
def _libraries() -> threadpoolctl.ThreadpoolController:
    """Those with threads that are loaded in this process, LAPACK among them."""
    import scipy.linalg.cython_lapack  # noqa: F401  (JAX takes it from there)

    return threadpoolctl.ThreadpoolController()


def lapack_threads() -> int | None:
    """Threads of LAPACK in this process if beamjax holds their number, else None."""
    return _limit.threads


def hold_lapack_threads(threads: int) -> None:
    """Fixes the number of threads of LAPACK for the rest of the process: that of a worker."""
    if _limit.threads is None:
        _limit.hold(threads)


@contextlib.contextmanager
def with_lapack_threads(threads: int) -> Iterator[None]:
    """A context in which LAPACK has this many threads, in all threads of this process."""
    _limit.hold(threads)
    try:
        yield
    finally:
        _limit.release(threads)


def use_lapack(artefact: bytes | None) -> None:
    """Fixes the threads of LAPACK now, if a body needs it.

    Args:
      artefact: the exported body; None for one that runs as Python. JAX loads LAPACK when it
        lowers that one, which it does to make the plan.
    """
    lapack = _LAPACK in artefact if artefact is not None else _SCIPY in sys.modules
    if lapack:
        _limit.use()


_LAPACK = b"lapack_"
"""How XLA's names of calls to LAPACK begin; they are in an exported body as they are."""
_SCIPY = "scipy.linalg.cython_lapack"
