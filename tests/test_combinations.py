"""Reductions whose partials a function brings together: in any shards, the same on every runner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_rules import assert_same

import beamjax as bj
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import Options
from beamjax.plan import Gather, walk
from beamjax.planning import make_plan

N = 20
RNG = np.random.default_rng(3)
SPECIAL = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
X = {
    "float32": jnp.asarray(RNG.normal(size=(N, 3)), "float32"),
    "special": jnp.asarray(RNG.choice(SPECIAL, (N, 3))),
    "equal": jnp.zeros((N, 3), "int32"),
    "lowest": jnp.full((N, 3), -128, "int8"),
    "uint8": jnp.asarray(RNG.integers(0, 4, (N, 3)), "uint8"),
}


def program(fn):
    return bj.program(clients=N)(lambda x: fn(bj.map_fn(lambda v: v, x)))


def gathers(fn, *args):
    arguments, _, restore = flatten_arguments(args)
    plan = make_plan(fn, arguments, restore, Options(shard_size=8)).plan
    return [step for step in walk(plan.steps) if isinstance(step, Gather)]


@pytest.mark.parametrize("name", X)
def test_the_highest_values_of_any_kind(name):
    # With 10 of them, each shard sends more rows than it has.
    fn = program(lambda x: (lax.top_k(x[:, 0], 3), lax.top_k(x.T, 10)))
    assert not gathers(fn, X[name])
    want = jax.jit(fn)(X[name])
    assert_same(want, bj.run(fn, X[name], runner="local", options={"shard_size": 8}), name)


@bj.program(clients=N)
def affine(a, b):
    joined = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
    kept = bj.map_fn(lambda a, b: (a, b), (a, b))
    start = np.int32(1), np.int32(5)
    return lax.reduce(kept, start, joined, (0,)), lax.reduce(kept, start, joined, (0, 1))


def test_a_function_that_does_not_commute_keeps_the_order():
    a, b = (jnp.asarray(RNG.integers(-3, 4, (N, 3)), "int32") for _ in range(2))
    a = jnp.where(a < 0, -1, 1)  # products stay small
    assert not gathers(affine, a, b)
    x, y = np.int32(1), np.int32(5)
    for row in zip(np.asarray(a).ravel(), np.asarray(b).ravel(), strict=True):
        x, y = x * row[0], y * row[0] + row[1]
    (_, (u, v)) = bj.run(affine, a, b, runner="local", options={"shard_size": 8})
    assert (int(u), int(v)) == (int(x), int(y))


def test_beam_gives_the_same_bits():
    fn = program(
        lambda x: (
            lax.top_k(x[:, 0], 3),
            lax.reduce(x, 0.0, lambda a, b: a + b + a * b / 8, (0,)),
            jnp.bitwise_xor.reduce(lax.bitcast_convert_type(x, np.dtype("int32"))),
            jnp.argmax(x),
        )
    )
    local, beam = (
        bj.run(fn, X["float32"], runner=runner, options={"shard_size": 8})
        for runner in ("local", "DirectRunner")
    )
    for a, b in zip(jax.tree.leaves(local), jax.tree.leaves(beam), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("combine", "read"),
    [
        (lambda a, b: (a[0] + b[0], a[1] + b[1]), 0),
        (lambda a, b: (a[0] * b[0], a[1] + b[1]), 1),
        (lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), 2),
    ],
)
def test_a_slope_gathers_the_leaves_that_it_depends_on(combine, read):
    @bj.program(clients=N)
    def total(x):
        leaves = bj.map_fn(lambda v: (v[0] / 2, v[1] / 3), x)
        return sum(bj.reduce(combine, leaves))

    slope, x = jax.grad(total), X["float32"] / 2
    assert len(gathers(slope, x)) == read
    got = bj.run(slope, x, runner="local", options={"shard_size": 8})
    assert_same(jax.jit(slope)(x), got)
