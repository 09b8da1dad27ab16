"""Fixes the number of threads that XLA and LAPACK use for one computation on a CPU.

XLA divides a long contraction, and LAPACK a factorization, among as many threads as the machine has
cores. Partial sums are rounded, so another number of cores gives other bits. JAX fixes its number
when it starts, and has no option for it. So beamjax computes with its own CPU client, beside JAX's
client in the same process. Its number of threads is the same on every machine. It is not 1, because
XLA hands parts of most bodies to these threads, so that shards would wait for each other.
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

    Calls compute in the calling thread, so that Python threads compute in parallel. There are as
    many devices as JAX has CPU devices in this process.
    """
    found = _devices.get(threads)
    if found is None:
        count = jax.local_device_count("cpu")
        with _starting:  # All threads of this process must use the same devices.
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
"""The number of LAPACK's threads while beamjax computes. The bits depend on it, so it is the same
on every machine. More threads save little time for the matrices of one member, and cost much time
if shards are computed in parallel."""


class _Limit:
    """Limits LAPACK and BLAS in this process to `LAPACK_THREADS` while anything holds the limit.

    The limit takes effect when LAPACK is first needed, because it takes long to load, and most
    programs do not need it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._limited: Any = None

    @property
    def held(self) -> bool:
        """Whether anything holds the limit."""
        return self._holders > 0

    def hold(self) -> None:
        """Holds the limit until `release`; calls nest."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Undoes one `hold`; the last one restores the number of threads of the process."""
        with self._lock:
            self._holders -= 1
            if not self.held and self._limited is not None:
                self._limited.restore_original_limits()
                self._limited = None

    def use(self) -> None:
        """Applies the limit if it is held. Call it when LAPACK is needed."""
        with self._lock:
            if self.held and self._limited is None:
                self._limited = _libraries().limit(limits=LAPACK_THREADS, user_api="blas")


_limit = _Limit()


@functools.cache
def _libraries() -> threadpoolctl.ThreadpoolController:
    """The loaded libraries with thread pools, including the LAPACK that JAX calls."""
    import scipy.linalg.cython_lapack  # noqa: F401  (JAX takes LAPACK from SciPy)

    return threadpoolctl.ThreadpoolController()


def lapack_threads() -> int | None:
    """The number of LAPACK's threads if beamjax limits it in this process, else None."""
    return LAPACK_THREADS if _limit.held else None


def hold_lapack_threads() -> None:
    """Limits LAPACK to `LAPACK_THREADS` for the rest of the process, which is a worker."""
    if not _limit.held:
        _limit.hold()


@contextlib.contextmanager
def with_lapack_threads() -> Iterator[None]:
    """A context that limits LAPACK to `LAPACK_THREADS`, in all threads of this process."""
    _limit.hold()
    try:
        yield
    finally:
        _limit.release()


def use_lapack(artefact: bytes | None) -> None:
    """Applies the limit on LAPACK's threads if a body needs LAPACK.

    Args:
      artefact: the exported body; None for a body that runs as Python. JAX has loaded LAPACK for
        it by now, because the body is lowered when the plan is made.
    """
    lapack = _LAPACK in artefact if artefact is not None else _SCIPY in sys.modules
    if lapack:
        _limit.use()


_LAPACK = b"lapack_"
"""The prefix of XLA's names for calls to LAPACK, which an exported body contains verbatim."""
_SCIPY = "scipy.linalg.cython_lapack"
