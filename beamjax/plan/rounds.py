"""Whether the workers of one Beam job serve all rounds of a program."""

from __future__ import annotations

from collections.abc import Iterable

from beamjax.options import Options
from beamjax.plan.one_pass import open_placements
from beamjax.plan.steps import Gather, Loop, Map, Plan, Step, walk


def is_resident(plan: Plan, options: Options) -> bool:
    """Whether a run starts one Beam job with resident workers, rather than many pipelines.

    A program whose loops have no passes is at most a few pipelines. Members of unknown number are
    read from a stream, and thus in a pipeline.
    """
    return options.resident and _has_rounds(plan.steps) and not open_placements(plan)


def _has_rounds(steps: Iterable[Step]) -> bool:
    loops = (step for step in walk(steps) if isinstance(step, Loop))
    return any(isinstance(step, Map | Gather) for loop in loops for step in _inside(loop))


def _inside(loop: Loop) -> Iterable[Step]:
    blocks = (loop.block, loop.condition) if loop.condition else (loop.block,)
    return (step for block in blocks for step in walk(block.steps))
