"""Measures the seconds in which JAX traces, lowers and compiles instead of computing."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_trace_duration", _LOWERED, _COMPILED)


class CompileClock:
    """Counts the compilations of one thread.

    Attributes:
      seconds: seconds of tracing, lowering and compiling.
      executables: number of executables that were compiled, or found in the cache on disk.
      cache_hits: number of executables that were found in the cache.
      cache_misses: number of executables that were not, and so were compiled.
      since: start of the current compilation, by `time.monotonic`; None if there is none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.executables = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.since: float | None = None

    def now(self) -> float:
        """`seconds`, with those of the current compilation so far; any thread may call this."""
        since = self.since
        return self.seconds + (0.0 if since is None else time.monotonic() - since)


class _Local(threading.local):
    def __init__(self) -> None:
        self.clock = CompileClock()


_local = _Local()
_lock = threading.Lock()
_listening = False


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        clock = _local.clock
        clock.seconds += duration_secs
        clock.executables += event == _COMPILED
        # JAX reports the end of a compilation, but not its start. It compiles right after lowering.
        clock.since = time.monotonic() if event == _LOWERED else None


def _count(event: str, **_: Any) -> None:
    # JAX reports a miss only if it then writes to the cache. So a request counts as a miss, and a
    # hit takes that back.
    if event == _REQUESTED:
        _local.clock.cache_misses += 1
    elif event == _FOUND:
        _local.clock.cache_misses -= 1
        _local.clock.cache_hits += 1


def compile_clock() -> CompileClock:
    """The clock of this thread. It counts from the first call of this function in the process."""
    global _listening
    if not _listening:
        with _lock:
            if not _listening:
                jax.monitoring.register_event_duration_secs_listener(_listen)
                jax.monitoring.register_event_listener(_count)
                _listening = True
    return _local.clock


def compile_seconds() -> float:
    """Seconds in which this thread has traced, lowered and compiled; see `compile_clock`.

    Only differences have a meaning. Nested traces count twice, so a difference may exceed the
    elapsed time.
    """
    return compile_clock().seconds
