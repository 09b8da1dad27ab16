"""Reductions of sliced and reshaped members, which are made of the members where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_rows import GROUPS
from test_rules import OPTIONS, as_program, assert_same, run_both

import beamjax as bj


@pytest.mark.parametrize("name", ["sliced", "reshaped"])
def test_rows_of_one_program_are_all_reduced_in_shards(name):
    members = GROUPS[name]
    functions = {row: function for row, (_, function) in members.rows.items()}
    together = lambda *args: {row: function(*args) for row, function in functions.items()}
    prog, values = as_program(together, members.args)
    assert bj.explain(prog, *values).facts.gathered_bytes == 0
    assert_same(*run_both(together, members.args), name)


N = 20
X = jax.random.normal(jax.random.key(0), (N, 4))
Y = jax.random.randint(jax.random.key(1), (N,), 0, 3)
W = jax.random.normal(jax.random.key(2), (4, 3))


def log_likelihood(w, x, y):
    return jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], axis=1))


@bj.program(clients=N)
def trained_and_held_out(w, x, y):
    loss, slope = jax.value_and_grad(log_likelihood)(w, x[:15], y[:15])
    best = w + slope
    return loss, best, log_likelihood(best, x[4:], y[4:])


def check(fn, *args, gathered=0):
    assert bj.explain(fn, *args).facts.gathered_bytes == gathered
    got = bj.run(fn, *args, runner="local", options=OPTIONS)
    assert_same(jax.jit(fn)(*args), got)
    return got


def test_a_model_is_fitted_to_one_part_of_the_members_and_tried_on_another():
    check(trained_and_held_out, W, X, Y)


def test_derivatives_and_batches():
    fn = lambda w, x: trained_and_held_out(w, x, Y)[2]
    check(jax.jit(jax.grad(fn, argnums=(0, 1))), W, X)
    check(jax.vmap(fn, in_axes=(0, None)), jnp.stack([W, 2 * W]), X)
    check(jax.vmap(fn, in_axes=(None, 1)), W, jnp.stack([X, -X], 1))
    check(lambda w, x: jax.jvp(lambda w: fn(w, x), (w,), (w,)), W, X)


@bj.program(clients=N)
def in_rounds(w, x):
    def step(w, _):
        error = jnp.mean(jnp.tanh(x[:15] @ w), 0)
        largest = jnp.max(jnp.abs(x.ravel()))
        return w - error[None] * largest, jnp.argmax(x @ w)

    return jax.lax.scan(step, w, None, length=3)


def test_in_a_loop():
    check(in_rounds, W, X)


@bj.program(clients=N)
def gathered_as_well(x):
    part = x[:15]
    return jnp.sum(part, 0), jnp.sort(part, 0)


def test_what_is_gathered_anyway_is_reduced_on_the_server():
    kept = lambda x: gathered_as_well(bj_identity(x))
    found = bj.explain(kept, X).facts
    assert found.gathered_bytes == X.nbytes
    assert_same(jax.jit(kept)(X), bj.run(kept, X, runner="local", options=OPTIONS))


@bj.program(clients=N)
def bj_identity(x):
    return bj.map_fn(lambda v: v * 1, x)


def test_an_input_that_the_server_needs_whole_stays_there():
    # Nothing but the slice asks for the rows, and the sort needs all of them.
    check(gathered_as_well, X)
    (seen,) = bj.explain(gathered_as_well, X).facts.inputs
    assert seen.values == ("arg0",)


@pytest.mark.parametrize("n", [16, 17, 24])
def test_any_number_of_members(n):
    x = jax.random.normal(jax.random.key(n), (n, 6))

    @bj.program(clients=n)
    def sums(x):
        x = bj.map_fn(lambda v: v + 1, x)
        cut = x.reshape(-1, n).sum(1) if n % 6 == 0 else x.reshape(3, -1).max(1)
        return jnp.sum(x[n // 3 :], 0), jnp.argmin(x), cut, jnp.prod(x[: n - 1] / 4, 0)

    for size in (8, 16):
        got = bj.run(sums, x, runner="local", options={"shard_size": size})
        assert_same(jax.jit(sums)(x), got, f"{n} in {size}")


def test_beam_gives_the_same_bits():
    kept = lambda w, x, y: (trained_and_held_out(w, x, y), in_rounds(w, x))
    local = bj.run(kept, W, X, Y, runner="local", options=OPTIONS)
    beam = bj.run(kept, W, X, Y, runner="DirectRunner", options=OPTIONS)
    for a, b in zip(jax.tree.leaves(local), jax.tree.leaves(beam), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
