"""Rows of members, however a shard is computed: what `jit` gives, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax import lax

import beamjax as bj

N, B = 40, 3
X = (np.arange(N * B * 2) * 37 % 101).reshape(N, B, 2).astype(np.float32)
ROWS = (np.arange(N * B * 2) * 53 % 89).reshape(N * B, 2).astype(np.float32)


@bj.program(clients=N)
def of_rows(x, rows, i):
    """Sums of whole numbers, which are exact in any order."""
    y = bj.map_fn(lambda v: v * 2, x)
    v, w = y.ravel(), y.reshape(N * B, 2)
    cut = (rows * 2 + jnp.arange(1.0 * N * B)[:, None]).reshape(N, B, 2)
    return {
        "picked": (v[7], v[i], v.argmax(), lax.top_k(v, 4)),
        "reduced": (v.max(), lax.reduce(v, 0.0, lambda a, b: a + b, (0,)), w.T @ w),
        "by key": jax.ops.segment_sum(w, jnp.arange(N * B) % 4, 4),
        "back to members": (w @ jnp.ones((2, 2))).reshape(N, B, 2),
        "made of rows": bj.map_fn(lambda a, b: a.sum() + b, (cut, y)),
        "along rows": jnp.sum(jnp.cumsum(w, 1)),
    }


@pytest.mark.parametrize(
    ("runner", "loop", "guard"),
    [
        ("local", "vmap", {}),
        ("local", "loop", {"on_nonfinite": "raise"}),
        ("local", "batches", {"on_nonfinite": "drop"}),
        ("local", "loop", {"on_error": "drop"}),
        ("DirectRunner", "batches", {}),
    ],
)
def test_rows_are_computed_as_members_are(runner, loop, guard):
    options = {"shard_size": 16, "member_loop": loop, **guard}
    args = bj.from_arrays(X), bj.from_arrays(ROWS), np.int32(5)
    found = bj.run(of_rows, *args, runner=runner, options=options)
    assert_same_bits(found, jax.jit(of_rows)(X, ROWS, np.int32(5)))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_rows_that_no_member_has_are_computed_on_the_server_too(runner):
    @bj.program(clients=N)
    def created():
        v = jnp.arange(2.0 * N * B).reshape(N, B, 2)
        return bj.reduce_sum(v, placement="clients"), v

    found = bj.run(created, runner=runner, options={"shard_size": 16})
    assert_same_bits(found, jax.jit(created)())
