"""Placed inputs in a store that workers elsewhere reach: a file system of Beam, here in memory."""

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from memory_files import FILES

import beamjax as bj
from beamjax.pipelines import uploads
from beamjax.pipelines.store import Store
from beamjax.sources.grouped_source import grouped
from beamjax.sources.source_base import open_spec

N = 50
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)


@pytest.fixture
def store():
    FILES.clear()
    return Store("inmemory://run", lasts=False)


@pytest.mark.parametrize("file_bytes", [1, 100, 1 << 20])
def test_members_come_back(file_bytes, store, monkeypatch):
    monkeypatch.setattr(uploads, "FILE_BYTES", file_bytes)
    tree = {"x": X, "y": np.arange(N, dtype=ml_dtypes.bfloat16)}
    leaves = [open_spec(s.to_spec()) for s in uploads.upload(bj.from_arrays(tree), store, True)]
    for leaf, expected in zip(leaves, (tree["x"], tree["y"]), strict=True):
        for start, stop in ((0, N), (0, 1), (17, 40), (N - 1, N)):
            (found,) = leaf.read(start, stop)
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected[start:stop].tobytes()
    assert all(len(data) < max(2000, 3 * file_bytes) for data in FILES.values())


def test_only_what_is_on_this_machine_is_written(store, tmp_path):
    arrays = bj.from_arrays(X)
    np.save(tmp_path / "x.npy", X)
    npy = bj.from_npy(str(tmp_path / "x.npy"))
    (uploaded,) = uploads.upload(npy, store, True)
    assert uploads.stays_here(arrays, store)
    assert uploads.stays_here(npy, store)
    assert uploads.stays_here(grouped(npy, 5), store)
    assert not uploads.stays_here(uploaded, store)
    assert not uploads.stays_here(npy, Store(str(tmp_path)))


@bj.program(clients=N)
def centred(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return bj.reduce_max(bj.map_fn(lambda u, m: u - m, (y, bj.broadcast(bj.reduce_mean(y)))))


@pytest.mark.parametrize("from_file", [False, True])
def test_a_run_with_its_folder_at_a_url(from_file, store, tmp_path):
    np.save(tmp_path / "x.npy", X)
    x = bj.from_npy(str(tmp_path / "x.npy")) if from_file else X
    w = np.arange(3, dtype=np.float32)
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=1"]
    options = ["--work_folder=inmemory://run", "--shard_size=8", *flags]
    expected = bj.run(centred, w, x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(bj.run(centred, w, x, options=options), expected)
    assert FILES == {}


def test_rounds_read_what_was_written_before_the_first(store, monkeypatch):
    """It is not swept away between the pipelines of a run."""
    import jax

    from beamjax.pipelines import connections

    monkeypatch.setattr(connections, "shares_memory", lambda *_: False)

    @bj.program(clients=N)
    def rounds(w, x):
        def step(w, _):
            return w + bj.reduce_mean(bj.map_fn(lambda v: v * w, x)) / 100, None

        return jax.lax.scan(step, w, length=3)[0]

    options = {"work_folder": "inmemory://run", "shard_size": 8, "rounds_per_graph": 1}
    w = np.ones(3, np.float32)
    expected = bj.run(rounds, w, X, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(bj.run(rounds, w, X, options=options), expected)
    assert FILES == {}


def test_ragged_members_are_padded(store):
    @bj.program(clients=None)
    def total(clients):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"]), clients))

    lengths = np.arange(10)
    clients = bj.from_ragged(np.arange(45, dtype=np.float32), lengths, buckets=[4, 9])
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=1"]
    options = [*flags, "--work_folder=inmemory://run", "--shard_size=8"]
    assert bj.run(total, clients, options=options) == 44 * 45 / 2


def test_all_kinds_of_local_files_are_written(store, tmp_path):
    np.save(tmp_path / "0.npy", X)
    np.save(tmp_path / "1.npy", X)
    np.savez(tmp_path / "x.npz", x=X)
    table = pa.table({"x": X[:, 0]})
    pq.write_table(table, tmp_path / "x.parquet")
    feather.write_feather(table, str(tmp_path / "x.arrow"))
    sources = [
        bj.from_npy(str(tmp_path / "*.npy")),
        bj.from_npz(tmp_path / "x.npz"),
        bj.from_parquet(tmp_path / "x.parquet"),
        bj.from_arrow(tmp_path / "x.arrow"),
        bj.from_ragged(bj.from_npy(tmp_path / "0.npy"), [N]),
        bj.take(bj.from_npy(tmp_path / "0.npy"), [3]),
    ]
    for source in sources:
        assert uploads.stays_here(source, store), source
        (leaf, *_) = uploads.upload(source, store, True)
        assert leaf.read(0, 1)[0].tobytes() == source.read(0, 1)[0].tobytes()
    assert not uploads.stays_here(bj.from_range(3), store)
