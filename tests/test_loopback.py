"""Servers of DirectRunner for its workers: nobody else reaches them."""

import socket
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import worker_handlers

import beamjax as bj
from beamjax.pipelines.loopback import loopback_only

N = 16
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 in the tables of Linux."""


def listening():
    """Addresses at which this process listens, as Linux writes them."""
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(str(link.readlink()))
        except OSError:  # it was closed
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


class Watch(threading.Thread):
    """Notes where this process listens, again and again."""

    def __init__(self):
        super().__init__(daemon=True)
        self.found, self.over = set(), threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            self.found |= listening()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


needs_proc = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into /proc")


@needs_proc
def test_it_sees_who_listens_everywhere():
    with socket.create_server(("0.0.0.0", 0)):
        assert not listening() <= LOOPBACK
    with socket.create_server(("127.0.0.1", 0)):
        assert "0100007F" in listening()


@needs_proc
@pytest.mark.parametrize("mode", ["multi_threading", "multi_processing"])
def test_nobody_else_reaches_the_workers(mode):
    program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    before = listening()
    options = {"shard_size": 8, "direct_running_mode": mode, "direct_num_workers": 2}
    with Watch() as watch:
        found = bj.run(program, np.ones(N, np.float32), options=options)
    np.testing.assert_allclose(found, N * np.sin(1), rtol=1e-6)
    opened = watch.found - before
    assert opened, "there was no server"
    assert opened <= LOOPBACK


def test_beam_is_left_as_it_was():
    before = worker_handlers.grpc
    with loopback_only():
        with loopback_only():
            assert worker_handlers.grpc is not before
            assert worker_handlers.grpc.StatusCode is before.StatusCode
        assert worker_handlers.grpc is not before
    assert worker_handlers.grpc is before
