"""Reductions in files: the same bits as in memory, on every runner, however they are cut."""

import math
import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import merge as wide
from beamjax.pipelines.worker.merge import AssignGroups
from beamjax.pipelines.worker.tasks import Task
from beamjax.plan import buffer_ranges
from beamjax.plan import merging as fan_out
from beamjax.plan.buffer_ranges import ValueRange, accumulator_ranges, file_ranges, key_of
from beamjax.plan.steps import FusedBuffer, Map, Plan, Reduction, ValueType
from beamjax.runtime import large_reductions as wide_lanes
from beamjax.runtime.large_reductions import LargeBuffers
from beamjax.runtime.shard_executor import new_accumulator
from beamjax.storage.scratch import Scratch

N, SIZE = 40, 700
RNG = np.random.default_rng(5)
X = (RNG.normal(size=(N, SIZE)) * 10.0 ** RNG.integers(-20, 20, (N, SIZE))).astype(np.float32)


def step(*buffers):
    return Map("m", "clients", "body", (), (), (), buffers)


# --- buffers are cut to pieces, without a gap


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_cuts_cover_a_piece(start, size, limit):
    cut = list(ValueRange(3, start, start + size).cut(limit))
    assert [piece.start for piece in cut[1:]] == [piece.stop for piece in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (start, start + size)
    assert all(piece.buffer == 3 and piece.stop - piece.start <= limit for piece in cut)


def test_sections_have_the_bytes_of_a_file_and_keys_of_their_own(monkeypatch):
    buffers = step(FusedBuffer("sum", "float32", 3 << 20, ()), FusedBuffer("max", "int8", 2, ()))
    pieces = [*accumulator_ranges(buffers), *file_ranges(buffers)]
    assert [ValueRange.from_key(key_of(piece)) for piece in pieces] == pieces
    monkeypatch.setattr(buffer_ranges, "SECTION_BYTES", 1000)
    for dtype, values in (("float32", 250), ("float64", 125), ("int8", 1000)):
        sections = file_ranges(
            step(FusedBuffer("sum", dtype, 2100, ()), FusedBuffer("max", dtype, 1, ()))
        )
        assert sections[0] == ValueRange(0, 0, values)
        assert sections[-1] == ValueRange(1, 0, 1)


# --- whole runs


@pytest.fixture
def in_files(monkeypatch):
    """Every reduction is too large for memory, and has many sections of many pieces."""
    monkeypatch.setattr(fan_out, "HELD_BYTES", 0)
    monkeypatch.setattr(buffer_ranges, "SECTION_BYTES", 1000)
    monkeypatch.setattr(buffer_ranges, "RANGE_VALUES", 64)
    monkeypatch.setattr(wide_lanes, "MAX_ROWS", 2)


def run(fn, *args, runner="DirectRunner", **options):
    return bj.run(fn, *args, runner=runner, options={"shard_size": 8, **options})


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_means_leave_out_members_that_are_dropped(runner, in_files):
    mean = bj.program(m=N)(lambda x: (bj.reduce_mean(x), bj.reduce_max(x)))
    x = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)
    gone = [*range(8), 13, 39]
    x[gone, 0] = np.nan
    found, largest = run(mean, x, runner=runner, on_nonfinite="drop", drop_limit=1.0)
    kept = np.delete(x.astype(np.float64), gone, axis=0)
    np.testing.assert_allclose(found, kept.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(largest, kept.max(0).astype(np.float32))


# --- parts of runs

BUFFER = FusedBuffer("sum", "float32", 30, (Reduction("y", "mean", "float32", 0, 30),))


@given(
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_any_partials_give_the_bits_of_an_accumulator(added, rows, piece):
    whole = new_accumulator(BUFFER, 30, "exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_lanes, "MAX_ROWS", rows)
        patch.setattr(buffer_ranges, "RANGE_VALUES", piece)
        patch.setattr(buffer_ranges, "SECTION_BYTES", 40)
        buffers = LargeBuffers(step(BUFFER), "exact", Scratch())
        for row, left_out in added:
            partial = X[row, :30] if left_out else None
            buffers.add(row, [partial], left_out)
            whole.left_out += left_out
            if partial is not None:
                whole.add(partial, row)
        values = {"y": ValueType((5, 6), "float32")}
        plan = Plan("p", {"clients": 400}, {"clients": 8}, values, (), (), (), {}, False, "")
        (found,) = buffers.results(plan).values()
    assert found.shape == (5, 6)
    assert found.tobytes() == whole.mean(0, 30, 400, np.dtype(np.float32)).tobytes()


STEP = step(FusedBuffer("sum", "float32", 500, (Reduction("y", "sum", "float32", 0, 500),)))
ROWS = X[:9, :500]


def nearest(column):
    """The float32 next to the exact sum; rounding twice, by float64, may give another one."""
    exact, near = sum(map(Fraction, column.tolist())), np.float32(math.fsum(column))
    ways = near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))
    return min(ways, key=lambda way: abs(Fraction(float(way)) - exact))


EXACT = np.array([nearest(column) for column in ROWS.T])


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer_ranges, "SECTION_BYTES", 800)
    monkeypatch.setattr(buffer_ranges, "RANGE_VALUES", 64)
    monkeypatch.setattr(wide, "MAX_OPEN", 2)
    values = {"y": ValueType((500,), "float32")}
    plan = Plan("p", {"clients": 9}, {"clients": 1}, values, (), (STEP,), (), {}, False, "")
    return Task(plan, STEP, {}, {}, Store(str(tmp_path / "store")))


def bundle(task, rows):
    buffers = LargeBuffers(STEP, "exact", Scratch())
    for shard in rows:
        buffers.add(shard, [ROWS[shard]], 0)
    return list(wide.terms_of_bundle(buffers, task.store))


def grouped(elements):
    found = {}
    for key, data in elements:
        found.setdefault(key, []).append(data)
    return found.items()


def finished(task, elements):
    fn, found = wide.FinishSections(task, "exact"), np.full(500, np.nan, np.float32)
    for element in grouped(elements):
        for environment in fn.process(element):
            for name, ref in environment.values.items():
                start = int(name.removeprefix("y|"))
                (part,) = task.store.get(ref)
                found[start : start + part.size] = part
    return found


@pytest.mark.parametrize("cuts", [[9], [1, 8], [4, 5], [1] * 9])
def test_any_bundles_and_groups_give_the_rounded_sum(task, cuts):
    for groups in (1, 2, 3):
        elements, start = [], 0
        for count in cuts:
            elements += bundle(task, range(start, start + count))
            start += count
        assert all(len(data) < 5000 for _, data in elements)
        if groups > 1:
            deal = AssignGroups(groups)
            deal.start_bundle()
            merge = wide.MergeSectionGroup(task, "exact")
            dealt = grouped(out for element in elements for out in deal.process(element))
            elements = [out for element in dealt for out in merge.process(element)]
        assert finished(task, elements).tobytes() == EXACT.tobytes()


def test_keys_are_those_of_sections_and_no_file_is_larger_than_one(task):
    keys = [key for key, _ in bundle(task, range(2))]
    assert keys == [key_of(ValueRange(0, i, min(i + 200, 500))) for i in range(0, 500, 200)]
    sizes = [entry.stat().st_size for entry in os.scandir(task.store.root)]
    assert sizes
    assert max(sizes) < 800 + 512
