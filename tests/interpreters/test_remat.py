"""Values that cross passes: computed again or stored, by what both take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, plan_of

import beamjax as bj
from beamjax.interpreters.cutting import remat as module
from beamjax.plan.steps import Map

MANY, FEW = 10**6, 96
X = np.random.default_rng(0).normal(size=(FEW, 1024)).astype(np.float32)


def variance_of(body, x):
    y = bj.map_fn(body, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


@bj.program(clients=None)
def quick(x):
    """A map that is no elementwise operation, but hardly any work."""
    return variance_of(lambda v: jnp.flip(v) * 2.0, x)


@bj.program(clients=None)
def long(x):
    """The same that is much work."""
    return variance_of(lambda v: jax.lax.fori_loop(0, 50, lambda _, w: jnp.sin(w) * 2.0, v), x)


@bj.program(clients=None)
def exponential(x):
    y = jnp.exp(x)
    return bj.reduce_mean((y - bj.reduce_mean(y)[None]) ** 2)


@bj.program(clients=None)
def chain(x):
    """Elementwise, but a lot of it."""
    y = x
    for _ in range(40):
        y = jnp.sin(jnp.exp(-y * y))
    return bj.reduce_mean((y - bj.reduce_mean(y)[None]) ** 2)


def crossing(fn, n):
    """ "stored" if the first of two passes returns a placed value, which the second reads."""
    plan = plan_of(fn, jax.ShapeDtypeStruct((n, 1024), np.float32))
    first, second = (step for step in plan.steps if isinstance(step, Map))
    assert set(first.results) <= set(second.operands)
    if first.results:
        return "stored"
    assert first.operands == second.operands  # it reads the input
    return "rematerialized"


CHOSEN = {
    quick: ("rematerialized", "stored"),
    long: ("stored", "stored"),
    exponential: ("rematerialized", "rematerialized"),
    chain: ("stored", "rematerialized"),
}


@pytest.mark.parametrize("fn", CHOSEN, ids=lambda fn: fn.__name__)
def test_costs_decide_where_they_clearly_do(fn):
    assert (crossing(fn, MANY), crossing(fn, FEW)) == CHOSEN[fn]


def test_answers_are_the_same_either_way(monkeypatch):
    for fn in CHOSEN:
        for worth in (module.WORTH_SECONDS, 0.0):
            monkeypatch.setattr(module, "WORTH_SECONDS", worth)
            fresh = bj.program(clients=None)(lambda x, fn=fn: fn(x))
            local = bj.run(fresh, X, runner="local")
            assert_close(local, jax.jit(fn)(X))
        assert_same_bits(bj.run(fresh, X, runner="DirectRunner"), local)
        assert crossing(fresh, FEW) == CHOSEN[fn][0]  # as for many members


def test_calls_to_the_host_are_not_rematerialized(monkeypatch):
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    seen = []

    def host(v):
        seen.append(1)
        return v

    @bj.program(clients=None)
    def program(x):
        of = jax.ShapeDtypeStruct((1024,), np.float32)
        return variance_of(lambda v: jax.pure_callback(host, of, v, vmap_method="sequential"), x)

    assert crossing(program, FEW) == "stored"
    bj.run(program, X[:16], runner="local", options={"shard_size": 8})
    assert len(seen) == 16


def test_what_is_an_output_is_stored():
    @bj.program(clients=None)
    def program(x):
        y = bj.map_fn(lambda v: jnp.flip(v) * 2.0, x)
        return variance_of(lambda v: v, y), y

    plan = plan_of(program, jax.ShapeDtypeStruct((MANY, 1024), np.float32))
    first = next(step for step in plan.steps if isinstance(step, Map))
    assert first.results


def test_what_is_clear():
    cases = {(3.0, 10.0): True, (4.0, 10.0): False, (0.0, 0.9): False, (10.0, 3.0): False}
    assert {times: module._is_clear(*times) for times in cases} == cases
