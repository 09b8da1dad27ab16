"""Reductions in files: the same bits as in memory, on every runner, however they are cut."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax import fan_out, lane_pieces, wide_lanes
from beamjax.plan import Lane, Map, Plan, Reduction, ValueType
from beamjax.scratch import Scratch
from beamjax.shards import new_accumulator
from beamjax.wide_lanes import Terms, WideLanes, decoded_terms, encoded_terms

N = 40
SIZE = 700
RNG = np.random.default_rng(5)
X = (RNG.normal(size=(N, SIZE)) * 10.0 ** RNG.integers(-20, 20, (N, SIZE))).astype(np.float32)
RUNNERS = {
    "local": {"runner": "local"},
    "DirectRunner": {"runner": "DirectRunner"},
    "threads": {
        "runner": "DirectRunner",
        "options": {"direct_running_mode": "multi_threading", "direct_num_workers": 3},
    },
    "processes": {
        "runner": "DirectRunner",
        "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
    },
}


@pytest.fixture
def in_files(monkeypatch):
    """Every reduction is too large for memory, and has many sections of many pieces."""
    monkeypatch.setattr(fan_out, "HELD_BYTES", 0)
    monkeypatch.setattr(lane_pieces, "SECTION_BYTES", 1000)
    monkeypatch.setattr(lane_pieces, "PIECE_VALUES", 64)
    monkeypatch.setattr(wide_lanes, "MAX_ROWS", 2)


@bj.program(m=N)
def everything(x):
    y = bj.map_fn(lambda v: v * 2, x)
    whole = bj.map_fn(lambda v: (jnp.abs(v) > 1).astype(jnp.int32), x)
    return {
        "sum": bj.reduce_sum(y),
        "mean": bj.reduce_mean(x),
        "max": bj.reduce_max(x),
        "count": bj.reduce_sum(whole),
        "empty": bj.reduce_sum(bj.map_fn(lambda v: v[:0], x)),
        "scalar": bj.reduce_sum(bj.map_fn(lambda v: v[0], x)),
    }


def run(fn, *args, runner, options=None, **more):
    return bj.run(fn, *args, runner=runner, options={"shard_size": 8, **(options or {}), **more})


def bits(tree):
    return {key: (x.dtype, x.shape, np.asarray(x).tobytes()) for key, x in tree.items()}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_the_same_as_in_memory(runner, reduction, monkeypatch, request):
    if reduction == "fast" and runner in ("threads", "processes"):
        pytest.skip("the order of the shards is another one")
    expected = bits(run(everything, X, runner="local", reduction=reduction))
    request.getfixturevalue("in_files")
    found = run(everything, X, **RUNNERS[runner], reduction=reduction)
    assert bits(found) == expected


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_means_leave_out_who_is_dropped(runner, in_files):
    @bj.program(m=N)
    def mean(x):
        return bj.reduce_mean(x), bj.reduce_max(x)

    x = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)
    gone = [*range(8), 13, 39]
    x[gone, 0] = np.nan
    how = {**RUNNERS[runner], "on_nonfinite": "drop", "drop_limit": 1.0}
    found, largest = run(mean, x, **how)
    kept = np.delete(x.astype(np.float64), gone, axis=0)
    np.testing.assert_allclose(found, kept.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(largest, kept.max(0).astype(np.float32))


LANE = Lane("sum", "float32", 30, (Reduction("y", "mean", "float32", 0, 30),))
STEP = Map("m", "clients", "body", (), (), (), (LANE,))


@given(
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_any_partials_give_what_an_accumulator_does(added, rows, piece):
    whole = new_accumulator(LANE, 30, "exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_lanes, "MAX_ROWS", rows)
        patch.setattr(lane_pieces, "PIECE_VALUES", piece)
        patch.setattr(lane_pieces, "SECTION_BYTES", 40)
        lanes = WideLanes(STEP, "exact", Scratch())
        for row, left_out in added:
            partial = X[row, :30] if left_out else None
            lanes.add(row, [partial], left_out)
            whole.left_out += left_out
            if partial is not None:
                whole.add(partial, row)
        values = {"y": ValueType((5, 6), "float32")}
        plan = Plan("p", {"clients": 400}, {"clients": 8}, values, (), (), (), {}, False, "")
        (found,) = lanes.results(plan).values()
    assert found.shape == (5, 6)
    assert found.tobytes() == whole.mean(0, 30, 400, np.dtype(np.float32)).tobytes()


def test_terms_as_text():
    terms = Terms([(3, "a"), (5, "b")], [["c", "d"], ["e", "f"]], 7)
    again = decoded_terms(json.loads(json.dumps(encoded_terms(terms, str.upper))), str.lower)
    assert again == terms
