"""What `run`, `launch`, `transform`, `explain` and `verify` check of how they are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from beamjax._text import hint
from beamjax.errors import StagingError, StructureError
from beamjax.interpreters.staging.lines import calling_line
from beamjax.ops.leaves import name_of
from beamjax.options import Options, parse_options

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def by_position(front: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Explains, for a function that is called as `front(fn, *args, **options)`, how `fn` gets its
    keyword arguments: Python would only say that `front` does not have them.
    """
    known = inspect.signature(front).parameters

    @functools.wraps(front)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        unknown = [name for name in kwargs if name not in known]
        if unknown and args:
            _refuse_keywords(front.__name__, args[0], unknown, known)
        return front(*args, **kwargs)

    return checked


def _refuse_keywords(front: str, fn: Any, unknown: list[str], known: Iterable[str]) -> None:
    name = name_of(fn)
    bound = ", ".join(f"{key}=..." for key in unknown)
    raise StructureError(
        f"{front}: found the keyword argument {unknown[0]!r}{hint(unknown[0], known) or '.'} The "
        f"arguments of {name} are given by position, beamjax.{front}({name}, ...), or bound "
        f"before: beamjax.{front}(functools.partial({name}, {bound}), ...)."
    )


def parsed_options(options: Any, runner: Any) -> Options:
    """The options of a run, with the flags among them that are Beam's checked.

    Args:
      options: what the user gave.
      runner: the name or an instance of a runner.

    Raises:
      OptionsError: an option is unknown or has an impossible value.
    """
    parsed = parse_options(options)
    if parsed.beam and isinstance(parsed.beam, Sequence):
        from beamjax.pipelines.runners.options import check_flags

        check_flags(parsed.beam, runner if isinstance(runner, str) else type(runner).__name__)
    return parsed


def refuse_tracers(front: str, fn: Any, values: Mapping[str, Iterable[Any]]) -> None:
    """Refuses values that JAX traces.

    Args:
      front: the function of beamjax that the user called.
      fn: what it is to run.
      values: by what they are, for the message.

    Raises:
      StagingError: one of them is a tracer.
    """
    for what, group in values.items():
        for value in group:
            if isinstance(value, jax.core.Tracer):
                raise _traced(front, fn, f"{what} is a tracer of type {jax.typeof(value)}")


def refuse_compilation(front: str, fn: Any) -> None:
    """StagingError inside a function that `jax.jit` traces, where nothing has a value."""
    if isinstance(jax.device_put(np.zeros(())), jax.core.Tracer):  # which compiles nothing
        raise _traced(front, fn, "jax.jit, or a loop or branch of JAX, traces the call")


def _traced(front: str, fn: Any, found: str) -> StagingError:
    name = name_of(fn)
    return StagingError(
        f"{calling_line()}: {front} of {name}: {found}, expected a call with values, outside of "
        f"jax.grad, jax.vmap, jax.jit and all other transformations: a runner computes outside of "
        f"JAX. Transform the function that is run: beamjax.{front}(jax.grad({name}), ...) or "
        f"beamjax.{front}(jax.vmap({name}), ...). It needs no jax.jit."
    )
