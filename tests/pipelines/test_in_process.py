"""Server values that stay in memory where one process runs all of a pipeline."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import PROCESSES, THREADS
from helpers import assert_same_bits

import beamjax as bj
from beamjax.pipelines import run as runs
from beamjax.pipelines.resident import executor
from beamjax.pipelines.values import store as in_process
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import INLINE_BYTES, Store

SIZE = 1 << 20


@pytest.fixture
def store(tmp_path):
    store = Store(str(tmp_path))
    in_process.open_memory_store(store.root, limit=3 * 4 * SIZE)
    yield store
    in_process.close_memory_store(store.root)


def files_of(store):
    return os.listdir(store.root)


def test_a_value_that_nobody_changes_is_kept_as_it_is(store):
    value = jnp.arange(SIZE, dtype=jnp.float32)
    (found,) = store.get(store.hold([np.asarray(value)]))
    assert np.shares_memory(found, np.asarray(value))
    assert not found.flags.writeable
    assert not files_of(store)


def test_a_value_that_somebody_may_change_is_copied(store):
    for seal in (False, True):
        value = np.arange(SIZE, dtype=np.float32)
        value.flags.writeable = not seal
        ref = store.hold([value])
        value.flags.writeable = True
        value[:] = 0
        np.testing.assert_array_equal(store.get(ref)[0], np.arange(SIZE))
    # What the store owns is not copied.
    value = np.arange(SIZE, dtype=np.float32).reshape(1024, -1)
    ref = store.hold([value], own=True)
    assert np.shares_memory(store.get(ref)[0], value)
    assert store.get(ref)[0].shape == value.shape
    assert ref.leaves == (("float32", value.shape),)
    assert store.is_held(ref)
    assert not files_of(store)


def test_references_to_held_values_travel_as_others_do(store):
    ref = store.hold([np.arange(SIZE), np.ones((2, 0)), np.arange(3)], "a value")
    again = StoreRef.from_json(ref.to_json())
    found = store.get(again)
    assert [x.tolist() for x in found[1:]] == [[[], []], [0, 1, 2]]
    np.testing.assert_array_equal(found[0], np.arange(SIZE))
    small = store.hold([np.zeros(INLINE_BYTES // 16)])
    assert small.kind == "inline"
    assert not store.is_held(small)


def test_past_the_limit_values_are_in_files(store):
    refs = [store.hold([np.full(SIZE, i, np.float32)]) for i in range(4)]
    assert [store.is_held(ref) for ref in refs] == [True, True, True, False]
    assert len(files_of(store)) == 1
    assert [store.get(ref)[0][0] for ref in refs] == [0, 1, 2, 3]
    store.release(refs[:2])
    assert store.is_held(store.hold([np.ones(SIZE, np.float32)]))
    store.sweep({name for name, _ in refs[3].files})
    assert [store.is_held(ref) for ref in refs] == [False] * 4
    assert store.get(refs[3], cache=False)[0][0] == 3
    with pytest.raises(bj.BeamjaxError, match="cannot read a stored value"):
        store.get(refs[2])


@bj.program(m=4)
def rounds(w, x):
    def one(w, _):
        y = bj.reduce_mean(bj.map_fn(lambda a, b: jnp.tanh(a * b), (x, bj.broadcast(w))))
        return w + y, jnp.sum(y)

    return jax.lax.scan(one, w, None, length=2)


WAYS = {
    "one": ({}, True),
    "threads": (THREADS, True),
    "time limit": ({"shard_timeout": 100}, True),
    "processes": (PROCESSES, False),
}
MARKS = {"processes": pytest.mark.long}  # They are slow to start.


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_runs_keep_server_values_in_memory_where_they_can(way, monkeypatch, tmp_path):
    options, held = WAYS[way]
    stores_in_memory, files = [], []
    open_memory_store, sweep = in_process.open_memory_store, Store.sweep

    def opened(root, limit):
        open_memory_store(root, limit)
        stores_in_memory.append(root)

    def swept(self, live):
        files.extend(
            name for name in files_of(self) if os.path.getsize(f"{self.root}/{name}") > SIZE
        )
        sweep(self, live)

    timed, bounded = [], executor.bounded
    monkeypatch.setattr(
        executor, "bounded", lambda run, limit: timed.append(run) or bounded(run, limit)
    )
    monkeypatch.setattr(runs, "open_memory_store", opened)
    monkeypatch.setattr(Store, "sweep", swept)
    w = np.linspace(-1, 1, 1_100_000, dtype=np.float32)
    x = np.arange(1, 5, dtype=np.float32)
    options = {"work_folder": str(tmp_path), **options}
    found = bj.run(rounds, w, x, options=options)
    expected = bj.run(rounds, w, x, runner="local")
    assert_same_bits(found, expected)
    assert bool(stores_in_memory) == held
    assert bool(files) != held
    assert bool(timed) == (way == "time limit")
    assert all(in_process.memory_store_of(root) is None for root in stores_in_memory)
