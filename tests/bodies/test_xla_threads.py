"""Several CPU clients in one process: which of them computes, and that all give the same bits."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import beamjax as bj
from beamjax import spans
from beamjax.bodies import xla_threads
from beamjax.bodies.xla_threads import CpuClients, clients_of, compute_device, cpu_devices
from beamjax.storage import shared_cache

pytestmark = pytest.mark.versions


@pytest.fixture
def three_clients(monkeypatch):
    """The clients of 2 threads in a process that has 5 cores, of which none has started."""
    monkeypatch.setattr(xla_threads, "available_cores", lambda: 5)
    monkeypatch.setattr(xla_threads, "_by_threads", {})
    shared_cache.reset()  # loaded plans have devices of other clients
    cpu_devices(2)
    yield xla_threads._by_threads[2]
    shared_cache.reset()


def client_numbers(clients):
    """The numbers of the clients that compute, in four contexts within each other."""
    with contextlib.ExitStack() as running:
        devices = [running.enter_context(clients.least_busy()) for _ in range(4)]
    return [[clients.devices(n)[0] for n in range(clients.count)].index(each) for each in devices]


def test_computations_at_the_same_time_are_spread_over_clients(three_clients):
    assert three_clients.count == 3
    for _ in range(3):  # one after the other: the others need not start
        with three_clients.least_busy() as device:
            assert device is compute_device(2)
    assert len(three_clients._devices) == 1
    assert client_numbers(three_clients) == [0, 1, 2, 0]
    assert client_numbers(three_clients) == [0, 1, 2, 0]
    assert clients_of(compute_device(2)) is three_clients
    assert clients_of(cpu_devices(2)[1]) is None
    assert clients_of(jax.devices("cpu")[0]) is None
    assert clients_of(None) is None


def test_one_client_has_all_cores_if_it_has_as_many_threads(monkeypatch):
    for cores, threads, count in [(1, 4, 1), (4, 4, 1), (5, 4, 2), (16, 4, 4), (3, 1, 3)]:
        monkeypatch.setattr(xla_threads, "available_cores", lambda cores=cores: cores)
        assert CpuClients(threads).count == count


@bj.program(placements={"members": None})
def factors(w, x):
    """Products, a factorization by LAPACK, and random numbers, of members and of pairs of them."""

    def body(x):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(3), x.size), x.shape)
        return jnp.tanh(x @ w) + 0.1 * noise, jnp.linalg.svd(x, compute_uv=False)

    made, values = bj.map_fn(body, x)
    return bj.reduce_mean(made), bj.reduce(jnp.maximum, values), jnp.cumsum(values, axis=0)


def example(n=21):
    rng = np.random.default_rng(0)
    return rng.normal(size=(4, 4)).astype(np.float32), rng.normal(size=(n, 6, 4)).astype(np.float32)


def bits(runner, **options):
    options = {"shard_size": 8, "xla_threads": 2, "local_threads": 1, **options}
    found = bj.run(factors, *example(), runner=runner, options=options)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)]


def no_code(*_):
    raise ValueError("no code")


def use_disk_cache(folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture(params=["moved", "on disk", "compiled again"])
def machine_code(request, monkeypatch, tmp_path):
    """How other clients get the machine code of the first one."""
    shared_cache.reset()
    spans.loaded_from_disk.clear()
    if request.param == "compiled again":
        monkeypatch.setattr(serialize_executable, "serialize", no_code)
    before = jax.config.jax_compilation_cache_dir
    try:
        use_disk_cache(str(tmp_path) if request.param == "on disk" else None)
        yield request.param
    finally:
        use_disk_cache(before)
        spans.loaded_from_disk.set()  # by other tests


@pytest.fixture
def events():
    """The events of JAX in this test."""
    found = []

    def listen(event, *_, **__):
        found.append(event.split("/")[-1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
    jax.monitoring.unregister_event_listener(listen)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_each_client_gives_the_same_bits(three_clients, monkeypatch, events, runner, machine_code):
    one = bits(runner)
    if machine_code == "on disk":  # as in a new process
        shared_cache.reset()
        assert bits(runner) == one
        assert "cache_hits" in events
    assert len(three_clients._devices) == 1
    with three_clients.least_busy():  # so that shards are computed on the second one
        events.clear()
        assert bits(runner) == one
        compiled, found = (events.count(e) for e in ("backend_compile_duration", "cache_hits"))
        events.clear()
        assert bits(runner) == one
        assert events == []
    assert len(three_clients._devices) == 2
    assert bool(compiled) == (machine_code != "moved")
    assert found == (compiled if machine_code == "on disk" else 0)


def test_threads_compute_on_all_clients(three_clients):
    one = bits("local")
    for _ in range(3):
        assert bits("local", local_threads=6) == one


def test_bodies_that_call_back_stay_on_the_first_client(three_clients):
    seen = []

    @bj.program(clients=16)
    def program(x):
        def body(x):
            jax.debug.callback(lambda x: seen.append(float(x)), x)
            return x + 1

        return bj.reduce_sum(bj.map_fn(body, x))

    with three_clients.least_busy():
        options = {"xla_threads": 2, "shard_size": 8}
        found = bj.run(program, np.arange(16.0, dtype=np.float32), runner="local", options=options)
    assert found == 136
    assert sorted(seen) == list(range(16))
    assert len(three_clients._devices) == 1
