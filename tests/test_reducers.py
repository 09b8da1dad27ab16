"""Each reducer against the `jnp` function of its name, shard by shard and finished on the host."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from beamjax.errors import BeamjaxError
from beamjax.reducers import REDUCERS, Reducer, decode_accumulator, make_accumulator

NARROW = ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e3m4"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
DTYPES = ["bool", *INTEGERS, *NARROW, "float32", "complex64"]
SOME = ["bool", "int8", "uint32", "bfloat16", "float32"]
WIDE = ["int64", "uint64", "float64", "complex128"]
CASES = [
    *((False, name, reducer) for name in DTYPES for reducer in REDUCERS),
    *((True, name, reducer) for name in [*SOME, *WIDE] for reducer in REDUCERS),
    *((False, name, reducer) for name in ("int4", "uint4") for reducer in ("mean", "max", "min")),
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def members(name: str, reducer: str, size: int = 5) -> np.ndarray:
    """(11, 5) of numbers small enough that every sum and product of a column is exact."""
    rng = np.random.default_rng(len(name) + len(reducer))
    choices = [0, 1] if reducer in ("any", "all") else [1, 2] if reducer == "prod" else range(-3, 4)
    if name.startswith("u"):
        choices = [abs(each) for each in choices]
    values = rng.choice(list(choices), (11, size))
    if reducer == "prod":
        values[rng.permuted(np.tile(np.arange(11)[:, None], size), axis=0) > 2] = 1
    if reducer == "sum" and name.startswith("float8"):
        values[4:] = 0
    return values.astype(np.float64).astype(dtype_of(name))


@functools.cache
def jitted(reducer: str) -> Callable[..., jax.Array]:
    return jax.jit(REDUCERS[reducer].partial)


def reduce_by_shards(
    reducer: Reducer,
    values: np.ndarray,
    *,
    shard_size: int = 4,
    mode: str = "exact",
    seed: int = 0,
) -> np.ndarray:
    """What a runner does: padded shards, partials, merged accumulators, one result."""
    partial = jitted(reducer.name)
    dtype = reducer.partial_dtype(values.dtype)
    shape = values.shape[1:]
    size = math.prod(shape)
    whole = make_accumulator(reducer.lane, dtype, size, mode=mode)
    shards = list(range(-(-len(values) // shard_size)))
    random.Random(seed).shuffle(shards)
    for shard in shards:
        rows = values[shard * shard_size : (shard + 1) * shard_size]
        padding = np.full((shard_size - len(rows), *shape), poison(values.dtype))
        mask = np.arange(shard_size) < len(rows)
        found = np.asarray(partial(np.concatenate([rows, padding.astype(values.dtype)]), mask))
        assert found.dtype == dtype
        assert found.shape == shape
        one = make_accumulator(reducer.lane, dtype, size, mode=mode)
        one.add(found.reshape(-1), shard)
        whole.merge(decode_accumulator(one.encode()))
    result = reducer.finish(whole, 0, size, len(values), values.dtype)
    return result.reshape(shape)


def poison(dtype: np.dtype) -> np.generic:
    """A value of padding that would be seen in any result: NaN, or a large or true one."""
    if dtype.kind == "c":
        return dtype.type(complex(np.nan, np.inf))
    if dtype.kind == "f" or dtype.name in NARROW:
        return np.float32(np.nan).astype(dtype)
    return np.array(True if dtype.kind == "b" else 3).astype(dtype)[()]


@pytest.mark.parametrize(("x64", "name", "reducer"), CASES)
def test_results_and_dtypes_are_those_of_jnp(x64: bool, name: str, reducer: str) -> None:
    values = members(name, reducer)
    with jax.enable_x64(x64):
        wanted = np.asarray(getattr(jnp, reducer)(jnp.asarray(values), axis=0))
        assert REDUCERS[reducer].result_dtype(values.dtype) == wanted.dtype
        for mode in ("exact", "fast"):
            found = reduce_by_shards(REDUCERS[reducer], values, mode=mode)
            assert found.dtype == wanted.dtype
            if reducer == "mean":
                eps = float(ml_dtypes.finfo(wanted.dtype).eps)
                wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
                np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), 2 * eps, eps)
            else:
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_infinities_and_nan_are_those_of_jnp(name: str, reducer: str) -> None:
    values = np.ones((9, 6), np.float32)
    values[2, 0] = values[8, 1] = np.inf
    values[8, 2] = -np.inf
    values[1, 3] = values[8, 4] = np.nan
    values[1, 5], values[7, 5] = np.inf, -np.inf
    values = values.astype(dtype_of(name))
    found = reduce_by_shards(REDUCERS[reducer], values)
    if name == "complex64" and reducer in ("max", "min"):  # jnp loses NaN of all but the last
        wanted = getattr(np, reducer)(values, axis=0)
    else:
        wanted = np.asarray(getattr(jnp, reducer)(values, axis=0))
    if name == "complex64" and reducer in ("mean", "prod"):  # jnp's NaN spreads to other parts
        found, wanted = np.isfinite(found), np.isfinite(wanted)
    wide = wanted.dtype if wanted.dtype.kind in "bc" else np.dtype(np.float32)
    np.testing.assert_array_equal(found.astype(wide), wanted.astype(wide))


@pytest.mark.parametrize("reducer", ["sum", "mean", "prod", "max", "min"])
def test_bits_do_not_depend_on_the_bundles(reducer: str) -> None:
    values = (np.random.default_rng(0).standard_normal((37, 9)) * 10).astype(np.float32)
    found = {reduce_by_shards(REDUCERS[reducer], values, seed=seed).tobytes() for seed in range(8)}
    assert len(found) == 1


def test_means_are_rounded_once() -> None:
    values = np.random.default_rng(0).standard_normal((7, 20)).astype(np.float32)
    found = reduce_by_shards(REDUCERS["mean"], values, shard_size=1)
    for place in range(20):
        mean = sum(map(Fraction, values[:, place].tolist())) / 7
        ulp = Fraction(float(np.spacing(np.abs(found[place]))))
        assert abs(Fraction(float(found[place])) - mean) <= ulp / 2


@pytest.mark.parametrize("name", [*DTYPES, "int4", "uint4"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_shard_of_padding_changes_nothing(name: str, reducer: str) -> None:
    if name in ("int4", "uint4") and reducer in ("sum", "prod"):
        pytest.skip("jnp does not sum integers of 4 bits")
    this = REDUCERS[reducer]
    values = members(name, reducer)[:3]
    found = np.asarray(this.partial(jnp.asarray(values), jnp.zeros(3, bool)))
    assert (found == this.identity(found.dtype)).all()
    accumulators = [make_accumulator(this.lane, found.dtype, 5) for _ in range(2)]
    for accumulator in accumulators:
        one = np.asarray(this.partial(jnp.asarray(values), jnp.ones(3, bool)))
        accumulator.add(one, 0)
    accumulators[1].add(found, 1)
    results = [this.finish(each, 0, 5, 3, values.dtype).tobytes() for each in accumulators]
    assert results[0] == results[1]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 3)])
def test_members_of_any_shape(shape: tuple[int, ...]) -> None:
    values = np.arange(6 * math.prod(shape), dtype=np.float32).reshape(6, *shape)
    for name, reducer in REDUCERS.items():
        found = reduce_by_shards(reducer, values)
        np.testing.assert_allclose(found, getattr(jnp, name)(values, axis=0), rtol=1e-6)


def test_leaves_share_an_accumulator() -> None:
    first, second = np.float32([[1, 2], [3, 4]]), np.float32([[10], [20]])
    accumulator = make_accumulator("sum", np.float32, 3)
    for shard in range(2):
        accumulator.add(np.concatenate([first[shard], second[shard]]), shard)
    total = REDUCERS["sum"].finish(accumulator, 0, 2, 2, first.dtype)
    mean = REDUCERS["mean"].finish(accumulator, 2, 3, 2, second.dtype)
    assert total.tolist() == [4, 6]
    assert mean.tolist() == [15]
    narrow = REDUCERS["mean"].finish(accumulator, 2, 3, 2, dtype_of("bfloat16"))
    assert narrow.dtype == dtype_of("bfloat16")


def test_means_of_integers_are_sums_of_floats() -> None:
    assert REDUCERS["mean"].partial_dtype(np.int32) == np.float32
    assert REDUCERS["mean"].partial_dtype(np.bool_) == np.float32
    assert REDUCERS["sum"].partial_dtype(np.uint8) == np.uint32
    assert REDUCERS["sum"].partial_dtype(dtype_of("bfloat16")) == np.float32
    assert REDUCERS["max"].partial_dtype(dtype_of("bfloat16")) == dtype_of("bfloat16")
    with jax.enable_x64(True):
        assert REDUCERS["mean"].partial_dtype(np.int64) == np.float64
        assert REDUCERS["sum"].partial_dtype(np.int8) == np.int64
    assert REDUCERS["sum"].partial_dtype(np.int8) == np.int32


def test_a_mean_of_no_members_is_nan() -> None:
    accumulator = make_accumulator("sum", np.float32, 2)
    assert np.isnan(REDUCERS["mean"].finish(accumulator, 0, 2, 0, np.float32)).all()
    assert REDUCERS["sum"].finish(accumulator, 0, 2, 0, np.float32).tolist() == [0, 0]


def test_partials_of_another_dtype_are_refused() -> None:
    accumulator = make_accumulator("sum", np.float32, 2)
    with pytest.raises(BeamjaxError, match="expected float32"):
        accumulator.add(np.zeros(2, np.int32), 0)
