"""A Flink cluster on this machine: its settings, its processes, and how launchers find it.

It has a job manager, task managers, Python workers and a job server; `flink_supervisor` runs them.
Everything listens at loopback addresses only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamjax.pipelines.clusters import guard, jars, processes
from beamjax.pipelines.clusters.flink_rest import NO_ANSWER, FlinkRest
from beamjax.pipelines.clusters.processes import LOOPBACK
from beamjax.storage import files, locks, trust
from beamjax.storage.schema import parse_json
from beamjax.storage.trust import cache_folder

WORKERS = "beamjax-workers"
"""The host name by which every task manager connects to its own pool."""
# The options of a pipeline name one host and port of a pool for all task managers. So each task
# manager is started with a hosts file that maps this name to the address of its own pool.
JOB_MANAGER, JOB_SERVER = "jobmanager", "jobserver"
"""The servers without which no pipeline can end."""
EMBEDDED = ("[local]", "[auto]")
"""Values of `flink_master` with which Flink runs in a job server of the launching process."""
_RECORD = "cluster.json"


@dataclass(frozen=True)
class Settings:
    """How a cluster is started."""

    taskmanagers: int = 2
    slots: int = 1  # tasks that a task manager runs at a time
    heap: int = 512  # MiB of the Java heap of a task manager
    # How often Flink restarts failed tasks before the pipeline fails. It counts all tasks of a
    # pipeline together, from its start. A pool that dies costs one attempt for each task with
    # workers there, and as many again if it is not back after `delay`.
    attempts: int = 8
    # Seconds before each attempt. Flink takes about 8 s (`heartbeat.timeout`) to notice that a task
    # manager is gone; a shorter delay wastes attempts.
    delay: int = 10


@dataclass(frozen=True)
class Cluster:
    """What is needed to use a cluster. While it runs, this is also in a file of its folder."""

    settings: Settings
    job_port: int  # of the job server
    rest_port: int  # of Flink's REST API and dashboard
    pool_port: int  # of each pool
    pools: tuple[str, ...]  # the address of the pool of each task manager, or one for all

    @property
    def rest(self) -> FlinkRest:
        """Flink's REST API."""
        return FlinkRest(f"http://{LOOPBACK}:{self.rest_port}")

    @property
    def flags(self) -> dict[str, Any]:
        """Beam's options for a pipeline on this cluster."""
        host = WORKERS if len(self.pools) > 1 else self.pools[0]
        return {
            "job_endpoint": f"{LOOPBACK}:{self.job_port}",
            "environment_type": "EXTERNAL",
            "environment_config": f"{host}:{self.pool_port}",
            "parallelism": self.settings.taskmanagers * self.settings.slots,
            # Flink then restarts only the tasks of a worker that dies, not the whole pipeline.
            "execution_mode_for_batch": "BATCH_FORCED",
        }


def default_folder() -> Path:
    """The default folder of a cluster."""
    return cache_folder("flink-cluster")


