"""Beam's Prism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beamjax.errors import OptionsError
from beamjax.options import Options
from beamjax.pipelines.runners.spec import RunnerSpec

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


class Prism(RunnerSpec):
    name = "PrismRunner"
    holds_elements = True
    one_bundle = True
    replaces_workers = False

    def create(self, name: str) -> Any:
        from beamjax.pipelines.clusters.prism_server import PrismRunner

        return PrismRunner()

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        from beamjax.pipelines.clusters import prism_server

        return options, prism_server.connected(flags)

    def has_several_workers(self, flags: PipelineOptions) -> bool:
        return False

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        return True, 1

    def missing(self) -> str:
        from beamjax.pipelines.clusters import prism_server, processes

        try:
            if prism_server.is_installed():
                return ""
        except OptionsError as error:
            return str(error)
        return processes.missing("go") or "run `beamjax prism install`"
