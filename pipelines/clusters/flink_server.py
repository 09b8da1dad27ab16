"""Beam's FlinkRunner: chooses its cluster, or starts a job server with a Flink inside of it."""

from __future__ import annotations

import logging
import os
import urllib.error
from pathlib import Path

from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions

from beamjax.errors import OptionsError
from beamjax.pipelines import own_user
from beamjax.pipelines.clusters import flink_cluster, guard, jars, job_servers, processes
from beamjax.pipelines.clusters.flags import ClusterOptions
from beamjax.pipelines.clusters.flink_rest import NO_ANSWER, FlinkRest
from beamjax.pipelines.clusters.processes import listens

VERSION = "1.16"
"""The version of Flink in `java/flink.xml`, for which beamjax starts job servers."""
POOL = "localhost:50001"
"""Where task managers look for pools by default: the port of `worker_pool`, on their own hosts."""
_LOG = logging.getLogger("beamjax")


def connected(options: PipelineOptions) -> PipelineOptions:
    """Options with the job server of a `FlinkRunner`, which is started if need be."""
    # It is the first of these:
    # 1. the job server that Beam's own options name, or the version of Beam's that they ask for;
    # 2. that of the cluster in the folder `flink_cluster`, where `beamjax flink up` runs;
    # 3. one that is started for the option `flink_master`;
    # 4. that of the cluster in the default folder, if it runs;
    # 5. one that is started with a Flink inside of it.
    flink = options.view_as(FlinkRunnerOptions)
    values = options.get_all_options(drop_default=True)
    if jars.names_job_server(values, "flink") or _asks_for_version(options):
        if (rest := rest_of(options)) is not None:
            options = _checked(rest, options, None, owns_strategy=False)
        return options
    named = options.view_as(ClusterOptions).flink_cluster
    if named is not None or "flink_master" not in values:
        folder = Path(named).absolute() if named else flink_cluster.default_folder()
        cluster = flink_cluster.read(folder)
        if cluster is not None:
            _LOG.info("on the Flink cluster in %s", folder)
            # If the launcher is killed, Flink would continue, though no process reads the results.
            for port in (cluster.job_port, cluster.rest_port):
                own_user.check_listener(f"{processes.LOOPBACK}:{port}")
            name = guard.watched(cluster.rest.address, os.getpid())
            flags = {"job_name": name, **cluster.flags}
            return job_servers.with_defaults(options, **flags, flink_cluster=str(folder))
        if named is not None:
            raise OptionsError(
                f"flink_cluster: found nothing in {folder}, expected a running cluster; start one "
                f"with `beamjax flink up --folder {named}`"
            )
    driver = "flink.FlinkJobServerDriver"
    if (rest := rest_of(options)) is not None:
        options = _checked(rest, options, VERSION, owns_strategy=True)
        arguments = [
            f"--flink-master={rest.address.removeprefix('http://')}",
            f"--flink-conf-dir={jars.SOURCES / 'flink-remote'}",
        ]
        return job_servers.connected_to_java(options, "Flink", driver, arguments, False)
    if flink.flink_master not in flink_cluster.EMBEDDED:
        raise OptionsError(
            f"flink_master: found {flink.flink_master!r}, expected host:port, or [local]"
        )
    arguments = ["--flink-master=[local]", f"--flink-conf-dir={jars.SOURCES / 'flink-local'}"]
    return job_servers.connected_to_java(options, "Flink", driver, arguments, True)


def rest_of(options: PipelineOptions) -> FlinkRest | None:
    """The REST API of the cluster of a pipeline; None if the options don't name it."""
    folder = options.view_as(ClusterOptions).flink_cluster
    if folder:
        cluster = flink_cluster.read(folder)
        return None if cluster is None else cluster.rest
    master = str(options.view_as(FlinkRunnerOptions).flink_master)
    if master in flink_cluster.EMBEDDED or ":" not in master:
        return None
    return FlinkRest(master.rstrip("/") if "://" in master else f"http://{master}")


def check(
    rest: FlinkRest, version: str | None, parallelism: int | None, owns_strategy: bool
) -> list[str]:
    """Raises OptionsError if pipelines can't run on a cluster; returns doubts for the log."""
    # `version` is what the job server needs, such as "1.16", None for a job server of others;
    # `owns_strategy` says that the job server sets a restart strategy of its own.
    where = f"flink_master: {rest.address}"
    try:
        actual = rest.ask("config")["flink-version"]
        overview = rest.ask("overview")
        settings = {entry["key"]: entry["value"] for entry in rest.ask("jobmanager/config")}
    except NO_ANSWER as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise OptionsError(
            f"{where} does not answer as Flink ({reason}); expected the host and port of the REST "
            "API of a job manager (rest.address and rest.port in its configuration)"
        ) from error
    if version is not None and not actual.startswith(f"{version}."):
        raise OptionsError(
            f"{where} is Flink {actual}, but the job server that beamjax starts is for Flink "
            f"{version}; add flink_version={actual.rpartition('.')[0]!r}, with which Beam fetches "
            "its own job server, or name one with job_endpoint"
        )
    order = settings.get("classloader.resolve-order", "child-first")
    if version is not None and order != "parent-first":
        raise OptionsError(
            f"{where} has classloader.resolve-order {order}, expected parent-first: Beam's jars "
            "are in Flink's lib, not sent with each pipeline"
        )
    slots, free = overview["slots-total"], overview["slots-available"]
    wanted = parallelism or 1
    if slots < wanted:
        raise OptionsError(
            f"{where} has {slots} slots on {overview['taskmanagers']} task managers, expected at "
            f"least {wanted} (option parallelism)"
        )
    doubts = []
    if free < wanted:
        names = ", ".join(f"{job['name']} ({job['jid']})" for job in rest.running())
        doubts.append(
            f"{where} has {free} free slots of {slots}, and this run needs {wanted}: it waits for "
            f"{names}"
        )
    strategy = settings.get("restart-strategy", settings.get("restart-strategy.type", "none"))
    if not owns_strategy and strategy in ("none", "off", "disable"):
        doubts.append(
            f"{where} has no restart-strategy, so one worker that dies ends the pipeline; set "
            "fixed-delay in the configuration of the job server or the job manager"
        )
    return doubts


def _checked(
    rest: FlinkRest, options: PipelineOptions, version: str | None, owns_strategy: bool
) -> PipelineOptions:
    """Options with defaults for a cluster, which has been checked."""
    values = options.get_all_options(drop_default=True)
    parallelism = values.get("parallelism")
    doubts = check(rest, version, parallelism, owns_strategy)
    pool = str(values.get("environment_config", POOL))
    host, _, port = pool.rpartition(":")
    # Those at a loopback address are on the hosts of the task managers.
    if port.isdigit() and host not in ("localhost", "127.0.0.1") and not listens(host, int(port)):
        doubts.append(f"environment_config: no pool of workers answers at {pool}")
    for doubt in doubts:
        _LOG.warning("%s", doubt)
    defaults = {
        "job_name": guard.watched(rest.address, os.getpid()),
        "execution_mode_for_batch": "BATCH_FORCED",
        "parallelism": rest.ask("overview")["slots-total"],
    }
    if "environment_type" not in values:
        defaults |= {"environment_type": "EXTERNAL", "environment_config": POOL}
    return job_servers.with_defaults(options, **defaults)


def _asks_for_version(options: PipelineOptions) -> bool:
    """Whether the version of Beam's own job server is given, be it the default one."""
    return any(str(flag).startswith("--flink_version") for flag in options._flags or ())
