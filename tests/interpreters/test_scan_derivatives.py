"""Derivatives of scans along the members: passes, with the values of `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from programs import step_kinds

import beamjax as bj

SCANS = {
    "cumprod": lambda x: jnp.cumprod(1 + x / 9, axis=0),
    "cumprod, not jitted": lambda x: lax.cumprod(x, axis=0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=0),
    "along another axis": lambda x: jnp.cumprod(x.T, axis=1).T,
}


def slope_of(name, n, equal, dtype):
    """The derivative of a scan by its members, some of which are equal, and these."""
    x = np.random.default_rng(n).uniform(-2, 2, (n, 2)).astype(dtype)
    x = np.round(x) if equal else x
    weights = np.cos(np.arange(2.0 * n).reshape(n, 2)).astype(dtype)

    @bj.program(clients=n)
    def fn(x):
        loss = lambda x: jnp.sum(jnp.sin(SCANS[name](x)) * weights)
        return jax.value_and_grad(loss)(bj.map_fn(lambda v: v + 0.5, x))

    return fn, x


def check(name, n, shard_size, equal, dtype=np.float32, tolerance=1e-4):
    fn, x = slope_of(name, n, equal, dtype)
    options = {"shard_size": shard_size}
    assert step_kinds(fn, x, **options)["Gather"] == 0
    found = bj.run(fn, x, runner="local", options=options)
    assert_close(found, jax.jit(fn)(x), rtol=tolerance, atol=tolerance)
    return fn, x, found


@pytest.mark.versions
@pytest.mark.parametrize("name", SCANS)
def test_values_are_those_of_jit_and_nothing_is_gathered(name):
    fn, x, found = check(name, 37, 8, equal="cum" in name)
    assert_same_bits(bj.run(fn, x, options={"shard_size": 8}), found)


@pytest.mark.table
@given(
    st.sampled_from(list(SCANS)), st.integers(4, 90), st.sampled_from([8, 16, 24]), st.booleans()
)
@settings(max_examples=40)
def test_any_number_of_members(name, n, shard_size, equal):
    with jax.enable_x64(True):  # products of many members amplify the errors of float32
        check(name, n, shard_size, equal, np.float64, 1e-8)


def test_other_terms_of_the_derivative_are_added():

    @bj.program(clients=40)
    def fn(x):
        loss = lambda x: jnp.sum(lax.cumprod(x, axis=0) ** 2) + jnp.sum(x[::2] ** 2)
        return jax.grad(loss)(bj.map_fn(jnp.cos, x))

    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    found = bj.run(fn, x, runner="local", options={"shard_size": 8})
    assert_close(found, jax.jit(fn)(x), rtol=1e-4, atol=1e-5)
