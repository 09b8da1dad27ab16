"""Rounds that hand their state on, placed and not: what `jit` gives, and nothing is gathered."""

import functools

import jax
import numpy as np
import pytest
from trainers import TRAINERS

import beamjax as bj


@pytest.fixture(autouse=True)
def promotion():
    """That of JAX as it comes; optimizers rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def built(name):
    return TRAINERS[name].build()


@functools.cache
def rounds_by_jit(name):
    return list(rounds(name, jax.jit(built(name)[0])))


def rounds(name, step):
    """State and metrics after each round."""
    _, state, batches = built(name)
    for batch in batches:
        state, metrics = step(state, *batch)
        yield state, metrics


def as_numbers(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        left, right = as_numbers(left), as_numbers(right)
        if left.dtype.kind in "biu":
            np.testing.assert_array_equal(left, right)
        else:
            left, right = left.astype("float64"), right.astype("float64")
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


every_trainer = pytest.mark.parametrize("name", TRAINERS)


@every_trainer
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_rounds(name, runner):
    step = functools.partial(bj.run, built(name)[0], runner=runner)
    found = rounds(name, step)
    for (state, metrics), expected in zip(found, rounds_by_jit(name), strict=True):
        assert_same((state, metrics), expected)


@every_trainer
def test_passes_and_what_is_gathered(name):
    step, state, batches = built(name)
    facts = bj.explain(step, state, *batches[0]).facts
    assert (facts.passes, facts.gathered_bytes) == (TRAINERS[name].passes, TRAINERS[name].gathered)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_state_keeps_its_types(name):
    """Else a round would be staged anew each time."""
    step, state, batches = built(name)
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert types(jax.eval_shape(step, state, *batches[0])[0]) == types(state)
