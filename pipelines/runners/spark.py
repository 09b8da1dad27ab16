"""Spark, through Beam's job server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from beamjax.options import Options
from beamjax.pipelines.runners.spec import RunnerSpec

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

_DEFAULT_MASTER = "local[4]"
"""Beam's default `spark_master_url`: four threads of the job server."""
_LOOPBACK = (
    "-Dspark.driver.bindAddress=127.0.0.1",
    "-Dspark.driver.host=127.0.0.1",
    "-Dspark.ui.enabled=false",
)
"""Settings with which the Spark in a job server listens at loopback addresses only."""
_OPENED = ("sun.security.action", "sun.nio.cs", "sun.util.calendar", "java.lang.invoke",
           "java.util.concurrent.atomic")  # fmt: skip
"""Packages that Spark needs to be open on Java 17, besides those in `jars.JAVA_OPTIONS`. Without
the first one it never reports a failed task."""


class Spark(RunnerSpec):
    name = "SparkRunner"
    outlives_launcher = True
    replaces_workers = False

    def connect(
        self, options: Options, flags: PipelineOptions, dry: bool = False
    ) -> tuple[Options, PipelineOptions]:
        from apache_beam.options.pipeline_options import SparkRunnerOptions

        from beamjax.pipelines.clusters import jars, job_servers

        if jars.names_job_server(flags.get_all_options(drop_default=True), "spark"):
            return options, flags
        master = flags.view_as(SparkRunnerOptions).spark_master_url
        embedded = master.startswith("local")
        java = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        java += _LOOPBACK if embedded else ()
        arguments = [f"--spark-master-url={master}"]
        driver = "spark.SparkJobServerDriver"
        return options, job_servers.connected_to_java(
            flags, "Spark", driver, arguments, embedded, java
        )

    def workers(self, flags: Mapping[str, Any]) -> tuple[bool, int]:
        from beamjax.pipelines.clusters.jars import names_job_server

        master = str(flags.get("spark_master_url", _DEFAULT_MASTER))
        if names_job_server(flags, "spark") or not master.startswith("local"):
            return False, 1
        threads = master.removeprefix("local").strip("[]") or "1"
        return True, int(threads) if threads.isdigit() else os.cpu_count() or 1

    def missing(self) -> str:
        from beamjax.pipelines.clusters import processes

        return processes.missing("java", "mvn")
