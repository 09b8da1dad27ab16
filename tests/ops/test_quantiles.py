"""`quantile`: the members that sorting selects, against NumPy in float64, JAX's sort and DuckDB."""

import itertools

import apache_beam as beam
import duckdb
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from explained import facts_of
from helpers import assert_close, assert_same_bits, examples
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import OutsideProgramError, PlacementError, StructureError
from beamjax.ops import quantiles

N, K = 203, 4
RNG = np.random.default_rng(21)
X = RNG.normal(size=(N, 3)).astype(np.float32)
KEYS = RNG.integers(-1, K, N).astype(np.int32)  # -1 is no key, and has members
QS = (0.1, 0.5, 0.99)
SHARDS = {"shard_size": 32}


def program(fn):
    return bj.program(placements={"rows": None})(fn)


def expected(x, q, keys=None, num_keys=None):
    """By NumPy, in float64."""
    wide = np.asarray(x, np.float64)
    if keys is None:
        return (
            np.quantile(wide, q, axis=0)
            if len(wide)
            else np.full((*np.shape(q), *wide.shape[1:]), np.nan)
        )
    return np.stack([expected(wide[keys == key], q) for key in range(num_keys)])


def test_the_shapes_and_values_of_jax():
    numbers = 0.5, [0.1, 0.9], np.float32(0.25), np.array([]), 0, jnp.float32(0.7), -0.5, 1.5
    for q in numbers:
        of_all = program(lambda x, q=q: bj.quantile(x, q))
        by_key = program(lambda x, k, q=q: bj.quantile(x, q, keys=k, num_keys=K))
        for x in (X, X[:, 0], X[:, :0], X.astype(np.float16), X.astype(np.int32)):
            want = jax.eval_shape(lambda x, q=q: jnp.quantile(x, jnp.asarray(q, float), axis=0), x)
            assert jax.eval_shape(of_all, x) == want
            assert jax.eval_shape(by_key, x, KEYS).shape == (K, *want.shape)
    found = jax.jit(program(lambda x: [bj.quantile(x, q) for q in numbers]))(X)
    for got, q in zip(found, numbers, strict=True):
        want = jnp.quantile(X, jnp.asarray(q, float), axis=0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "bool",
    "float8_e5m2",
    "int4",
]


def values(rng, dtype, n):
    """Numbers of a dtype: over its whole range or with many ties, and a few NaN."""
    if dtype == "bool":
        return rng.integers(0, 2, (n, 2)).astype(bool)
    if "int" in dtype:
        info, few = jnp.iinfo(dtype), rng.random() < 0.5
        low, high = (0, 3) if few else (int(info.min), int(info.max))
        return rng.integers(low, high, (n, 2), endpoint=True).astype(dtype)
    ties = rng.choice([0.0, -0.0, 1.0, -2.0, 3.0], (n, 2))
    x = np.where(rng.random((n, 2)) < rng.random(), ties, rng.normal(size=(n, 2)) * 100)
    return np.where(rng.random((n, 2)) < 0.01, np.nan, x).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(dtype):
    both = program(lambda x, k, q: (bj.quantile(x, q), bj.quantile(x, q, keys=k, num_keys=4)))
    jitted, n = jax.jit(both), 60
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x, q = values(rng, dtype, n), np.append(rng.random(2), rng.choice([0, 0.5, 1])).astype("f4")
        keys = rng.choice([-1, 0, 1, 2, 9], n, p=rng.dirichlet(np.ones(5))).astype(np.int32)
        found = jitted(x, keys, q)
        rough, wide = found[0].dtype.itemsize < 4, q.astype(float)
        wants = expected(x, wide), expected(x, wide, keys, 4)
        for got, want in zip(found, wants, strict=True):
            limit = float(jnp.finfo(got.dtype).max)
            want = np.clip(want, -limit, limit)
            tolerance = 0.3 if "float8" in dtype else 1e-2 if rough else 2e-6
            np.testing.assert_allclose(np.asarray(got, float), want, tolerance, tolerance * 1e-2)
    assert_same_bits(bj.run(both, x, keys, q, runner="local", options={"shard_size": 16}), found)


