"""Scalars that depend on no argument are computed with the plan, and not by steps of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of

import beamjax as bj
from beamjax.interpreters import planning

pytestmark = pytest.mark.versions

X = np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)
W = np.linspace(0.1, 1, 5, dtype=np.float32)


@bj.program(placements={"clients": None})
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w) ** 2, x))


def scaled(w, x):
    """Reads a scalar in a pass, on the server and in a loop."""
    half = jax.grad(lambda s: bj.reduce_mean(bj.map_fn(lambda v: s * v, x))[0] / 3.0)(1.0)
    slope = jax.grad(loss)(w, x)
    slope = jax.lax.fori_loop(0, 3, lambda _, s: s - jax.grad(loss)(s, x), slope)
    return slope / 7.0 + half


PROGRAMS = {
    "gradient": jax.grad(loss),
    "loop": bj.program(placements={"clients": "x"})(scaled),
    "branch": lambda w, x: jax.lax.cond(w.sum() > 0, jax.grad(loss), lambda w, _: w, w, x),
}


def steps_of(fn, *args):
    return [step.kind for step in all_steps(facts_of(bj.explain(fn, *args)).steps)]


def test_the_gradient_of_a_mean_is_one_pass():
    assert steps_of(jax.grad(loss), W, X) == ["Map"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("x64", [False, True])
def test_the_bits_are_those_of_a_step(monkeypatch, name, x64):
    with jax.enable_x64(x64):
        args = [a.astype(np.float64) if x64 else a for a in (W, X)]
        options = {"shard_size": 8}
        found = bj.run(PROGRAMS[name], *args, runner="local", options=options)
        on_beam = bj.run(PROGRAMS[name], *args, runner="DirectRunner", options=options)
        count = len(steps_of(PROGRAMS[name], *args))
        monkeypatch.setattr(planning, "fold_scalars", lambda *_: None)
        other = bj.program(placements={"clients": "x"})(lambda w, x: PROGRAMS[name](w, x))
        by_steps = bj.run(other, *args, runner="local", options=options)
        assert len(steps_of(other, *args)) > count
    assert found.dtype == by_steps.dtype
    np.testing.assert_array_equal(found, by_steps)
    np.testing.assert_array_equal(found, on_beam)


def test_scalars_that_are_returned_or_need_more_than_arithmetic_are_steps():
    @bj.program(placements={"clients": "x"})
    def program(x):
        total = bj.reduce_sum(bj.map_fn(lambda v: v * jnp.exp(jnp.float32(2)), x))
        return total, jnp.float32(1) / jnp.float32(3)

    found = bj.run(program, X, runner="local")
    np.testing.assert_allclose(found[0], X.sum(0) * np.exp(2), rtol=1e-5)
    assert found[1] == np.float32(1) / np.float32(3)


def test_unknown_numbers_of_members_are_no_constants():
    source = bj.from_chunks(lambda: [X[:9], X[9:]])
    found = bj.run(jax.grad(loss), W, source, runner="local")
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5)
