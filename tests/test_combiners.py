"""Partials are merged to the same bits in any order, and pieces make whole values."""

import itertools

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from beamjax.errors import ArrayFormatError
from beamjax.lane_pieces import Piece, key_of, lane_pieces, step_pieces
from beamjax.pipelines.combiners import (
    AccumulatorCoder,
    Assemble,
    MergeAccumulators,
    PartsOfBlocks,
    PartsOfSource,
)
from beamjax.pipelines.elements import Block, Environment
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import Sources
from beamjax.plan import Gather, Lane, Map, ValueType
from beamjax.reducers import decode_accumulator, make_accumulator
from beamjax.sources import from_arrays, live_spec, register, release

RNG = np.random.default_rng(0)
PARTIALS = (RNG.normal(size=(6, 4)) * 10.0 ** RNG.integers(-20, 20, (6, 4))).astype(np.float32)


def encoded(partials, kind="sum"):
    accumulator = make_accumulator(kind, np.dtype("float32"), 4, mode="exact")
    for shard, partial in enumerate(partials):
        accumulator.add(partial, shard)
    return accumulator.encode()


def total(data):
    return decode_accumulator(data).total(0, 4, np.dtype("float32"))


WHOLE = total(encoded(PARTIALS))
EACH = [encoded([partial]) for partial in PARTIALS]


# --- pieces


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, [(0, 0)]), (1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (8, [(0, 4), (4, 8)])],
)
def test_lanes_are_cut_to_pieces(size, expected):
    lane = Lane("sum", "float32", size, ())
    assert [(p.lane, p.start, p.stop) for p in lane_pieces(7, lane, 4)] == [
        (7, *piece) for piece in expected
    ]


def test_pieces_of_a_step_and_their_keys():
    lanes = (Lane("sum", "float32", 3 << 20, ()), Lane("max", "int8", 2, ()))
    step = Map("m", "clients", "body", (), (), (), lanes)
    pieces = step_pieces(step)
    assert [piece.stop - piece.start for piece in pieces] == [1 << 20] * 3 + [2]
    assert [Piece.from_key(key_of(piece)) for piece in pieces] == pieces
    assert len({key_of(piece) for piece in pieces}) == len(pieces)


# --- merging


@pytest.mark.parametrize("order", list(itertools.permutations(range(6)))[::71])
def test_any_order_and_grouping_gives_the_same_bits(order):
    combine = MergeAccumulators("step")
    for cut in range(7):
        halves = []
        for numbers in (order[:cut], order[cut:]):
            accumulator = combine.create_accumulator()
            for number in numbers:
                accumulator = combine.add_input(accumulator, EACH[number])
            halves.append(combine.compact(accumulator))
        merged = combine.merge_accumulators([*halves, combine.create_accumulator()])
        assert total(combine.extract_output(merged)).tobytes() == WHOLE.tobytes()


def test_merging_does_not_change_what_was_merged():
    combine = MergeAccumulators("step")
    first, second = EACH[0], EACH[1]
    before = bytes(first), bytes(second)
    merged = combine.merge_accumulators([first, second])
    combine.merge_accumulators([merged, EACH[2]])
    assert (first, second) == before


def test_an_empty_accumulator_stays_empty():
    combine = MergeAccumulators("step")
    assert combine.merge_accumulators([None, None]) is None
    assert combine.compact(None) is None


def test_the_coder_of_accumulators():
    coder = AccumulatorCoder()
    live = decode_accumulator(EACH[0])
    assert coder.is_deterministic()
    assert MergeAccumulators("step").get_accumulator_coder().encode(live) == EACH[0]
    assert coder.decode(coder.encode(EACH[0])) == EACH[0]
    assert coder.decode(coder.encode(None)) is None
    assert coder.estimate_size(EACH[0]) == len(EACH[0])
    assert coder.estimate_size(live) > 0
    assert coder.estimate_size(None) == 0


def test_bytes_that_are_no_accumulator():
    with pytest.raises(ArrayFormatError):
        MergeAccumulators("step").merge_accumulators([EACH[0], EACH[1][:-3]])


@pytest.mark.parametrize("repeat", [0, 1])
def test_in_a_pipeline(repeat):
    options = PipelineOptions([f"--direct_runner_bundle_repeat={repeat}"])

    def check(found):
        (pair,) = found
        assert pair[0] == "0:0:4"
        assert total(pair[1]).tobytes() == WHOLE.tobytes()

    with beam.Pipeline(runner=FnApiRunner(), options=options) as p:
        pairs = p | beam.Create([("0:0:4", data) for data in EACH])
        merged = pairs | beam.CombinePerKey(MergeAccumulators("step"))
        assert merged.element_type == beam.typehints.Tuple[str, bytes]
        assert_that(merged, check)


# --- whole values


def test_parts_in_any_order_are_assembled(tmp_path):
    store = Store(str(tmp_path))
    flat = np.arange(12.0)
    parts = [
        Environment({f"{name}|{i}": store.put([flat[i : i + 5]]) for name in ("a", "b|c")})
        for i in (10, 0, 5)
    ]
    types = {"a": ValueType((3, 4), "float64"), "b|c": ValueType((12,), "float32")}
    fn = Assemble(store, types, {})
    (environment,) = fn.process((b"", parts))
    np.testing.assert_array_equal(store.get(environment.values["a"])[0], flat.reshape(3, 4))
    (narrow,) = store.get(environment.values["b|c"])
    np.testing.assert_array_equal(narrow, flat)
    assert narrow.dtype == np.float32


def test_members_are_gathered_along_their_axis(tmp_path):
    store = Store(str(tmp_path))
    x = np.arange(20 * 3).reshape(20, 3)
    step = Gather("gather_0", "y", "whole", 1, "why", "where")
    parts = PartsOfBlocks(store, step)
    found = []
    for start in (16, 0, 8):
        values = x[start : start + 8]
        found += parts.process(Block(start, len(values), 8, {"y": values}))
    token = register(from_arrays(x))
    reading = PartsOfSource(store, Sources((live_spec(token),), {"y": (0, 0)}, False), step, 20, 8)
    reading.setup()
    read = [part for range_ in [(2, 3), (0, 2)] for part in reading.process(range_)]
    release(token)
    for environments in (found, read):
        assemble = Assemble(store, {"whole": ValueType((3, 20), "int64")}, {"whole": 1})
        (environment,) = assemble.process((b"", environments))
        np.testing.assert_array_equal(store.get(environment.values["whole"])[0], x.T)