def read(folder: Path | str) -> Cluster | None:
    """The cluster that runs in a folder, or None."""
    trust.check_folder(folder, "flink_cluster")
    # The supervisor holds this lock as long as it lives; a record may remain after it was killed.
    if not locks.is_locked(Path(folder) / locks.NAME):
        return None
    try:
        path = os.fspath(Path(folder) / _RECORD)
        record = parse_json(files.read(path), path)
        record["settings"] = Settings(**record["settings"])
        return Cluster(**{**record, "pools": tuple(record["pools"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextlib.contextmanager
def announced(folder: Path, cluster: Cluster) -> Iterator[None]:
    """A context in which launchers find a cluster in its folder, which must be locked."""
    path = os.fspath(folder / _RECORD)
    files.write(path, json.dumps(dataclasses.asdict(cluster), indent=1).encode())
    try:
        yield
    finally:
        os.unlink(path)


def incomplete(cluster: Cluster) -> str | None:
    """What a cluster lacks before it takes jobs, or None."""
    if not processes.listens(LOOPBACK, cluster.job_port):
        return "the job server does not listen"
    number, expected = len(registered(cluster)), cluster.settings.taskmanagers
    if number != expected:
        return f"{number} of {expected} task managers are registered"
    pools = [host for host in cluster.pools if not processes.listens(host, cluster.pool_port)]
    return f"no pool listens at {', '.join(pools)}" if pools else None


def registered(cluster: Cluster) -> frozenset[str]:
    """The ids of the task managers that are registered at the job manager."""
    with contextlib.suppress(*NO_ANSWER):
        return frozenset(
            manager["id"] for manager in cluster.rest.ask("taskmanagers")["taskmanagers"]
        )
    return frozenset()


def with_ports(settings: Settings) -> Cluster:
    """A cluster of these settings, at free ports."""
    pools = [f"127.0.0.{2 + number}" for number in range(settings.taskmanagers)]
    # macOS has one loopback address unless more are configured.
    if settings.taskmanagers == 1 or not all(map(processes.can_listen, pools)):
        pools = [LOOPBACK]
    (pool_port,) = processes.free_ports(1, pools)
    job_port, rest_port = processes.free_ports(2)
    return Cluster(settings, job_port, rest_port, pool_port, tuple(pools))


def commands(folder: Path, cluster: Cluster) -> dict[str, list[str]]:
    """Command lines of the servers by name, in the order of their start; writes their files."""
    # Each server ends when the process that starts it ends: those in Java have a guard, and pools
    # watch their parent.
    classpath = jars.classpath("flink")
    loopback = jars.own_classes(classpath, "ServerFactory")
    job_server = jars.own_classes(classpath, "ServerFactory", "ClasspathScanningResourcesDetector")
    rpc_port, artifact_port = processes.free_ports(2)
    configuration = _configuration(folder, cluster, rpc_port)

    def java(heap: int, front: Path, *arguments: str) -> list[str]:
        return guard.guarded(jars.java(heap, [front, classpath], *arguments))

    servers = {}
    for number, host in enumerate(cluster.pools):
        pool = [sys.executable, "-m", "beamjax.pipelines.clusters.worker_pool"]
        pool += [f"--host={host}", f"--port={cluster.pool_port}", f"--supervisor={os.getpid()}"]
        servers[f"workers-{number}"] = pool
    entry = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
    servers[JOB_MANAGER] = java(512, loopback, entry, f"--configDir={configuration}")
    for number in range(cluster.settings.taskmanagers):
        arguments = _task_manager(folder, cluster, number, configuration)
        servers[f"taskmanager-{number}"] = java(cluster.settings.heap, loopback, *arguments)
    arguments = jars.job_server(
        "flink.FlinkJobServerDriver",
        (cluster.job_port, artifact_port),
        folder,
        f"--flink-master=localhost:{cluster.rest_port}",
        f"--flink-conf-dir={configuration}",
    )
    servers[JOB_SERVER] = java(512, job_server, *arguments)
    return servers


def _task_manager(folder: Path, cluster: Cluster, number: int, configuration: Path) -> list[str]:
    hosts = folder / f"hosts-{number}"  # see `WORKERS`
    names = f"{LOOPBACK} localhost {socket.gethostname()}\n"
    pool_host = cluster.pools[number % len(cluster.pools)]
    hosts.write_text(f"{names}{pool_host} {WORKERS}\n", encoding="utf-8")
    return [
        f"-Djdk.net.hosts.file={hosts}",
        "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
        f"--configDir={configuration}",
        *_memory(cluster.settings),
    ]


def _configuration(folder: Path, cluster: Cluster, rpc_port: int) -> Path:
    settings = cluster.settings
    configuration = folder / "configuration"
    configuration.mkdir(exist_ok=True)
    values = {
        "jobmanager.rpc.address": "localhost",
        "jobmanager.rpc.port": rpc_port,
        "jobmanager.bind-host": "localhost",
        "jobmanager.memory.process.size": "1024m",
        "taskmanager.host": "localhost",
        "taskmanager.bind-host": "localhost",
        "taskmanager.numberOfTaskSlots": settings.slots,
        "rest.address": "localhost",
        "rest.bind-address": "localhost",
        "rest.port": cluster.rest_port,
        # By default, pages of all sites may read what a browser gets here, and post jars.
        "web.access-control-allow-origin": "https://beamjax.invalid",
        "web.submit.enable": "false",
        "io.tmp.dirs": folder / "temporary",
        # Beam is on the classpath of Flink itself, not sent with each pipeline.
        "classloader.resolve-order": "parent-first",
        # Network buffers that each shuffle needs at least. Flink's default of 512 is too many for
        # pipelines with dozens of steps.
        "taskmanager.network.sort-shuffle.min-buffers": 64,
        "heartbeat.interval": 1000,
        "heartbeat.timeout": 8000,
        "restart-strategy": "fixed-delay" if settings.attempts else "none",
        "restart-strategy.fixed-delay.attempts": settings.attempts,
        "restart-strategy.fixed-delay.delay": f"{settings.delay} s",
    }
    text = "".join(f"{key}: {value}\n" for key, value in values.items())
    (configuration / "flink-conf.yaml").write_text(text, encoding="utf-8")
    return configuration


def _memory(settings: Settings) -> list[str]:
    """The settings that Flink's start scripts would compute; they are not used here."""
    values: Mapping[str, Any] = {
        "taskmanager.cpu.cores": settings.slots,
        "taskmanager.memory.framework.heap.size": "128m",
        "taskmanager.memory.framework.off-heap.size": "128m",
        "taskmanager.memory.task.heap.size": f"{settings.heap - 128}m",
        "taskmanager.memory.task.off-heap.size": "0b",
        "taskmanager.memory.managed.size": "256m",
        "taskmanager.memory.network.min": "128m",
        "taskmanager.memory.network.max": "128m",
        "taskmanager.memory.jvm-metaspace.size": "256m",
        "taskmanager.memory.jvm-overhead.min": "192m",
        "taskmanager.memory.jvm-overhead.max": "192m",
    }
    return [argument for key, value in values.items() for argument in ("-D", f"{key}={value}")]
