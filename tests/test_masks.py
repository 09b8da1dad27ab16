"""Full shards have no mask: what that makes of sums of products, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CASES
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax.bodies import load_body
from beamjax.errors import WorkerError
from beamjax.interpreters import masks
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import parse_options
from beamjax.plan import Map, walk
from beamjax.planning import plan_for
from beamjax.shards import Shard, ShardExecutor

D = 16
RNG = np.random.default_rng(5)
RUNNERS = ["local", "DirectRunner"]


@pytest.fixture
def apart(monkeypatch):
    """Masks are taken to cost so much that short shards always have an executable of their own."""
    monkeypatch.setattr(masks, "MASKED_SECONDS", 1.0)


def passes(fn, *args, **options):
    arguments, key, restore = flatten_arguments(args)
    options = parse_options({"platforms": ["cpu"], **options})
    plan = plan_for(fn, arguments, key, restore, options).plan
    return plan, [step for step in walk(plan.steps) if isinstance(step, Map)]


def rows(n):
    return RNG.normal(size=(n, D)).astype(np.float32)


def scatter():
    """A program of its own, as plans are remembered by program."""

    @bj.program(r=None)
    def program(x):
        return bj.reduce_sum(bj.map_fn(lambda v: jnp.outer(v, v), x))

    return program


def optimized(plan, step, key, size):
    """What XLA makes of a body."""
    x = jax.ShapeDtypeStruct((size, D), np.float32)
    number = jax.ShapeDtypeStruct((), np.int32)
    call = load_body(key, plan.bodies[key])
    return call.lower(number, number, x).compile().as_text()


@pytest.mark.usefixtures("apart")
def test_full_shards_select_nothing():
    plan, (step,) = passes(scatter(), rows(70), shard_size=64)
    assert step.executables == (step.body, step.short_body)
    assert " select(" not in optimized(plan, step, step.body, 64)
    assert " select(" in optimized(plan, step, step.short_body, 64)


@pytest.mark.parametrize(
    ("n", "members", "which"),
    [
        (64, 1.0, "full"),
        (8, 1.0, "full"),
        (64, 0.0, "full"),
        (70, 1.0, "both"),
        (70, 0.0, "one"),
        (7, 1.0, "one"),
    ],
)
def test_which_executables_there_are(n, members, which, monkeypatch):
    monkeypatch.setattr(masks, "MASKED_SECONDS", members)
    _, (step,) = passes(scatter(), rows(n), shard_size=8)
    if which == "full":
        assert step.short_body is None
        assert step.executables == (step.body,)
    elif which == "one":
        assert step.short_body == step.body
        assert step.executables == (step.body,)
    else:
        assert step.executables == (step.body, step.short_body)
        assert step.short_body != step.body


def test_masks_of_much_that_is_reduced_are_worth_an_executable():
    many, few = 2_000_003, 1_003
    as_types = lambda n: jax.ShapeDtypeStruct((n, D), np.float32)
    assert len(passes(scatter(), as_types(many))[1][0].executables) == 2
    assert len(passes(scatter(), as_types(few))[1][0].executables) == 1
    total = bj.program(r=None)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sum, x)))
    assert len(passes(total, as_types(many))[1][0].executables) == 1


@pytest.mark.usefixtures("apart")
def test_explain_tells_of_them():
    told = "full shards by an executable of their own, without a mask"
    assert told in str(bj.explain(scatter(), rows(70), options={"shard_size": 64}))
    assert told not in str(bj.explain(scatter(), rows(64), options={"shard_size": 64}))


@pytest.mark.usefixtures("apart")
@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_programs_give_what_jit_gives(name):
    fn, args = CASES[name].build(bj)
    assert_close(bj.run(fn, *args, runner="local"), jax.jit(fn)(*args))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("loop", [{}, {"member_loop": "loop"}, {"member_batch": 8}])
@pytest.mark.parametrize("n", [64, 61, 16, 5])
def test_sums_of_full_and_short_shards(n, loop, runner):
    if "member_batch" in loop:
        loop = {"member_loop": "batches", **loop}
    x = rows(n)
    x[-1, 0] = 1e15  # which padding repeats
    found = bj.run(scatter(), x, runner=runner, options={"shard_size": 16, **loop})
    wide = x.astype(np.float64)
    expected = wide.T @ wide
    assert found.dtype == np.float32
    assert found.shape == (D, D)
    scale = np.abs(wide).T @ np.abs(wide)
    assert np.all(np.abs(found - expected) <= 1e-6 * scale + np.finfo(np.float32).tiny)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("loop", [None, "loop"])
@pytest.mark.parametrize("n", [32, 29])
def test_a_plan_has_the_same_bits_on_beam(n, loop):
    @bj.program(r=None)
    def program(x):
        y = bj.map_fn(lambda v: jnp.sin(v) @ v, x)
        return y, bj.reduce_mean(y), bj.reduce_max(x), x.T @ x, jnp.argmax(y), jnp.sort(x[:, 0])

    x, options = rows(n), {"shard_size": 8, "member_loop": loop}
    local = bj.run(program, x, runner="local", options=options)
    assert_same_bits(bj.run(program, x, runner="DirectRunner", options=options), local)
    assert_close(local, jax.jit(program)(x))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("loop", ["vmap", "loop"])
@pytest.mark.parametrize("on_nonfinite", ["raise", "drop"])
def test_a_guard_that_drops_nobody_changes_no_bit(on_nonfinite, loop, runner):
    @bj.program(r=None)
    def program(x, k):
        y = bj.map_fn(lambda v, k: jnp.tanh(v) * k.astype(v.dtype), (x, k))
        return y, bj.reduce_sum(y), bj.reduce_max(k)

    args = rows(35), np.arange(35, dtype=np.int32)
    options = {"shard_size": 8, "member_loop": loop}
    plain = bj.run(program, *args, runner=runner, options=options)
    options |= {"on_nonfinite": on_nonfinite}
    assert_same_bits(bj.run(program, *args, runner=runner, options=options), plain)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("runner", RUNNERS)
def test_members_that_are_dropped_from_full_shards(runner):
    x = rows(32)
    x[5, 3] = np.nan
    x[24:] = np.inf  # a whole shard
    options = {"shard_size": 8, "on_nonfinite": "drop", "drop_limit": 0.9}
    found = bj.run(scatter(), x, runner=runner, options=options)
    kept = np.delete(x[:24], 5, axis=0)
    np.testing.assert_allclose(found, kept.T.astype(np.float64) @ kept, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("runner", RUNNERS)
def test_members_of_unequal_length(runner):
    lengths = np.sort(RNG.integers(1, 60, 45))
    data = RNG.normal(size=(int(lengths.sum()), 3)).astype(np.float32)

    @bj.program(clients=None)
    def program(client):
        def one(client):
            masked = jnp.where(client["mask"][:, None], client["x"], 0)
            return masked.T @ masked

        return bj.reduce_sum(bj.map_fn(one, client))

    source = bj.from_ragged({"x": data}, lengths)
    found = bj.run(program, source, runner=runner, options={"shard_size": 8})
    np.testing.assert_allclose(found, data.T.astype(np.float64) @ data, rtol=1e-5, atol=1e-4)


def test_a_short_shard_of_a_plan_without_one_is_told():
    x = rows(16)
    plan, (step,) = passes(scatter(), x, shard_size=8)
    execute = ShardExecutor(plan, step, {})
    assert execute(Shard(0, 0, 8), [x[:8]]).partials[0].shape == (D * D,)
    with pytest.raises(WorkerError, match="found a shard of 5 members, expected 8"):
        execute(Shard(1, 8, 5), [x[8:13]])
