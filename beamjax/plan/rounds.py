"""Whether the workers of one Beam job serve all rounds of a program."""

from __future__ import annotations

from beamjax.options import Options
from beamjax.plan.one_pass import open_placements
from beamjax.plan.steps import Plan, is_straight


def is_resident(plan: Plan, options: Options) -> bool:
    """Whether a run is on the resident workers of one Beam job, rather than one pipeline.

    Loops and branches need resident workers, as their next step depends on values; so do
    checkpoints. Streams of unknown length need a pipeline.
    """
    needs_driver = not is_straight(plan.steps) or options.checkpoint is not None
    return needs_driver and not open_placements(plan)
