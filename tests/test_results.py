"""Results are whole, or the launcher says what is missing."""

import numpy as np
import pytest

from beamjax.arrays import decode_arrays
from beamjax.errors import ArrayFormatError, WorkerError
from beamjax.pipelines import results
from beamjax.pipelines.elements import Block, Environment
from beamjax.pipelines.results import WritePlaced, WriteServed, find_placed, read_served
from beamjax.pipelines.store import Store
from beamjax.plan import Plan, ValueType

X = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
PLAN = Plan(
    name="prog", sizes={"clients": 20}, shard_sizes={"clients": 8},
    values={"y": ValueType((3,), "float32", None, "clients")},
    inputs=(), steps=(), outputs=(), bodies={}, x64=False, jax_version="0",
)  # fmt: skip
SHARDS = [0, 8, 16]


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def block(start):
    values = X[start : start + 8]
    return Block(start, len(values), 8, {"y": values, "other": values * 2})


def write(store, *bundles):
    fn = WritePlaced(store, "y", "result-3")
    for bundle in bundles:
        fn.start_bundle()
        for start in bundle:
            fn.process(block(start))
        fn.finish_bundle()


def read_placed(store, stem="result-3"):
    return find_placed(store, PLAN, "y", stem).read(0, 20)[0]


@pytest.mark.parametrize(
    "bundles",
    [
        [SHARDS],
        [[16], [0], [8]],
        [[8, 16], [0]],
        [[8], [8], [0, 8], [16], []],
    ],
    ids=["one", "each", "two", "retried"],
)
def test_placed_results_are_whole_however_they_are_bundled(store, bundles):
    write(store, *bundles)
    np.testing.assert_array_equal(read_placed(store), X)


def test_many_blocks_fit_no_file(store, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FILE_BYTES", 100)
    write(store, SHARDS)
    assert len(list(tmp_path.iterdir())) == 2
    np.testing.assert_array_equal(read_placed(store), X)


def test_results_do_not_mix(store):
    write(store, SHARDS)
    fn = WritePlaced(store, "other", "result-31")
    fn.start_bundle()
    for start in SHARDS:
        fn.process(block(start))
    fn.finish_bundle()
    np.testing.assert_array_equal(read_placed(store), X)
    np.testing.assert_array_equal(read_placed(store, "result-31"), X * 2)


def test_missing_members_are_counted(store):
    write(store, [0, 16])
    with pytest.raises(WorkerError, match=r"result y: 8 of 20 members are missing, .* is 8;"):
        read_placed(store)


def test_blocks_in_a_row_share_a_file(store, tmp_path):
    write(store, [16, 0], [8])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"result-3-0-8.members", "result-3-8-8.members", "result-3-16-4.members"}
    write(store, [16, 8, 0])
    (array,), meta = decode_arrays((tmp_path / "result-3-0-20.members").read_bytes())
    np.testing.assert_array_equal(array, X)
    assert meta == {"value": "y"}


@pytest.mark.parametrize("inline", [0, 1 << 16], ids=["files", "inline"])
def test_served_results(store, inline, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", inline)
    refs = {"a": store.put([X]), "b": store.put([X[0]]), "c": store.put([X])}
    WriteServed(store, ("a", "b"), "result-0").process(Environment(refs))
    found = read_served(store, "result-0")
    assert found.values == {"a": refs["a"], "b": refs["b"]}
    with pytest.raises(WorkerError, match=r"result-1\.arrays: cannot read a result"):
        read_served(store, "result-1")


def test_a_damaged_result_names_the_file(store, tmp_path):
    (tmp_path / "result-0.arrays").write_bytes(b"nothing")
    with pytest.raises(ArrayFormatError, match=r"result-0\.arrays: "):
        read_served(store, "result-0")
