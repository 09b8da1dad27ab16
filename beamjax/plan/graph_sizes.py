"""How many rounds of a loop make one graph.

A graph has a price, and that of its steps grows a little with their number, as a runner looks at
all of them for each. So wide graphs take less, up to a width. Seconds are usual ones: the number is
the same on all machines.
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
"""What graphs and steps take where workers are threads of the launching process, and besides for
each two steps of a graph."""
ELSEWHERE_PAIR = 4.5e-4
"""The same where each graph starts workers or a job anew, which takes seconds to minutes."""
NEARLY = 1.015
"""How much longer than at best it may take: narrow graphs hold fewer values at once."""
MAX_BYTES = 1 << 28
"""Bytes of the values that unrolled rounds make, all together, if nothing else is asked for."""


@dataclass(frozen=True)
class Width:
    """Rounds of a loop that make one graph.

    Attributes:
      rounds: how many.
      seconds: that the runner is told to take for itself, for all rounds.
      nbytes: of the values that the rounds of a graph make.
    """

    rounds: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class GraphSize:
    """What was chosen, and why.

    Attributes:
      chosen: the width.
      others: that were compared with it.
      why: in words.
    """

    chosen: Width
    others: tuple[Width, ...]
    why: str


def graph_size(plan: Plan, loop: Loop, options: Options, shared: bool) -> GraphSize:
    """How many rounds of a loop make one graph, and what that is told to take.

    Args:
      plan: that the loop is part of.
      loop: with known rounds, and a block without control flow.
      options: `rounds_per_graph`.
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
    """The fewest rounds of such steps at which a round takes hardly more than at best."""

    def each(rounds: float) -> float:
        """Seconds of a round."""
        return _work(steps) * fixed.step + pair * rounds * len(steps) ** 2 + fixed.pipeline / rounds

    if not steps:
        return 1
    best = max(1.0, math.sqrt(fixed.pipeline / pair) / len(steps))
    limit = NEARLY * each(best)
    return next(n for n in range(1, math.ceil(best) + 1) if each(n) <= limit or n >= best)


def _seconds(total: int, width: int, steps: Sequence[Step], fixed: Fixed, pair: float) -> float:
    """What the runner takes for itself."""
    if not steps or not total:
        return 0.0
    pairs = pair * total * width * len(steps) ** 2
    return math.ceil(total / width) * fixed.pipeline + total * _work(steps) * fixed.step + pairs


def _work(steps: Sequence[Step]) -> int:
    """Steps that a runner runs: what is on the server is done as part of them."""
    return sum(isinstance(step, Map | Gather) for step in steps)


def rounds_per_graph(plan: Plan, loop: Loop, options: Options, shared: bool) -> int:
    """How many rounds of a loop make one graph; see `graph_size`."""
    return graph_size(plan, loop, options, shared).chosen.rounds
