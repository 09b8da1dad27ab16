"""Finds the lines of the user's code that equations come from."""

from __future__ import annotations

import sys
import types
from typing import Any

from beamjax import _compat


def user_line(eqn: Any) -> str:
    """`file:line (function)` of the innermost frame of an equation outside of libraries."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def calling_line() -> str:
    """`file:line (function)` of the innermost frame of this thread outside of libraries."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""


def is_library(file_name: str) -> bool:
    """Whether a file belongs to JAX, NumPy or beamjax, and not to the user."""
    return file_name.startswith(_LIBRARIES)


_LIBRARIES = (*_compat.folders_of("jax", "numpy"), *_compat.OWN_FOLDERS, "<frozen ")
