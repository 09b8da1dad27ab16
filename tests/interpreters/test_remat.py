"""Values that cross passes: elementwise ones are computed again, others are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, plan_of

import beamjax as bj
from beamjax.plan.steps import Map

X = np.random.default_rng(0).normal(size=(96, 1024)).astype(np.float32)


def squares_from_mean(y):
    return bj.reduce_mean((y - bj.reduce_mean(y)[None]) ** 2)


def long_chain(x, rounds=40):
    for _ in range(rounds):
        x = jnp.sin(jnp.exp(-x * x))
    return x


def on_the_host(v):
    return jax.pure_callback(lambda v: v, jax.typeof(v), v, vmap_method="sequential")


CROSSING = {
    "operations": (jnp.exp, "recomputed"),
    "many operations": (long_chain, "recomputed"),
    "too many operations": (lambda x: long_chain(x, 80), "stored"),
    "too many operations in a map": (
        lambda x: bj.map_fn(lambda v: long_chain(v, 80), x), "stored"),
    "entries in another order": (lambda x: jnp.flip(x, 1) * 2, "recomputed"),
    "operations with what is created": (
        lambda x: x * jnp.arange(96.0, dtype="float32")[:, None], "recomputed"),
    "a map of operations": (lambda x: bj.map_fn(lambda v: jnp.flip(v) * 2.0, x), "recomputed"),
    "a call in a map": (lambda x: bj.map_fn(jax.nn.relu, x), "recomputed"),
    "a sum": (lambda x: x * jnp.sum(x, axis=1, keepdims=True), "stored"),
    "a product": (lambda x: bj.map_fn(lambda v: v @ v * v, x), "stored"),
    "a loop": (
        lambda x: bj.map_fn(lambda v: jax.lax.fori_loop(0, 2, lambda _, w: w * 2, v), x), "stored"),
    "a draw": (
        lambda x: bj.map_fn(lambda v: v * jax.random.normal(jax.random.key(0)), x), "stored"),
    "operations on what is stored": (
        lambda x: jnp.exp(bj.map_fn(lambda v: v / (v @ v), x)), "stored"),
    "a call of the host": (lambda x: bj.map_fn(on_the_host, x), "stored"),
}  # fmt: skip


def crossing(fn, *args):
    """Whether the first of two passes returns a placed value, which the second reads."""
    plan = plan_of(fn, *args)
    first, second = (step for step in plan.steps if isinstance(step, Map))
    assert set(first.results) <= set(second.operands)
    if first.results:
        return "stored"
    assert first.operands == second.operands  # it reads the input
    return "recomputed"


@pytest.mark.parametrize("name", CROSSING)
def test_elementwise_values_are_recomputed_and_others_stored(name):
    make, expected = CROSSING[name]
    prog = bj.program(clients=None)(lambda x: squares_from_mean(make(x)))
    assert crossing(prog, X) == expected


@pytest.mark.parametrize("name", ["operations", "a map of operations", "a product"])
def test_answers_are_those_of_jit_and_of_beam(name):
    prog = bj.program(clients=None)(lambda x: squares_from_mean(CROSSING[name][0](x)))
    local = bj.run(prog, X, runner="local")
    assert_close(local, jax.jit(prog)(X))
    assert_same_bits(bj.run(prog, X, runner="DirectRunner"), local)


def test_a_call_of_the_host_is_made_once_a_member():
    seen = []

    def host(v):
        seen.append(1)
        return v

    @bj.program(clients=None)
    def program(x):
        of = jax.ShapeDtypeStruct((1024,), np.float32)
        body = lambda v: jax.pure_callback(host, of, v, vmap_method="sequential")
        return squares_from_mean(bj.map_fn(body, x))

    bj.run(program, X[:16], runner="local", options={"shard_size": 8})
    assert len(seen) == 16


def test_what_is_an_output_is_stored():
    @bj.program(clients=None)
    def program(x):
        y = bj.map_fn(lambda v: jnp.flip(v) * 2.0, x)
        return squares_from_mean(y), y

    passes = [step for step in plan_of(program, X).steps if isinstance(step, Map)]
    assert sum(len(step.results) for step in passes) == 1
