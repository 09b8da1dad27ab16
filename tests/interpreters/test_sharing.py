"""Views of one placed value are gathered once."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close

import beamjax as bj

N = 12
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32))
CASES = {
    "gram": lambda x: x @ x.T,
    "distances": lambda x: jnp.sum((x[:, None] - x[None]) ** 2, -1),
    "repeated_view": lambda x: x @ x.T + jnp.flip(x @ x.T, 0),
    "view_of_a_view": lambda x: x @ jnp.reshape(x.T, (1, 3, N))[0],
    "with_a_part": lambda x: (jnp.sort(x, 0), jnp.sort(x.T, 1)),
    "columns_that_overlap": lambda x: (
        jnp.sort(x[:, :2], 0),
        jnp.sort(x[:, 1:], 0),
        jnp.sort(x[:, 2:], 0),
    ),
    "in_rounds": lambda x: jax.lax.scan(
        lambda c, _: (c + bj.reduce_sum(bj.map_fn(jnp.sum, x)), x @ x.T), 0.0, None, length=2
    ),
    "in_a_body": lambda x: bj.map_fn(lambda v: x @ v + (x.T @ x) @ v @ jnp.ones((3, N)), x),
}


def test_one_gather():
    for name, case in CASES.items():
        prog = bj.program(clients=N)(lambda x, case=case: case(bj.map_fn(jnp.sin, x)))
        assert bj.explain(prog, X).facts.gathered_bytes == X.nbytes, name
        found = bj.run(prog, X, runner="local", options={"shard_size": 8})
        assert_close(found, jax.jit(prog)(X), 1e-5, 1e-5)


def test_a_part_alone_is_not_a_reason_to_gather_all():
    prog = bj.program(clients=N)(lambda x: jnp.sort(bj.map_fn(jnp.sin, x)[:, 0]))
    assert bj.explain(prog, X).facts.gathered_bytes == 4 * N


def test_what_is_sorted_and_read_by_its_order_is_gathered_once():
    prog = bj.program(clients=N)(lambda k: jnp.unique(bj.map_fn(lambda v: v % 4, k), size=5))
    keys = jnp.arange(N)
    assert bj.explain(prog, keys).facts.gathered_bytes == keys.nbytes
    found = bj.run(prog, keys, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, jax.jit(prog)(keys))
