"""One pass over one shard: which members, padding, and what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.plan.shard import Shards


@given(data=st.data(), n=st.integers(1, 500), size=st.integers(1, 64), cut=st.integers(0, 20))
def test_shards_cover_all_members_once_and_end_at_borders(data, n, size, cut):
    borders = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=5))) if n > 1 else []
    shards = Shards(n, size, tuple(borders))
    found = list(shards)
    assert [s.index for s in found] == list(range(len(shards))) == [*range(shards.count)]
    assert [m for s in found for m in range(s.start, s.start + s.count)] == list(range(n))
    assert all(0 < s.count <= size for s in found)
    ends = {s.start + s.count for s in found}
    assert ends >= {*borders, n}
    assert all(s.count == size for s in found if s.start + s.count not in {*borders, n})
    assert [shards.index_at(s.start) for s in found] == [s.index for s in found]
    cut = min(cut, len(shards))
    assert [*shards.between(0, cut), *shards.between(cut, len(shards))] == found


def test_padding_repeats_a_member_so_that_loops_end():
    # A row of zeros would never end this loop.
    body = lambda v: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, v)
    fn = bj.program(clients=3)(lambda x: bj.map_fn(body, x))
    x = jnp.asarray([1.0, 3.0, 50.0])
    found = bj.run(fn, x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, [128.0, 192.0, 100.0])
