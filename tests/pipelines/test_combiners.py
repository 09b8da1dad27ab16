"""Partials are merged to the same bits in any order, as elements or in files."""

import itertools
import random

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.numerics.reducers import decode_accumulator, make_accumulator
from beamjax.pipelines.values import store as in_process
from beamjax.pipelines.values.run_stores import clear_store
from beamjax.pipelines.values.store import LOCAL_BYTES, REMOTE_BYTES, Store
from beamjax.pipelines.worker import merge as spill
from beamjax.pipelines.worker.merge import (
    EMPTY,
    RANGE,
    Accumulated,
    MergeAccumulators,
    receive,
    send,
)
from beamjax.storage import files

RNG = np.random.default_rng(0)
PARTIALS = (RNG.normal(size=(6, 4)) * 10.0 ** RNG.integers(-20, 20, (6, 4))).astype(np.float32)


def summed(*partials):
    partials = [np.asarray(partial, np.float32) for partial in partials]
    accumulator = make_accumulator("sum", np.dtype("float32"), partials[0].size, mode="exact")
    for shard, partial in enumerate(partials):
        accumulator.add(partial, shard)
    return accumulator


def total(data):
    return decode_accumulator(data).total(0, 4, np.dtype("float32"))


WHOLE = total(summed(*PARTIALS).encode())
EACH = [summed(partial).encode() for partial in PARTIALS]


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path), piece_bytes=1 << 20)


# --- merging


def test_any_order_and_grouping_gives_the_same_bits(store):
    combine = MergeAccumulators("step", store)
    for order in random.Random(0).sample(list(itertools.permutations(range(6))), 12):
        for cut in range(7):
            halves = []
            for numbers in (order[:cut], order[cut:]):
                accumulator = combine.create_accumulator()
                for number in numbers:
                    accumulator = combine.add_input(accumulator, EACH[number])
                halves.append(combine.compact(accumulator))
            merged = combine.merge_accumulators([*halves, combine.create_accumulator()])
            assert total(combine.extract_output(merged)).tobytes() == WHOLE.tobytes()
    assert combine.merge_accumulators([EMPTY, EMPTY]) == EMPTY
    assert combine.compact(EMPTY) == EMPTY
    with pytest.raises(ArrayFormatError):
        combine.merge_accumulators([Accumulated(EACH[0]), Accumulated(EACH[1][:-3])])


def test_merging_does_not_change_what_was_merged(store):
    combine = MergeAccumulators("step", store)
    first, second = EACH[0], EACH[1]
    before = bytes(first), bytes(second)
    merged = combine.merge_accumulators([Accumulated(first), Accumulated(second)])
    combine.merge_accumulators([merged, Accumulated(EACH[2])])
    assert (first, second) == before


def test_the_coder_of_accumulators(store):
    coder = MergeAccumulators("step", store).get_accumulator_coder()
    live, element = Accumulated(accumulator=decode_accumulator(EACH[0])), Accumulated(EACH[0])
    assert coder.is_deterministic()
    assert coder.encode(live) == EACH[0]
    assert coder.decode(coder.encode(element)) == element
    assert coder.decode(coder.encode(EMPTY)) == EMPTY
    assert coder.estimate_size(element) == len(EACH[0])
    assert coder.estimate_size(live) > 0
    assert coder.estimate_size(EMPTY) == 0


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_merge_in_a_pipeline(repeat, tmp_path, monkeypatch):
    monkeypatch.setattr(in_process, "LOCAL_BYTES", 10)  # All are files on their way.
    options = PipelineOptions([f"--direct_runner_bundle_repeat={repeat}"])
    store = Store(str(tmp_path))

    def check(found):
        ((key, element),) = found
        assert key == (0, 0, 4)
        assert total(receive(store, element).encode()).tobytes() == WHOLE.tobytes()

    with beam.Pipeline(runner=FnApiRunner(), options=options) as p:
        parts = [((0, 0, 4), send(store, summed(partial))) for partial in PARTIALS]
        merge = beam.CombinePerKey(MergeAccumulators("step", store))
        merged = p | beam.Create(parts) | merge
        assert merged.element_type == beam.typehints.Tuple[RANGE, bytes]
        assert_that(merged, check)


# --- large accumulators


LARGE = summed(np.arange(200_000))


class Encoded:
    """An accumulator of so many bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def encode(self):
        return bytes(self.nbytes)


def test_small_ones_are_the_element(store, tmp_path):
    for found in (summed([1, 2, 3]), summed(np.ones(9999))):
        element = send(store, found)
        assert element == found.encode()
        assert receive(store, element).encode() == element
    assert send(store, Encoded(LOCAL_BYTES)) == bytes(LOCAL_BYTES)
    assert not list(tmp_path.iterdir())


def test_large_ones_are_files(store, tmp_path):
    elements = {send(store, LARGE) for _ in range(2)}
    assert len(elements) == 2  # So that nobody waits for, or removes, what is another's.
    assert all(len(element) < 1000 for element in elements)
    assert {receive(store, element).encode() for element in elements} == {LARGE.encode()}
    large = sorted(path.stat().st_size for path in tmp_path.iterdir())[2:]
    assert len(large) == 2
    assert all(0.99 * (1 << 20) < size <= 1 << 20 for size in large)
    clear_store(store)
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_files_have_64_mib_and_at_a_url_elements_may_be_larger(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(files, "write", lambda path, data, **_: written.append(len(data)))
    assert len(send(Store(str(tmp_path)), Encoded(70 << 20))) < 1000
    assert len(written) == 2
    assert max(written) <= 64 << 20
    assert 70 << 20 < sum(written) < (70 << 20) + 1024
    monkeypatch.setattr(files, "join", lambda root, name: f"{root}/{name}")
    store = Store("memory://folder")
    assert LOCAL_BYTES < REMOTE_BYTES < 64 << 20
    assert len(send(store, Encoded(REMOTE_BYTES))) == REMOTE_BYTES
    assert len(send(store, Encoded(REMOTE_BYTES + 1))) < 1000


def test_large_ones_stay_in_memory_where_one_process_runs_all(store, tmp_path):
    in_process.open_memory_store(store.root, limit=0)
    try:
        small = summed([1, 2, 3])
        assert send(store, small) == small.encode()
        element = send(store, LARGE)
        assert len(element) < 1000
        assert receive(store, element) is LARGE
        with pytest.raises(SourceError, match="was merged before"):  # It may have changed there.
            receive(store, element)
        element = send(store, LARGE)
        in_process.memory_store_of(store.root).sweep(())
        with pytest.raises(SourceError, match="not in this process"):
            receive(store, element)
        element = send(store, LARGE)
    finally:
        in_process.close_memory_store(store.root)
    with pytest.raises(SourceError, match="not in this process"):
        receive(store, element)
    assert not list(tmp_path.iterdir())


def test_files_that_are_gone_or_damaged(tmp_path):
    store = Store(str(tmp_path))
    element = send(store, LARGE)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArrayFormatError, match=r"found \d+ bytes, expected \d+"):
        receive(store, element)
    path.unlink()
    with pytest.raises(SourceError, match="cannot read a stored value"):
        receive(store, element)
    with pytest.raises(ArrayFormatError):
        receive(store, element[:-1])
    for name in ("../x.arrays", "/etc/passwd", 7):
        ref = {"key": "k", "leaves": [["uint8", [1]]], "files": [[name, 1]]}
        element = spill.encode_arrays([], {"spilled": ref})
        with pytest.raises(ArrayFormatError, match="reference to a stored value"):
            receive(store, element)
