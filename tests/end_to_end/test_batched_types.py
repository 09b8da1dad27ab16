"""Members of types that JAX batches in its own way, and of narrow integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax.experimental import sparse

import beamjax as bj

N = 11
X = np.zeros((N, 4, 3), np.float32)
X[:, 1, 2], X[:, 3, 0] = np.arange(N), 1
SPARSE = sparse.BCOO.fromdense(X, n_batch=1)
ONE = sparse.BCOO.fromdense(X[2] + 1)
W = jnp.arange(3.0)


def ways(program, *args):
    yield jax.jit(program)(*args)
    for runner in ("local", "DirectRunner"):
        yield bj.run(program, *args, runner=runner, options={"shard_size": 8})


@pytest.mark.versions
def test_members_may_be_sparse_as_under_vmap():
    @bj.program(clients=N)
    def program(members, one, w):
        products = bj.map_fn(lambda m: m @ w, members)
        doubled = bj.map_fn(lambda m: m * 2, members)
        shared = bj.map_fn(lambda m, b: m.todense() + b.todense(), (members, bj.broadcast(one)))
        return products, doubled, bj.reduce_sum(shared)

    products = jax.vmap(lambda m: m @ W)(SPARSE)
    for found, doubled, shared in ways(program, SPARSE, ONE, W):
        assert_same_bits(found, products)
        assert isinstance(doubled, sparse.BCOO)
        assert (doubled.shape, doubled.n_batch) == (SPARSE.shape, 1)
        np.testing.assert_array_equal(doubled.todense(), 2 * X)
        np.testing.assert_array_equal(shared, X.sum(0) + N * np.asarray(ONE.todense()))


def test_narrow_integers_are_summed_by_key_as_jax_does():
    keys = jnp.arange(N) % 3
    for dtype in ("int4", "uint4"):
        x = jnp.arange(N).astype(dtype)
        program = bj.program(clients=N)(lambda x, k: bj.reduce_by_key(x, k, 3))
        for found in ways(program, x, keys):
            assert_same_bits(found, jax.ops.segment_sum(x, keys, 3))
