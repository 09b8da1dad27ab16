"""Server values that shards make for themselves, with the bits that the whole value has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import creations, stage
from beamjax.interpreters.readings import Shard
from beamjax.options import parse_options
from beamjax.plan import Scatter
from beamjax.planning import plan_for

N = 20
OPTIONS = {"shard_size": 8}
KEY = jax.random.key(5)

DRAWS = {
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (N, 2, 2)),
    "bits": lambda k: jax.random.bits(k, (N, 3)),
    "bits of 8": lambda k: jax.random.bits(k, (N, 3), "uint8"),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(4.0), shape=(N,)),
    "exponential": lambda k: jax.random.exponential(k, (N,)),
    "gumbel": lambda k: jax.random.gumbel(k, (N, 5)),
    "normal": lambda k: jax.random.normal(k, (N, 3)),
    "normal of bfloat16": lambda k: jax.random.normal(k, (N, 3), "bfloat16"),
    "randint": lambda k: jax.random.randint(k, (N,), 0, 7),
    "raw keys": lambda k: jax.random.normal(jax.random.key_data(k), (N, 2)),
    "split": lambda k: jax.random.key_data(jax.random.split(k, (N, 3))),
    "uniform": lambda k: jax.random.uniform(k, (N,), minval=-1.0),
}


def with_draws(draw):
    @bj.program(clients=N)
    def fn(key, x):
        return bj.map_fn(lambda z, v: (z, v + z.astype(v.dtype).sum()), (draw(key), x))

    return fn


def scatters(fn, *args):
    arguments, key, restore = stage.flatten_arguments(args)
    plan = plan_for(fn, arguments, key, restore, parse_options(OPTIONS)).plan
    return sum(isinstance(step, Scatter) for step in plan.steps)


def assert_same(found, expected):
    """The same bits, but for what functions of floats round otherwise for other lengths."""
    assert found.dtype == expected.dtype
    if jnp.issubdtype(found.dtype, jnp.floating):
        assert found.shape == expected.shape
        a, b = (np.asarray(x, "float64") for x in (found, expected))
        np.testing.assert_allclose(a, b, rtol=1e-6 if found.dtype == "float32" else 1e-2)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_for_all_members(name):
    fn, args = with_draws(DRAWS[name]), (KEY, jnp.arange(float(N)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert scatters(fn, *args) == 0
        found, _ = bj.run(fn, *args, runner="local", options=OPTIONS)
        expected, _ = jax.jit(fn)(*args)
    assert_same(found, expected)


def test_bits_of_64():
    fn = with_draws(lambda k: jax.random.bits(k, (N, 3), "uint64"))
    with jax.enable_x64(True):
        args = (KEY, np.arange(float(N)))
        assert scatters(fn, *args) == 0
        found, _ = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_same(found, jax.jit(fn)(*args)[0])


def rbg_key(key):
    return jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")


def test_other_draws_are_made_at_once():
    draws = {
        "rbg": lambda k: jax.random.normal(rbg_key(k), (N,)),
        "not along the first axis": lambda k: jax.random.normal(k, (3, N)).T,
        "permutation": lambda k: jax.random.permutation(k, N),
    }
    for draw in draws.values():
        fn, args = with_draws(draw), (KEY, jnp.arange(float(N)))
        assert scatters(fn, *args) == 1
        found, _ = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_same(found, jax.jit(fn)(*args)[0])


def test_draws_without_partitionable_keys():
    fn, args = with_draws(DRAWS["normal"]), (KEY, jnp.arange(float(N)))
    with jax.threefry_partitionable(False):
        assert scatters(fn, *args) == 1
        found, _ = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_same(found, jax.jit(fn)(*args)[0])


@pytest.mark.parametrize("inner", [1, 3, 2**16 - 1, 2**16, 70_001])
@pytest.mark.parametrize("start", [0, 61_356, 2**31 - 4])
def test_numbers_of_elements_have_64_bits(start, inner):
    shard = Shard(jnp.int32(start), 3, jnp.ones(3, bool))
    high, low = (np.asarray(x, "uint64") for x in creations._element_numbers(shard, inner))
    rows = np.arange(start, start + 3, dtype="uint64")[:, None]
    want = rows * np.uint64(inner) + np.arange(inner, dtype="uint64")
    np.testing.assert_array_equal((high << np.uint64(32)) | low, want)
