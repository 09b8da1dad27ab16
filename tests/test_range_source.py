"""`from_range`: members that are their own index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from source_checks import RUNNERS, check_ranges, check_runs, check_spec, check_threads

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.source_base import open_spec

N = 50


def test_members():
    source = bj.from_range(N)
    check_ranges(source, jnp.arange(N))
    check_spec(source, jnp.arange(N))
    check_threads(source, jnp.arange(N))
    assert repr(source) == "<RangeSource: 50 members of int32[] (200 bytes) range>"


def test_the_dtype_is_that_of_arange():
    with jax.enable_x64(True):
        source = bj.from_range(np.int64(N))
        assert source.leaves[0].dtype == np.dtype(np.int64)
        check_ranges(source, jnp.arange(N))
    check_spec(source, np.arange(N))


def test_the_largest_one_needs_no_memory():
    n = 2**31 - 1
    source = bj.from_range(n)
    assert source.nbytes == 4 * n
    assert source.read(n - 3, n)[0].tolist() == [n - 3, n - 2, n - 1]
    assert "2147483647 members" in str(bj.explain(draws, jax.random.key(0), source))


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (3.0, StructureError, "from_range: found 3.0, expected the number of members"),
        (None, StructureError, "found None"),
        (np.ones(3), StructureError, "expected the number of members, an integer"),
        (0, PlacementError, "found 0 members, expected 1 to 2147483647"),
        (-5, PlacementError, "found -5 members"),
        (2**31, PlacementError, "found 2147483648 members.*let each member make several"),
    ],
)
def test_what_is_no_number_of_members(n, error, message):
    with pytest.raises(error, match=message):
        bj.from_range(n)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0}, {"size": 2**60}, {"size": 2.0}, {"size": None}, {"leaf": 3},
        {"leaf": {"shape": [2], "dtype": "int32", "key_impl": None, "path": ""}},
        {"leaf": {"shape": [], "dtype": "float32", "key_impl": None, "path": ""}},
        {"leaf": {"shape": [], "dtype": "int8", "key_impl": None, "path": ""}, "size": 129},
    ],
)  # fmt: skip
def test_specs_that_are_none(change):
    with pytest.raises(SourceError, match="kind 'range'"):
        open_spec({**bj.from_range(N).to_spec(), **change})


@pytest.mark.parametrize("runner", RUNNERS)
def test_runs(runner):
    check_runs(bj.from_range(N), jnp.arange(N), runner)


@bj.program(placements={"draws": None})
def draws(key, i):
    values = bj.map_fn(lambda i: jax.random.normal(jax.random.fold_in(key, i), (3,)), i)
    return bj.reduce_mean(values), bj.reduce_max(values)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_random_draws_are_those_of_jit(runner):
    key = jax.random.key(7)
    mean, greatest = bj.run(draws, key, bj.from_range(1000), runner=runner)
    expected = jax.jit(draws)(key, jnp.arange(1000))
    np.testing.assert_allclose(mean, expected[0], atol=1e-6)
    np.testing.assert_array_equal(greatest, expected[1])


@bj.program(placements={"clients": None})
def picked(i, x):
    return bj.reduce_sum(bj.map_fn(lambda i, x: x * i, (i, x)))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_two_sources_are_read_together(runner):
    x = np.arange(N, dtype=np.int32) ** 2
    found = bj.run(picked, bj.from_range(N), bj.from_arrays(x), runner=runner)
    assert found.dtype == jnp.int32
    assert found == np.sum(np.arange(N) ** 3)
    with pytest.raises(PlacementError, match=r"has shape \(51,\), expected \(50, \.\.\.\)"):
        bj.run(picked, bj.from_range(N), bj.from_arrays(np.ones(51, np.int32)), runner=runner)


def test_many_shards_are_dealt_in_few_elements():
    """A pass starts from ranges of shards, however many shards there are."""
    from beamjax.pipelines.workers import Ranges

    count = -(-(2**31 - 1) // 8)
    found = list(Ranges(count, -(-count // 256)).process(None))
    assert len(found) <= 256
    assert found[-1][1] == count
