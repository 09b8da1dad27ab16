"""A pool of Beam's SDK workers: threads of one process that keeps loaded modules between jobs.

Beam's own pool identifies workers by their ids. All task managers of Flink use the same ids, so it
stops the worker of one when another asks for one. This pool identifies a worker by its id and by
the connection that asked for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import grpc

from beamjax import _beam_compat
from beamjax.pipelines import own_user

READY = "workers at"
"""The beginning of the line in the log which says that workers can start."""
RESTART_SECONDS = 1.0
"""Seconds before a pool or another server that ended is started again, so that one that can't start
does not use up a core."""
_STATE_CACHE_BYTES = 64 * 2**20
_LOG = logging.getLogger("beamjax")


class _Servicer:
    """The service of `BeamFnExternalWorkerPool`."""

    def __init__(self, loaded: threading.Event) -> None:
        self._loaded = loaded
        self._workers: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def StartWorker(self, request: Any, context: Any) -> Any:
        self._loaded.wait()
        response = _beam_compat.beam_fn_api_pb2.StartWorkerResponse
        try:
            worker = _beam_compat.SdkHarness(
                request.control_endpoint.url,
                worker_id=request.worker_id,
                state_cache_size=_STATE_CACHE_BYTES,
                data_buffer_time_limit_ms=-1,
            )
            key = context.peer(), request.worker_id
            with self._lock:
                before = self._workers.get(key)
                self._workers[key] = worker
            if before is not None:
                _beam_compat.end_worker(before)
            threading.Thread(target=self._run, args=(key, worker), daemon=True).start()
            return response()
        except Exception:
            return response(error=traceback.format_exc())

    def StopWorker(self, request: Any, context: Any) -> Any:
        with self._lock:
            worker = self._workers.pop((context.peer(), request.worker_id), None)
        if worker is not None:
            _beam_compat.end_worker(worker)
        return _beam_compat.beam_fn_api_pb2.StopWorkerResponse()

    def _run(self, key: tuple[str, str], worker: Any) -> None:
        """Runs a worker until it is stopped, or the connection to its runner ends."""
        # A runner that connects again is another peer, which can't stop it with `StopWorker`. So
        # the worker has to clean up itself.
        try:
            worker.run()
        except Exception as error:
            # As text: a log record with the error itself would keep its frames, and so the worker,
            # alive.
            _LOG.warning("the worker %s of %s ended: %s", *reversed(key), str(error))
            _beam_compat.end_worker(worker)
            _beam_compat.close_worker(worker)
        finally:
            _beam_compat.close_control_channel(worker)
            with self._lock:
                if self._workers.get(key) is worker:
                    del self._workers[key]


def serve(host: str, port: int, loaded: threading.Event) -> Any:
    """Starts a pool in this process and returns its server; requests wait until `loaded` is set."""
    # Clients of this user, and on other machines that reach the address, can run any code in this
    # process.
    options = [
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
    own = own_user.OwnUserOnly()
    threads = _beam_compat.shared_unbounded_instance()
    server = grpc.server(threads, options=options, interceptors=[own])
    services = _beam_compat.beam_fn_api_pb2_grpc
    services.add_BeamFnExternalWorkerPoolServicer_to_server(_Servicer(loaded), server)
    own.ports.add(server.add_insecure_port(f"{host}:{port}"))
    server.start()
    return server


def supervise(arguments: list[str]) -> None:
    """Runs a pool as a child process, and starts it again whenever it dies."""
    command = [sys.executable, "-m", "beamjax.pipelines.clusters.worker_pool", *arguments]
    command.append(f"--supervisor={os.getpid()}")
    while True:
        status = subprocess.call(command)
        print(f"the pool ended with status {status}; starting another one", flush=True)
        time.sleep(RESTART_SECONDS)


def main(argv: list[str] | None = None) -> None:
    """Runs a pool until it is stopped."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m beamjax.pipelines.clusters.worker_pool")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=50001, help="port to listen at")
    parser.add_argument("--supervisor", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.supervisor is None:
        supervise(argv)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    loaded = threading.Event()
    # Listen before the slow imports: Flink counts a refused connection as a failed attempt.
    server = serve(arguments.host, arguments.port, loaded)
    import jax

    import beamjax.pipelines.worker.map_shards  # noqa: F401  (so that the first job finds it loaded)

    # Starts JAX before the first job, so a machine without a usable device fails at once.
    print(f"devices: {jax.devices()}", flush=True)
    loaded.set()
    address = f"{arguments.host}:{arguments.port}"
    print(f"{READY} {address}, process {os.getpid()}", flush=True)
    while os.getppid() == arguments.supervisor:  # it changes when the supervisor ends
        time.sleep(0.5)
    server.stop(0)
    os._exit(1)  # threads of workers may hang


if __name__ == "__main__":
    main()
