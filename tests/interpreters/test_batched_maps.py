"""`lax.map` over members with a batch size, which is the pass of a `lax.map` without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close, planned
from jax import lax

import beamjax as bj

N = 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.float32([0.5, -1.0, 2.0])


def mapped(w, x, batch_size):
    return lax.map(lambda row: jnp.tanh(row * w).sum(), x, batch_size=batch_size)


def check(fn, *args):
    expected = jax.jit(fn)(*args)
    assert facts_of(bj.explain(fn, *args)).gathered_bytes == 0
    assert_close(bj.run(fn, *args, runner="local", options={"shard_size": 8}), expected)


@pytest.mark.parametrize("batch_size", [1, 7, 10, N, 50])
def test_a_map_with_a_batch_size_is_a_pass(batch_size):
    values = bj.program(rows="x")(lambda w, x: mapped(w, x, batch_size))
    check(values, W, X)
    check(jax.grad(lambda w, x: jnp.mean(values(w, x) ** 2), argnums=(0, 1)), W, X)


def test_a_function_that_jit_has_traced_before():
    inner = jax.jit(lambda x: mapped(W, x, 7))
    program = bj.program(rows="x")(lambda x: inner(x))
    whole = jax.make_jaxpr(program)(X)
    check(program, X)
    assert str(jax.make_jaxpr(program)(X)) == str(whole)
    assert "length=2" in str(whole)


def test_batches_in_a_body_and_of_other_rows_stay():
    table = np.ones((N, N, 3), np.float32)
    body = bj.program(rows="x")(lambda x: bj.map_fn(lambda v: mapped(W, v, 7), x))
    assert "length=2" in str(planned(body, table).staged)
    of_server = bj.program(rows=N)(lambda x, y: (bj.reduce_sum(x), mapped(W, y, 7)))
    assert "length=2" in str(planned(of_server, X, X[:19]).staged)
