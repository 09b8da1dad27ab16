"""Refuses calls of beamjax inside a JAX transformation, whose values are tracers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.errors import StagingError
from beamjax.interpreters.staging.lines import calling_line
from beamjax.ops.leaves import name_of


def refuse_tracers(front: str, fn: Any, values: Mapping[str, Iterable[Any]]) -> None:
    """Raises a StagingError if `front(fn, ...)` was called with tracers; says which, by group."""
    for what, group in values.items():
        for value in group:
            if isinstance(value, jax.core.Tracer):
                reason = f"{what} is a tracer of type {jax.typeof(value)}"
                if not _compat.is_tracing():  # The trace that made the value is over.
                    raise StagingError(
                        f"{calling_line()}: {front} of {name_of(fn)}: {reason}, expected a value: "
                        "a function that JAX or beamjax traced has leaked it, for example to a "
                        "global, a list or an attribute. Return the value from that function."
                    )
                raise _traced(front, fn, reason)


def refuse_compilation(front: str, fn: Any) -> None:
    """Raises a StagingError inside a function that `jax.jit` traces, where no value is known."""
    # Under `jax.grad` alone, values are known. device_put compiles nothing.
    if isinstance(jax.device_put(np.zeros(())), jax.core.Tracer):
        raise _traced(front, fn, "jax.jit, or a loop or branch of JAX, traces the call")


def _traced(front: str, fn: Any, reason: str) -> StagingError:
    name = name_of(fn)
    return StagingError(
        f"{calling_line()}: {front} of {name}: {reason}, expected a call with values, outside of "
        f"jax.grad, jax.vmap, jax.jit and all other transformations: a runner computes outside of "
        f"JAX. Transform the function that is run: beamjax.{front}(jax.grad({name}), ...) or "
        f"beamjax.{front}(jax.vmap({name}), ...). It needs no jax.jit."
    )
