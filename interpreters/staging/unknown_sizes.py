"""Errors of programs that need the number of members while it is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from beamjax.errors import StagingError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.ops.placements import unobserved
from beamjax.ops.tracer_errors import line_of

ADVICE = (
    "Give the number of members in the decorator of the program and in the jax.ShapeDtypeStruct"
)
INSTEAD = "or reduce over the members, or do it for each of them inside a map_fn"

SOME_NUMBER = 840
"""A number of members with which a function is traced to find out whether it fails only because
the number is unknown. It has many divisors, so that most reshapes of the members work."""


def explained(
    error: Exception, fn: Callable[..., Any], avals: Sequence[Any]
) -> StagingError | None:
    """The error to raise if a function can be traced once all sizes are known, else None."""
    unknown_size = next((d for a in avals for d in getattr(a, "shape", ()) if is_unknown(d)), None)
    if unknown_size is None:
        return None
    known = [
        jax.ShapeDtypeStruct((SOME_NUMBER, *a.shape[1:]), a.dtype)
        if any(map(is_unknown, getattr(a, "shape", ())))
        else a
        for a in avals
    ]
    try:
        # The placements of this second trace must not count as those of the program.
        with unobserved():
            jax.make_jaxpr(fn)(*known)
    except Exception:  # Of any type: the unknown number of members is not the reason.
        return None
    what = str(error).split("\n")[0]
    reason = f"{line_of(error) or 'in the program'}: this needs the number of members as a constant"
    return StagingError(
        f"{reason}, but {unknown_size} is found only while the program runs "
        f"({type(error).__name__}: {what}). {ADVICE}."
    )
