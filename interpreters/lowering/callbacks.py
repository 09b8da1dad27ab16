"""Steps that run as Python because JAX can't export them, mostly because they call the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from beamjax import _compat
from beamjax.bodies.export import NotExportedError, export_body
from beamjax.errors import StagingError
from beamjax.interpreters.program import Eqn, aval_of
from beamjax.interpreters.staging.flatten import host_call
from beamjax.interpreters.staging.lines import user_line
from beamjax.options import Options
from beamjax.plan.steps import Body

NOT_EXPORTED = "nothing is exported here"
"""The reason of all steps of a plan that a worker makes to find its Python functions."""


def reason_for_python(eqns: Sequence[Eqn], options: Options) -> str:
    """Why a step with these equations must run as Python; "" if it can be exported."""
    if options.platforms == ():  # a plan of Python functions, see `bodies.python_bodies`
        return NOT_EXPORTED
    for eqn in eqns:
        call = host_call(eqn)
        if call is None:
            continue
        name, line = call[0], call[1] or eqn.line or "in the program"
        return f"{name} calls back to the host at {line}"
    return ""


def reason_not_exported(
    error: NotExportedError, eqns: Sequence[Eqn], platforms: Sequence[str]
) -> str:
    """Why a step that JAX failed to export must run as Python, with the equation to blame."""
    # No equation calls the host, but primitives of other packages, such as `lineax.linear_solve`,
    # may call it when they are lowered. So each equation is exported by itself.
    why = str(error.__cause__).partition("\n")[0]
    for eqn in eqns:
        innermost = _not_exported(eqn, platforms)
        if innermost:
            return f"JAX can't export {innermost[0]} at {innermost[1] or eqn.line} ({why})"
    return f"JAX can't export it ({why})"


def _not_exported(eqn: Any, platforms: Sequence[str]) -> tuple[str, str] | None:
    """The name and the user's line of the innermost equation that JAX can't export."""
    inputs = eqn.inputs if isinstance(eqn, Eqn) else eqn.invars
    call = functools.partial(_call, eqn)
    try:
        export_body("", call, [aval_of(atom) for atom in inputs], platforms)
    except NotExportedError:
        for sub in _compat.jaxprs_in_params(eqn.params):
            for inner in getattr(sub, "jaxpr", sub).eqns:
                innermost = _not_exported(inner, platforms)
                if innermost:
                    return innermost
        return eqn.primitive.name, user_line(eqn)
    except Exception:  # any error: an equation by itself need not be a function of arrays
        return None
    return None


def _call(eqn: Any, *args: Any) -> list[Any]:
    return _compat.bind(eqn.primitive, args, eqn.params)


def as_python(
    name: str,
    sized: Callable[[int | None], Callable[..., Sequence[Any]]],  # by the number of members
    members: int | None,  # of a full shard, None for a step on the server
    arguments: Sequence[Any],  # shapes and dtypes for that many members
    eqns: Sequence[Eqn],
    reason: str,
) -> tuple[str, Body]:
    """Makes a body that runs as Python, and its key."""
    from beamjax.bodies.python_bodies import PythonFunction, python_body  # few bodies need it

    lines = tuple(dict.fromkeys(eqn.line for eqn in eqns if eqn.line))
    function = PythonFunction(sized)
    working = 0
    try:
        if reason != NOT_EXPORTED:
            working = function.check(members, arguments)
    # Such as an ordered call in a map_fn, which JAX does not vectorize.
    except (ValueError, TypeError, NotImplementedError) as error:
        raise StagingError(
            f"{name}: JAX can't compile this step, which runs as Python ({reason}): {error}\n"
            f"It holds the lines {', '.join(lines) or '(none known)'}"
        ) from error
    fingerprint = "\n".join([*map(str, arguments), *map(_text, eqns)])
    key, body = python_body(name, function, reason, fingerprint, lines)
    return key, replace(body, working=working)


def _text(eqn: Eqn) -> str:
    """The text of an equation without the user's line, whose path differs between machines."""
    return repr(eqn).partition("    # ")[0]
