"""Large accumulators travel as files, small ones as they are."""

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

import beamjax as bj
from beamjax.errors import ArrayFormatError, SourceError
from beamjax.pipelines import files, parcels
from beamjax.pipelines.combiners import MergeAccumulators
from beamjax.pipelines.parcels import LOCAL_BYTES, REMOTE_BYTES, receive, send
from beamjax.pipelines.store import Store
from beamjax.reducers import decode_accumulator, make_accumulator

F32 = np.dtype(np.float32)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def encoded(values, size=3):
    accumulator = make_accumulator("sum", F32, size)
    accumulator.add(np.asarray(values, np.float32))
    return accumulator.encode()


def test_small_ones_are_the_element(store, tmp_path):
    for data in (encoded([1, 2, 3]), encoded(np.ones(9999), 9999), bytes(LOCAL_BYTES)):
        assert send(store, data) == data
        assert receive(store, data) == data
    assert not list(tmp_path.iterdir())


def test_large_ones_are_files(store, tmp_path):
    data = encoded(np.arange(200_000), 200_000)
    elements = {send(store, data) for _ in range(2)}
    assert len(elements) == 2  # so that nobody waits for, or removes, what is another's
    assert all(len(element) < 1000 for element in elements)
    assert {bytes(receive(store, element)) for element in elements} == {data}
    store.cleanup()
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_no_element_is_over_64_mib(store, monkeypatch):
    written = {}
    monkeypatch.setattr(files, "write", lambda path, data, **_: written.update({path: len(data)}))
    assert len(send(store, bytes(70 << 20))) < 1000
    assert list(written.values()) == [64 << 20, 6 << 20]


def test_several_files_are_one_again(tmp_path):
    store = Store(str(tmp_path), piece_bytes=1 << 20)
    data = encoded(np.arange(200_000), 200_000)
    element = send(store, data)
    assert len(list(tmp_path.iterdir())) == 2
    assert receive(store, element) == data


def test_at_a_url_elements_may_be_larger(monkeypatch):
    monkeypatch.setattr(files, "write", lambda *_, **__: None)
    monkeypatch.setattr(files, "join", lambda root, name: f"{root}/{name}")
    store = Store("memory://folder")
    assert LOCAL_BYTES < REMOTE_BYTES < 64 << 20
    assert len(send(store, bytes(REMOTE_BYTES))) == REMOTE_BYTES
    assert len(send(store, bytes(REMOTE_BYTES + 1))) < 1000


def test_files_that_are_gone_or_damaged(store, tmp_path):
    element = send(store, encoded(np.arange(200_000), 200_000))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArrayFormatError, match=r"has \d+ bytes, expected \d+"):
        receive(store, element)
    path.unlink()
    with pytest.raises(SourceError, match="cannot read a sum on its way"):
        receive(store, element)
    with pytest.raises(ArrayFormatError):
        receive(store, element[:-1])


@pytest.mark.parametrize("name", ["../x.arrays", "/etc/passwd", 7])
def test_names_that_no_store_gives(store, name):
    element = parcels.encode_arrays([], {"parcel": [name], "nbytes": 1})
    with pytest.raises(ArrayFormatError, match="not a file name"):
        receive(store, element)


def test_merging_of_files(store, monkeypatch):
    monkeypatch.setattr(parcels, "LOCAL_BYTES", 10)
    parts = [send(store, encoded(values)) for values in np.eye(3) * 2.0**-20]

    def check(found):
        ((key, element),) = found
        assert key == "k"
        total = decode_accumulator(receive(store, element)).total(0, 3, F32)
        assert total.tolist() == [2.0**-20] * 3

    with beam.Pipeline(runner=FnApiRunner()) as p:
        merge = MergeAccumulators("step", None, store)
        merged = p | beam.Create([("k", part) for part in parts]) | beam.CombinePerKey(merge)
        assert_that(merged, check)


@bj.program(m=24)
def wide(x, w):
    y = bj.map_fn(lambda v: w * v, x)
    return bj.reduce_sum(y), bj.reduce_mean(y), bj.reduce_max(y)


@pytest.mark.parametrize("options", [
    {},
    {"direct_running_mode": "multi_threading", "direct_num_workers": 2},
    {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
], ids=["one", "threads", "processes"])  # fmt: skip
def test_wide_results_have_the_bits_of_the_run_in_this_process(options):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=1_200_000) * 10.0 ** rng.integers(-9, 9, 1_200_000))
    x = rng.normal(size=24).astype(np.float32)
    w = w.astype(np.float32)
    expected = bj.run(wide, x, w, runner="local", options={"shard_size": 8})
    found = bj.run(wide, x, w, options={"shard_size": 8, **options})
    for one, other in zip(found, expected, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
