"""Placements without members: whatever `jit` gives, on any runner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_types

import beamjax as bj

X = jnp.zeros((0, 3))
K = jnp.zeros(0, jnp.int32)
W = jnp.ones(3)


def operators(w, x, k):
    y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
    members = {"map": y, "broadcast": bj.broadcast(w), "input": x, "outside": x * 2}
    reduced = {
        "sum": bj.reduce_sum(y), "mean": bj.reduce_mean(y), "prod": bj.reduce_prod(y),
        "any": bj.reduce_any(y), "all": bj.reduce_all(y),
        "weighted": bj.reduce_weighted_mean(y, y[:, 0]), "by_key": bj.reduce_by_key(y, k, 4),
        "by": bj.reduce(jnp.add, y, w), "jnp": (x.sum(0), x.mean(0), jnp.sort(x, 0)),
    }  # fmt: skip
    return members, reduced


def rounds(w, x, k):
    step = lambda c, _: (c + bj.reduce_sum(bj.map_fn(lambda v: v * c, x)), None)
    return jax.lax.scan(step, w, None, length=2)[0]


def gradient(w, x, k):
    return jax.grad(lambda w: jnp.sum(rounds(w, x, k)))(w)


def two_placements(w, x, k):
    double = lambda v, name: bj.map_fn(lambda v: v * 2, v, placement=name)
    y = jnp.arange(6.0).reshape(2, 3)
    return [
        bj.reduce_sum(double(v, name), placement=name)
        for v, name in ((x, "clients"), (y, "others"))
    ]


PROGRAMS = {
    "operators": bj.program(clients=0)(operators),
    "size from the arguments": bj.program(clients=None)(operators),
    "rounds": bj.program(clients=None)(rounds),
    "gradient": bj.program(clients=0)(gradient),
    "batched": jax.vmap(bj.program(clients=0)(rounds), (None, None, None), axis_size=2),
    "two placements": bj.program(clients=0, others=2)(two_placements),
}
DROP = {"on_error": "drop", "on_nonfinite": "drop"}


@pytest.mark.versions
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_under_jit(name):
    fn = PROGRAMS[name]
    expected = jax.jit(fn)(W, X, K)
    for runner, options in (("local", {}), ("local", DROP), ("DirectRunner", {})):
        found = bj.run(fn, W, X, K, runner=runner, options=options)
        assert_same_types(found, expected)
        assert_close(found, expected, rtol=0, atol=0)


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
