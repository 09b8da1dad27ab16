"""Beam's in-memory runner, "DirectRunner"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beamjax.pipelines.runners.spec import RunnerSpec, number

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


class Direct(RunnerSpec):
    # Beam's own DirectRunner tries Prism first, so it would be another runner on other machines.
    name = "DirectRunner"
    class_name = "FnApiRunner"
    in_this_process = True
    holds_elements = True
    one_bundle = True
    replaces_workers = False
    all_flags_known = True

    def create(self, name: str) -> Any:
        from beamjax.pipelines.clusters.in_memory import FnApiRunner

        return FnApiRunner()

    def shares_memory(self, runner: Any, flags: PipelineOptions) -> bool:
        from apache_beam.options.pipeline_options import DirectOptions

        from beamjax import _beam_compat as compat

        mode = flags.view_as(DirectOptions).direct_running_mode
        if mode == "in_memory":
            here = (compat.EmbeddedPythonEnvironment, compat.EmbeddedPythonGrpcEnvironment)
            return isinstance(compat.default_environment(runner), here)
        return mode == "multi_threading"

    def has_several_workers(self, flags: PipelineOptions) -> bool:
        from apache_beam.options.pipeline_options import DirectOptions

        return flags.view_as(DirectOptions).direct_num_workers != 1

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        count = number(flags, "direct_num_workers", 1) or os.cpu_count() or 1
        return flags.get("direct_running_mode") != "multi_processing", count