@pytest.mark.versions
def test_infinities_ties_and_nan():
    x = np.float32([np.inf, 1, 1, 1, -np.inf, np.inf])
    found = jax.jit(program(lambda x: bj.quantile(x, [0, 0.2, 0.5, 0.7, 1])))(x)
    assert found.tolist() == [-np.inf, 1, 1, np.inf, np.inf]
    x[2] = np.nan
    assert np.isnan(jax.jit(program(lambda x: bj.quantile(x, [0, 1])))(x)).all()
    by_key = program(lambda x, k: bj.quantile(x, 0.5, keys=k, num_keys=4))
    found = jax.jit(by_key)(x, np.int32([0, 1, 1, 2, 2, 9]))
    np.testing.assert_array_equal(found, [np.inf, np.nan, -np.inf, np.nan])
    assert np.isnan(jax.jit(program(lambda x: bj.quantile(x, np.nan)))(X)).all()
    assert np.isnan(bj.run(program(lambda x: bj.quantile(x, 0.5)), X[:0], runner="local")).all()


@pytest.mark.parametrize("how", [{"runner": "local"}, {}], ids=["local", "beam"])
@pytest.mark.versions
def test_passes_of_a_run(how):
    """Nothing is gathered, and bits are those of `jit`."""

    @program
    def summary(w, rows, keys):
        score = bj.map_fn(lambda row: {"dot": row @ w, "row": row}, rows)
        by_key = bj.quantile(score, QS, keys=keys, num_keys=K)
        spread = bj.map_fn(
            lambda s, m: jnp.abs(s - m),
            (score["dot"], bj.broadcast(bj.quantile(score["dot"], 0.5))),
        )
        return by_key, bj.quantile(spread, 0.5), bj.reduce_mean(spread)

    args = np.float32([1, -1, 0.5]), X, KEYS
    assert_same_bits(bj.run(summary, *args, options=SHARDS, **how)[:2], jax.jit(summary)(*args)[:2])
    found = bj.explain(summary, *args, options=SHARDS)
    assert facts_of(found).gathered_bytes == 0
    assert "quantile_pass_1_of_3" in str(found)


def test_in_loops_and_under_vmap():
    @program
    def descent(x, rates):
        def step(center, rate):
            found = bj.quantile(bj.map_fn(lambda row: row - center, x), 0.5)
            return center + rate * found, found

        return jax.lax.scan(step, jnp.ones(3), rates)

    rates = np.float32([0.5, 0.25])
    want = jax.jit(descent)(X, rates)
    assert_close(bj.run(descent, X, rates, runner="local", options=SHARDS), want, 1e-6)
    assert_close(bj.run(descent, X, rates, options=SHARDS), want, 1e-6)
    several = jax.vmap(
        program(lambda x, k: bj.quantile(x, 0.5, keys=k, num_keys=K)), in_axes=(1, None)
    )
    found = bj.run(several, X, KEYS, runner="local", options=SHARDS)
    np.testing.assert_allclose(found, expected(X, 0.5, KEYS, K).T, rtol=1e-6)


def test_dropped_members_and_members_of_unknown_number():
    x, median = X[:, 0].copy(), program(lambda x: bj.quantile(x, 0.5))
    x[7] = np.nan
    options = {"on_nonfinite": "drop", "drop_limit": 0.1, **SHARDS}
    mapped = program(lambda x: bj.quantile(bj.map_fn(lambda v: v * 1, x), 0.5))
    for runner in ("local", "DirectRunner"):
        assert bj.run(mapped, x, runner=runner, options=options) == np.nanmedian(x)
    (n,) = jax.export.symbolic_shape("n")
    elements = [(i, v) for i, v in enumerate(X[:, 0])]
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        counted = bj.transform(median, jax.ShapeDtypeStruct((n,), "float32"))
        result = pipeline | beam.Create(elements) | counted
        assert_that(result, equal_to([np.median(X[:, 0])]))


