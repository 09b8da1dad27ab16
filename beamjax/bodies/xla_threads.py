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
from typing import Any

import jax
import threadpoolctl

from beamjax import _compat
from beamjax.plan.steps import Body


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

    def __enter__(self) -> None:
        """Holds the limit; calls nest."""
        with self._lock:
            self._holders += 1

    def __exit__(self, *error: object) -> None:
        """Undoes one `__enter__`; the last one restores the number of threads of the process."""
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
        _limit.__enter__()


def with_lapack_threads() -> contextlib.AbstractContextManager[None]:
    """A context that limits LAPACK to `LAPACK_THREADS`, in all threads of this process."""
    return _limit


def use_lapack(body: Body) -> None:
    """Applies the limit on LAPACK's threads if a body needs LAPACK.

    JAX has loaded LAPACK for a body that runs as Python by now, because the body is lowered when
    the plan is made.
    """
    if body.calls_lapack if body.python is None else _SCIPY in sys.modules:
        _limit.use()


_SCIPY = "scipy.linalg.cython_lapack"
