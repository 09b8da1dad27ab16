"""Beam's SparkRunner: Spark inside of a job server of this process, or a master that is named."""

from __future__ import annotations

from apache_beam.options.pipeline_options import PipelineOptions, SparkRunnerOptions

from beamjax.pipelines import jars, job_servers

_HEAP = 1024


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with which a `SparkRunner` finds its job server, which is started if need be.

    Raises:
      OptionsError: there is no Java, or the job server does not start.
    """
    given = options.get_all_options(drop_default=True)
    theirs = ("job_endpoint", "spark_job_server_jar", "spark_submit_uber_jar")
    if any(given.get(name) for name in theirs):
        return options
    master = options.view_as(SparkRunnerOptions).spark_master_url
    if master.startswith("local"):
        options = job_servers.with_defaults(options, environment_type="LOOPBACK")
    classpath = jars.classpath("spark")
    server = job_servers.serve(
        "Spark",
        ("spark", master),
        lambda ports, folder: jars.java(
            _HEAP, [classpath], "org.apache.beam.runners.spark.SparkJobServerDriver",
            "--job-host=localhost", f"--job-port={ports[0]}", f"--artifact-port={ports[1]}",
            f"--expansion-port={ports[2]}", f"--artifacts-dir={folder / 'artifacts'}",
            f"--spark-master-url={master}",
        ),
    )  # fmt: skip
    return job_servers.with_defaults(options, job_endpoint=server.endpoint)
