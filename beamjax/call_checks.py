"""Checks of the arguments of `run`, `launch`, `transform`, `explain` and `verify`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from beamjax._text import hint
from beamjax.errors import StructureError
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
