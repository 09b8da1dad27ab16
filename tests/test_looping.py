"""How shards are computed: all members at once, in batches, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.custom_batching import custom_vmap
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax.choices import Looping
from beamjax.interpreters import stage
from beamjax.options import parse_options
from beamjax.plan import Map, walk
from beamjax.planning import plan_for

N = 45
RNG = np.random.default_rng(0)
W = RNG.normal(size=(6, 4)).astype(np.float32)
X = RNG.normal(size=(N, 6)).astype(np.float32)

WAYS = {
    "vmap": {"member_loop": "vmap"},
    "loop": {"member_loop": "loop"},
    "batches": {"member_loop": "batches"},
    "batches of 8": {"member_loop": "batches", "member_batch": 8, "shard_size": 24},
    "batches of 16": {"member_loop": "batches", "member_batch": 16, "shard_size": 32},
}


@bj.program(clients=N)
def everything(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    keys = jax.random.split(jax.random.key(0), N)
    drawn = bj.map_fn(lambda k, v: jax.random.normal(k, (2,)) + v[:2], (keys, y))
    whole = jnp.arange(N)
    return {
        "sum": bj.reduce_sum(y), "mean": bj.reduce_mean(drawn), "max": bj.reduce_max(y),
        "min": bj.reduce_min(whole), "any": bj.reduce_any(y > 0.9), "all": bj.reduce_all(y > -2),
        "prod": bj.reduce_prod(y), "placed": y, "drawn": drawn,
        "count": bj.reduce_sum(jnp.ones(N, jnp.int32)),
    }  # fmt: skip


@bj.program(clients=N)
def reduced_only(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w), x))


@bj.program(clients=N)
def two_passes(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


def plan_of(fn, *args, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, parse_options(options)).plan


def loopings(plan):
    return [step.looping for step in walk(plan.steps) if isinstance(step, Map)]


PROGRAMS = {"everything": everything, "reduced": reduced_only, "two passes": two_passes}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_any_way_gives_what_jit_gives_with_the_same_bits_on_beam(name, way):
    program = PROGRAMS[name]
    expected = jax.jit(program)(W, X)
    local = bj.run(program, W, X, runner="local", options=WAYS[way])
    assert_close(local, expected)
    assert_same_bits(bj.run(program, W, X, options=WAYS[way]), local)


@pytest.mark.parametrize("way", WAYS)
def test_bits_of_a_member_do_not_depend_on_where_it_stands(way):
    @bj.program(clients=None)
    def placed(w, x):
        return bj.map_fn(lambda v: jnp.tanh(v @ w), x)

    options = {**WAYS[way], "shard_size": 48}
    whole = bj.run(placed, W, X, runner="local", options=options)
    rolled = bj.run(placed, W, np.roll(X, 9, axis=0), runner="local", options=options)
    assert_same_bits(rolled, jnp.roll(whole, 9, axis=0))


@pytest.mark.parametrize("way", ["loop", "batches of 8"])
@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_members_that_are_dropped(way, on_error):
    x = X.copy()
    x[[3, 17, 44]] = np.nan
    options = {**WAYS[way], "on_nonfinite": "drop", "on_error": on_error}
    told = bj.run(reduced_only, W, x, runner="local", options=options)
    kept = np.delete(X, [3, 17, 44], axis=0)
    np.testing.assert_allclose(told, np.tanh(kept.astype(np.float64) @ W).mean(0), rtol=1e-5)
    assert_same_bits(bj.run(reduced_only, W, x, options=options), told)


def test_the_plan_holds_the_way_and_explain_says_so():
    plan = plan_of(two_passes, W, X, **WAYS["batches of 16"])
    assert loopings(plan) == [Looping("batches", 16)] * 2
    told = str(bj.explain(two_passes, W, X, options=WAYS["batches of 16"]))
    assert "members in batches of 16: the option member_loop='batches'" in told
    told = str(bj.explain(two_passes, W, X, options=WAYS["loop"]))
    assert "members one after the other: the option member_loop='loop'" in told


def test_batches_that_do_not_fit_a_shard_are_none():
    assert loopings(plan_of(reduced_only, W, X, member_loop="batches", shard_size=8)) == [Looping()]
    plan = plan_of(reduced_only, W, X, member_loop="batches", member_batch=32)
    assert loopings(plan) == [Looping()]  # all members are a shard of 48


def test_shards_that_are_short_are_computed_in_batches():
    def body(w, x):
        return jax.lax.scan(lambda w, _: (w - 0.1 * x.T @ (x @ w), None), w, None, length=3)[0]

    @bj.program(clients=None)
    def trained(w, x):
        ws = bj.map_fn(body, (bj.broadcast(w), x))
        return bj.reduce_mean(ws), ws

    w, x = np.ones(16, np.float32), RNG.normal(size=(3001, 8, 16)).astype(np.float32)
    plan = plan_of(trained, w, x)
    (looping,) = loopings(plan)
    assert looping.kind == "batches"
    assert plan.shard_sizes["clients"] >= 2 * looping.batch
    local = bj.run(trained, w, x, runner="local")
    assert_close(local, jax.jit(trained)(w, x))
    assert_same_bits(bj.run(trained, w, x), local)
    assert "the cache holds no more of them" in str(bj.explain(trained, w, x))
    assert loopings(plan_of(trained, w, x, shard_size=128)) == [Looping()]


def test_no_batches_without_a_number_of_members_or_on_other_devices():
    @bj.program(clients=None)
    def squares(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v**2, x))

    chunks = bj.from_chunks(lambda: iter([np.ones((24, 6), np.float32)]))
    text = str(bj.explain(squares, chunks))
    assert "the cache holds no more" not in text
    assert "in vmap" not in text
    rows = np.ones((3000, 10), np.float32)
    source = bj.from_ragged(rows, [*np.full(599, 4), 604])

    @bj.program(clients=None)
    def sums(data):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"][:, None]), data))

    for platforms, kinds in (("cpu", {"batches"}), ("cuda", {"vmap"})):
        plan = plan_of(sums, source, platforms=platforms)
        assert {looping.kind for looping in loopings(plan)} == kinds


def test_batches_of_members_of_which_the_cache_holds_none():
    @bj.program(clients=32)
    def total(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v + 1, x))

    plan = plan_of(total, np.zeros((32, 300_000), np.float32), member_loop="batches", shard_size=32)
    assert loopings(plan) == [Looping("batches", 8)]


def test_batches_of_what_calls_back():
    """The last shard is not padded then, and has no whole number of batches."""
    seen = []

    @bj.program(clients=N)
    def told(x):
        def body(v):
            jax.debug.callback(lambda v: seen.append(float(v)), v[0])
            return v * 2

        return bj.reduce_sum(bj.map_fn(body, x))

    options = {"member_loop": "batches", "member_batch": 8, "shard_size": 32}
    found = bj.run(told, X, runner="local", options=options)
    np.testing.assert_allclose(found, 2 * X.sum(axis=0), rtol=1e-6)
    assert sorted(seen) == sorted(X[:, 0].tolist())


def test_what_has_an_order_is_computed_together():
    @bj.program(clients=N)
    def ordered(x):
        return bj.reduce(lambda a, b: a + b, bj.map_fn(jnp.sin, x))

    plan = plan_of(ordered, X, member_loop="loop")
    assert loopings(plan) == [Looping()]
    assert_close(
        bj.run(ordered, X, runner="local", options={"member_loop": "loop"}), jax.jit(ordered)(X)
    )


def test_callbacks_are_called_once_a_member_in_a_loop():
    seen = []

    @bj.program(clients=N)
    def tells(x):
        def body(v):
            jax.debug.callback(lambda s: seen.append(float(s)), v[0])
            return v.sum()

        return bj.reduce_sum(bj.map_fn(body, x))

    bj.run(tells, X, runner="local", options={"member_loop": "loop", "shard_size": 48})
    assert sorted(set(seen)) == sorted(X[:, 0].tolist())


def code_of(fn, *args, **options):
    """The bodies of the passes, as StableHLO."""
    plan = plan_of(fn, *args, **options)
    bodies = [plan.bodies[step.body] for step in walk(plan.steps) if isinstance(step, Map)]
    texts = [export.deserialize(bytearray(body.artefacts["cpu"])).mlir_module() for body in bodies]
    return "\n".join(map(str, texts))


def test_weights_that_members_share_are_there_once():
    @bj.program(clients=N)
    def products(w, x):
        return bj.reduce_sum(bj.map_fn(lambda w, v: jnp.tanh(v @ w), (bj.broadcast(w), x)))

    text = code_of(products, W, X, shard_size=8)
    assert "stablehlo.dot_general" in text
    assert "tensor<8x6x4xf32>" not in text
    assert "batching_dims" not in text


def test_the_body_of_one_member_is_what_was_written():
    """Under vmap a product has an axis more, and both sides of a branch are computed."""

    @bj.program(clients=N)
    def branches(x):
        def body(v):
            m = jnp.outer(v, v)
            return jax.lax.cond(v[0] > 0, lambda: m @ m, lambda: m)

        return bj.reduce_sum(bj.map_fn(body, x))

    alone = code_of(branches, X, member_loop="loop")
    assert "stablehlo.case" in alone
    assert "batching_dims" not in alone
    together = code_of(branches, X, member_loop="vmap")
    assert "stablehlo.case" not in together
    assert "batching_dims" in together


def test_rules_for_vmap_hold_for_one_member_too():
    @custom_vmap
    def scaled(v):
        return v * 0

    @scaled.def_vmap
    def _(size, batched, v):
        return v * 2, True

    @bj.program(clients=N)
    def ruled(x):
        return bj.reduce_sum(bj.map_fn(lambda v: jax.jit(scaled)(v), x))

    found = bj.run(ruled, X, runner="local", options={"member_loop": "loop"})
    assert_close(found, jax.jit(ruled)(X))
    np.testing.assert_allclose(found, 2 * X.sum(axis=0), rtol=1e-5)
