"""Job servers that this process starts for itself, and stops when it ends."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions, PortableOptions

from beamjax.errors import OptionsError
from beamjax.pipelines import own_user
from beamjax.pipelines.clusters import guard, jars, processes
from beamjax.pipelines.clusters.processes import ServerProcess
from beamjax.storage import temporary

_SECONDS_TO_START = 90.0
_SECONDS_TO_ANSWER = 60.0
_ATTEMPTS = 3
_HEAP_MIB = 1024  # of the Java heap of a job server


class JobServer(ServerProcess):
    """A job server that this process uses alone, with a folder of its own."""

    def __init__(self, command: list[str], folder: Path, endpoint: str):
        self.folder = folder  # of its log and its temporary files
        self.endpoint = endpoint
        # The guard stops it, and removes the folder, if this process is killed.
        super().__init__(guard.guarded(command, str(folder)), folder / "log")

    @property
    def listens(self) -> bool:
        """Whether a server takes connections at its port; OptionsError if it is another user's."""
        own_user.check_listener(self.endpoint)
        return processes.listens(processes.LOOPBACK, int(self.endpoint.rpartition(":")[2]))

    def answers(self) -> bool:
        """Whether it takes jobs."""
        # A server that was just killed may still appear alive, and its port may still accept
        # connections. So this waits until it answers a request.
        end = time.monotonic() + _SECONDS_TO_ANSWER
        with grpc.insecure_channel(self.endpoint) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            while self.alive and self.listens and time.monotonic() < end:
                try:
                    call(b"", timeout=1)
                    return True
                except grpc.RpcError as error:
                    # Beam's servers have no health service, but they do answer.
                    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                        return True
                time.sleep(0.05)
        return False

    def stop(self) -> None:
        """Stops it and removes its folder."""
        if self.owner == os.getpid():
            processes.stop(self)
            temporary.remove(str(self.folder))


_servers: dict[Any, JobServer] = {}
_lock = threading.Lock()


def serve(name: str, key: Any, command: Callable[[list[int], Path], list[str]]) -> JobServer:
    """The job server of this process for a key. It is started if there is none or it has ended."""
    # `command` gets three free ports, at the first of which the server takes jobs, and a folder.
    with _lock:
        server = _servers.get(key)
        if server is None or not server.answers():
            if server is not None:
                server.stop()
            _servers[key] = server = _start(name, command)
        return server


def is_own(endpoint: str) -> bool:
    """Whether a job server of this process takes jobs at an address."""
    return any(server.endpoint == endpoint for server in list(_servers.values()))


def connected_to_java(
    options: PipelineOptions,
    name: str,
    driver: str,
    arguments: Sequence[str],
    embedded: bool,
    java_options: Sequence[str] = (),
) -> PipelineOptions:
    """Options with the endpoint of one of Beam's Java job servers, which is started if need be."""
    if embedded:  # it runs jobs itself, with threads of this process as workers
        options = with_defaults(options, environment_type="LOOPBACK")
    classpath = jars.classpath(name.lower())
    # A cluster has Beam's jars, so they are not sent with each pipeline.
    others = ["ClasspathScanningResourcesDetector"] if name == "Flink" and not embedded else []
    loopback = jars.own_classes(classpath, "ServerFactory", *others)

    def command(ports: list[int], folder: Path) -> list[str]:
        called = jars.job_server(driver, ports, folder, *arguments)
        return jars.java(_HEAP_MIB, [loopback, classpath], *java_options, *called)

    server = serve(name, (name, *arguments), command)
    return with_defaults(options, job_endpoint=server.endpoint)


def stop_all() -> None:
    """Stops the job servers of this process. The next run starts new ones."""
    with _lock:
        while _servers:
            _servers.popitem()[1].stop()


def with_defaults(options: PipelineOptions, **defaults: Any) -> PipelineOptions:
    """Options with defaults for those that are not given. Beam need not know their names."""
    flags = options.get_all_options(drop_default=True, retain_unknown_options=True)
    return PipelineOptions.from_dictionary({**defaults, **flags})


def loops_back(options: PipelineOptions) -> bool:
    """Whether workers are threads of the process that launches the pipeline."""
    kind = options.view_as(PortableOptions).environment_type
    return kind == "LOOPBACK" and not _process_workers(options)


def _process_workers(options: PipelineOptions) -> bool:
    return bool(options.view_as(DebugOptions).lookup_experiment("use_loopback_process_worker"))


def _start(name: str, command: Callable[[list[int], Path], list[str]]) -> JobServer:
    tail = ""
    # Another process may take a free port before the server does.
    for _ in range(_ATTEMPTS):
        folder = Path(temporary.new_name(None, name.lower()))
        temporary.make(str(folder))
        ports = processes.free_ports(3)
        endpoint = f"{processes.LOOPBACK}:{ports[0]}"
        server = JobServer(command(ports, folder), folder, endpoint)
        atexit.register(server.stop)  # before the wait, which the end of this process may interrupt
        try:
            if _ready(server):
                return server
            tail = processes.tail(server.log)
        except OptionsError as error:  # another user was faster
            tail = f"  {error}"
        server.stop()
    raise OptionsError(
        f"runner: the job server of {name} does not start; its log ends with:\n{tail}"
    )


def _ready(server: JobServer) -> bool:
    """Waits until a server accepts connections; returns False if it ends or takes too long."""

    def done() -> bool:
        return not server.alive or server.listens

    return processes.wait_until(done, _SECONDS_TO_START) and server.alive
