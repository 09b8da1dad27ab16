"""Sizes of placements that come from the arguments of each call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj

X = jnp.arange(10.0).reshape(5, 2)
W = jnp.asarray([1.0, 2.0, 3.0])
opened = bj.program(placements={"clients": None})


@opened
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v, b: v.sum() * b.sum(), (x, bj.broadcast(w))))


def test_the_size_is_that_of_the_argument():
    mean = bj.program(clients=None)(lambda x: bj.reduce_mean(x))
    np.testing.assert_array_equal(mean(X), [4.0, 5.0])
    np.testing.assert_array_equal(mean(X[:2]), [1.0, 2.0])
    np.testing.assert_array_equal(mean(jnp.ones((1, 2))), [1.0, 1.0])


def test_the_only_size_with_which_a_program_can_run():
    assert total(W, X) == 270.0
    assert total(W, X[:4]) == 168.0
    with jax.checking_leaks():
        assert jax.jit(total)(W, X) == 270.0


def test_transformed_programs():
    fixed = bj.program(clients=5)(total.__wrapped__)
    for transform in (jax.grad, lambda f: jax.vmap(f, (0, None)), jax.hessian):
        w = W if transform is jax.grad else jnp.stack([W, W])
        w = W if transform is jax.hessian else w
        found, expected = transform(total)(w, X), transform(fixed)(w, X)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_plans_for_several_sizes(runner):
    for n in (3, 20, 9):
        x = np.ones((n, 2), np.float32)
        assert bj.run(total, jnp.ones(2), x, runner=runner) == 4 * n
        assert bj.run(total, jnp.ones(2), bj.from_arrays(x), runner=runner) == 4 * n


def test_several_placements():
    @bj.program(placements={"a": None, "b": 2})
    def prog(x, y):
        return bj.reduce_sum(x, placement="a") + bj.reduce_sum(y, placement="b")

    np.testing.assert_array_equal(prog(X, jnp.ones((2, 2))), [22.0, 27.0])


def test_a_program_inside_takes_the_size_around_it():
    inner = opened(lambda w: bj.reduce_sum(bj.broadcast(w)))
    outer = bj.program(clients=4)(lambda w: inner(w))
    np.testing.assert_array_equal(outer(W), 4 * W)


def test_a_size_that_nothing_tells():
    message = "program <lambda>: found no single size for the placement 'clients'"
    with pytest.raises(bj.PlacementError, match=re.escape(message) + ".*no argument is an array"):
        opened(lambda: bj.broadcast(1.0))()
    count = opened(lambda x, y: bj.reduce_sum(bj.broadcast(1.0)))
    with pytest.raises(bj.PlacementError, match=r"\[5, 3\], and clients=5 and clients=3 all fit"):
        count(X, W)


def test_sizes_with_which_nothing_runs_are_told_with_their_reasons():
    with pytest.raises(bj.PlacementError, match=r"clients=5: PlacementError.*\n.*clients=3: "):
        opened(lambda x, y: bj.reduce_sum((x, y)))(X, W)


def test_only_the_right_size_is_staged():
    plan = bj.explain(total, W, X, stage="placed")
    assert "clients along axis 0" in str(plan)
    assert "clients[" not in str(plan)
