"""Job servers that this process starts for itself, and stops when it ends."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions, PortableOptions

from beamjax.errors import OptionsError
from beamjax.pipelines import own_user
from beamjax.pipelines.clusters import guard, jars, processes
from beamjax.storage import temporary

_SECONDS_TO_START = 90.0
_SECONDS_TO_ANSWER = 60.0
_ATTEMPTS = 3
_HEAP = 1024  # MiB of the Java heap of a job server


@dataclass
class JobServer:
    """A job server that is a child of this process."""

    endpoint: str
    process: subprocess.Popen[bytes]  # its guard, which stops it if this process is killed
    folder: Path  # of its log and its temporary files
    owner: int  # the pid of the process that started it; forked processes must not stop it

    @property
    def log(self) -> Path:
        """The path of its log."""
        return self.folder / "log"

    @property
    def alive(self) -> bool:
        """Whether it still runs, as a child of this process."""
        return self.owner == os.getpid() and self.process.poll() is None

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
        if self.owner != os.getpid():
            return
        self.process.terminate()
        self.process.wait()
        temporary.remove(str(self.folder))


_servers: dict[Any, JobServer] = {}
_lock = threading.Lock()


def serve(name: str, key: Any, command: Callable[[list[int], Path], list[str]]) -> JobServer:
    """The job server of this process for a key. It is started if there is none or it has ended."""
    # `command` gets three free ports, at the first of which the server takes jobs, and a folder.
    with _lock:
        found = _servers.get(key)
        if found is None or not found.answers():
            if found is not None:
                found.stop()
            _servers[key] = found = _start(name, command)
        return found


def is_own(endpoint: str) -> bool:
    """Whether a job server of this process takes jobs at an address."""
    return any(server.endpoint == endpoint for server in list(_servers.values()))


def names_one(options: PipelineOptions, runner: str) -> bool:
    """Whether Beam's options for a runner, "flink" or "spark", name a job server already."""
    given = options.get_all_options(drop_default=True)
    names = ("job_endpoint", f"{runner}_job_server_jar", f"{runner}_submit_uber_jar")
    return any(given.get(name) for name in names)


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
        return jars.java(_HEAP, [loopback, classpath], *java_options, *called)

    server = serve(name, (name, *arguments), command)
    return with_defaults(options, job_endpoint=server.endpoint)


def stop_all() -> None:
    """Stops the job servers of this process. The next run starts new ones."""
    with _lock:
        while _servers:
            _servers.popitem()[1].stop()


def with_defaults(options: PipelineOptions, **defaults: Any) -> PipelineOptions:
    """Options with defaults for those that are not given. Beam need not know their names."""
    given = options.get_all_options(drop_default=True, retain_unknown_options=True)
    return PipelineOptions.from_dictionary({**defaults, **given})


def loops_back(options: PipelineOptions) -> bool:
    """Whether workers are threads of the process that launches the pipeline."""
    found = options.view_as(PortableOptions).environment_type
    return found == "LOOPBACK" and not _process_workers(options)


def _process_workers(options: PipelineOptions) -> bool:
    return bool(options.view_as(DebugOptions).lookup_experiment("use_loopback_process_worker"))


def _start(name: str, command: Callable[[list[int], Path], list[str]]) -> JobServer:
    tail = ""
    # Another process may take a free port before the server does.
    for _ in range(_ATTEMPTS):
        folder = Path(temporary.new_name(None, name.lower()))
        temporary.make(str(folder))
        ports = processes.free_ports(3)
        with open(folder / "log", "wb") as log:
            # In a session of its own, Ctrl-C does not reach it: this process stops it when it ends.
            process = subprocess.Popen(
                guard.guarded(command(ports, folder), str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        server = JobServer(f"{processes.LOOPBACK}:{ports[0]}", process, folder, os.getpid())
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
