"""Bodies timed on made-up members."""

import threading
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import beamjax as bj
from beamjax import probe
from beamjax.interpreters import stage
from beamjax.interpreters.lower import lower_passes
from beamjax.options import Options, parse_options
from beamjax.plan import ValueType
from beamjax.planning import plan_for
from beamjax.probe import ProbeError, in_time, made_up, shard_seconds

N = 40


def passes(fn, *args, size=16, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    parsed = parse_options(options)
    found = plan_for(fn, arguments, key, restore, parsed)
    return lower_passes(found.placed, found.pieces, "clients", parsed, size, {})


@bj.program(clients=N)
def mean(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w), x))


def test_a_shard_is_timed_by_the_clock_that_is_given():
    plan = passes(mean, jnp.ones((3, 2)), jnp.ones((N, 3)))
    (step,) = plan.steps
    # A run takes 5, 3, 1, 4 seconds: the first one compiles, and of the others the best counts.
    times = iter([0.0, 9.0, 10.0, 15.0, 20.0, 23.0, 30.0, 31.0, 40.0, 44.0])
    assert shard_seconds(plan, step, Options(), 60.0, lambda: next(times)) == 1.0
    assert list(times) == []


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "drop"}, {"member_loop": "loop"}])
def test_passes_of_any_kind_are_timed(mode, options):
    @bj.program(clients=N)
    def two(w, k, x, i):
        y = bj.map_fn(lambda v, j: v @ w + j, (x, i))
        scale = bj.reduce_max(y)
        total = bj.reduce(lambda a, b: a + b, bj.map_fn(lambda v: v * scale, y))
        return total, bj.reduce_mean(y), y

    key = jnp.zeros(2, jnp.uint32)
    plan = passes(
        two, jnp.ones(3), key, jnp.ones((N, 3)), jnp.arange(N, dtype="float32"), **options
    )
    for step in plan.steps:
        assert 0 < shard_seconds(plan, step, Options(reduction=mode), 60.0) < 60


def test_the_names_are_those_of_the_whole_plan():
    arguments, key, restore = stage.flatten_arguments((jnp.ones((3, 2)), jnp.ones((N, 3))))
    found = plan_for(mean, arguments, key, restore, Options())
    (step,) = lower_passes(found.placed, found.pieces, "clients", Options(), 8, {}).steps
    assert step.name == found.plan.steps[0].name == "map_clients_0"


def test_a_body_that_fails():
    plan = passes(mean, jnp.ones((3, 2)), jnp.ones((N, 3)), on_nonfinite="raise")
    (step,) = plan.steps

    def broken(rng, value, leading):
        return np.full((*leading, *value.shape), np.nan, value.dtype)

    original, probe.made_up = probe.made_up, broken
    try:
        with pytest.raises(ProbeError, match="a body fails on made-up members"):
            shard_seconds(plan, step, Options(), 60.0)
    finally:
        probe.made_up = original


def test_what_hangs_is_left_behind():
    over = threading.Event()
    start = time.monotonic()
    with pytest.raises(ProbeError, match=r"takes longer than 0\.1 s"):
        in_time(lambda: over.wait(30) and 1.0, 0.1)
    assert time.monotonic() - start < 10
    over.set()


def test_what_is_done_in_time_comes_back():
    assert in_time(lambda: 2.5, 10.0) == 2.5


@pytest.mark.parametrize(
    "dtype",
    "bool int8 int32 uint8 uint32 int4 uint4 float16 float32 float64 bfloat16 float8_e4m3fn "
    "complex64".split(),
)
def test_made_up_values_have_their_types(dtype):
    value = ValueType((5, 3), dtype)
    found = made_up(np.random.default_rng(0), value, (8,))
    assert found.shape == (8, 5, 3)
    assert found.dtype == np.dtype(dtype)
    assert len(np.unique(found.astype(np.complex64))) > 1
    assert ml_dtypes.__version__


def test_made_up_keys_are_any_bits():
    found = made_up(np.random.default_rng(0), ValueType((2,), "uint32", "fry"), (100,))
    assert found.max() > 2**31
