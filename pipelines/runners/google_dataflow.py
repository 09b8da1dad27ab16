"""Google Cloud Dataflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beamjax.options import Options
from beamjax.pipelines.runners.spec import RunnerSpec

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


class Dataflow(RunnerSpec):
    name = "DataflowRunner"
    all_flags_known = True
    packages = ("apitools", "google.auth")
    install = "pip install -e '.[dataflow]' in a clone of beamjax"

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        from beamjax.pipelines.clusters import dataflow_options

        options, flags = dataflow_options.prepare(options, flags)
        if not dry:
            dataflow_options.check_credentials(flags)
        return options, flags

    def attach(self, options: Options, flags: PipelineOptions) -> Options:
        from beamjax.pipelines.clusters import dataflow_options

        return replace(options, work_folder=dataflow_options.work_folder(options, flags))

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        return False, 12  # Dataflow's default number of threads in a worker process
