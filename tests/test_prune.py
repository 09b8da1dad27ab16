"""What maps read and hand on for nothing is neither computed, nor read, nor kept."""

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

import beamjax as bj

N = 6
X = jax.random.normal(jax.random.key(0), (N, 3))
Y = jnp.arange(N, dtype="int32")


def program(fn):
    return bj.program(clients=N)(fn)


def maps(fn, *args):
    """For each pass, the names of what it reads along the members and of what it makes."""
    steps = [step for step in bj.explain(fn, *args).facts.steps if step.kind == "Map"]
    return [(len(step.placed), len(step.results)) for step in steps]


def check(fn, *args):
    expected = jax.jit(fn)(*args)
    found = bj.run(fn, *args, runner="local", options={"shard_size": 8})
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, strict=True)


@program
def replaced(state):
    state = bj.map_fn(lambda s: {"w": 2 * s["w"], "m": s["m"] + 1}, state)
    mean = bj.reduce_mean(state["w"])
    return mean, bj.map_fn(lambda s: {**s, "w": mean}, state)


def test_a_part_of_a_state_that_is_handed_on_is_not_read_again():
    state = {"w": X, "m": Y}
    # The second pass makes `w` of a server value; `m` is what the first has made.
    assert maps(replaced, state) == [(2, 1), (0, 1)]
    check(replaced, state)


def test_an_operand_that_no_result_needs_is_not_read():
    @program
    def total(x, y):
        return bj.reduce_sum(bj.map_fn(lambda x, y: x + 1, (x, y)))

    assert maps(total, X, Y) == [(1, 0)]
    check(total, X, Y)


def test_a_result_that_nobody_uses_is_not_made():
    @program
    def total(x, y):
        doubled, _ = bj.map_fn(lambda x, y: (2 * x, y + 1), (x, y))
        bj.map_fn(lambda v: v + 1, doubled)
        return doubled

    assert maps(total, X, Y) == [(1, 1)]
    check(total, X, Y)


def test_a_value_that_is_handed_on_twice():
    @program
    def twice(x):
        doubled = bj.map_fn(lambda v: 2 * v, x)
        again, number = bj.map_fn(lambda v: (v, 1.0), doubled)
        return doubled, again, bj.map_fn(lambda v: v, again), number, bj.reduce_sum(again)

    assert maps(twice, X) == [(1, 2)]
    check(twice, X)


def test_only_what_the_body_does_not_touch():
    @program
    def swapped(x, y):
        x = bj.map_fn(lambda v: v + 1, x)
        return bj.map_fn(
            lambda a, b: (b, a, a[0], jax.lax.cond(b > 2, lambda: a, lambda: -a)), (x, y)
        )

    check(swapped, X, Y)


def test_server_values_become_placed_results():
    @program
    def placed(w):
        return bj.map_fn(lambda v: v, w + 1), bj.map_fn(lambda v: v, bj.broadcast(w[0]))

    check(placed, X)


def test_gradients():
    @program
    def value(w, x):
        kept, scaled = bj.map_fn(lambda v: (v, v @ w), x)
        return bj.reduce_mean(bj.map_fn(lambda k, s: jnp.sum(jnp.tanh(k * s)), (kept, scaled)))

    check(jax.grad(value, argnums=(0, 1)), jnp.arange(3.0), X)


@pytest.mark.parametrize("given", ["memory", "pipeline"])
def test_inputs_that_are_handed_on_are_placed_results(given):
    """In a pipeline, a result is placed or not by what the program says, whatever is pruned."""

    @program
    def both(x, y):
        return bj.map_fn(lambda x, y: (x, y + 1), (x, y))

    def check_first(elements):
        assert sorted(index for index, _ in elements) == list(range(N))
        for index, member in elements:
            np.testing.assert_array_equal(member, X[index])

    x = X if given == "memory" else jax.ShapeDtypeStruct(X.shape, X.dtype)
    y = jax.ShapeDtypeStruct(Y.shape, Y.dtype)
    members = [(i, Y[i] if given == "memory" else (X[i], Y[i])) for i in range(N)]
    members = jax.tree.map(np.asarray, members)
    members = [(int(i), member) for i, member in members]
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        first, _ = pipeline | beam.Create(members) | bj.transform(both, x, y)
        assert_that(first, check_first)
