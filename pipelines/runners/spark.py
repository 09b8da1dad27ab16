"""Spark, through Beam's job server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beamjax.options import Options
from beamjax.pipelines.runners.spec import RunnerSpec, names_job_server

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

_DEFAULT_MASTER = "local[4]"
"""Beam's default `spark_master_url`: four threads of the job server."""


class Spark(RunnerSpec):
    name = "SparkRunner"
    outlives_launcher = True
    replaces_workers = False

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        from beamjax.pipelines.clusters import spark_server

        return options, spark_server.connected(flags)

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        master = str(flags.get("spark_master_url", _DEFAULT_MASTER))
        if names_job_server(flags, "spark") or not master.startswith("local"):
            return False, 1
        threads = master.removeprefix("local").strip("[]") or "1"
        return True, int(threads) if threads.isdigit() else os.cpu_count() or 1

    def missing(self) -> str:
        from beamjax.pipelines.clusters import processes

        return processes.missing("java", "mvn")
