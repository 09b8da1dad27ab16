"""Says in a line which rule makes an equation part of a step, for `explain`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from beamjax.interpreters.cutting.stages import (
    BranchStage,
    Emission,
    GatherStage,
    LoopStage,
    MapStage,
    RowsStage,
    ScatterStage,
    ServerStage,
    Stage,
)
from beamjax.interpreters.program import Eqn, Var
from beamjax.interpreters.rules.by_rows import operation_of
from beamjax.interpreters.rules.sharding_rules import ReductionRule, draw_by_batch, shape_of
from beamjax.interpreters.staging.flatten import HOST_CALLS

ALONG, REDUCES, CREATED = "along the members", "reduces over the members", "created on workers"
"""The rules by which a pass computes an equation; see docs/concepts.md."""

INSTEAD = {
    **dict.fromkeys(("sort", "top_k"), "beamjax.quantile finds medians and quantiles by passes"),
    **dict.fromkeys(
        """
        concatenate conv_general_dilated pad reduce_window reduce_window_max reduce_window_min
        reduce_window_sum rev slice
        """.split(),
        "beamjax.neighbours gives each member those beside it by passes",
    ),
    "dot_general": "x.T @ x, which contracts the members, is a reduction",
    "gather": "a loop over the indices that takes x[i] reads its rows by index",
    "reshape": "jax.ops.segment_sum reduces groups of members by passes, and a loop over "
    "lax.dynamic_slice_in_dim(x, i * rows, rows) reads batches by index",
    "scan": "beamjax.map_fn, beamjax.reduce and jnp.cumsum take the members in passes",
}
"""For primitives that mix members, the operator that gathers nothing."""


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
        return f"{short_name(user)} reads it as a server value"
    if name in HOST_CALLS:
        return f"{name} calls back to the host with all members"
    instead = f" ({INSTEAD[name]})" if name in INSTEAD else ""
    return f"{name} mixes members{instead}"


def rule_of(stage: Stage, sizes: Collection[Any] = ()) -> str:
    """The rule that chose a stage, in a line; `sizes` are numbers of members."""
    match stage:
        case MapStage(emissions=emissions):
            groups: dict[str, list[Eqn]] = {}
            for emission in emissions:
                groups.setdefault(_answer(emission), []).append(emission.eqn)
            order = (answer for answer in (ALONG, REDUCES, CREATED) if answer in groups)
            return "; ".join(f"{answer}: {_names(groups[answer])}" for answer in order)
        case ServerStage(eqns=eqns):
            return f"on the server, as no operand is placed: {_names(eqns)}{_sorted(eqns, sizes)}"
        case LoopStage() | BranchStage():
            what = "rounds" if isinstance(stage, LoopStage) else "branches"
            return f"its {what} have steps of their own, as they hold operators or gather nothing"
        case GatherStage(user=user):
            return f"gathered: {why_on_server(user)}"
        case RowsStage(eqn=eqn):
            (operand, _), (rows,) = eqn.inputs, eqn.outputs
            assert isinstance(operand, Var)
            return f"reads {shape_of(rows)[0]} rows by index of {operand.name}"
        case ScatterStage(user=user):
            return f"scattered: {short_name(user)} reads a server value along the members"


def _sorted(eqns: Iterable[Eqn], sizes: Collection[Any]) -> str:
    """What to use instead of sorts of arrays in memory along their members."""
    for eqn in eqns:
        if eqn.primitive.name == "sort":
            shape = shape_of(eqn.inputs[0])
            if shape[eqn.params["dimension"]] in sizes:
                return f" ({INSTEAD['sort']})"
    return ""


def _answer(emission: Emission) -> str:
    if isinstance(emission.rule, ReductionRule):
        return REDUCES
    is_placed = any(axis is not None for axis in emission.rule.in_axes)
    return ALONG if is_placed else CREATED


def _names(eqns: Iterable[Eqn]) -> str:
    return ", ".join(dict.fromkeys(map(short_name, eqns)))


def short_name(eqn: Eqn) -> str:
    """The name of an operation as users know it."""
    name = operation_of(eqn).primitive.name
    return "map_fn" if name == "bj_map" else name.removeprefix("bj_")
