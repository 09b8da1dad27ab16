"""Terms of large reductions in a pipeline: in any number of bundles, groups and merges."""

import math
import os

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beamjax as bj
from beamjax import fan_out, lane_pieces
from beamjax.lane_pieces import Piece, key_of
from beamjax.pipelines import wide
from beamjax.pipelines.combiners import AssignGroups
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import Task
from beamjax.plan import Lane, Map, Plan, Reduction, ValueType
from beamjax.scratch import Scratch
from beamjax.wide_lanes import WideLanes

SIZE = 500
RNG = np.random.default_rng(1)
ROWS = (RNG.normal(size=(9, SIZE)) * 10.0 ** RNG.integers(-9, 9, (9, SIZE))).astype(np.float32)
LANE = Lane("sum", "float32", SIZE, (Reduction("y", "sum", "float32", 0, SIZE),))
STEP = Map("m", "clients", "body", (), (), (), (LANE,))
EXACT = np.array([math.fsum(column) for column in ROWS.T])


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_pieces, "SECTION_BYTES", 800)
    monkeypatch.setattr(lane_pieces, "PIECE_VALUES", 64)
    values = {"y": ValueType((SIZE,), "float32")}
    plan = Plan("p", {"clients": 9}, {"clients": 1}, values, (), (STEP,), (), {}, False, "")
    return Task(plan, STEP, {}, {}, Store(str(tmp_path / "store")))


def bundle(task, rows):
    lanes = WideLanes(STEP, "exact", Scratch())
    for shard in rows:
        lanes.add(shard, [ROWS[shard]], 0)
    return list(wide.terms_of_bundle(lanes, task.store))


def grouped(elements):
    found = {}
    for key, data in elements:
        found.setdefault(key, []).append(data)
    return found.items()


def finished(task, elements):
    fn, found = wide.FinishSections(task, "exact"), np.full(SIZE, np.nan, np.float32)
    for element in grouped(elements):
        for environment in fn.process(element):
            for name, ref in environment.values.items():
                start = int(name.removeprefix("y|"))
                (part,) = task.store.get(ref)
                found[start : start + part.size] = part
    return found


@pytest.mark.parametrize("cuts", [[9], [1, 8], [4, 5], [1] * 9])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_any_bundles_and_groups_give_the_rounded_sum(task, cuts, groups, monkeypatch):
    monkeypatch.setattr(wide, "MAX_OPEN", 2)
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
    assert finished(task, elements).tobytes() == EXACT.astype(np.float32).tobytes()


def test_keys_are_those_of_sections(task):
    keys = [key for key, _ in bundle(task, range(2))]
    assert keys == [key_of(Piece(0, i, min(i + 200, SIZE))) for i in range(0, SIZE, 200)]


def test_no_file_is_larger_than_a_section(task):
    bundle(task, range(2))
    sizes = [entry.stat().st_size for entry in os.scandir(task.store.root)]
    assert sizes
    assert max(sizes) < 800 + 512


def test_groups_in_a_pipeline(monkeypatch):
    monkeypatch.setattr(fan_out, "HELD_BYTES", 0)
    monkeypatch.setattr(fan_out, "MERGE_RATE", 1.0)
    flags = {"direct_running_mode": "multi_threading", "direct_num_workers": 4, "shard_size": 8}

    @bj.program(m=64)
    def total(x):
        return bj.reduce_sum(x), bj.reduce_max(x)

    x = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)
    step = Map("m", "m", "body", (), (), (), (Lane("sum", "float32", 50, ()),))
    assert fan_out.fan_out(step, 8, fan_out.workers_of(PipelineOptions.from_dictionary(flags)),
                           "exact").groups == 2  # fmt: skip
    found = bj.run(total, x, options=flags)
    expected = bj.run(total, x, runner="local", options={"shard_size": 8})
    monkeypatch.setattr(fan_out, "HELD_BYTES", 1 << 30)
    hot = bj.run(total, x, options=flags)
    for a, b, c in zip(found, expected, hot, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() == np.asarray(c).tobytes()
