"""Jobs on devices: in order of the results, one at a time on each, a few ahead."""

import gc
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.pipelines.worker.devices import AHEAD, CpuTurn, DeviceExecutor, _turns
from beamjax.runtime import shard_times
from beamjax.runtime.shard_executor import ShardExecutor

TWO = ("first", "second")


def run(executor, jobs):
    return [found for job in jobs for found in executor.add(job)] + list(executor.rest())


def test_results_come_in_order_and_devices_in_turn():
    def job(number, index):
        time.sleep(0.002 * ((number * 7) % 3))
        return number, index

    for devices in ((None,), ("a",), TWO, tuple(range(5))):
        for count in (0, 1, 2, 7, 20):
            jobs = [lambda index, number=number: job(number, index) for number in range(count)]
            expected = [(i, i % len(devices)) for i in range(count)]
            assert run(DeviceExecutor(devices), jobs) == expected
    # Without a device jobs run in the thread that adds them.
    executor = DeviceExecutor((None,))
    assert list(executor.add(lambda index: threading.get_ident())) == [threading.get_ident()]
    (elsewhere,) = run(DeviceExecutor(("a",)), [lambda index: threading.get_ident()])
    assert elsewhere != threading.get_ident()


def test_a_device_has_one_job_at_a_time_though_bundles_share_it():
    busy = {0: 0, 1: 0}
    most = []

    def job(index):
        busy[index] += 1
        most.append(busy[index])
        time.sleep(0.002)
        busy[index] -= 1

    threads = [
        threading.Thread(target=run, args=(DeviceExecutor(TWO), [job] * 6)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 18


def test_devices_work_at_the_same_time():
    both = threading.Barrier(2, timeout=60)
    assert sorted(run(DeviceExecutor(TWO), [lambda index: both.wait()] * 2)) == [0, 1]


def test_few_jobs_wait():
    gate, started = threading.Event(), []

    def job(index):
        started.append(index)
        gate.wait(60)
        return len(started)

    executor = DeviceExecutor(TWO)
    for _ in range(AHEAD * len(TWO) - 1):
        assert list(executor.add(job)) == []
    gate.set()
    assert len(list(executor.add(job))) == 1
    assert len(list(executor.rest())) == AHEAD * len(TWO) - 1


def test_errors_come_with_their_turn():
    def fail(index):
        raise ValueError("no")

    executor = DeviceExecutor(("a",))
    assert list(executor.add(fail)) == []
    with pytest.raises(ValueError, match="no"):
        list(executor.add(lambda index: 1))
    executor.cancel()
    assert list(executor.rest()) == []
    assert run(executor, [lambda index: 2]) == [2]


def test_what_is_cancelled_does_not_start():
    gate, started = threading.Event(), []
    executor = DeviceExecutor(("a",))
    held = executor.add(lambda index: gate.wait(60))
    assert list(held) == []
    other = DeviceExecutor(("a",))
    assert list(other.add(started.append)) == []
    other.cancel()
    gate.set()
    assert run(DeviceExecutor(("a",)), [lambda index: "after"]) == ["after"]
    assert started == []


# --- bundles on a CPU


def test_no_two_bundles_have_one_thread():
    first, second = CpuTurn(), CpuTurn()
    assert first.device != second.device
    _, number = first.device
    assert number in _turns
    del first
    gc.collect()
    assert number not in _turns


N = 83
X = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32) * 1e3


@bj.program(clients=N)
def reduced(x):
    y = bj.map_fn(jnp.tanh, x)
    small = bj.map_fn(lambda v: jnp.eye(3) + 1e-2 * jnp.sin(v[:3, None]), x)
    return bj.reduce_mean(x), bj.reduce_max(y), bj.reduce(lambda a, b: a @ b, small), y


@pytest.fixture
def read_in(monkeypatch):
    """The threads in which shards are read and computed, with shards that are always long."""
    for name in ("LONG_IN_BUNDLE", "SURELY_LONG"):
        monkeypatch.setattr(shard_times, name, 0.0)
    monkeypatch.setattr(shard_times, "threads_in_bundle", lambda body, most: most)
    threads = []
    compute = ShardExecutor._called

    def called(self, *args):
        thread = threading.current_thread()
        threads.append((thread.name, thread.ident))
        return compute(self, *args)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    return threads


def idents(threads):
    return {ident for name, ident in threads if name.startswith("beamjax-device")}


def test_a_bundle_reads_while_it_computes(read_in):
    expected = bj.run(reduced, X, runner="local", options={"shard_size": 8, "local_threads": 1})
    two = {"direct_num_workers": 2, "direct_running_mode": "multi_threading"}
    before = set(_turns)
    for threads, flags, most in ((1, {}, 1), (3, {}, 3), (3, two, 2)):
        read_in.clear()
        found = bj.run(reduced, X, options={"shard_size": 8, "local_threads": threads, **flags})
        assert_same_bits(found, expected)
        assert len(idents(read_in)) <= most
        assert flags or len(idents(read_in)) == most
        assert _turns <= before


@pytest.mark.parametrize("threads", [1, 3])
def test_a_shard_that_fails_is_told_of_in_the_order_of_the_shards(read_in, monkeypatch, threads):
    real = ShardExecutor._called

    def called(self, call, shard, *rest):
        if shard.index >= 6:
            raise RuntimeError(f"no room for {shard.index}")
        return real(self, call, shard, *rest)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    options, before = {"shard_size": 8, "local_threads": threads}, len(_turns)
    with pytest.raises(bj.WorkerError, match=r"shard 6 .*no room for 6"):
        bj.run(reduced, X, options=options)
    monkeypatch.setattr(ShardExecutor, "_called", real)
    assert len(bj.run(reduced, X, options=options)) == 4
    assert len(_turns) <= before + threads  # as long as somebody looks at the traceback
