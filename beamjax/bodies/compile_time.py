"""Counts compilations of JAX, and their seconds, from the import of this module on."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

from beamjax.bodies.counts import counts

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_trace_duration", _LOWERED, _COMPILED)


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        found = counts()
        found.compile += duration_secs
        found.executables += event == _COMPILED
        # JAX reports the end of a compilation, but not its start. It compiles right after lowering.
        found.compiles_since = time.monotonic() if event == _LOWERED else None


def _count(event: str, **_: Any) -> None:
    # JAX reports a miss only if it then writes to the cache. So a request counts as a miss, and a
    # hit takes that back.
    if event == _REQUESTED:
        counts().cache_misses += 1
    elif event == _FOUND:
        counts().cache_misses -= 1
        counts().cache_hits += 1
        loaded_from_disk.set()


loaded_from_disk = threading.Event()
"""Set once an executable of this process came from JAX's cache on disk."""


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_count)
