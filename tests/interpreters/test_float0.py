"""Tangents of integers, of dtype float0, wherever a program has them: as under `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import beamjax as bj

N = 11  # the last shard holds three members
X = jnp.arange(2.0 * N).reshape(N, 2)
K = jnp.arange(N)
GUARDS = {"on_error": "drop", "on_nonfinite": "drop"}


def zeros(*shape):
    return np.zeros(shape, jax.dtypes.float0)


CASES = {}


def case(*args):
    """Adds a function of programs, with its arguments, to the cases."""

    def add(fn):
        CASES[fn.__name__] = fn, args
        return fn

    return add


def program(fn):
    return bj.program(clients=N)(fn)


def squares(x, k):
    return bj.reduce_sum(bj.map_fn(lambda v, i: jnp.sum(v**2) * i.astype(v.dtype), (x, k)))


@case(X, K)
def gradient(x, k):
    return jax.grad(program(squares), argnums=(0, 1), allow_int=True)(x, k)


@case(X, K)
def gradient_in_a_body(x, k):
    loss = lambda v, i: jnp.sum(v * i.astype(v.dtype))
    gradient = jax.grad(loss, argnums=(0, 1), allow_int=True)
    return program(lambda x, k: bj.map_fn(gradient, (x, k)))(x, k)


@case(X, K)
def tangents(x, k):
    fn = lambda x, k: (bj.map_fn(lambda v, i: (-v, i + 1), (x, k)), bj.reduce_sum(k))
    return jax.jvp(program(fn), (x, k), (x, zeros(N)))


@case(X, K)
def custom_jvp(x, k):
    @jax.custom_jvp
    def f(v, i):
        return v * i.astype(v.dtype)

    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    body = lambda v, i: (f(v, i), i)
    return jax.jvp(program(lambda x, k: bj.map_fn(body, (x, k))), (x, k), (x, zeros(N)))


@case(X)
def made_in_programs(x):
    t = zeros(2)
    return program(
        lambda x: (
            bj.broadcast(zeros(3)),
            bj.reduce_sum(x),
            bj.map_fn(lambda v: (v * 2, t), x),
            bj.map_fn(lambda v: (v * 2, zeros(2)), x),
        )
    )(x)


@case(X)
def batched(x):
    fn = program(lambda x: bj.map_fn(lambda v: (v, zeros(2)), x))
    return jax.vmap(fn, axis_size=3, in_axes=None)(x)


@case(X)
def carried_on_the_server(x):
    @program
    def fn(x):
        def step(carry, _):
            t, total = carry
            return (t, total + bj.reduce_sum(bj.map_fn(lambda v: v * total, x))), t

        return jax.lax.scan(step, (zeros(3), jnp.ones(2)), None, length=2)

    return fn(x)


@case(X)
def carried_by_members(x):
    @program
    def fn(x):
        def step(carry):
            i, t, y = carry
            y, t = bj.map_fn(lambda v, u: (v * 2, u), (y, t))
            return i + 1, t, y

        return jax.lax.while_loop(lambda c: c[0] < 2, step, (0, bj.broadcast(zeros()), x))

    return fn(x)


@case(X)
def chosen(x):
    @program
    def fn(x):
        t = bj.broadcast(zeros())
        first = lambda: bj.map_fn(lambda v, u: (v * 2, u), (x, t))
        return jax.lax.cond(bj.reduce_sum(x)[0] > 0, first, lambda: (x, t))

    return fn(x)


@case(X, zeros(N), zeros(3))
def inputs(x, placed, served):
    body = lambda v, u: (v * 2, u, served)
    return program(lambda x, t, s: (bj.map_fn(body, (x, t)), t, s, bj.broadcast(s)))(
        x, placed, served
    )


@case(X, zeros(N, 2))
def outside_of_bodies(x, t):
    @program
    def fn(x, t):
        both = jax.lax.concatenate([t, t], 0)
        return bj.reduce_sum(x), t[2], t.reshape(2 * N), both, jnp.sort(x, axis=0)

    return fn(x, t)


@pytest.mark.versions
def test_as_under_jit():
    faults = []
    for name, (fn, args) in CASES.items():
        expected = jax.jit(fn)(*args)
        assert any(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(expected)), name
        for runner, options in (("local", {}), ("local", GUARDS), ("DirectRunner", {})):
            try:
                found = bj.run(fn, *args, runner=runner, options={"shard_size": 8, **options})
                assert_close(found, expected)
            except Exception as error:  # Of any kind: all cases are reported.
                faults.append(f"{name} by {runner} {options}: {error!r:.200}")
    assert faults == []


def test_verify_compares_them():
    assert "float0" in str(bj.verify(inputs, *CASES["inputs"][1], runner="local"))
