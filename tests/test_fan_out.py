"""How reductions are merged follows from bytes and workers."""

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from hypothesis import assume, given
from hypothesis import strategies as st

from beamjax import fan_out as module
from beamjax.fan_out import accumulator_bytes, fan_out, workers_of
from beamjax.plan import Lane, Map
from beamjax.reducers import make_accumulator

GIB = 1 << 30


def step(*lanes):
    return Map("m", "clients", "body", (), (), (), lanes)


def floats(gib):
    return step(Lane("sum", "float32", int(gib * GIB) // 4, ()))


@pytest.mark.parametrize(
    ("kind", "dtype", "mode", "expected"),
    [
        ("sum", "float32", "exact", 8),
        ("sum", "float64", "exact", 24),
        ("sum", "complex64", "exact", 16),
        ("sum", "float32", "fast", 8),
        ("sum", "int32", "exact", 4),
        ("max", "float32", "exact", 4),
        ("max", "bfloat16", "exact", 4),
        ("prod", "float32", "exact", 8),
        ("prod", "complex64", "fast", 16),
        ("any", "bool", "exact", 1),
    ],
)
def test_bytes_of_a_value_in_an_accumulator(kind, dtype, mode, expected):
    lane = Lane(kind, dtype, 1 << 15, ())
    assert accumulator_bytes(lane, mode) == expected << 15
    accumulator = make_accumulator(kind, np.dtype(dtype), lane.size, mode=mode)
    values = np.random.default_rng(0).normal(size=lane.size)
    with np.errstate(all="ignore"):
        accumulator.add(values.astype(dtype), 0)
    assert accumulator.nbytes == expected << 15


def test_large_accumulators_are_in_files():
    assert not fan_out(floats(1 / 16), 64, 2, "exact").in_files
    assert fan_out(floats(1), 64, 2, "exact").in_files
    assert fan_out(floats(3), 1, 2, "exact").pieces == 96


@pytest.mark.parametrize("workers", [None, 1, 96])
def test_pieces_alone_keep_few_workers_busy(workers):
    assert fan_out(floats(3), 10_000, workers, "exact").groups == 1


def test_many_workers_merge_in_groups():
    found = fan_out(floats(1 / 256), 10_000, 64, "exact")
    assert (found.pieces, found.groups) == (1, 8)
    assert found.why == "64 workers for 256 partials"
    assert fan_out(floats(1 / 256), 10_000, 8, "exact").groups == 8
    assert fan_out(floats(1 / 256), 4, 64, "exact").groups == 1


@pytest.mark.parametrize(
    ("step", "workers", "expected"),
    [
        (floats(1 / 256), None, "8 of accumulators in memory, 1 piece: on one worker"),
        (floats(3), None, "8 of accumulators in files, 96 pieces: side by side on the workers"),
        (floats(3), 2, "8 of accumulators in files, 96 pieces: side by side on 2 workers"),
        (floats(3), 1, "8 of accumulators in files, 96 pieces: on one worker"),
        (
            floats(1 / 256),
            8,
            "8 of accumulators in memory, 1 piece, each in 8 groups before: 8 workers for 256 "
            "partials",
        ),
        (
            floats(0),
            8,
            "8 of accumulators in memory, 1 piece: too little to be divided for 8 workers",
        ),
    ],
)
def test_it_is_told_in_a_line(step, workers, expected):
    assert fan_out(step, None, workers, "exact").text("8") == expected


def test_small_values_are_merged_at_once():
    assert fan_out(step(Lane("sum", "float32", 1000, ())), 10_000, 64, "exact").groups == 1


@given(st.integers(0, 1 << 32), st.none() | st.integers(1, 10**6), st.none() | st.integers(1, 999))
def test_groups_are_never_more_than_workers_or_partials(size, shards, workers):
    found = fan_out(step(Lane("sum", "float32", size, ())), shards, workers, "exact")
    assert 1 <= found.groups <= max(1, workers or 1)
    assert found.groups**2 <= max(1, min(shards or 256, module.MAX_PARTIALS))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--direct_num_workers=1"], None),
        (["--direct_num_workers=3"], 3),
        (["--direct_num_workers", "3"], 3),
        (["--parallelism=4", "--direct_num_workers=3"], 4),
        (["--max_num_workers=20", "--num_workers=2"], 20),
    ],
)
def test_workers_that_options_ask_for(flags, expected):
    assert workers_of(flags) == expected
    assert workers_of(tuple(flags)) == expected
    assert workers_of(PipelineOptions(flags)) == expected


def test_groups_take_less_where_they_are_chosen():
    found = fan_out(floats(1 / 256), 10_000, 64, "exact")
    assert (found.groups, found.other) == (8, 1)
    assert found.other_seconds == pytest.approx(256 * (8 << 20) / module.MERGE_RATE)
    assert found.seconds + module.WORTH_SECONDS < found.other_seconds
    assert found.merged == 256 * found.nbytes
    one = fan_out(floats(1 / 4096), 10_000, 64, "exact")
    assert (one.groups, one.other) == (1, 2)
    assert one.seconds < module.WORTH_SECONDS


def test_the_option_wins_over_what_groups_take():
    for fixed, other in ((1, 2), (3, 1)):
        found = fan_out(floats(1 / 256), 10_000, 64, "exact", fixed)
        assert (found.groups, found.other) == (fixed, other)
        assert found.why == f"the option merge_fan_out={fixed}"


@given(st.integers(1, 1 << 32), st.integers(4, 400), st.integers(1, 999))
def test_the_other_number_of_groups_takes_no_clearly_shorter_time(size, shards, workers):
    found = fan_out(step(Lane("sum", "float32", size, ())), shards, workers, "exact")
    assume(workers > found.pieces)  # else all workers have some piece to merge
    assert found.other_seconds > found.seconds - module.WORTH_SECONDS
