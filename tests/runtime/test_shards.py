"""One pass over one shard: which members, padding, and what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import SourceError, WorkerError
from beamjax.plan.shard import Shard, shard_errors, shards
from beamjax.plan.steps import Map
from beamjax.runtime.shard_executor import ShardExecutor


@given(n=st.integers(1, 500), size=st.integers(1, 64), cut=st.integers(0, 20))
def test_shards_cover_all_members_once(n, size, cut):
    found, count = list(shards(n, size)), -(-n // size)
    assert [s.index for s in found] == list(range(count))
    assert [m for s in found for m in range(s.start, s.start + s.count)] == list(range(n))
    assert all(s.count == size for s in found[:-1])
    cut = min(cut, count)
    assert [*shards(n, size, 0, cut), *shards(n, size, cut, count)] == found


@bj.program(clients=11)
def prog(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return y, bj.reduce_sum(y), bj.reduce_max(x), bj.reduce_mean(x), bj.reduce_sum(x > 3)


X = np.arange(22, dtype=np.float32).reshape(11, 2)


@pytest.fixture(scope="module")
def executor():
    plan = plan_of(prog, np.float32(2.0), X, shard_size=8)
    (step,) = [step for step in plan.steps if isinstance(step, Map)]
    (name,) = step.broadcasts
    return step, ShardExecutor(plan, step, {name: np.float32(2.0)})


def test_a_shard(executor):
    step, execute = executor
    infinite = np.float32([[1.0, 2.0], [np.inf, np.nan]])
    for rows in (X[:1], X[:3], infinite, X[:8]):  # of one shard nothing is left in the next
        found = execute(Shard(0, 0, len(rows)), [rows])
        np.testing.assert_array_equal(found.results[0], rows * 2)
        values = {}
        for buffer, partial in zip(step.buffers, found.partials, strict=True):
            assert (partial.shape, partial.dtype) == ((buffer.size,), buffer.dtype)
            for r in buffer.reductions:
                values[r.reducer, r.dtype] = partial[r.offset : r.offset + r.size]
        np.testing.assert_array_equal(values["max", "float32"], rows.max(0))
        np.testing.assert_array_equal(values["sum", "bool"], (rows > 3).sum(0))
        np.testing.assert_array_equal(values["sum", "float32"], (rows * 2).sum(0))


def test_errors_name_step_shard_and_members(executor):
    step, execute = executor
    with pytest.raises(WorkerError) as caught:
        execute(Shard(1, 8, 3), [np.ones((3, 5), "float32")])
    assert str(caught.value).startswith(f"step {step.name!r} (")
    assert "shard 1 of placement 'clients', members 8 to 10: " in str(caught.value)
    where = "shard 2 of placement 'clients', members 16 to 16: "
    for error, kind, message in [
        (OSError("gone"), WorkerError, "OSError: gone"),
        (SourceError("f: gone"), SourceError, "f: "),
    ]:
        with pytest.raises(kind, match=where + message), shard_errors(step, Shard(2, 16, 1)):
            raise error


def test_padding_repeats_a_member_so_that_loops_end():
    # A row of zeros would never end this loop.
    body = lambda v: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, v)
    fn = bj.program(clients=3)(lambda x: bj.map_fn(body, x))
    x = jnp.asarray([1.0, 3.0, 50.0])
    found = bj.run(fn, x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, [128.0, 192.0, 100.0])
