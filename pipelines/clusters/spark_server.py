"""Beam's SparkRunner: starts a job server with a Spark inside of it, or for a given master."""

from __future__ import annotations

from apache_beam.options.pipeline_options import PipelineOptions, SparkRunnerOptions

from beamjax.pipelines.clusters import job_servers

_LOOPBACK = (
    "-Dspark.driver.bindAddress=127.0.0.1",
    "-Dspark.driver.host=127.0.0.1",
    "-Dspark.ui.enabled=false",
)
"""Settings with which the Spark in a job server listens at loopback addresses only."""
_OPENED = (
    "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.cs=ALL-UNNAMED",
    "--add-opens=java.base/sun.util.calendar=ALL-UNNAMED",
    "--add-opens=java.base/java.lang.invoke=ALL-UNNAMED",
    "--add-opens=java.base/java.util.concurrent.atomic=ALL-UNNAMED",
)
"""Further options that Spark needs on Java 17. Without the first one it never reports a failed
task."""


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with the job server of a `SparkRunner`, which is started if need be."""
    if job_servers.names_one(options, "spark"):
        return options
    master = options.view_as(SparkRunnerOptions).spark_master_url
    embedded = master.startswith("local")
    return job_servers.connected_to_java(
        options,
        "Spark",
        "spark.SparkJobServerDriver",
        [f"--spark-master-url={master}"],
        embedded,
        (*_OPENED, *(_LOOPBACK if embedded else ())),
    )
