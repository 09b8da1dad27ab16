"""One pass over one shard: which members, padding, and what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.plan.shard import shards


@given(n=st.integers(1, 500), size=st.integers(1, 64), cut=st.integers(0, 20))
def test_shards_cover_all_members_once(n, size, cut):
    found, count = list(shards(n, size)), -(-n // size)
    assert [s.index for s in found] == list(range(count))
    assert [m for s in found for m in range(s.start, s.start + s.count)] == list(range(n))
    assert all(s.count == size for s in found[:-1])
    cut = min(cut, count)
    assert [*shards(n, size, 0, cut), *shards(n, size, cut, count)] == found


def test_padding_repeats_a_member_so_that_loops_end():
    # A row of zeros would never end this loop.
    body = lambda v: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, v)
    fn = bj.program(clients=3)(lambda x: bj.map_fn(body, x))
    x = jnp.asarray([1.0, 3.0, 50.0])
    found = bj.run(fn, x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, [128.0, 192.0, 100.0])
