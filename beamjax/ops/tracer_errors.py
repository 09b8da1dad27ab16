"""Advice for JAX's errors on traced values: the user's line, and what to write instead."""

from __future__ import annotations

import contextlib
import traceback

import jax

from beamjax import _compat

_INSTEAD = {
    jax.errors.TracerBoolConversionError: (
        "Python's `if`, `while`, `and`, `or` and `not` need a known value; use jnp.where, "
        "lax.cond, lax.while_loop or jnp.logical_and and its like"
    ),
    jax.errors.TracerArrayConversionError: (
        "NumPy needs a known value; use jax.numpy, or jax.pure_callback to call NumPy"
    ),
    jax.errors.TracerIntegerConversionError: (
        "`range`, an index of a list and a shape need a known value; use lax.fori_loop, an array "
        "in place of the list, or a shape that does not depend on values"
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "the shape of `x[mask]` depends on values; use jnp.where(mask, x, 0), or sums with where="
    ),
    jax.errors.ConcretizationTypeError: (
        "`float(x)`, `int(x)`, `x.item()` and shapes need a known value; use x.astype(...), or a "
        "shape that does not depend on values"
    ),
}
"""What to do, by the type of the error; the first that fits."""


_MARK = ", and the values are not known yet"


def add_advice(error: BaseException, traced: str) -> None:
    """Adds a note to an error of JAX on a traced value, unless it has one."""
    advice = next((text for kind, text in _INSTEAD.items() if isinstance(error, kind)), None)
    # JAX may have added notes of its own.
    if advice is not None and not any(_MARK in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"{line_of(error) or 'in the program'}: {traced}{_MARK}: {advice}.")


def line_of(error: BaseException) -> str:
    """`file:line (function)` of the innermost frame of an error outside of libraries, or ""."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_library(code.co_filename):
            line = f"{code.co_filename}:{number} ({code.co_name})"
    return line


def is_library(file_name: str) -> bool:
    """Whether a file belongs to JAX, NumPy, beamjax or contextlib, and not to the user."""
    return file_name.startswith(_LIBRARIES)


# beamjax has functions that a context decorates.
_LIBRARIES = (
    *_compat.folders_of("jax", "numpy"),
    *_compat.OWN_FOLDERS,
    contextlib.__file__,
    "<frozen ",
)
