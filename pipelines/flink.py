"""Beam's FlinkRunner: which cluster it uses, or the one inside of a job server of this process."""

from __future__ import annotations

import logging
from pathlib import Path

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    PipelineOptions,
)

from beamjax.errors import OptionsError
from beamjax.pipelines import flink_cluster, jars, job_servers
from beamjax.pipelines.cluster_options import ClusterOptions

_HEAP = 1024
_EMBEDDED = ("[local]", "[auto]")
_LOG = logging.getLogger("beamjax")


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with which a `FlinkRunner` finds its job server.

    In this order: what the options say of a job server is left to Beam; `flink_cluster`, a folder
    of `beamjax flink up`; `flink_master`, for which a job server is started; the cluster in the
    default folder, if it runs; Flink inside of a job server that is started.

    Raises:
      OptionsError: the cluster does not run, or the job server cannot be started.
    """
    flink = options.view_as(FlinkRunnerOptions)
    given = options.get_all_options(drop_default=True)
    theirs = ("job_endpoint", "flink_job_server_jar", "flink_submit_uber_jar")
    if any(given.get(name) for name in theirs):
        return options
    named = options.view_as(ClusterOptions).flink_cluster
    if named is not None or "flink_master" not in given:
        folder = Path(named).absolute() if named else flink_cluster.default_folder()
        cluster = flink_cluster.read(folder)
        found = "nothing" if cluster is None else flink_cluster.trouble(folder)
        if cluster is not None and not found:
            _LOG.info("beamjax: on the Flink cluster in %s", folder)
            return job_servers.with_defaults(options, **cluster.flags, flink_cluster=str(folder))
        if named is not None:
            raise OptionsError(
                f"flink_cluster: found {found} in {folder}, expected a running cluster; start one "
                f"with `beamjax flink up --folder {named}`"
            )
    return _own_job_server(options, flink.flink_master)


def _own_job_server(options: PipelineOptions, master: str) -> PipelineOptions:
    embedded = master in _EMBEDDED
    if embedded:
        options = job_servers.with_defaults(options, environment_type="LOOPBACK")
    classpath = jars.classpath("flink")
    server = job_servers.serve(
        "Flink",
        ("flink", master),
        lambda ports, folder: jars.java(
            _HEAP, [classpath], "org.apache.beam.runners.flink.FlinkJobServerDriver",
            "--job-host=localhost", f"--job-port={ports[0]}", f"--artifact-port={ports[1]}",
            f"--expansion-port={ports[2]}", f"--artifacts-dir={folder / 'artifacts'}",
            f"--flink-master={'[local]' if embedded else master}",
        ),
    )  # fmt: skip
    return job_servers.with_defaults(options, job_endpoint=server.endpoint)
