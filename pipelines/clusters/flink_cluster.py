"""A Flink cluster on this machine: job manager, task managers, Python workers and a job server.

Each task manager has its own pool of Python workers, as it would on a machine of its own. The
options of a pipeline name one host and port of a pool for all task managers. So each task manager
is started with a hosts file that maps this name to the address of its pool. Everything listens at
loopback addresses only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import jars, processes
from beamjax.pipelines.clusters.processes import LOOPBACK, Process
from beamjax.pipelines.clusters.worker_pool import READY
from beamjax.storage.cache_folder import cache_folder

WORKERS = "beamjax-workers"
"""The host name by which every task manager connects to its own pool."""
_SECONDS_TO_START = 120.0
_RECORD = "cluster.json"


@dataclass(frozen=True)
class Settings:
    """How a cluster is started.

    Attributes:
      taskmanagers: the number of task managers.
      slots: the number of tasks that a task manager runs at a time.
      heap: the Java heap of a task manager, in MiB.
      attempts: how often Flink restarts failed tasks before the pipeline fails. Flink counts all
        tasks of a pipeline together, from its start. A pool that dies costs one attempt for each
        task with workers there, and as many again if it is not back after `delay`.
      delay: seconds before each attempt. Flink takes about 8 s (`heartbeat.timeout`) to notice that
        a task manager is gone; a shorter delay wastes attempts.
    """

    taskmanagers: int = 2
    slots: int = 1
    heap: int = 512
    attempts: int = 8
    delay: int = 10


@dataclass(frozen=True)
class Cluster:
    """What is needed to use a cluster. It is also stored in a file of the folder of the cluster.

    Attributes:
      settings: how it was started.
      job_port: the port at which the job server takes jobs.
      rest_port: the port of Flink's REST API and dashboard.
      pool_port: the port at which each pool listens.
      pools: the addresses of the pools: one for each task manager, or one for all.
    """

    settings: Settings
    job_port: int
    rest_port: int
    pool_port: int
    pools: tuple[str, ...]

    @property
    def flags(self) -> dict[str, Any]:
        """Beam's options for a pipeline on this cluster."""
        host = WORKERS if len(self.pools) > 1 else self.pools[0]
        return {
            "job_endpoint": f"localhost:{self.job_port}",
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
    """The cluster that was started in a folder, or None. Its processes may have ended since."""
    try:
        record = json.loads((Path(folder) / _RECORD).read_text(encoding="utf-8"))
        record["settings"] = Settings(**record["settings"])
        return Cluster(**{**record, "pools": tuple(record["pools"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def status(folder: Path | str) -> dict[str, Any]:
    """The state of a cluster as plain values; `healthy` is whether it takes jobs."""
    folder = Path(folder).absolute()
    cluster = read(folder)
    found: dict[str, Any] = {
        "folder": str(folder),
        "healthy": False,
        "processes": {
            process.name: {"pid": process.pid, "alive": process.alive, "log": str(process.log)}
            for process in processes.known(folder)
        },
    }
    if cluster is None:
        return found
    registered, expected = len(_registered(cluster)), cluster.settings.taskmanagers
    pools = [host for host in cluster.pools if processes.listens(host, cluster.pool_port)]
    serves = processes.listens(LOOPBACK, cluster.job_port)
    healthy = serves and registered == expected and len(pools) == len(cluster.pools)
    return found | {
        "healthy": healthy and all(one["alive"] for one in found["processes"].values()),
        "job_endpoint": f"localhost:{cluster.job_port}",
        "dashboard": f"http://localhost:{cluster.rest_port}",
        "taskmanagers": {"registered": registered, "expected": expected},
        "slots": cluster.settings.slots,
        "pools": {"listening": len(pools), "expected": len(cluster.pools)},
        "flags": cluster.flags,
    }


def trouble(folder: Path | str) -> str | None:
    """The reason why pipelines on a cluster can't end any more, or None."""
    needed = {process.name: process for process in processes.known(Path(folder))}
    for name in ("jobmanager", "jobserver"):
        if name not in needed or not needed[name].alive:
            end = processes.tail(Path(folder) / f"{name}.log")
            return (
                f"Flink cluster in {folder}: its {name} has ended; `beamjax flink up` starts it "
                f"again. Its log ends with:\n{end}"
            )
    return None


def up(folder: Path | str, settings: Settings | None = None) -> Cluster:
    """Starts a cluster and waits until it takes jobs.

    A healthy cluster of this size is left as it is. If only task managers or pools have ended, and
    the settings are the same, these are started again while the others continue to work.

    Args:
      folder: the folder for its settings, logs and pid files; created for this user only.
      settings: how to start it.

    Raises:
      OptionsError: something that it needs is missing, or it does not start; the message has the
        end of the log of the process that failed.
    """
    settings = Settings() if settings is None else settings
    folder = Path(folder).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with processes.locked(folder):
        found = read(folder)
        if found is not None and status(folder)["healthy"]:
            has = found.settings
            if (has.taskmanagers, has.slots) == (settings.taskmanagers, settings.slots):
                return found
            raise OptionsError(
                f"{folder}: found a running cluster of {has.taskmanagers} task managers with "
                f"{has.slots} slots, expected {settings.taskmanagers} with {settings.slots}; "
                "stop it with `beamjax flink down`, or give another --folder"
            )
        if found is not None and found.settings == settings and not trouble(folder):
            with contextlib.suppress(OptionsError):  # then the whole cluster is started again
                _restart_ended(folder, found)
                return found
        _stop(folder)
        if os.stat(folder).st_mode & 0o077:
            os.chmod(folder, 0o700)
        cluster = _plan(settings)
        try:
            _start(folder, cluster)
        except BaseException:
            _stop(folder)
            raise
        record = json.dumps(dataclasses.asdict(cluster), indent=1)
        (folder / _RECORD).write_text(record, encoding="utf-8")
        return cluster


def down(folder: Path | str) -> list[str]:
    """Stops a cluster, and returns the names of the processes that were still running."""
    folder = Path(folder).absolute()
    if not folder.is_dir():
        return []
    with processes.locked(folder):
        return _stop(folder)


def _stop(folder: Path) -> list[str]:
    found = processes.known(folder)
    alive = [process.name for process in found if process.alive]
    # The job server first, so that no job is submitted; the job manager last.
    for process in sorted(found, key=lambda p: (p.name != "jobserver", p.name == "jobmanager")):
        process.stop()
    (folder / _RECORD).unlink(missing_ok=True)
    return alive


def _plan(settings: Settings) -> Cluster:
    pools = [f"127.0.0.{2 + number}" for number in range(settings.taskmanagers)]
    # macOS has one loopback address unless more are configured.
    if settings.taskmanagers == 1 or not all(map(processes.can_listen, pools)):
        pools = [LOOPBACK]
    (pool_port,) = processes.free_ports(1, pools)
    job_port, rest_port = processes.free_ports(2)
    return Cluster(settings, job_port, rest_port, pool_port, tuple(pools))


def _start(folder: Path, cluster: Cluster) -> None:
    settings = cluster.settings
    classpath = jars.classpath("flink")
    loopback = jars.own_classes(classpath, "ServerFactory")
    job_server = jars.own_classes(classpath, "ServerFactory", "ClasspathScanningResourcesDetector")
    rpc_port, artifact_port = processes.free_ports(2)
    configuration = _configuration(folder, cluster, rpc_port)

    def run(name: str, heap: int, *arguments: str) -> Process:
        front = job_server if name == "jobserver" else loopback
        command = jars.java(heap, [front, classpath], *arguments)
        return processes.start(name, command, folder)

    started = []
    for number, host in enumerate(cluster.pools):
        pool = [sys.executable, "-m", "beamjax.pipelines.clusters.worker_pool"]
        pool += [f"--host={host}", f"--port={cluster.pool_port}"]
        started.append(processes.start(f"workers-{number}", pool, folder))
    entry = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
    started.append(run("jobmanager", 512, entry, f"--configDir={configuration}"))
    for number in range(settings.taskmanagers):
        hosts = folder / f"hosts-{number}"
        names = f"{LOOPBACK} localhost {socket.gethostname()}\n"
        pool_host = cluster.pools[number % len(cluster.pools)]
        hosts.write_text(f"{names}{pool_host} {WORKERS}\n", encoding="utf-8")
        arguments = [
            f"-Djdk.net.hosts.file={hosts}",
            "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
            f"--configDir={configuration}",
            *_memory(settings),
        ]
        started.append(run(f"taskmanager-{number}", settings.heap, *arguments))
    arguments = jars.job_server(
        "flink.FlinkJobServerDriver",
        (cluster.job_port, artifact_port),
        folder,
        f"--flink-master=localhost:{cluster.rest_port}",
        f"--flink-conf-dir={configuration}",
    )
    started.append(run("jobserver", 512, *arguments))
    _wait(folder, cluster, started)


def _restart_ended(folder: Path, cluster: Cluster) -> None:
    """Starts the processes again that have ended, and waits until the cluster is complete."""
    before = _registered(cluster)
    ended = [process for process in processes.known(folder) if not process.alive]
    _wait(folder, cluster, [processes.start_again(process) for process in ended], before)


def _wait(
    folder: Path,
    cluster: Cluster,
    started: list[Process],
    before: frozenset[str] = frozenset(),
) -> None:
    """Waits until a cluster takes jobs.

    Args:
      folder: the folder of the cluster.
      cluster: the cluster.
      started: those of its processes that were just started.
      before: task managers that were registered before. Flink takes a while to remove those that
        ended, so the number of registered ones does not show whether the new ones are there.
    """
    pools = [process for process in started if process.name.startswith("workers")]
    new = sum(process.name.startswith("taskmanager") for process in started)

    def ready() -> bool:
        registered = _registered(cluster)
        return (
            all(READY in processes.tail(pool.log) for pool in pools)
            and processes.listens(LOOPBACK, cluster.job_port)
            and len(registered) == cluster.settings.taskmanagers
            and len(registered - before) == new
        )

    def failed() -> list[Process]:
        restarted = "starting another one"
        return [p for p in started if not p.alive or restarted in processes.tail(p.log)]

    processes.wait_until(lambda: bool(failed()) or ready(), _SECONDS_TO_START)
    for process in failed():
        raise OptionsError(
            f"{folder}: {process.name} does not start; its log ends with:\n"
            f"{processes.tail(process.log)}"
        )
    if not ready():
        logs = "\n".join(f"{p.name}:\n{processes.tail(p.log, 5)}" for p in started)
        raise OptionsError(
            f"{folder}: the cluster is not ready after {_SECONDS_TO_START:.0f} s; the logs end "
            f"with:\n{logs}"
        )


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


def _registered(cluster: Cluster) -> frozenset[str]:
    """The ids of the task managers that are registered at the job manager."""
    # Without the proxy of the environment, which may not reach this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    address = f"http://localhost:{cluster.rest_port}/taskmanagers"
    troubles = (OSError, ValueError, KeyError, TypeError)
    with contextlib.suppress(*troubles), direct.open(address, timeout=5) as answer:
        return frozenset(one["id"] for one in json.load(answer)["taskmanagers"])
    return frozenset()
