"""Decides whether a plan runs in one pass over a stream, or on resident workers."""

from __future__ import annotations

from collections.abc import Sequence

from beamjax.options import Options
from beamjax.plan.steps import (
    Branch,
    Gather,
    Loop,
    Map,
    Plan,
    Scatter,
    Server,
    Step,
    is_straight,
    size_name,
    walk,
)


def open_placements(plan: Plan) -> list[str]:
    """The placements whose number of members is only known once the plan has run."""
    return [placement for placement, n in plan.sizes.items() if n is None]


def is_resident(plan: Plan, options: Options) -> bool:
    """Whether a run uses the resident workers of one Beam job, rather than one pipeline.

    Loops and branches need resident workers, as their next step depends on values; so do
    checkpoints. Streams of unknown length need a pipeline.
    """
    needs_driver = not is_straight(plan.steps) or options.checkpoint is not None
    return needs_driver and not open_placements(plan)


def obstacle(plan: Plan, streamed: Sequence[int]) -> str:
    """Why members must be counted before the plan runs; "" if one pass is enough.

    Args:
      plan: staged with an unknown number of members.
      streamed: indices of the inputs that come from sources of unknown length.
    """
    for step in walk(plan.steps):
        if isinstance(step, Loop | Branch):
            what = "rounds" if isinstance(step, Loop) else "branches"
            return f"{step.line}: {what} around placed operators read them again"
    placements = open_placements(plan)
    if len(placements) != 1:
        return f"the program has several placements of unknown size, {', '.join(placements)}"
    for i in streamed:
        spec = plan.inputs[i]
        if spec.views or spec.server is not None or spec.axis:
            return f"{spec.path} is not read one member at a time"
        if any(output.input == i for output in plan.outputs):
            return f"the result contains {spec.path} unchanged"
    passes = [s for s in plan.steps if isinstance(s, Map) and s.placement == placements[0]]
    if len(passes) > 1:
        return f"{len(passes)} passes read them: {', '.join(step.name for step in passes)}"
    before, _ = split(plan)
    if any(step not in before for step in passes):
        return f"{passes[0].name} uses the number of members for each of them"
    return ""


def split(plan: Plan) -> tuple[list[Step], list[Step]]:
    """Splits the steps of a plan without control flow, keeping their order.

    Returns:
      The steps that do not depend on an unknown number of members, and those that do.
    """
    waiting = {size_name(placement) for placement in open_placements(plan)}
    before: list[Step] = []
    after: list[Step] = []
    for step in plan.steps:
        reads, makes = _flow(step)
        if waiting.isdisjoint(reads):
            before.append(step)
        else:
            waiting.update(makes)
            after.append(step)
    return before, after


def _flow(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the values that a step reads, and of those that it defines."""
    match step:
        case Server(inputs=inputs, outputs=outputs):
            return inputs, outputs
        case Map(broadcasts=broadcasts, operands=operands):
            return (*broadcasts, *operands), (*step.results, *step.reduced)
        case Gather(operand=operand, result=result) | Scatter(operand=operand, result=result):
            return (operand,), (result,)
    raise TypeError(f"{step.name}: a step without control flow was expected")
