"""Beam's FlinkRunner: chooses its cluster, or starts a job server with a Flink inside of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    PipelineOptions,
)

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import flink_cluster, guard, jars, job_servers
from beamjax.pipelines.runners.options import ClusterOptions

_EMBEDDED = ("[local]", "[auto]")
_LOG = logging.getLogger("beamjax")


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with the job server of a `FlinkRunner`.

    It is the first of these:

    1. the job server that Beam's own options name;
    2. that of the cluster in the folder `flink_cluster`, where `beamjax flink up` runs;
    3. one that is started for the option `flink_master`;
    4. that of the cluster in the default folder, if it runs;
    5. one that is started with a Flink inside of it.

    Raises:
      OptionsError: the cluster does not run, or the job server can't be started.
    """
    flink = options.view_as(FlinkRunnerOptions)
    given = options.get_all_options(drop_default=True)
    if job_servers.names_one(options, "flink"):
        return options
    named = options.view_as(ClusterOptions).flink_cluster
    if named is not None or "flink_master" not in given:
        folder = Path(named).absolute() if named else flink_cluster.default_folder()
        cluster = flink_cluster.read(folder)
        if cluster is not None:
            _LOG.info("beamjax: on the Flink cluster in %s", folder)
            # If the launcher is killed, Flink would continue, though no process reads the results.
            address = f"http://localhost:{cluster.rest_port}"
            flags = {"job_name": guard.watched(address, os.getpid()), **cluster.flags}
            return job_servers.with_defaults(options, **flags, flink_cluster=str(folder))
        if named is not None:
            raise OptionsError(
                f"flink_cluster: found nothing in {folder}, expected a running cluster; start one "
                f"with `beamjax flink up --folder {named}`"
            )
    embedded = flink.flink_master in _EMBEDDED
    arguments = [f"--flink-master={'[local]' if embedded else flink.flink_master}"]
    if embedded:
        arguments.append(f"--flink-conf-dir={jars.SOURCES / 'flink-local'}")
    driver = "flink.FlinkJobServerDriver"
    return job_servers.connected_to_java(options, "Flink", driver, arguments, embedded)
