"""Large accumulators travel as files, small ones as they are."""

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

import beamjax as bj
from beamjax.errors import ArrayFormatError, SourceError
from beamjax.pipelines import files, in_process, parcels
from beamjax.pipelines.combiners import MergeAccumulators
from beamjax.pipelines.parcels import LOCAL_BYTES, REMOTE_BYTES, receive, send
from beamjax.pipelines.store import Store
from beamjax.reducers import make_accumulator

F32 = np.dtype(np.float32)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def summed(values, size=3):
    accumulator = make_accumulator("sum", F32, size)
    accumulator.add(np.asarray(values, np.float32))
    return accumulator


class Encoded:
    """An accumulator of so many bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def encode(self):
        return bytes(self.nbytes)


@pytest.fixture
def shelf(store):
    in_process.open_shelf(store.root, limit=0)
    yield in_process.shelf_of(store.root)
    in_process.close_shelf(store.root)


def test_small_ones_are_the_element(store, tmp_path):
    for found in (summed([1, 2, 3]), summed(np.ones(9999), 9999)):
        element = send(store, found)
        assert element == found.encode()
        assert receive(store, element).encode() == element
    assert send(store, Encoded(LOCAL_BYTES)) == bytes(LOCAL_BYTES)
    assert not list(tmp_path.iterdir())


def test_large_ones_are_files(store, tmp_path):
    found = summed(np.arange(200_000), 200_000)
    elements = {send(store, found) for _ in range(2)}
    assert len(elements) == 2  # so that nobody waits for, or removes, what is another's
    assert all(len(element) < 1000 for element in elements)
    assert {receive(store, element).encode() for element in elements} == {found.encode()}
    store.cleanup()
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_no_element_is_over_64_mib(store, monkeypatch):
    written = {}
    monkeypatch.setattr(files, "write", lambda path, data, **_: written.update({path: len(data)}))
    assert len(send(store, Encoded(70 << 20))) < 1000
    assert list(written.values()) == [64 << 20, 6 << 20]


def test_several_files_are_one_again(tmp_path):
    store = Store(str(tmp_path), piece_bytes=1 << 20)
    found = summed(np.arange(200_000), 200_000)
    element = send(store, found)
    assert len(list(tmp_path.iterdir())) == 2
    assert receive(store, element).encode() == found.encode()


def test_large_ones_stay_in_memory_where_one_process_runs_all(store, shelf, tmp_path):
    small, large = summed([1, 2, 3]), summed(np.arange(200_000), 200_000)
    assert send(store, small) == small.encode()
    element = send(store, large)
    assert len(element) < 1000
    assert not list(tmp_path.iterdir())
    assert receive(store, element) is large
    with pytest.raises(SourceError, match="was merged before"):  # It may have been changed there.
        receive(store, element)


def test_what_is_in_memory_goes_with_the_run(store, shelf):
    large = summed(np.arange(200_000), 200_000)
    element = send(store, large)
    shelf.sweep(())
    with pytest.raises(SourceError, match="not in this process"):
        receive(store, element)
    element = send(store, large)
    in_process.close_shelf(store.root)
    with pytest.raises(SourceError, match="not in this process"):
        receive(store, element)


def test_at_a_url_elements_may_be_larger(monkeypatch):
    monkeypatch.setattr(files, "write", lambda *_, **__: None)
    monkeypatch.setattr(files, "join", lambda root, name: f"{root}/{name}")
    store = Store("memory://folder")
    assert LOCAL_BYTES < REMOTE_BYTES < 64 << 20
    assert len(send(store, Encoded(REMOTE_BYTES))) == REMOTE_BYTES
    assert len(send(store, Encoded(REMOTE_BYTES + 1))) < 1000


def test_files_that_are_gone_or_damaged(store, tmp_path):
    element = send(store, summed(np.arange(200_000), 200_000))
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
    parts = [send(store, summed(values)) for values in np.eye(3) * 2.0**-20]

    def check(found):
        ((key, element),) = found
        assert key == "k"
        total = receive(store, element).total(0, 3, F32)
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
