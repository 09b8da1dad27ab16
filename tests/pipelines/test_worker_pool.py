"""The pool of workers that stays: what it keeps of workers whose runner has gone."""

import collections
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2 as api
from apache_beam.portability.api import beam_fn_api_pb2_grpc as services
from apache_beam.runners.worker.sdk_worker import SdkHarness

from beamjax.pipelines.clusters import processes, worker_pool


class Runner(services.BeamFnControlServicer):
    """A runner that has no work, and ends the connections of its workers as it is told."""

    def __init__(self):
        self.ended, self.aborts = threading.Event(), False

    def Control(self, responses, context):
        self.ended.wait()
        if self.aborts:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the task manager is gone")
        yield from ()


class Listener(services.BeamFnControlServicer):
    """A runner that has no work, and ends a connection when the worker does."""

    def Control(self, responses, context):
        collections.deque(responses, maxlen=0)
        yield from ()


@pytest.fixture
def started():
    """Starts servers at loopback addresses; the pool, and runners that it connects to."""
    servers = []

    def start(runner):
        servers.append(server := grpc.server(ThreadPoolExecutor(8)))
        services.add_BeamFnControlServicer_to_server(runner, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    (port,) = processes.free_ports(1)
    loaded = threading.Event()
    loaded.set()
    servers.append(worker_pool.serve("127.0.0.1", port, loaded))
    yield f"127.0.0.1:{port}", start
    for server in servers:
        server.stop(0)


def alive(prefix):
    gc.collect()
    workers = [each for each in gc.get_objects() if isinstance(each, SdkHarness)]
    return sorted(w._worker_id for w in workers if str(w._worker_id).startswith(prefix))


def test_a_worker_goes_with_the_connection_to_its_runner(started):
    """Each connection of a task manager is a peer of its own: a later one can't stop a worker."""
    pool, start = started
    runners = {"ended": Runner(), "aborted": Runner(), "stays": Runner()}
    runners["aborted"].aborts = True
    addresses = {name: start(runner) for name, runner in runners.items()}

    def ask(method, **fields):
        with grpc.insecure_channel(pool) as channel:  # a connection of its own
            request = getattr(api, f"{method}Request")(**fields)
            return getattr(services.BeamFnExternalWorkerPoolStub(channel), method)(request)

    for name, address in addresses.items():
        endpoint = {"url": address}
        ask("StartWorker", worker_id=f"pool-{name}", control_endpoint=endpoint)
    assert alive("pool-") == ["pool-aborted", "pool-ended", "pool-stays"]
    for name in ("ended", "aborted"):
        runners[name].ended.set()
        ask("StopWorker", worker_id=f"pool-{name}")
    ask("StopWorker", worker_id="pool-stays")  # that of another task manager has the same name
    try:
        assert processes.wait_until(lambda: alive("pool-") == ["pool-stays"], 30), alive("pool-")
    finally:
        runners["stays"].ended.set()


def test_a_worker_ends_when_it_is_stopped(started):
    pool, start = started
    endpoint = {"url": start(Listener())}
    with grpc.insecure_channel(pool) as channel:
        stub = services.BeamFnExternalWorkerPoolStub(channel)
        # The same one is asked for twice where the answer to the first request was lost.
        for _ in range(2):
            request = api.StartWorkerRequest(worker_id="twice", control_endpoint=endpoint)
            assert not stub.StartWorker(request).error
        assert processes.wait_until(lambda: alive("twice") == ["twice"], 30), alive("twice")
        stub.StopWorker(api.StopWorkerRequest(worker_id="twice"))
        assert processes.wait_until(lambda: alive("twice") == [], 30), alive("twice")
