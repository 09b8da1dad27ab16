"""Explains why a placed value has to be gathered."""

from __future__ import annotations

from beamjax.interpreters.program import Eqn
from beamjax.interpreters.rules.readings import draw_by_batch
from beamjax.interpreters.staging.flatten import HOST_CALLS


def why_on_server(user: Eqn) -> str:
    """Why an equation reads a placed value on the server, as text."""
    name = user.primitive.name
    if name == "bj_map":
        draw = draw_by_batch(user.params["jaxpr"])
        if draw is not None:
            return (
                f"the body {user.params['name']} draws from rbg keys ({draw[0]} at "
                f"{draw[1] or user.line}), and such draws depend on all members"
            )
        return f"the body {user.params['name']} closes over a placed value"
    if user.is_placed_operator:
        return f"{name.removeprefix('bj_')} reads it as a server value"
    if name in HOST_CALLS:
        return f"{name} calls back to the host with all members"
    return f"{name} mixes members"
