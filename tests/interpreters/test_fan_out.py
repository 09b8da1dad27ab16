"""How reductions are merged follows from bytes and workers."""

import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from hypothesis import given
from hypothesis import strategies as st

from beamjax.numerics.reducers import make_accumulator
from beamjax.plan import merging as module
from beamjax.plan.merging import accumulator_bytes, fan_out, range_width, workers_of
from beamjax.plan.steps import FusedBuffer, Map

GIB = 1 << 30


def step(*buffers):
    return Map("m", "clients", "body", (), (), (), buffers)


def floats(gib):
    return step(FusedBuffer("sum", "float32", int(gib * GIB) // 4, ()))


def test_bytes_of_a_value_in_an_accumulator():
    """Of ordinary values after one shard, and at most, after so many that they are merged."""
    rng = np.random.default_rng(0)
    faults = []
    for kind, dtype, mode, each, most in (
        ("sum", "float32", "exact", 8, 25),
        ("sum", "float64", "exact", 24, 49),
        ("sum", "complex64", "exact", 16, 50),
        ("sum", "float32", "fast", 8, 8),
        ("sum", "complex64", "fast", 16, 16),
        ("sum", "int32", "exact", 4, 4),
        ("max", "float32", "exact", 4, 4),
        ("max", "bfloat16", "exact", 4, 4),
        ("prod", "float32", "exact", 8, 160),
        ("prod", "complex128", "fast", 16, 16),
        ("any", "bool", "exact", 1, 1),
    ):
        for size, shards in ((1 << 15, 1), (100, 300)):
            buffer = FusedBuffer(kind, dtype, size, ())
            accumulator = make_accumulator(kind, np.dtype(dtype), size, mode=mode)
            for shard in range(shards):
                accumulator.add((rng.normal(size=size) * shards).astype(dtype), shard)
            told = accumulator_bytes(buffer, mode), accumulator_bytes(buffer, mode, most=True)
            nbytes = accumulator.nbytes
            if told != (each * size, most * size) or not (
                nbytes == each * size if shards == 1 else nbytes <= most * size + 2**18
            ):
                faults.append((kind, dtype, mode, size, told, nbytes))
    assert faults == []


def test_pieces_groups_and_what_is_told_of_them():
    """The accumulator of a GiB of floats has two."""
    for gib, shards, workers, pieces, groups, why in (
        (1 / 256, None, None, 1, 1, "on one worker"),
        (3, None, None, 768, 1, "in parallel on the workers"),
        (3, None, 2, 768, 1, "in parallel on 2 workers"),
        (3, 1, 2, 768, 1, "in parallel on 2 workers"),
        (3, 10_000, 1, 768, 1, "on one worker"),
        (3, 10_000, 96, 768, 1, "in parallel on 96 workers"),
        (1 / 256, None, 8, 1, 8, "8 workers for 256 partials"),
        (1 / 256, 10_000, 64, 1, 8, "64 workers for 250 partials"),
        (1 / 256, 4, 64, 1, 1, "too few bytes to divide among 64 workers"),
        (1 / (1 << 18), 10_000, 64, 1, 1, "too few bytes to divide among 64 workers"),
    ):
        found = fan_out(floats(gib), shards, workers, "exact")
        assert (found.pieces, found.groups, found.why) == (pieces, groups, why)


@given(st.integers(0, 1 << 32), st.none() | st.integers(1, 10**6), st.none() | st.integers(1, 999))
def test_groups_are_few(size, shards, workers):
    found = fan_out(step(FusedBuffer("sum", "float32", size, ())), shards, workers, "exact")
    assert 1 <= found.groups <= max(1, workers or 1)
    width = range_width(shards or 256, workers)
    assert found.groups**2 <= max(1, -(-(shards or 256) // width))


def test_ranges_of_shards_are_few_and_short_and_enough_for_all_workers():
    for shards, workers, ranges in (
        (1, None, 1), (256, None, 256), (257, None, 129), (65_536, None, 256),
        (10**6, None, 3907), (10**6, 1000, 4000), (10**4, 1000, 3334), (3000, 1000, 3000),
        (10**6, 4, 3907), (10**8, 1000, 390_625),
    ):  # fmt: skip
        width = range_width(shards, workers)
        assert -(-shards // width) == ranges, (shards, workers)
        assert width <= module.RANGE_SHARDS


def test_workers_that_options_ask_for():
    for flags, expected in (
        ([], None),
        (["--direct_num_workers=1"], None),
        (["--direct_num_workers=3"], 3),
        (["--direct_num_workers", "3"], 3),
        (["--parallelism=4", "--direct_num_workers=3"], 4),
        (["--max_num_workers=20", "--num_workers=2"], 20),
    ):
        for given_as in (list, tuple, PipelineOptions):
            assert workers_of(given_as(flags)) == expected, (flags, given_as)