# --- derivatives


def loss(x, k, q):
    return jnp.sum(bj.quantile(x, q) ** 2) + jnp.sum(
        jnp.sin(bj.quantile(x, 0.3, keys=k, num_keys=K))
    )


def sorted_loss(x, k, q):
    found = [jnp.quantile(x[key == KEYS], jnp.float32(0.3), axis=0) for key in range(K)]
    return jnp.sum(jnp.quantile(x, q, axis=0) ** 2) + jnp.sum(jnp.sin(jnp.stack(found)))


@pytest.mark.versions
def test_derivatives_are_those_of_sorting():
    q = np.float32([0.25, 0.6])
    of_x, of_q = jax.jit(jax.grad(sorted_loss, argnums=(0, 2)))(X, KEYS, q)
    both = jax.grad(program(loss), argnums=(0, 2))
    for found in (jax.jit(both)(X, KEYS, q), bj.run(both, X, KEYS, q, options=SHARDS)):
        np.testing.assert_allclose(found[0], of_x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1], of_q, rtol=1e-3)
    gradient = lambda x, k: jax.grad(program(loss))(x, k, q)
    assert facts_of(bj.explain(gradient, X, KEYS, options=SHARDS)).gathered_bytes == 0
    t = RNG.normal(size=X.shape).astype(np.float32)
    forward = lambda x, k, t: jax.jvp(lambda x: program(loss)(x, k, q), (x,), (t,))[1]
    of_sorting = lambda x: sorted_loss(x, KEYS, q)
    want = jax.jit(lambda x: jax.jvp(of_sorting, (x,), (t,))[1])(X)
    np.testing.assert_allclose(
        bj.run(forward, X, KEYS, t, runner="local", options=SHARDS), want, rtol=1e-4
    )
    twice = lambda x, k: jax.jvp(jax.grad(lambda x: program(loss)(x, k, q)), (x,), (t,))[1]
    want = jax.jit(lambda x: jax.jvp(jax.grad(of_sorting), (x,), (t,))[1])(X)
    np.testing.assert_allclose(jax.jit(twice)(X, KEYS), want, rtol=1e-3, atol=1e-4)


def test_members_that_tie_share_the_derivative():
    x = np.float32([1, 2, 2, 5, 0, 7, 9, 0, -1, 2, 2])
    gradient = jax.grad(program(lambda x: bj.quantile(x, 0.5)))
    for found in (
        jax.jit(gradient)(x),
        bj.run(gradient, x, runner="local", options={"shard_size": 8}),
    ):
        np.testing.assert_allclose(found, (x == 2) / 4, rtol=1e-6)


# --- other engines


@pytest.mark.parametrize("num_keys", [1, 300])
def test_by_key_against_duckdb(num_keys):
    x, keys = RNG.normal(size=(2, 20_000)).astype(np.float32)[0], RNG.integers(0, num_keys, 20_000)
    keys = keys.astype(np.int32)
    members = pa.table({"x": x, "k": keys})
    sql = f"SELECT quantile_cont(x, {list(QS)}) FROM members GROUP BY k ORDER BY k"
    with duckdb.connect() as database:
        database.register("members", members)
        rows = [row[0] for row in database.sql(sql).fetchall()]
    by_key = program(lambda x, k: bj.quantile(x, QS, keys=k, num_keys=num_keys))
    found = bj.run(by_key, x, keys, runner="local", options={"shard_size": 3000})
    np.testing.assert_allclose(found, rows, rtol=1e-6, atol=1e-7)


def test_64_bits():
    with jax.enable_x64(True):
        x = np.concatenate([RNG.normal(size=500), [1e300, -1e300, 2.0**-900, 1, 1 + 2**-52]])
        whole = RNG.integers(-(2**63), 2**63 - 1, len(x))
        both = program(lambda x, i: (bj.quantile(x, QS), bj.quantile(i, 0.25)))
        found = bj.run(both, x, whole, runner="local", options=SHARDS)
        np.testing.assert_allclose(found[0], np.quantile(x, QS), rtol=1e-9)
        np.testing.assert_allclose(found[1], np.quantile(whole.astype(float), 0.25), rtol=1e-12)
        assert found[1].dtype == np.float64


