"""Beam's FlinkRunner: chooses its cluster, or starts a job server with a Flink inside of it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
import urllib.error
from pathlib import Path

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
)

from beamjax.errors import OptionsError, WorkerError
from beamjax.pipelines import own_user
from beamjax.pipelines.clusters import flink_cluster, guard, jars, job_servers, processes
from beamjax.pipelines.clusters.flags import ClusterOptions
from beamjax.pipelines.clusters.flink_rest import NO_ANSWER, FlinkRest
from beamjax.pipelines.clusters.processes import listens

VERSION = "1.16"
"""The version of Flink in `java/flink.xml`, for which beamjax starts job servers."""
POOL = "localhost:50001"
"""Where task managers look for pools by default: the port of `worker_pool`, on their own hosts."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_GO = 10.0
"""Seconds in which a cancelled job has to be gone."""
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


def rename(options: PipelineOptions) -> None:
    """Gives the job of a pipeline a name of its own, by which Flink knows it."""
    # A run that starts its job again cancels the one before, and must not cancel the new one.
    named = options.view_as(GoogleCloudOptions)
    if rest_of(options) is not None and (named.job_name or "").startswith(guard.PREFIX):
        named.job_name = f"{named.job_name}-{secrets.token_hex(4)}"


def is_running(options: PipelineOptions) -> bool:
    """Whether the job of a pipeline runs, as Flink says."""
    rest, name = rest_of(options), options.view_as(GoogleCloudOptions).job_name
    try:
        return bool(rest is not None and name and rest.running(name))
    except NO_ANSWER:
        return False


def wait(options: PipelineOptions) -> None:
    """Waits for the end of the job of a pipeline, without its job server."""
    rest, name = rest_of(options), options.view_as(GoogleCloudOptions).job_name
    assert rest is not None
    try:
        while rest.running(name):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        state, reason = rest.end(name)
    except NO_ANSWER as error:
        raise RuntimeError(f"Flink at {rest.address} does not answer: {error}") from error
    if state != "FINISHED":
        raise RuntimeError(f"the job {name} of Flink ended as {state}: {reason}")


def cancel(options: PipelineOptions) -> None:
    """Ends the jobs of a pipeline on its cluster, and warns of those that go on."""
    # The cancellation of Beam's job servers may leave them running, with all their slots.
    rest, name = rest_of(options), options.view_as(GoogleCloudOptions).job_name
    if rest is None or not name:
        endpoint = options.view_as(PortableOptions).job_endpoint
        if endpoint and not job_servers.is_own(endpoint):
            _LOG.warning(
                "the job %s was cancelled at %s, whose Flink may go on until its workers notice; "
                "with the option flink_master, its end is checked", name or "", endpoint,
            )  # fmt: skip
        return
    end = time.monotonic() + _SECONDS_TO_GO
    try:
        # At first there may be none: a job server goes on to submit a job after a cancellation.
        while (left := rest.cancel(jobs := rest.named(name))) or not jobs:
            if time.monotonic() > end:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except NO_ANSWER as error:
        _LOG.warning("can't cancel the job %s at %s: %s", name, rest.address, error)
        return
    for job in left:
        _LOG.warning(
            "the job %s at %s still runs; cancel it in Flink's dashboard",
            job["jid"], rest.address,
        )  # fmt: skip


def gone(options: PipelineOptions) -> WorkerError | None:
    """The error of a job manager that does not answer."""
    rest = rest_of(options)
    if rest is None:
        return None
    try:
        rest.ask("config")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return WorkerError(
            f"flink_master: the job manager at {rest.address} does not answer any more ({reason}); "
            "start it again, and run again"
        )
    return None


_REFUSED = re.compile(
    r"(?:Connection refused|UnknownHostException)[^\n]*?([\w.-]+(?:/[\d.]+)?:\d+)"
)
_NO_SLOTS = "NoResourceAvailableException"


def reason_of(failures: list[tuple[int, str]], pool: str, attempts: int) -> str | None:
    """Why a job does not get on, if its failures show it; None if they don't."""
    refusals = {}
    for moment, text in failures:
        refused = _REFUSED.search(text)
        # By the port alone: each task manager writes the name of the host in its own way.
        if refused and refused[1].rpartition(":")[2] == pool.rpartition(":")[2]:
            refusals[moment] = refused[0]
        if _NO_SLOTS in text:
            return "Flink has no slots for it: other jobs have them, or task managers are gone"
    if len(refusals) < attempts:  # the pool may just be restarted
        return None
    return (
        f"a task manager can't reach its pool of workers at {pool} ({refusals[max(refusals)]}); "
        "start one on its host with `python -m beamjax.pipelines.clusters.worker_pool`, with the "
        "host and port of environment_config"
    )


class Progress:
    """Looks for the reason why the job of a pipeline does not get on; see `spec.Look`."""

    SECONDS_BEFORE, SECONDS_BETWEEN = 8.0, 4.0
    SECONDS_OF_SILENCE = 15.0
    """Seconds in which a job manager that ended may be back."""

    def __init__(self, options: PipelineOptions, attempts: int = 3):
        self._attempts = attempts
        self._rest = rest_of(options)
        self._name = options.view_as(GoogleCloudOptions).job_name
        self._pool = options.view_as(PortableOptions).environment_config or ""
        self._flags = options
        self._next = time.monotonic() + self.SECONDS_BEFORE
        self._answered = self._next

    def __call__(self) -> WorkerError | None:
        """The error of a pool or a job manager out of reach, or of missing slots."""
        now = time.monotonic()
        if self._rest is None or not self._name or now < self._next:
            return None
        self._next = now + self.SECONDS_BETWEEN
        try:
            failures = self._rest.failures(self._name)
            reason = reason_of(failures, self._pool, self._attempts)
        except NO_ANSWER:
            # The job manager is restarted, or the job has just ended.
            return gone(self._flags) if now - self._answered > self.SECONDS_OF_SILENCE else None
        self._answered = now
        return None if reason is None else WorkerError(reason)


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
