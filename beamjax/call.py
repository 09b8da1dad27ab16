"""A call of a function of programs with its plan: what `run`, `launch` and `transform` go through,
what `explain` shows, and what `replay` computes again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from beamjax.diagnostics.fact_types import PlanFacts, PredictionFact
from beamjax.diagnostics.facts import facts_of
from beamjax.diagnostics.forecast import prediction
from beamjax.interpreters.planning import Planned
from beamjax.interpreters.staging.stage import FlatCall
from beamjax.options import Options
from beamjax.plan.steps import Plan
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import MaterializedOutputs

if TYPE_CHECKING:
    from beamjax.pipelines.session_workers import SessionWorkers

LOCAL = "local"


@dataclass(frozen=True)
class Call:
    """A call with its plan.

    Attributes:
      flat: the function and its arguments, those of unknown length as they are read.
      backend: the user's runner, or "local".
      options: of the run.
      planned: the plan with what it was made from.
      plan: the same plan, as other processes need it.
      inputs: the values of the plan's inputs; None if an argument has no value.
      can_replay: whether the members can be read again, which those of streams can't.
      results: where results that are kept go.
      files: with members that were counted before; they go when the run is over.
      workers: those of a session, in place of those that a run starts.
    """

    flat: FlatCall
    backend: Any
    options: Options
    planned: Planned
    plan: Plan
    inputs: Inputs | None
    can_replay: bool = True
    results: MaterializedOutputs = field(default_factory=MaterializedOutputs)
    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    workers: SessionWorkers | None = None

    @property
    def values(self) -> Inputs:
        """The inputs of a call whose arguments all have values."""
        assert self.inputs is not None
        return self.inputs

    @property
    def runner(self) -> str:
        """The name of the runner."""
        return runner_name(self.backend)

    def facts(self, notes: tuple[str, ...] | None = None, cached: bool = False) -> PlanFacts:
        """What `explain` shows of the plan.

        Args:
          notes: of how the arguments are read; by default those of the plan.
          cached: whether to count the shards that the cache has.
        """
        notes = self.planned.notes if notes is None else notes
        inputs = self.inputs if cached else None
        return facts_of(self.planned, self.flat.arguments, self.options, notes, self.runner, inputs)

    def prediction(self) -> PredictionFact:
        """The predicted seconds of the plan, by step."""
        return prediction(self.plan, self.options, self.runner)


def runner_name(backend: Any) -> str:
    """The name of a runner, which users give by name or as an instance."""
    return backend if isinstance(backend, str) else type(backend).__name__
