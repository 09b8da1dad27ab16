"""How shards are computed: all members at once, in batches, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of
from helpers import assert_close, assert_same_bits, plan_of
from jax import export
from jax.custom_batching import custom_vmap
from programs import run_everywhere

import beamjax as bj
from beamjax.plan.steps import Map, walk

N = 45
RNG = np.random.default_rng(0)
W = RNG.normal(size=(6, 4)).astype(np.float32)
X = RNG.normal(size=(N, 6)).astype(np.float32)

WAYS = {
    "vmap": {"member_loop": "vmap"},
    "loop": {"member_loop": "loop"},
    "batches": {"member_loop": "batches"},
    "batches of 8": {"member_loop": "batches", "shard_size": 24},
    "batches of 16": {"member_loop": "batches", "shard_size": 32},
}


@bj.program(clients=N)
def reduced_only(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w), x))


@bj.program(clients=N)
def two_passes(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


def ways_of(fn, *args, **options):
    """What `bj.explain` says of each pass: "in batches of 8", "sequentially", or nothing."""
    facts = facts_of(bj.explain(fn, *args, options=options))
    reasons = [step.reason for step in all_steps(facts.steps) if step.kind == "Map"]
    return [r.partition(":")[0].removeprefix("members ") for r in reasons]


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
    found = bj.run(reduced_only, W, x, runner="local", options=options)
    left = np.delete(X, [3, 17, 44], axis=0).astype(np.float64)
    np.testing.assert_allclose(found, np.tanh(left @ W).mean(0), rtol=1e-5)
    assert_same_bits(bj.run(reduced_only, W, x, options=options), found)


def test_explain_says_how_members_are_computed():
    assert ways_of(two_passes, W, X, **WAYS["batches of 16"]) == ["in batches of 16"] * 2
    assert ways_of(two_passes, W, X, member_loop="loop") == ["sequentially"] * 2
    # The batches of a shard are two or more, and alike: 16 does not divide 40.
    for size, batch in ((8, None), (16, 8), (24, 8), (32, 16), (40, 8), (48, 24)):
        (way,) = ways_of(reduced_only, W, X, member_loop="batches", shard_size=size)
        assert way == (f"in batches of {batch}" if batch else ""), size
    large = np.zeros((32, 300_000), np.float32)  # The cache holds not one of them.

    @bj.program(clients=32)
    def total(x):
        return bj.reduce_sum(
            bj.map_fn(lambda v: jax.lax.fori_loop(0, 9, lambda _, v: v[::-1], v), x)
        )

    assert ways_of(total, large, member_loop="batches", shard_size=32) == ["in batches of 8"]


def test_shards_that_are_short_are_computed_in_batches():
    def body(w, x):
        return jax.lax.scan(lambda w, _: (w - 0.1 * x.T @ (x @ w), None), w, None, length=3)[0]

    @bj.program(clients=None)
    def trained(w, x):
        ws = bj.map_fn(body, (bj.broadcast(w), x))
        return bj.reduce_mean(ws), ws

    w, x = np.ones(16, np.float32), RNG.normal(size=(3001, 8, 16)).astype(np.float32)
    (way,) = ways_of(trained, w, x)
    (placement,) = facts_of(bj.explain(trained, w, x)).placements
    assert placement.shard_size >= 2 * int(way.removeprefix("in batches of "))
    assert "no more members fit in the cache" in str(bj.explain(trained, w, x))
    assert "batches" not in str(ways_of(trained, w, x, shard_size=128))
    run_everywhere(trained, w, x)


def test_no_batches_of_ragged_members_or_on_other_devices():
    @bj.program(clients=None)
    def squares(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v**2, x))

    rows = np.ones((3000, 10), np.float32)
    source = bj.from_ragged(rows, [*np.full(599, 4), 604])

    @bj.program(clients=None)
    def sums(data):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"][:, None]), data))

    for platforms, batches in (("cpu", True), ("cuda", False)):
        ways = ways_of(sums, source, platforms=platforms)
        assert ways
        assert all(("in batches" in way) == batches for way in ways)


@pytest.mark.parametrize("loop", [{"member_loop": "loop", "shard_size": 48}, WAYS["batches of 16"]])
def test_callbacks_are_called_once_a_member(loop):
    """The last shard is not padded then, and has no whole number of batches."""
    seen = []

    def body(v):
        jax.debug.callback(lambda v: seen.append(float(v)), v[0])
        return v * 2

    calls = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    found = bj.run(calls, X, runner="local", options=loop)
    np.testing.assert_allclose(found, 2 * X.sum(axis=0), rtol=1e-6)
    assert sorted(seen) == sorted(X[:, 0].tolist())


def test_what_has_an_order_is_computed_together():
    ordered = bj.program(clients=N)(lambda x: bj.reduce(lambda a, b: a + b, bj.map_fn(jnp.sin, x)))
    assert ways_of(ordered, X, member_loop="loop") == [""]
    run_everywhere(ordered, X, beam=False, member_loop="loop")


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
