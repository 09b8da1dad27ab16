"""Flink, through Beam's job server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beamjax.options import Options
from beamjax.pipelines.runners.spec import RunnerSpec, RunningJob, number

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


class Flink(RunnerSpec):
    name = "FlinkRunner"
    outlives_launcher = True
    # Flink takes up to 25 s to notice a death and to start a worker, while a new job has workers
    # within 5 s. Flink may also never start one: if a pool is gone, it waits for it.
    seconds_alone = 5.0

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        from beamjax.pipelines.clusters.flink_server import connected

        return options, connected(flags)

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        """Those of a task manager with slots, or of Flink in a job server."""
        from beamjax.pipelines.clusters import flink_cluster, jars

        if jars.names_job_server(flags, "flink"):
            return False, 1
        master = flags.get("flink_master")
        if master is None or flags.get("flink_cluster"):
            folder = flags.get("flink_cluster") or flink_cluster.default_folder()
            cluster = flink_cluster.read(folder)
            if cluster is not None:
                return False, cluster.settings.slots
        if flags.get("flink_cluster") or master not in (None, *flink_cluster.EMBEDDED):
            return False, 1
        return True, number(flags, "parallelism", 0) or os.cpu_count() or 1

    def missing(self) -> str:
        from beamjax.pipelines.clusters import processes

        return processes.missing("java", "mvn")

    def begin(self, flags: PipelineOptions) -> None:
        from beamjax.pipelines.runners.flink_job import rename

        rename(flags)

    def job(self, flags: PipelineOptions) -> RunningJob:
        from beamjax.pipelines.runners.flink_job import FlinkJob

        return FlinkJob(flags)
