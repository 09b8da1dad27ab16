"""Placed inputs in a store that workers elsewhere reach: one of fsspec, here in memory."""

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from memory_files import FILES
from source_files import SOURCES

import beamjax as bj
from beamjax.pipelines.runners.direct import Direct
from beamjax.pipelines.values import members as uploads
from beamjax.pipelines.values.store import Store
from beamjax.sources.source_base import open_spec, spec_of

N = 50
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
W = np.arange(3, dtype=np.float32)
FOLDER = {"work_folder": "inmemory://run", "shard_size": 8}


@pytest.fixture
def store():
    FILES.clear()
    yield Store("inmemory://run", persistent=False)
    FILES.clear()


@pytest.fixture
def elsewhere(monkeypatch):
    """Runs whose workers see no memory of this process; they leave no file."""
    FILES.clear()
    monkeypatch.setattr(Direct, "shares_memory", lambda *_: False)
    yield
    assert FILES == {}


@pytest.mark.parametrize("file_bytes", [1, 100, 1 << 20])
def test_members_come_back(file_bytes, store, monkeypatch):
    monkeypatch.setattr(uploads, "FILE_BYTES", file_bytes)
    tree = {"x": X, "y": np.arange(N, dtype=ml_dtypes.bfloat16)}
    stem = f"source-of-{file_bytes}"  # processes cache what is in a file of a name
    source = open_spec(spec_of(uploads.upload(bj.from_arrays(tree), store, True, stem)))
    for start, stop in ((0, N), (0, 1), (17, 40), (N - 1, N)):
        for found, expected in zip(source.read(start, stop), tree.values(), strict=True):
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected[start:stop].tobytes()
    assert all(len(data) < max(2000, 3 * file_bytes) for data in FILES.values())


def test_all_that_is_on_this_machine_is_written(store, tmp_path):
    for name in (
        "arrays", "spilled", "npy", "npy series", "npz", "parquet", "arrow", "feather", "tfrecord",
        "members", "taken", "ragged", "grouped",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        source, _ = SOURCES[name](tmp_path / name)
        assert uploads.stays_here(source, store), name
        written = uploads.upload(source, store, True, name)
        assert_same_bits(written.read(3, 9), source.read(3, 9))
        assert not uploads.stays_here(written, store)
    assert not uploads.stays_here(bj.from_range(3), store)
    assert not uploads.stays_here(source, Store(str(tmp_path)))


@bj.program(clients=N)
def centred(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return bj.reduce_max(bj.map_fn(lambda u, m: u - m, (y, bj.broadcast(bj.reduce_mean(y)))))


@bj.program(clients=N)
def rounds(w, x):
    def step(w, _):
        return w + bj.reduce_mean(bj.map_fn(lambda v: v * w, x)) / 100, None

    return jax.lax.scan(step, w, length=3)[0]


def test_runs_with_their_folder_at_a_url(elsewhere, tmp_path):
    """What is written before the first of several pipelines is not swept away between them."""
    np.save(tmp_path / "x.npy", X)
    for program in (centred, rounds):
        expected = bj.run(program, W, X, runner="local", options={"shard_size": 8})
        for x in (X, bj.from_npy(tmp_path / "x.npy")):
            found = bj.run(program, W, x, options=FOLDER)
            np.testing.assert_array_equal(found, expected)


def test_ragged_members_are_padded(elsewhere):
    @bj.program(clients=None)
    def total(clients):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"]), clients))

    clients = bj.from_ragged(np.arange(45, dtype=np.float32), np.arange(10), buckets=[4, 9])
    assert bj.run(total, clients, options=FOLDER) == 44 * 45 / 2


def test_a_session_with_its_folder_at_a_url_leaves_nothing(elsewhere, monkeypatch):
    """Of inputs that stay there between calls, until others take their place."""
    monkeypatch.setattr("beamjax.pipelines.session_workers.MOST_UPLOADS", 2)
    with bj.session(options=FOLDER) as session:
        for i in range(4):
            expected = bj.run(centred, W, X + i, runner="local", options={"shard_size": 8})
            np.testing.assert_array_equal(session.run(centred, W, X + i), expected)
            assert sum(name.endswith(".npy") for name in FILES) <= 2
