"""Computations of rows before a program cuts them into members: each member makes its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import stage
from beamjax.options import parse_options
from beamjax.plan import Gather, Scatter, walk
from beamjax.planning import plan_for

N, B = 20, 3
OPTIONS = {"shard_size": 8}
X = jnp.asarray(np.random.default_rng(0).normal(size=(N * B, 4)), "float32")
T = jnp.arange(N * B * 6, dtype="int32").reshape(-1, 6) % 11
W = jnp.arange(4.0)
KEY = jax.random.key(3)

programs = {}


def program(*args, moves=(0, 0)):
    """A program, its arguments, and how many values of it are gathered and scattered."""

    def decorate(fn):
        programs[fn.__name__] = bj.program(clients=N)(fn), args, moves
        return fn

    return decorate


def cut(x):
    return x.reshape(N, -1, *x.shape[1:])


@program(T)
def shifted_tokens(tokens):
    inputs, targets = cut(tokens[:, :-1]), cut(tokens[:, 1:])
    return bj.reduce_sum(bj.map_fn(lambda a, b: jnp.sum(a * b), (inputs, targets)))


@program(X, W)
def with_server_values(x, w):
    scaled = cut((x - w[None]) / jnp.max(w))
    return bj.map_fn(lambda v: v.sum(0), scaled)


@program(T)
def one_hot_and_rolled(tokens):
    hot = cut(jax.nn.one_hot(jnp.roll(tokens, 1, axis=1), 11))
    return bj.reduce_mean(bj.map_fn(lambda v: v.mean(0), hot))


@program(X, T)
def two_inputs(x, t):
    y = cut(x * t[:, :4].astype("float32"))
    return bj.reduce_max(bj.map_fn(lambda v: v[::-1], y))


@program(X)
def numbers_of_rows(x):
    y = cut(x + jnp.arange(float(N * B))[:, None])
    return bj.map_fn(lambda v: v.max(0), y)


@program(KEY)
def two_keys_for_each(key):
    keys = jax.random.split(key, 2 * N).reshape(N, 2)
    return bj.map_fn(lambda k: jax.random.bits(k[1], (2,)), keys)


@program(jax.random.PRNGKey(3))
def two_raw_keys_for_each(key):
    keys = jax.random.split(key, 2 * N).reshape(N, 2, 2)
    return bj.map_fn(lambda k: jax.random.bits(k[1], (2,)), keys)


@program(X, W)
def in_a_loop(x, w):
    y = x * 2

    def step(w, rate):
        return w - rate * bj.reduce_mean(bj.map_fn(lambda v: v.sum(0), cut(y))), None

    return jax.lax.scan(step, w, jnp.asarray([0.1, 0.2]))[0]


@program(X, W)
def a_gradient(x, w):
    def loss(w):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.sum((v @ w) ** 2), cut(x * 2)))

    return jax.grad(loss)(w)


@program(X, moves=(0, 1))
def rows_that_mix(x):
    return bj.reduce_sum(bj.map_fn(lambda v: v[0] - v[1], cut(jnp.cumsum(x, axis=0))))


@program(X, moves=(0, 1))
def also_on_the_server(x):
    y = cut(x * 2)
    return bj.reduce_sum(bj.map_fn(lambda v: v[0], y)), jnp.sort(y, axis=None)


@pytest.mark.parametrize("name", programs)
def test_programs_that_compute_rows(name):
    fn, args, moves = programs[name]
    with jax.numpy_rank_promotion("allow"):
        arguments, key, restore = stage.flatten_arguments(args)
        plan = plan_for(fn, arguments, key, restore, parse_options(OPTIONS)).plan
        steps = list(walk(plan.steps))
        counts = [sum(isinstance(step, kind) for step in steps) for kind in (Gather, Scatter)]
        found = bj.run(fn, *args, runner="local", options=OPTIONS)
        expected = jax.jit(fn)(*args)
    assert tuple(counts) == moves
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["shifted_tokens", "two_keys_for_each", "numbers_of_rows"])
def test_computed_rows_on_beam(name):
    fn, args, _ = programs[name]
    with jax.numpy_rank_promotion("allow"):
        found, expected = bj.run(fn, *args, options=OPTIONS), jax.jit(fn)(*args)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_source_of_tokens(tmp_path):
    fn, (tokens,), _ = programs["shifted_tokens"]
    np.save(tmp_path / "tokens.npy", tokens)
    source = bj.from_npy(tmp_path / "tokens.npy")
    found = bj.run(fn, source, runner="local", options=OPTIONS)
    np.testing.assert_array_equal(found, jax.jit(fn)(tokens))
