"""Beam's SparkRunner: Spark inside of a job server of this process, or a master that is named."""

from __future__ import annotations

from apache_beam.options.pipeline_options import PipelineOptions, SparkRunnerOptions

from beamjax.pipelines import job_servers


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with which a `SparkRunner` finds its job server, which is started if need be.

    Raises:
      OptionsError: there is no Java, or the job server does not start.
    """
    if job_servers.names_one(options, "spark"):
        return options
    master = options.view_as(SparkRunnerOptions).spark_master_url
    return job_servers.connected_to_java(
        options,
        "Spark",
        "spark.SparkJobServerDriver",
        f"--spark-master-url={master}",
        embedded=master.startswith("local"),
    )
