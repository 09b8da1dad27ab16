"""Programs over all members that are passes: values as `jax.jit` gives them, and nothing gathered.

There are 23 members in shards of 8, so the last shard is not full.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types
from jax import lax

import beamjax as bj

N = 23
X = jax.random.normal(jax.random.key(0), (N, 3))
W = jnp.asarray([0.5, -1.0, 2.0])


# --- scans


def mapped(x):
    return lax.map(lambda row: (jnp.sin(row @ W), row[::2]), x)


def mapped_with_numbers(x):
    return lax.map(lambda each: each[0] * each[1], (x, jnp.arange(N, dtype="float32")))


def mapped_with_a_loop(x):
    return lax.map(lambda row: lax.while_loop(lambda v: v[0] < 3, lambda v: v + 1, row), x)


def slope_of_mapped(x):
    def loss(w, x):
        return jnp.sum(lax.map(lambda row: jnp.sin(row @ w), x) ** 2)

    return jax.grad(loss, (0, 1))(W, x)


def totals_of_a_scan(x):
    def step(carry, row):
        a, b, c, d, same = carry
        small = (row * 50).astype("int8")
        return (a + row, b * row[0], jnp.maximum(c, row), small + d, same), row * same

    carry = W, jnp.float32(2), W, jnp.ones(3, "int8"), W
    return lax.scan(step, carry, x, reverse=True)


PASSES = [mapped, mapped_with_numbers, mapped_with_a_loop, slope_of_mapped, totals_of_a_scan]


# --- programs that are not passes, whose members are gathered


def scan_that_reads_its_carry(x):
    return lax.scan(lambda c, row: (c * 0.5 + row, c), W, x)


def mapped_in_batches(x):
    return lax.map(jnp.sin, x, batch_size=4)


GATHERS = [scan_that_reads_its_carry, mapped_in_batches]


@pytest.mark.versions
@pytest.mark.parametrize("function", [*PASSES, *GATHERS], ids=lambda each: each.__name__)
def test_a_program_over_members(function):
    prog = bj.program(clients=N)(lambda x: function(bj.map_fn(jnp.tanh, x)))
    want = jax.jit(prog)(X)
    results = []
    for runner in ("local", "DirectRunner"):
        results.append(bj.run(prog, X, runner=runner, options={"shard_size": 8}))
        assert_same_types(results[-1], want)
        assert_close(results[-1], want)
    assert_same_bits(*results)
    gathered = bj.explain(prog, X).facts.gathered_bytes
    assert (gathered > 0) == (function in GATHERS)
