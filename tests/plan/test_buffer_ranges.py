"""Reductions in ranges of values: without a gap, and with the same results however they are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.plan import steps
from beamjax.plan.steps import FusedBuffer, Map, ValueRange, accumulator_ranges


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_cuts_cover_a_piece(start, size, limit):
    cut = list(ValueRange(3, start, start + size).cut(limit))
    assert [piece.start for piece in cut[1:]] == [piece.stop for piece in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (start, start + size)
    assert all(piece.buffer == 3 and piece.stop - piece.start <= limit for piece in cut)


def test_ranges_of_all_buffers():
    buffers = FusedBuffer("sum", "float32", 3 << 20, ()), FusedBuffer("max", "int8", 2, ())
    pieces = accumulator_ranges(Map("m", "clients", "body", (), (), (), buffers))
    assert pieces[-1] == ValueRange(1, 0, 2)
    assert len(pieces) == 4


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_means_leave_out_members_that_are_dropped(runner, monkeypatch):
    monkeypatch.setattr(steps, "RANGE_VALUES", 64)
    mean = bj.program(m=40)(lambda x: (bj.reduce_mean(x), bj.reduce_max(x)))
    x = np.random.default_rng(2).normal(size=(40, 700)).astype(np.float32)
    gone = [*range(8), 13, 39]
    x[gone, 0] = np.nan
    options = {"shard_size": 8, "on_nonfinite": "drop", "drop_limit": 1.0}
    found, largest = bj.run(mean, x, runner=runner, options=options)
    kept = np.delete(x.astype(np.float64), gone, axis=0)
    np.testing.assert_allclose(found, kept.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(largest, kept.max(0).astype(np.float32))
