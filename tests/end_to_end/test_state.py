"""Rounds that hand their state on, placed or not: as `jit` has it, and nothing is gathered."""

import functools

import jax
import pytest
from helpers import assert_close
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


def rounds(name, step):
    """State and metrics after each round."""
    _, state, batches = built(name)
    for batch in batches:
        state, metrics = step(state, *batch)
        yield state, metrics


@functools.cache
def rounds_by_jit(name):
    return list(rounds(name, jax.jit(built(name)[0])))


NAMES = list(TRAINERS)
SOME = [
    *((name, "local") for name in NAMES[::3]),
    *((name, "DirectRunner") for name in NAMES[1::6]),
]
REST = [(name, runner) for name in NAMES for runner in ("local", "DirectRunner")]
REST = [pytest.param(*each, marks=pytest.mark.long) for each in REST if each not in SOME]


@pytest.mark.parametrize(("name", "runner"), [*SOME, *REST])
def test_rounds(name, runner):
    step = functools.partial(bj.run, built(name)[0], runner=runner)
    for found, expected in zip(rounds(name, step), rounds_by_jit(name), strict=True):
        assert_close(found, expected, 1e-4, 1e-5)


@pytest.mark.parametrize("name", TRAINERS)
def test_passes_and_gathered_bytes_and_types_that_stay(name):
    """With other types of the state a round would be staged anew each time."""
    step, state, batches = built(name)
    facts = bj.explain(step, state, *batches[0]).facts
    assert (facts.passes, facts.gathered_bytes) == (TRAINERS[name].passes, TRAINERS[name].gathered)
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert types(jax.eval_shape(step, state, *batches[0])[0]) == types(state)
