"""One pass over one shard: which members, padding, and what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import SourceError, WorkerError
from beamjax.interpreters import stage
from beamjax.options import Options
from beamjax.plan import Map
from beamjax.planning import plan_for
from beamjax.shards import (
    Shard,
    ShardExecutor,
    finish_lane,
    new_accumulators,
    shard_errors,
    shards,
)


@given(n=st.integers(1, 500), size=st.integers(1, 64))
def test_shards_cover_all_members_once(n, size):
    found = list(shards(n, size))
    assert [s.index for s in found] == list(range(-(-n // size)))
    assert [m for s in found for m in range(s.start, s.start + s.count)] == list(range(n))
    assert all(s.count == size for s in found[:-1])


@given(n=st.integers(1, 500), size=st.integers(1, 64), cut=st.integers(0, 20))
def test_ranges_of_shards(n, size, cut):
    count = -(-n // size)
    cut = min(cut, count)
    assert [*shards(n, size, 0, cut), *shards(n, size, cut, count)] == list(shards(n, size))


def planned(fn, *args):
    arguments, key, restore = stage.flatten_arguments(args)
    plan = plan_for(fn, arguments, key, restore, Options(shard_size=8)).plan
    (step,) = [step for step in plan.steps if isinstance(step, Map)]
    return plan, step


@bj.program(clients=11)
def prog(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return y, bj.reduce_sum(y), bj.reduce_max(x), bj.reduce_mean(x), bj.reduce_sum(x > 3)


X = jnp.arange(22.0).reshape(11, 2)


@pytest.fixture(scope="module")
def executor():
    plan, step = planned(prog, jnp.float32(2.0), X)
    (name,) = step.broadcasts
    return plan, step, ShardExecutor(plan, step, {name: np.float32(2.0)})


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_shard(executor, count):
    _, step, execute = executor
    rows = np.asarray(X)[:count]
    found = execute(Shard(0, 0, count), [rows])
    (result,), partials = found.results, found.partials
    np.testing.assert_array_equal(result, rows * 2)
    found = {}
    for lane, partial in zip(step.lanes, partials, strict=True):
        assert (partial.shape, partial.dtype) == ((lane.size,), lane.dtype)
        for r in lane.reductions:
            found[r.reducer, r.dtype] = partial[r.offset : r.offset + r.size]
    np.testing.assert_array_equal(found["max", "float32"], rows.max(0))
    np.testing.assert_array_equal(found["sum", "bool"], (rows > 3).sum(0))
    np.testing.assert_array_equal(found["sum", "float32"], (rows * 2).sum(0))


def test_padding_is_not_seen(executor):
    _, _, execute = executor
    rows = np.asarray([[1.0, 2.0], [np.inf, np.nan]], "float32")
    found = execute(Shard(0, 0, 2), [rows])
    (result,), partials = found.results, found.partials
    np.testing.assert_array_equal(result, rows * 2)
    whole = execute(Shard(0, 0, 8), [np.concatenate([rows[:1]] * 8)]).results
    assert np.isfinite(whole[0]).all()
    assert any(np.isinf(p).any() for p in partials if p.dtype == np.float32)


def test_lanes_finish_to_results(executor):
    plan, step, execute = executor
    want = jax.jit(prog)(jnp.float32(2.0), X)
    accumulators = new_accumulators(step, "exact")
    for shard in shards(11, 8):
        rows = np.asarray(X)[shard.start : shard.start + shard.count]
        for accumulator, partial in zip(accumulators, execute(shard, [rows]).partials, strict=True):
            accumulator.add(partial, shard.index)
    found = {}
    for lane, accumulator in zip(step.lanes, accumulators, strict=True):
        for name, offset, values in finish_lane(plan, step, lane, accumulator, (0, lane.size)):
            assert offset == 0
            found[name] = values
    for out, array in zip(plan.outputs[1:], want[1:], strict=True):
        assert found[out.value].dtype == array.dtype
        np.testing.assert_allclose(found[out.value], np.asarray(array), rtol=1e-6)


def test_pieces_of_a_lane(executor):
    plan, step, execute = executor
    lane = max(step.lanes, key=lambda lane: lane.size)
    number = step.lanes.index(lane)
    partials = execute(Shard(0, 0, 8), [np.asarray(X)[:8]]).partials
    whole, pieces = {}, {}
    for bounds, found in [((0, lane.size), whole), ((0, 1), pieces), ((1, lane.size), pieces)]:
        lo, hi = bounds
        accumulator = new_accumulators(step, "exact")[number]
        from beamjax.reducers import make_accumulator

        accumulator = make_accumulator(lane.kind, np.dtype(lane.dtype), hi - lo, mode="exact")
        accumulator.add(partials[number][lo:hi], 0)
        for name, offset, values in finish_lane(plan, step, lane, accumulator, bounds):
            found.setdefault(name, {}).update(enumerate(values.tolist(), offset))
    assert whole == pieces


def test_a_wrong_shape_names_step_and_shard(executor):
    _, step, execute = executor
    with pytest.raises(WorkerError) as error:
        execute(Shard(1, 8, 3), [np.ones((3, 5), "float32")])
    message = str(error.value)
    assert message.startswith(f"step {step.name!r} (")
    assert "shard 1 of placement 'clients', members 8 to 10: " in message


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [(OSError("gone"), WorkerError, "OSError: gone"), (SourceError("f: gone"), SourceError, "f: ")],
)
def test_the_message_of_a_failed_shard(executor, error, kind, message):
    _, step, _ = executor
    where = "shard 2 of placement 'clients', members 16 to 16: "
    with pytest.raises(kind, match=where + message), shard_errors(step, Shard(2, 16, 1)):
        raise error


def test_padding_repeats_a_member_so_that_loops_end():
    # A row of zeros would never end this loop.
    body = lambda v: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, v)
    fn = bj.program(clients=3)(lambda x: bj.map_fn(body, x))
    x = jnp.asarray([1.0, 3.0, 50.0])
    found = bj.run(fn, x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, [128.0, 192.0, 100.0])
