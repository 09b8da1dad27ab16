"""Slices, windows and padding of the members, in any order: the values of `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import beamjax as bj


def convolved(x, width, stride, low, high, dilation=1):
    kernel = jnp.arange(1, width + 1).astype(x.dtype)
    return lax.conv_general_dilated(
        x.T[:, None], kernel[None, None], (stride,), [(low, high)], rhs_dilation=(dilation,)
    )[:, 0].T


def pooled(x, start, op, width, stride, low, high, dilation=1):
    return lax.reduce_window(
        x, np.asarray(start, x.dtype), op, (width, 1), (stride, 1), ((low, high), (0, 0)),
        window_dilation=(dilation, 1),
    )  # fmt: skip


def largest(x, *of_windows):
    lowest = -np.inf if x.dtype == "float32" else -(2**31)
    return pooled(x, lowest, lax.max, *of_windows)


@st.composite
def steps(draw, count):
    """An operation on an array of `count` rows, and the number of rows that it gives."""
    kind = draw(
        st.sampled_from(
            ["slice", "conv", "sums", "largest", "pad", "edge", "join", "flip", "twice", "acts"]
        )
    )
    few = st.integers(0, 3)
    low, high = draw(few), draw(few)
    stride = draw(st.sampled_from([1, 1, 2, 3, 9]))
    if kind == "slice" and low + high < count - 2:
        return lambda x: x[low : count - high : stride], -((low + high - count) // stride)
    if kind in ("conv", "sums", "largest") and count > 8:
        width, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        rows = (count + low + high - (width - 1) * dilation - 1) // stride + 1
        of_windows = width, stride, low, high, dilation
        if kind == "conv":
            return lambda x: convolved(x, *of_windows), rows
        if kind == "sums":
            return lambda x: pooled(x, 0, lax.add, *of_windows), rows
        # JAX has no derivative of the largest entry with a dilation.
        rows = (count + low + high - width) // stride + 1
        return lambda x: largest(x, width, stride, low, high), rows
    if kind == "twice" and count <= 50:
        return lambda x: jnp.concatenate([x, x[low:]]), 2 * count - low
    if kind == "flip":
        return draw(st.sampled_from([jnp.flip, jnp.flipud, lambda x: x[::-1]])), count
    if kind in ("pad", "edge"):
        mode = {"mode": "edge"} if kind == "edge" else {"constant_values": 2}
        return lambda x: jnp.pad(x, ((low, high), (0, 0)), **mode), count + low + high
    if kind == "join":
        ends = jnp.ones((low, 2)), jnp.zeros((high, 2))
        joined = lambda x: jnp.concatenate([ends[0].astype(x.dtype), x, ends[1].astype(x.dtype)])
        return joined, count + low + high
    return lambda x: x * 2 - jnp.arange(count)[:, None].astype(x.dtype), count


@st.composite
def programs(draw):
    """A program, and its members."""
    n, functions = draw(st.integers(9, 50)), []
    count = n
    for _ in range(draw(st.integers(1, 3))):
        function, count = draw(steps(count))
        functions.append(function)
    end = draw(st.sampled_from(["all", "sum", "largest", "slope", "parts", "totals"]))
    dtype = "float32" if end == "slope" else draw(st.sampled_from(["float32", "int32"]))
    chain = lambda x: functools.reduce(lambda v, f: f(v), functions, x)
    weights = jnp.cos(jnp.arange(count))[:, None]
    ends = {
        "all": chain,
        "sum": lambda x: jnp.sum(chain(x), 0),
        "largest": lambda x: jnp.max(chain(x), 0),
        "slope": jax.grad(lambda x: jnp.sum(jnp.sin(chain(x)) * weights)),
        "parts": lambda x: jnp.stack([jnp.max(p, 0) for p in jnp.array_split(chain(x), 3)]),
        "totals": lambda x: jnp.cumsum(chain(x), 0)[::-1],
    }
    x = np.random.default_rng(n).integers(-9, 9, (n, 2)).astype(dtype)
    return bj.program(clients=n)(lambda x: ends[end](bj.map_fn(lambda v: v + 1, x))), x


def check(drawn, shard_size, runner="local"):
    fn, x = drawn
    options = {"shard_size": shard_size}
    found, expected = bj.run(fn, x, runner="local", options=options), jax.jit(fn)(x)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if x.dtype == "int32":
        np.testing.assert_array_equal(found, expected)
    assert_close(found, expected, rtol=1e-4, atol=1e-3)
    if runner != "local":
        assert_same_bits(bj.run(fn, x, runner=runner, options=options), found)


SHARD_SIZES = st.sampled_from([8, 16, 24])


@pytest.mark.versions
@given(programs(), SHARD_SIZES)
@settings(max_examples=10)
def test_values_are_those_of_jit(drawn, shard_size):
    check(drawn, shard_size)


@pytest.mark.table
@given(programs(), SHARD_SIZES)
@settings(max_examples=60)
def test_more_programs(drawn, shard_size):
    check(drawn, shard_size)
