"""Finds equations, and the lines of the user's code that they come from."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from beamjax import _compat
from beamjax.interpreters.program import Eqn
from beamjax.ops.tracer_errors import is_library


def user_line(eqn: Any) -> str:
    """`file:line (function)` of the innermost frame of an equation outside of libraries, or ""."""
    if isinstance(eqn, Eqn):
        return eqn.line
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def find_equation(eqn: Any, matches: Callable[[Any], bool]) -> tuple[str, str] | None:
    """The primitive and the line of the first match in an equation and its jaxprs, or None."""
    if matches(eqn):
        return eqn.primitive.name, user_line(eqn)
    for sub in _compat.jaxprs_in_params(eqn.params):
        for inner in getattr(sub, "jaxpr", sub).eqns:
            first_match = find_equation(inner, matches)
            if first_match is not None:
                # Equations of libraries have no line; that of the equation around them is the best
                # one.
                return first_match[0], first_match[1] or user_line(eqn)
    return None


def calling_line() -> str:
    """`file:line (function)` of the innermost frame of this thread outside of libraries."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""
