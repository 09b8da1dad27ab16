"""Runs a Flink cluster in the foreground: starts its servers, and replaces those that end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import flink_cluster, processes
from beamjax.pipelines.clusters.flink_cluster import (
    JOB_MANAGER,
    JOB_SERVER,
    Cluster,
    Settings,
    incomplete,
)
from beamjax.pipelines.clusters.processes import ServerProcess
from beamjax.pipelines.clusters.worker_pool import READY, RESTART_SECONDS
from beamjax.storage import locks, trust

_SECONDS_TO_START = 120.0
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_LOCK = 2.0
"""Longer than a launcher that looks for a cluster holds the lock of a folder."""
_LOG = logging.getLogger("beamjax")


class Supervisor:
    """The servers of a cluster, by name, that run as children of this process."""

    def __init__(self, folder: Path, cluster: Cluster, servers: dict[str, ServerProcess]):
        self.folder = folder
        self.cluster = cluster
        self.servers = servers
        self._over = threading.Event()
        self._failure: OptionsError | None = None

    def wait(self) -> None:
        """Waits until the cluster can't continue; then raises OptionsError."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def watch(self) -> None:
        """Replaces servers that end, until `stop`, or until one ends that can't be replaced."""
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
            for server in self.servers.values():
                if server.alive:
                    continue
                if server.name in (JOB_MANAGER, JOB_SERVER):
                    self._failure = _ended(self.folder, server)
                    self._over.set()
                elif not self._over.wait(RESTART_SECONDS):
                    _LOG.warning("%s ended; starting another one", server.name)
                    server.start_again()

    def stop(self) -> None:
        """Stops all servers."""
        self._over.set()
        # The job server first, so that no job is submitted; the job manager last.
        others = [name for name in self.servers if name not in (JOB_MANAGER, JOB_SERVER)]
        for names in ([JOB_SERVER], others, [JOB_MANAGER]):
            processes.stop(*(self.servers[name] for name in names if name in self.servers))


@contextlib.contextmanager
def running(folder: Path | str, settings: Settings | None = None) -> Iterator[Supervisor]:
    """A context in which a cluster runs, whose folder has its logs; launchers find it there."""
    folder = Path(folder).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust.check_folder(folder, "flink up")
    # The lock is what says that the cluster runs: it ends with this process, however it dies.
    lock = locks.try_lock(folder / locks.NAME, _SECONDS_TO_LOCK)
    if lock is None:
        raise OptionsError(
            f"{folder}: found a running cluster; end it with Ctrl-C where `beamjax flink up` runs, "
            "or give another --folder"
        )
    supervisor = Supervisor(folder, flink_cluster.with_ports(settings or Settings()), {})
    watching = threading.Thread(target=supervisor.watch, name="beamjax flink", daemon=True)
    try:
        _start(supervisor)
        with flink_cluster.announced(folder, supervisor.cluster):
            watching.start()
            yield supervisor
    finally:
        supervisor.stop()
        if watching.is_alive():
            watching.join()
            supervisor.stop()  # what it has started meanwhile
        os.close(lock)


def _start(supervisor: Supervisor) -> None:
    folder, servers = supervisor.folder, supervisor.servers
    for name, command in flink_cluster.commands(folder, supervisor.cluster).items():
        servers[name] = ServerProcess(command, folder / f"{name}.log")
    end = time.monotonic() + _SECONDS_TO_START
    while (lacks := _lacks(supervisor)) is not None:
        for server in servers.values():
            if not server.alive:
                raise _ended(folder, server)
        if time.monotonic() > end:
            logs = "\n".join(f"{p.name}:\n{processes.tail(p.log, 5)}" for p in servers.values())
            raise OptionsError(
                f"{folder}: the cluster is not ready after {_SECONDS_TO_START:.0f} s, {lacks}; the "
                f"logs end with:\n{logs}"
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _lacks(supervisor: Supervisor) -> str | None:
    """What is missing at the start. A pool listens before it has loaded its modules."""
    for server in supervisor.servers.values():
        if server.name.startswith("workers") and READY not in processes.tail(server.log):
            return f"{server.name} has not loaded its modules"
    return incomplete(supervisor.cluster)


def _ended(folder: Path, server: ServerProcess) -> OptionsError:
    return OptionsError(
        f"{folder}: {server.name} ended with status {server.process.returncode}, so the cluster "
        f"ends; its log ends with:\n{processes.tail(server.log)}"
    )
