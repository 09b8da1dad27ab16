"""Servers that Beam opens in this process: nobody else reaches them."""

import socket

import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer
from listeners import IS_TOLD, Watch, for_others, listening

import beamjax as bj
from beamjax.pipelines.runners.loopback import loopback_only

N = 16
needs_proc = pytest.mark.skipif(not IS_TOLD, reason="looks into /proc")


@needs_proc
def test_it_sees_who_listens_everywhere():
    with socket.create_server(("0.0.0.0", 0)):
        assert for_others(listening()) == {"00000000"}
    with socket.create_server(("::", 0), family=socket.AF_INET6):
        assert for_others(listening()) == {"0" * 32}
    for address in ("127.0.0.1", "127.0.0.3"):
        with socket.create_server((address, 0)):
            assert listening()
            assert not for_others(listening())


@needs_proc
@pytest.mark.parametrize(
    "mode", ["multi_threading", pytest.param("multi_processing", marks=pytest.mark.long)]
)
def test_nobody_else_reaches_the_workers(mode):
    program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    before = listening()
    options = {"shard_size": 8, "direct_running_mode": mode, "direct_num_workers": 2}
    with Watch() as watch:
        found = bj.run(program, np.ones(N, np.float32), options=options)
    np.testing.assert_allclose(found, N * np.sin(1), rtol=1e-6)
    assert watch.found - before, "there was no server"
    assert not for_others(watch.found)


@needs_proc
def test_nobody_else_reaches_the_pool_that_gives_workers_to_a_runner():
    before = listening()
    with Watch() as watch:
        with loopback_only():
            address, server = BeamFnExternalWorkerPoolServicer.start()
        with socket.create_connection(("localhost", int(address.rpartition(":")[2]))):
            pass
        found = listening() - before
        server.stop(0)
    assert len(found) == 1, "a free port of one address may be taken at the other"
    assert not for_others(watch.found)


def test_beam_is_left_as_it_was():
    before = worker_handlers.grpc
    with loopback_only():
        with loopback_only():
            assert worker_handlers.grpc is not before
            assert worker_handlers.grpc.StatusCode is before.StatusCode
        assert worker_handlers.grpc is not before
    assert worker_handlers.grpc is before
