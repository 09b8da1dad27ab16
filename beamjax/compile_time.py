"""Seconds that JAX spends on making executables, told apart from those in which it computes."""

from __future__ import annotations

import threading
from typing import Any

import jax

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()
_lock = threading.Lock()
_listening = False


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        _spent.seconds += duration_secs


def compile_seconds() -> float:
    """Seconds that this thread has traced, lowered and compiled since the first call of this.

    Only differences mean anything. What is traced within something else counts twice, so a
    difference may exceed the time between its two ends.
    """
    global _listening
    if not _listening:
        with _lock:
            if not _listening:
                jax.monitoring.register_event_duration_secs_listener(_listen)
                _listening = True
    return _spent.seconds
