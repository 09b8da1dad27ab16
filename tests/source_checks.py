"""What is true of every source, against the arrays that it stands for."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import SourceError
from beamjax.sources.source_base import open_spec

RUNNERS = {
    "local": {"runner": "local"},
    "threads": {"options": {"direct_num_workers": 2}},
    "processes": {"options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2}},
}


def assert_reads(found, expected):
    """Arrays of the same bits, dtypes and shapes."""
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert isinstance(left, np.ndarray)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()


def check_ranges(source, tree):
    """Any range is the slice of the whole; what is outside is refused."""
    arrays = list(map(np.asarray, jax.tree.leaves(tree)))
    n = len(arrays[0])
    assert len(source) == n
    assert source.treedef == jax.tree.structure(tree)
    assert_reads(source.read(0, n), arrays)

    @hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
    @hypothesis.given(st.data())
    def ranges(data):
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        assert_reads(source.read(start, stop), [array[start:stop] for array in arrays])

    ranges()
    for start, stop in ((-1, 1), (2, 1), (0, n + 1), (n + 1, n + 1)):
        with pytest.raises(SourceError, match=f"members {start} to {stop} were asked for"):
            source.read(start, stop)


def check_spec(source, tree):
    """A spec is JSON, and opens to the same members; pickles hold nothing else."""
    arrays = list(map(np.asarray, jax.tree.leaves(tree)))
    spec = source.to_spec()
    again = open_spec(json.loads(json.dumps(spec)))
    assert again.to_spec() == spec
    assert again.leaves == source.leaves
    assert_reads(again.read(0, len(again)), arrays)
    assert_reads(pickle.loads(pickle.dumps(source)).read(1, 2), [array[1:2] for array in arrays])
    assert len(pickle.dumps(source)) < 1000 + 2 * len(json.dumps(spec))


def check_threads(source, tree):
    """Eight threads at once read what one reads."""
    arrays = list(map(np.asarray, jax.tree.leaves(tree)))
    n = len(arrays[0])

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            start, stop = sorted(rng.integers(0, n + 1, 2))
            assert_reads(source.read(start, stop), [array[start:stop] for array in arrays])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))


@bj.program(placements={"members": None})
def moments(scale, tree):
    """A mean, a maximum, and a placed result of each leaf."""
    members = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    scaled = bj.map_fn(lambda m: jax.tree.map(lambda x: jnp.tanh(x * scale), m), members)
    return bj.reduce_mean(scaled), bj.reduce_max(tree), scaled


def check_runs(source, tree, runner):
    """A program gives the bits of `from_arrays`, and what jit gives."""
    options = {"shard_size": 8} | RUNNERS[runner].get("options", {})
    how = {**RUNNERS[runner], "options": options}
    scale = jnp.float32(0.01)
    found = bj.run(moments, scale, source, **how)
    same = bj.run(moments, scale, bj.from_arrays(tree), runner="local", options={"shard_size": 8})
    truth = jax.jit(moments)(scale, jax.tree.map(jnp.asarray, tree))
    for each, other, true in zip(*map(jax.tree.leaves, (found, same, truth)), strict=True):
        assert each.dtype == other.dtype == true.dtype
        assert np.asarray(each).tobytes() == np.asarray(other).tobytes()
        np.testing.assert_allclose(each, true, rtol=1e-5, atol=1e-6)
