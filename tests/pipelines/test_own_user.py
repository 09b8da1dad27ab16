"""Sockets of other users: servers refuse them, and clients do not connect to them."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from other_user import NEEDS_ROOT, NOBODY, answer_to, taken

import beamjax as bj
from beamjax.errors import OptionsError
from beamjax.pipelines import own_user
from beamjax.pipelines.clusters import job_servers, processes, worker_pool
from beamjax.pipelines.own_user import OwnUserOnly, check_listener, serves
from beamjax.pipelines.runners import loopback

LINUX = pytest.mark.skipif(not own_user.is_known(), reason="this system does not name users")

STOP_WORKER = "/org.apache.beam.model.fn_execution.v1.BeamFnExternalWorkerPool/StopWorker"


@pytest.fixture
def pool():
    (port,) = processes.free_ports(1)
    loaded = threading.Event()
    server = worker_pool.serve("127.0.0.1", port, loaded)
    yield f"127.0.0.1:{port}"
    server.stop(0)


def test_a_pool_answers_its_own_user(pool):
    assert answer_to(os.geteuid(), pool, STOP_WORKER) == "answered"


@NEEDS_ROOT
def test_a_pool_refuses_another_user(pool):
    assert answer_to(NOBODY, pool, STOP_WORKER) == "PERMISSION_DENIED"


@NEEDS_ROOT
def test_servers_of_beam_in_this_process_refuse_another_user():
    """That of workers which are threads of this process, for Prism and others."""
    from apache_beam.runners.worker import worker_pool_main

    with loopback.loopback_only():
        address, server = worker_pool_main.BeamFnExternalWorkerPoolServicer.start()
    try:
        port = address.rpartition(":")[2]
        assert answer_to(os.geteuid(), f"127.0.0.1:{port}", STOP_WORKER) == "answered"
        assert answer_to(NOBODY, f"127.0.0.1:{port}", STOP_WORKER) == "PERMISSION_DENIED"
    finally:
        server.stop(0)


@pytest.mark.parametrize("mode", ["multi_threading", "multi_processing"])
def test_workers_of_the_in_memory_runner_are_answered(mode):
    program = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(x))
    options = {"direct_running_mode": mode, "direct_num_workers": 2}
    found = bj.run(program, np.arange(64, dtype=np.float32), options=options)
    assert float(found) == 2016


KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


class Generic(grpc.GenericRpcHandler):
    """Answers each kind of call with its request."""

    def service(self, details):
        kind = details.method.removeprefix("/")
        if kind not in KINDS:
            return None
        streams = kind.split("_")

        def behavior(request, context):
            data = b"".join(request) if streams[0] == "stream" else request
            return iter([data]) if streams[1] == "stream" else data

        return getattr(grpc, f"{kind}_rpc_method_handler")(behavior)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answered", [True, False])
def test_every_kind_of_call_is_checked(kind, answered, monkeypatch):
    own = OwnUserOnly()
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[own])
    server.add_generic_rpc_handlers([Generic()])
    own.ports.add(port := server.add_insecure_port("127.0.0.1:0"))
    server.start()
    asked = []
    monkeypatch.setattr(own_user, "serves", lambda *args: asked.append(args) or answered)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request, reply = kind.split("_")
            data = iter([b"a", b"b"]) if request == "stream" else b"ab"
            call = getattr(channel, kind)(f"/{kind}")

            def result():
                found = call(data, timeout=30)
                return b"".join(found) if reply == "stream" else found

            if answered:
                assert result() == b"ab"
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    result()
                assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/none")(b"", timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(0)
    ((peer, ports),) = asked
    assert peer.startswith("ipv4:127.0.0.1:")
    assert ports == {port}


# --- the tables of the system


@LINUX
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "::1"])
def test_sockets_of_this_user(host):
    try:
        server = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError:
        pytest.skip(f"no {host} here")
    own = server.getsockname()[1]
    client = socket.create_connection(server.getsockname()[:2])
    with server, server.accept()[0]:
        peer_host, port = client.getsockname()[:2]
        peer = f"ipv6:%5B::1%5D:{port}" if ":" in host else f"ipv4:{peer_host}:{port}"
        assert serves(peer, {own})
        assert not serves(peer, {own + 1})  # a connection to another server
        check_listener(f"[{host}]:{own}" if ":" in host else f"{host}:{own}")
        client.close()
        assert not serves(peer, {own})  # it says nothing any more


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid ...
   0: {client} {server} {state} 00000000:00000000 00:00000000 00000000 {uid:5} 0 {inode} 1 0 20
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the order of bytes in the table")
@pytest.mark.parametrize(
    ("peer", "row", "expected"),
    [
        ("ipv4:127.0.0.1:8080", {}, True),
        ("ipv4:127.0.0.1:8080", {"uid": 0}, True),
        ("ipv4:127.0.0.1:8080", {"uid": 1234567}, False),
        ("ipv4:127.0.0.1:8080", {"uid": 0, "state": "06"}, False),  # closed sockets have user 0
        ("ipv4:127.0.0.1:8080", {"uid": 0, "inode": 0}, False),
        ("ipv4:127.0.0.1:8081", {}, False),
        ("ipv4:127.0.0.1:8080", {"server": "0100007F:2000"}, False),
        ("ipv4:10.0.0.1:8080", {}, True),  # of another machine
        ("ipv4:10.0.0.1:8080", {"client": "0100000A:1F90", "uid": 1234567}, False),
        ("ipv6:%5B::ffff:127.0.0.1%5D:8080", {"uid": 1234567}, False),
        ("ipv6:%5B::1%5D:8080", {"client": f"{'0' * 24}01000000:1F90"}, True),
        ("ipv6:%5B::1%5D:8080", {"client": f"{'0' * 24}01000000:1F90", "uid": 1234567}, False),
        ("unix:/tmp/socket", {}, False),
    ],
)
def test_which_clients_are_served(peer, row, expected, tmp_path, monkeypatch):
    known = {"client": "0100007F:1F90", "server": "0100007F:1F91", "state": "01", "inode": 7}
    (tmp_path / "tcp").write_text(TABLE.format(**{**known, "uid": os.geteuid(), **row}))
    monkeypatch.setattr(own_user, "_TABLES", (tmp_path / "tcp", tmp_path / "none"))
    assert serves(peer, {0x1F91}) == expected
    monkeypatch.setattr(own_user, "_TABLES", (tmp_path / "none",) * 2)
    assert serves(peer, {0x1F91}) == (peer != "unix:/tmp/socket")  # another system


@NEEDS_ROOT
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_port_that_another_user_has_taken(host, tmp_path):
    (port,) = processes.free_ports(1)
    with taken(host, port):
        where = f"[::1]:{port}" if ":" in host else f"localhost:{port}"
        with pytest.raises(OptionsError, match=f"found a server of user {NOBODY}, expected"):
            check_listener(where)
        check_listener("localhost:1")
        if ":" not in host:
            sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
            server = job_servers.JobServer(sleep, tmp_path, f"127.0.0.1:{port}")
            try:
                with pytest.raises(OptionsError, match=f"found a server of user {NOBODY}"):
                    server.answers()
            finally:
                processes.stop(server)


@NEEDS_ROOT
def test_a_worker_process_takes_no_work_from_another_user():
    (port,) = processes.free_ports(1)
    command = [sys.executable, "-m", "beamjax.pipelines.worker.direct_worker", str(os.getpid())]
    control = {"CONTROL_API_SERVICE_DESCRIPTOR": f'url: "localhost:{port}"'}
    with taken("127.0.0.1", port):
        done = subprocess.run(command, env=os.environ | control, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"localhost:{port}: found a server of user {NOBODY}" in done.stderr


def test_names_that_are_not_checked():
    for endpoint in ("no-such-host.invalid:80", "localhost:", "embed", ""):
        check_listener(endpoint)
