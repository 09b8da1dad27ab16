"""Bundles on a CPU: shards are read while threads compute others, with the same bits and errors."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.runtime import ordered_pool
from beamjax.runtime.shard_executor import ShardExecutor

N = 83
X = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32) * 1e3


@bj.program(clients=N)
def reduced(x):
    y = bj.map_fn(jnp.tanh, x)
    small = bj.map_fn(lambda v: jnp.eye(3) + 1e-2 * jnp.sin(v[:3, None]), x)
    return bj.reduce_mean(x), bj.reduce_max(y), bj.reduce(lambda a, b: a @ b, small), y


@pytest.fixture
def computed_in(monkeypatch):
    """The threads that read and compute shards, which are always long enough for threads."""
    for name in ("SHARD_OPERATIONS", "PASS_OPERATIONS"):
        monkeypatch.setattr(ordered_pool, name, 0.0)
    threads = {"read": set(), "compute": set()}
    compute, read = ShardExecutor._called, ordered_pool.OrderedJobs.add

    def called(self, *args):
        threads["compute"].add(threading.get_ident())
        return compute(self, *args)

    def added(self, job):
        threads["read"].add(threading.get_ident())
        return read(self, job)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    monkeypatch.setattr(ordered_pool.OrderedJobs, "add", added)
    return threads


def test_a_bundle_reads_while_it_computes(computed_in):
    expected = bj.run(reduced, X, runner="local", options={"shard_size": 8, "local_threads": 1})
    two = {"direct_num_workers": 2, "direct_running_mode": "multi_threading"}
    for threads, flags, most in ((1, {}, 1), (3, {}, 3), (3, two, 2)):
        for times in computed_in.values():
            times.clear()
        options = {"shard_size": 8, "local_threads": threads, **flags}
        assert_same_bits(bj.run(reduced, X, options=options), expected)
        others = computed_in["compute"] - computed_in["read"]
        assert len(others) <= most
        assert flags or others  # threads take jobs from one queue, so some may have none


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_shard_that_fails_is_the_error(computed_in, monkeypatch, threads):
    real = ShardExecutor._called

    def called(self, call, shard, *rest):
        if shard.index >= 6:
            raise RuntimeError(f"no room for {shard.index}")
        return real(self, call, shard, *rest)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    options = {"shard_size": 8, "local_threads": threads}
    with pytest.raises(bj.WorkerError, match=r"shard 6 .*no room for 6"):
        bj.run(reduced, X, options=options)
    monkeypatch.setattr(ShardExecutor, "_called", real)
    assert len(bj.run(reduced, X, options=options)) == 4
