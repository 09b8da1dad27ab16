"""What a run gives at its end: arrays, and handles to the placed results that stay in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from beamjax.pipelines.graph import build
from beamjax.pipelines.launch import Launcher
from beamjax.pipelines.values.values import PlacedValue, ServerValue, Value
from beamjax.pipelines.worker.tasks import Sources
from beamjax.plan.steps import Output, Plan
from beamjax.runtime.materialized_outputs import MaterializedOutputs
from beamjax.sources.arrays import placed as kept_sources
from beamjax.sources.source_base import open_spec


def fetched(
    values: Mapping[str, Value], plan: Plan, launcher: Launcher, results: MaterializedOutputs
) -> dict[str, np.ndarray | kept_sources.Placed]:
    """The raw array of each value, or the handle to its files.

    Args:
      values: the outputs of a plan, by name.
      plan: that they are of, with the numbers of members.
      launcher: of pipelines that write what is kept and not where it belongs, such as the state of
        a loop.
      results: what is kept.

    Raises:
      SourceError: something can't be read or written.
      WorkerError: a pipeline failed.
    """
    found: dict[str, np.ndarray | kept_sources.Placed] = {}
    for name, value in values.items():
        if isinstance(value, ServerValue):
            found[name] = value.array()
        elif name in results.folders:
            found[name] = results.finish(_kept(name, value, plan, launcher, results))
        else:
            found[name] = value.whole()
    return found


def _kept(
    name: str, value: PlacedValue, plan: Plan, launcher: Launcher, results: MaterializedOutputs
) -> kept_sources.Placed:
    source = open_spec(value.spec)
    if isinstance(source, kept_sources.Placed) and source.stem == results.stem:
        return source
    plan = replace(
        plan, inputs=(), steps=(), outputs=(Output(value=name),), constants=(), bodies={}
    )
    inputs = build.GraphInputs({}, Sources((value.spec,), {name: (0, value.leaf)}, plan.x64))
    writer = replace(launcher, results=results)
    made = writer.run(plan, inputs, f"keep-{name}")[name]
    assert isinstance(made, PlacedValue)
    return kept_sources.Placed.from_spec(made.spec)
