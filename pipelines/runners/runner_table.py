"""The runners that beamjax knows. Beam finds any other by the name of its class."""

from __future__ import annotations

from typing import Any

from beamjax.pipelines.runners.direct import Direct
from beamjax.pipelines.runners.flink import Flink
from beamjax.pipelines.runners.google_dataflow import Dataflow
from beamjax.pipelines.runners.prism import Prism
from beamjax.pipelines.runners.spark import Spark
from beamjax.pipelines.runners.spec import RunnerSpec

RUNNERS: tuple[RunnerSpec, ...] = (Direct(), Prism(), Flink(), Spark(), Dataflow())

OTHER = RunnerSpec()
"""Serves any other runner."""

NAMES = tuple(spec.name for spec in RUNNERS)


def spec_of(runner: Any) -> RunnerSpec:
    """What is known of a runner: a name as Beam takes it, or an instance."""
    if isinstance(runner, str):
        return _BY_NAME.get(short(runner), OTHER)
    # By the names of classes: those of Dataflow can't be imported without its packages.
    kinds = (short(kind.__name__) for kind in type(runner).__mro__)
    return next((_BY_CLASS[kind] for kind in kinds if kind in _BY_CLASS), OTHER)


def short(name: str) -> str:
    """The name of a runner as Beam compares it: in any case, and without "Runner"."""
    return name.lower().removesuffix("runner")


_BY_CLASS = {short(spec.class_name or spec.name): spec for spec in RUNNERS}
_BY_NAME = {short(spec.name): spec for spec in RUNNERS} | _BY_CLASS
