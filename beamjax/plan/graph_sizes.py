"""Chooses how many rounds of a loop to unroll into one Beam graph.

Each graph has an overhead. The overhead of each step in it grows with the number of steps, because
a runner looks at all steps for each one. So unrolling more rounds pays up to some width. The choice
uses fixed typical times and is therefore the same on all machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from beamjax.options import Options
from beamjax.plan.cost import ELSEWHERE, RUNNERS, Fixed
from beamjax.plan.liveness import made
from beamjax.plan.steps import Gather, Loop, Map, Plan, Scatter, Step

HERE, PAIR = RUNNERS["DirectRunner"], 2.5e-5
"""Overhead where workers are threads of the launching process: of graphs and steps (`Fixed`), and
seconds per pair of steps of a graph."""
ELSEWHERE_PAIR = 4.5e-4
"""Seconds per pair of steps where each graph starts new workers or a new job."""
NEARLY = 1.015
"""A graph may take longer than the fastest one by this factor if it is narrower: narrow graphs hold
fewer values at once."""
MAX_BYTES = 1 << 28
"""Default bound of the bytes of all values that the unrolled rounds of one graph make."""


@dataclass(frozen=True)
class Width:
    """A number of rounds per graph, and its consequences.

    Attributes:
      rounds: rounds per graph.
      seconds: predicted overhead of the runner for the whole loop.
      nbytes: bytes of the values that the rounds of one graph make.
    """

    rounds: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class GraphSize:
    """The chosen number of rounds per graph.

    Attributes:
      chosen: the choice.
      others: alternatives that it was compared with.
      why: the reason, as text.
    """

    chosen: Width
    others: tuple[Width, ...]
    why: str


def graph_size(plan: Plan, loop: Loop, options: Options, shared: bool) -> GraphSize:
    """Chooses how many rounds of a loop to unroll into one graph, with the predicted overhead.

    Args:
      plan: the plan of the loop.
      loop: a loop with a known number of rounds whose block has no control flow.
      options: `rounds_per_graph` is read.
      shared: whether workers are threads of this process.
    """
    steps = loop.block.steps
    fixed, pair = (HERE, PAIR) if shared else (ELSEWHERE, ELSEWHERE_PAIR)
    nbytes = sum(plan.nbytes(name) for step in steps for name in made(step))
    total = loop.rounds or 0

    def width(rounds: int) -> Width:
        held = min(rounds, max(total, 1))
        return Width(rounds, _seconds(total, held, steps, fixed, pair), held * nbytes)

    scattered = {step.result for step in steps if isinstance(step, Scatter)}
    narrowest = _narrowest(steps, fixed, pair)
    fitting = max(1, MAX_BYTES // max(nbytes, 1))
    if scattered & set(loop.block.outputs):  # only a source can be gathered again
        return GraphSize(width(1), (), "a round scatters what the next one reads")
    if options.rounds_per_graph is not None:
        chosen, why = options.rounds_per_graph, "the option rounds_per_graph"
    elif fitting < narrowest:
        chosen, why = fitting, "more hold too many bytes"
    else:
        chosen, why = narrowest, "more are hardly faster"
    others = dict.fromkeys((1, min(2 * chosen, max(total, 1))))
    return GraphSize(width(chosen), tuple(width(n) for n in others if n != chosen), why)


def _narrowest(steps: Sequence[Step], fixed: Fixed, pair: float) -> int:
    """The fewest rounds per graph whose overhead per round is within `NEARLY` of the best."""

    def each(rounds: float) -> float:
        """Predicted overhead per round, in seconds."""
        return _work(steps) * fixed.step + pair * rounds * len(steps) ** 2 + fixed.pipeline / rounds

    if not steps:
        return 1
    best = max(1.0, math.sqrt(fixed.pipeline / pair) / len(steps))
    limit = NEARLY * each(best)
    return next(n for n in range(1, math.ceil(best) + 1) if each(n) <= limit or n >= best)


def _seconds(total: int, width: int, steps: Sequence[Step], fixed: Fixed, pair: float) -> float:
    """Predicted overhead of the runner, in seconds."""
    if not steps or not total:
        return 0.0
    pairs = pair * total * width * len(steps) ** 2
    return math.ceil(total / width) * fixed.pipeline + total * _work(steps) * fixed.step + pairs


def _work(steps: Sequence[Step]) -> int:
    """The number of steps that a runner runs; server steps are computed as part of these."""
    return sum(isinstance(step, Map | Gather) for step in steps)


def rounds_per_graph(plan: Plan, loop: Loop, options: Options, shared: bool) -> int:
    """The number of rounds of a loop to unroll into one graph; see `graph_size`."""
    return graph_size(plan, loop, options, shared).chosen.rounds
