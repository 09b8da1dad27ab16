"""Placements without members: what has no result there. `user_programs` has what has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj

X = jnp.zeros((0, 3))


def test_reductions_without_a_result_raise_what_jit_raises():
    for reduce in (bj.reduce_max, bj.reduce_min, bj.reduce_argmax):
        fn = bj.program(clients=0)(reduce)
        errors = []
        for call in (jax.jit(fn), lambda x, fn=fn: bj.run(fn, x, runner="local")):
            with pytest.raises(ValueError, match=r"zero-size|empty") as error:
                call(X)
            errors.append(str(error.value))
        assert errors[0] == errors[1]
    with pytest.raises(bj.PlacementError, match=r"found no members .* identity"):
        jax.jit(bj.program(clients=0)(lambda x: bj.reduce(jnp.add, x)))(X)


def test_an_empty_array_is_only_the_last_resort_for_an_open_size():
    fn = bj.program(clients=None)(lambda x, unused: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    np.testing.assert_allclose(fn(jnp.ones((4, 2)), X), np.full(2, 4 * np.sin(1)), rtol=1e-6)