# --- ranks and digits


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1)
)
@examples(6)
def test_products_of_64_bits(pairs):
    a, b = np.array(pairs, np.uint32).T
    high, low = quantiles._product(jnp.asarray(a), jnp.asarray(b))
    whole = zip(np.asarray(high).tolist(), np.asarray(low).tolist(), strict=True)
    assert [(upper << 32) + lower for upper, lower in whole] == [x * y for x, y in pairs]


def test_ranks_of_many_members():
    """Where float32, in which JAX computes them, is a thousand members off."""
    for count, q in itertools.product(
        [1, 2, 11, 10**7, 2**31 - 1], [0, 0.1, 0.3, 0.5, 1 / 3, 0.999, 1]
    ):
        lower, upper, weight = quantiles._ranks(quantiles._as_quantiles(q), jnp.int32([count]))
        rank = q * (count - 1)
        assert abs(int(lower[0, 0]) + int(weight[0, 0]) * 2.0**-32 - rank) <= 1e-9 * max(rank, 1)
        assert int(upper[0, 0]) - int(lower[0, 0]) == (int(weight[0, 0]) > 0)


def test_digits():
    for bits, cells, values in itertools.product([8, 16, 32, 64], [1, 3, 1000, 10**5], [1, 2, 20]):
        widths = quantiles._digits(bits, cells, values)
        assert sum(widths) == bits
        tables = [cells << widths[0], *(cells * values << width for width in widths[1:])]
        assert all(
            t <= quantiles.MAX_COUNTS or w <= quantiles.LEAST_BITS
            for t, w in zip(tables, widths, strict=True)
        )
    passes = {
        (k, bits): len(quantiles._digits(bits, k, 2)) for k in (1, 1000) for bits in (8, 16, 32, 64)
    }
    assert passes == {
        (1, 8): 1, (1, 16): 1, (1, 32): 2, (1, 64): 4,
        (1000, 8): 1, (1000, 16): 2, (1000, 32): 4, (1000, 64): 7,
    }  # fmt: skip


# --- what is refused


def test_bad_input():
    with pytest.raises(OutsideProgramError, match="quantile"):
        bj.quantile(X, 0.5)
    for call, error, message in (
        (
            lambda x, k: bj.quantile(x, 0.5, keys=k),
            StructureError,
            "found keys alone, expected both",
        ),
        (lambda x, k: bj.quantile(x, 0.5, num_keys=3), StructureError, "found num_keys alone"),
        (
            lambda x, k: bj.quantile(x, 0.5, keys=k, num_keys=0),
            StructureError,
            "quantile: found num_keys 0",
        ),
        (
            lambda x, k: bj.quantile(x, 0.5, keys=x, num_keys=3),
            StructureError,
            "quantile: found keys of",
        ),
        (
            lambda x, k: bj.quantile(x, 0.5, keys=k[:3], num_keys=3),
            PlacementError,
            "keys has shape",
        ),
        (
            lambda x, k: bj.quantile({"a": x.astype("complex64")}, 0.5),
            StructureError,
            r"x\['a'\] has dtype complex64",
        ),
        (lambda x, k: bj.quantile(x, [[0.5]]), StructureError, r"found q of shape \(1, 1\)"),
        (lambda x, k: bj.quantile(x, 1j), StructureError, "q has dtype complex"),
    ):
        with pytest.raises(error, match=message):
            bj.run(bj.program(placements={"rows": N})(call), X, KEYS, runner="local")
    weighted = bj.reweight(program(lambda x: bj.quantile(x, 0.5)))
    with pytest.raises(StructureError, match="several definitions of a quantile with weights"):
        bj.run(weighted, np.ones(N, np.float32), X, runner="local")
