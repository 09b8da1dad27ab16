"""Programs over all members that are passes, where there are many members or special values.

The small programs are in `programs.members`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close
from programs.members import N, X

import beamjax as bj


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (7, 3), (16, 16)])
def test_neighbours_over_many_shards(before, after):
    """They reach up to a whole shard on either side; the last shard has eleven members."""
    n = 1_003
    x = np.arange(3 * n, dtype="int32").reshape(n, 3)

    @bj.program(clients=n)
    def around(x):
        return bj.neighbours(bj.map_fn(lambda v: v + 1, x), before, after, wrap=True)

    rows = (np.arange(n)[:, None] + np.arange(-before, after + 1)) % n
    for options in ({"shard_size": 16}, {"shard_size": 24}, {}):
        np.testing.assert_array_equal(bj.run(around, x, options=options), (x + 1)[rows])
        assert facts_of(bj.explain(around, x, options=options)).gathered_bytes == 0


@pytest.mark.parametrize("options", [{}, {"shard_size": 40}, {"member_loop": "loop"}], ids=str)
def test_running_sums_of_many_members(options):
    """Shards of many members, and none that is cut within a row of the table."""
    n = 20_003
    numbers = np.random.default_rng(0).integers(-(2**20), 2**20, n).astype("int32")
    shares = np.random.default_rng(1).random(n).astype("float32")
    prog = bj.program(clients=n)(lambda x: jax.tree.map(jnp.cumsum, x))
    ints, floats = bj.run(prog, (numbers, shares), options=options)
    np.testing.assert_array_equal(ints, np.cumsum(numbers, dtype="int32"))
    # The error of a sum does not grow with the number of shards.
    np.testing.assert_allclose(floats, np.cumsum(shares, dtype="float64"), rtol=5e-6)
    assert facts_of(bj.explain(prog, (numbers, shares), options=options)).gathered_bytes == 0


def test_members_that_may_be_dropped_are_gathered():
    prog = bj.program(clients=N)(lambda x: jnp.cumsum(bj.map_fn(jnp.sum, x)))
    assert facts_of(bj.explain(prog, X, options={"on_nonfinite": "drop"})).gathered_bytes > 0


def test_decompositions_of_tall_matrices():
    """As good as LAPACK's, and with its signs, where columns are nearly dependent or zero first."""
    x = jax.random.normal(jax.random.key(4), (3_001, 6)) * jnp.logspace(0.0, -5.0, 6)[None]
    x = x.at[:, 4].set(x[:, 0] + 1e-4 * x[:, 5]).at[:9].set(0)
    prog = bj.program(clients=len(x))(lambda x: jnp.linalg.qr(bj.map_fn(lambda v: v + 0, x)))
    for options in ({}, {"shard_size": 16}):
        assert facts_of(bj.explain(prog, x, options=options)).gathered_bytes == 0
        q, r = bj.run(prog, x, options=options)
        assert_close(q.T @ q, jnp.eye(6), atol=1e-5)
        assert_close(q @ r, x, atol=1e-5)
        signs = np.sign(np.diag(jax.jit(jnp.linalg.qr)(x)[1]))
        np.testing.assert_array_equal(np.sign(np.diag(r)), signs)


# --- sorting


def test_sorts_are_gathered_and_explain_names_quantile():
    for function in (jnp.median, jnp.sort, lambda x, axis: jnp.percentile(x, 5, axis=axis)):
        prog = bj.program(clients=N)(lambda x, f=function: f(bj.map_fn(jnp.tanh, x), axis=0))
        gathers = [s for s in facts_of(bj.explain(prog, X)).steps if s.kind == "Gather"]
        assert [gather.reason for gather in gathers] == [
            "sort mixes members (beamjax.quantile finds medians and quantiles by passes)"
        ]
