"""Loops and branches on placed values outside of `map_fn`: inside a pass where they can be."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import beamjax as bj
from beamjax import planning
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import parse_options
from beamjax.plan import Gather, Loop, Map, walk

N = 20
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
OPTIONS = {"shard_size": 8}
CASES = {}


def case(**steps):
    """Registers a function of a server value and a placed one, and how many steps it takes."""

    def register(fn):
        def prog(w, x):
            return fn(w, bj.map_fn(jnp.sin, x))

        CASES[fn.__name__] = bj.program(clients=N)(prog), steps
        return fn

    return register


def training(w, v):
    return lax.scan(lambda c, i: (jnp.tanh(c * w + v * i), c.sum()), v, jnp.arange(3.0))


@case(maps=1)
def vmapped_scan(w, x):
    return jax.vmap(training, (None, 0))(w, x)


@case(maps=1)
def vmapped_along_another_axis(w, x):
    return jax.vmap(training, (None, 1), 1)(w, x.T)[0]


@case(maps=1)
def reduced_afterwards(w, x):
    return jnp.mean(jax.vmap(training, (None, 0))(w, x)[0], 0)


@case(maps=1)
def vmapped_while(w, x):
    one = lambda s: (s[0] * 0.5, s[1] + 1)
    return jax.vmap(lambda v: lax.while_loop(lambda s: jnp.abs(s[0]).sum() > 0.5, one, (v, 0)))(x)


@case(maps=1)
def vmapped_cond(w, x):
    return jax.vmap(lambda v: lax.cond(v[0] > 0, lambda v: v * w, lambda v: v - w, v))(x)


@case(maps=1)
def branch_of_the_server(w, x):
    return lax.cond(w[0] > 0, lambda x: x * 2, lambda x: jnp.zeros_like(x), x)


@case(maps=1)
def branch_of_scans(w, x):
    scan = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
    return lax.switch(w.astype(int)[2], [lambda x: x, scan, scan], x)


@case(maps=1)
def rounds_of_elementwise_operations(w, x):
    return lax.fori_loop(0, 4, lambda i, c: jnp.sin(c) + i, x)


@case(maps=1)
def rounds_that_stack(w, x):
    return lax.scan(lambda c, i: (c * 0.5 + i, c[:, 0]), x, jnp.arange(3.0), reverse=True)


@case(maps=1)
def rounds_over_a_stack(w, x):
    return lax.scan(lambda c, v: (c + v, None), x, jnp.stack([x, x * 2]))[0]


@case(maps=1)
def rounds_with_member_indices(w, x):
    one = lambda c, i: (c + jnp.where(jnp.arange(N) == i, 1.0, 0.0)[:, None], None)
    return lax.scan(one, x, jnp.arange(3))[0]


@case(maps=1)
def rounds_with_values_made_around(w, x):
    y = jnp.ones((N, 3)) * 0.5
    return lax.scan(lambda c, _: (c * y, None), x, None, length=2)[0]


@case(maps=1)
def rounds_that_read_a_made_value_whole_and_by_members(w, x):
    # The tangent of ones is a value of the server, and in the product with x one of the members.
    def last(x, v):
        return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(v * 0.5), x)

    return jax.jvp(last, (x, x), (jnp.ones_like(x), jnp.ones_like(x)))[0]


@case(maps=1)
def scan_in_a_vmapped_while(w, x):
    def one(s):
        return lax.scan(lambda c, _: (c * 0.9, None), s, None, length=2)[0]

    return jax.vmap(lambda v: lax.while_loop(lambda s: jnp.abs(s).sum() > 0.5, one, v))(x)


@case(maps=2, loops=1)
def rounds_that_reduce(w, x):
    return lax.fori_loop(0, 4, lambda i, w: w - 0.1 * jnp.mean(x * w[None], 0), w)


@case(maps=2, loops=1)
def rounds_that_count(w, x):
    # What a round computes for the server, the server needs.
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * 2, s[1] + 1), (x, 0))


@case(maps=4, loops=2)
def rounds_with_rounds_that_count(w, x):
    def inner(x):
        one = lambda i, s: (s[0] * 0.9, s[1] + i)
        return lax.fori_loop(0, 3, one, (x, jnp.ones(2, jnp.int32)))

    def outer(s):
        y, counts = inner(x)
        return s[0] + 1, s[1] + y * jnp.sum(counts).astype(y.dtype)

    return lax.while_loop(lambda s: (s[0] < 3) & (jnp.sum(x) != 0), outer, (0, x))[1]


@case(maps=1, gathers=1)
def rounds_that_mix_members(w, x):
    return lax.fori_loop(0, 2, lambda i, c: jnp.sort(c, 0) * 2, x)


@case(maps=1, gathers=1)
def scan_over_members(w, x):
    return lax.scan(lambda c, v: (c + v, jnp.sum(c)), w, x)


def plan_of(fn):
    arguments, key, restore = flatten_arguments((W, X))
    return planning.plan_for(fn, arguments, key, restore, parse_options(OPTIONS)).plan


@pytest.mark.parametrize("name", CASES)
def test_steps(name):
    fn, expected = CASES[name]
    found = collections.Counter(type(step) for step in walk(plan_of(fn).steps))
    steps = {"maps": found[Map], "loops": found[Loop], "gathers": found[Gather]}
    assert {kind: n for kind, n in steps.items() if n} == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_values(name, runner):
    fn, _ = CASES[name]
    expected, found = jax.jit(fn)(W, X), bj.run(fn, W, X, runner=runner, options=OPTIONS)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-6)
