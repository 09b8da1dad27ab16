"""`jax.experimental.jet` of programs: the series that it gives with `vmap` for `map_fn`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import beamjax as bj

N = 11  # the last shard holds three members
X = jnp.linspace(0.1, 0.9, 2 * N).reshape(N, 2)
K = jnp.arange(N)
W = jnp.asarray([0.3, 0.7])
SERIES = [[jnp.cos(x * (k + 1)) for k in range(3)] for x in (W, X)]


def mapped(ops, w, x):
    return ops.map_fn(lambda v: jnp.sin(v * w) + jnp.exp(v), x)


def summed(ops, w, x):
    y = ops.map_fn(lambda v: jnp.tanh(v) @ w, x)
    return {"sum": ops.reduce_sum(y), "mean": ops.reduce_mean(y), "max": ops.reduce_max(y)}


def with_ints(ops, w, x):
    body = lambda v, k: (jnp.where(k % 2 == 0, v * w, v**2), k + 1)
    y, k = ops.map_fn(body, (x * 2, K))
    return ops.reduce_sum(y), ops.reduce_sum(k)


def broadcast(ops, w, x):
    mean = ops.reduce_mean(x)
    return ops.reduce_sum(ops.map_fn(lambda v, u: v / u, (x, ops.broadcast(mean * w))))


def constant_members(ops, w, x):
    del x
    return ops.reduce_sum(ops.map_fn(lambda k: k.astype(w.dtype) * jnp.log(w), K))


def through_jit(ops, w, x):
    return jax.jit(lambda w, x: mapped(ops, w, x))(w, x)


class Operators:
    """What a program is without beamjax."""

    map_fn = staticmethod(lambda fn, x: jax.vmap(fn)(*(x if isinstance(x, tuple) else (x,))))
    reduce_sum = staticmethod(lambda x: jnp.sum(x, axis=0))
    reduce_mean = staticmethod(lambda x: jnp.mean(x, axis=0))
    reduce_max = staticmethod(lambda x: jnp.max(x, axis=0))
    broadcast = staticmethod(lambda x: jnp.broadcast_to(x, (N, *jnp.shape(x))))


PROGRAMS = [mapped, summed, with_ints, broadcast, constant_members, through_jit]


@pytest.fixture(autouse=True)
def promotion():
    """`jet` multiplies the terms of integers by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("way", ["eager", "jit", "local", "DirectRunner"])
def test_the_series_that_vmap_gives(way):
    faults = []
    for fn in PROGRAMS:
        plain = lambda w, x, fn=fn: jet(lambda w, x: fn(Operators, w, x), (w, x), SERIES)
        program = bj.program(clients=N)(lambda w, x, fn=fn: fn(bj, w, x))
        series = lambda w, x, program=program: jet(program, (w, x), SERIES)
        run = {
            "eager": series, "jit": jax.jit(series),
            "local": lambda w, x, series=series: bj.run(series, w, x, runner="local"),
            "DirectRunner": lambda w, x, series=series: bj.run(series, w, x),
        }[way]  # fmt: skip
        expected = jax.jit(plain)(W, X)
        found = run(W, X)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if a.dtype != b.dtype or not np.allclose(a, b, rtol=1e-4, atol=1e-5):
                faults.append(f"{fn.__name__}: {a} != {b}")
    assert faults == []


def test_the_map_stays_a_map():
    program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    series = jax.make_jaxpr(lambda x: jet(program, (x,), (SERIES[1],)))(X)
    assert "bj_map" in str(series)
