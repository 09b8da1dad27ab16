"""Moving values is told apart from reading, computing and merging."""

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import transfer_time
from beamjax.meters import Meter
from beamjax.pipelines.store import Store
from beamjax.transfer_time import (
    from_device,
    is_copied,
    to_device,
    transfer_seconds,
    transferring,
)

N = 20
X = np.ones((N, 3), np.float32)


@bj.program(clients=N)
def total(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    return bj.reduce_sum(y) + bj.reduce(lambda a, b: a * b, y)


def test_what_is_within_itself_counts_once():
    before = transfer_seconds()
    with transferring():
        with transferring():
            time.sleep(0.05)
        assert transfer_seconds() == before
    with pytest.raises(KeyError), transferring():
        raise KeyError
    assert 0.05 <= transfer_seconds() - before < 0.1  # not twice as much


def test_each_thread_has_its_own():
    before = transfer_seconds()

    def move():
        with transferring():
            time.sleep(0.02)

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert transfer_seconds() == before


def test_a_lap_is_told_apart_from_the_transfers_in_it():
    meter = Meter("step", 8)
    time.sleep(0.02)
    with transferring():
        time.sleep(0.1)
    meter.lap("compute")
    with transferring():  # while nobody measures
        time.sleep(0.1)
    meter.resume()
    meter.lap("merge")
    meter.apart()
    assert 0.1 <= meter.total.transfer < 0.2
    assert 0.02 <= meter.total.compute < 0.12
    assert meter.total.merge < 0.1


def test_a_cpu_gets_the_arrays_and_an_accelerator_copies(monkeypatch):
    arrays = [X, np.int32(3)]
    assert not is_copied(None)
    assert not is_copied(jax.devices("cpu")[0])
    asked = []

    def put(values, device):
        asked.append(device)
        time.sleep(0.05)
        return [jnp.asarray(value) for value in values]

    monkeypatch.setattr(transfer_time.jax, "device_put", put)
    device, before = SimpleNamespace(platform="gpu"), transfer_seconds()
    copies = to_device(arrays, device)
    assert asked == [device]
    assert transfer_seconds() - before >= 0.05
    np.testing.assert_array_equal(copies[0], X)
    found = from_device(copies)
    assert [type(array) for array in found] == [np.ndarray, np.ndarray]
    assert [array.dtype for array in found] == [np.float32, np.int32]


@pytest.mark.parametrize(("name", "most"), [("_put", 1.0), ("_load", 1.0)])
def test_values_in_the_store_are_transfers(name, most, monkeypatch):
    real = getattr(Store, name)
    slow = lambda *args: [time.sleep(0.3), real(*args)][1]
    w = np.ones((3, 20_000), np.float32)  # too big to travel as an element
    with bj.launch(total, w, X, options={"shard_size": 8}) as job:
        job.result()
    monkeypatch.setattr(Store, name, slow)
    with bj.launch(total, w * 2, X, options={"shard_size": 8}) as job:
        job.result()
        progress = job.progress()
        assert progress.done.transfer >= 0.3
        assert progress.done.compute + progress.done.merge < most + progress.done.compile
        assert progress.shares["transfer"] > 0.1
        assert bj.open_job(job.folder).progress().done == progress.done
