"""Weights of members: against members that are repeated, closed forms, and refits."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types, examples
from hypothesis import given

import beamjax as bj
from beamjax.errors import PlacementError, StagingError, StructureError
from beamjax.numerics.reducers import REDUCERS

N, KEYS = 24, 4
RNG = np.random.default_rng(0)
SHARDS = {"shard_size": 8}
COUNTS = RNG.integers(0, 4, N)
KEY_OF = RNG.integers(-1, KEYS + 1, N)
OPS = list(REDUCERS)


def local(fn, *args, **options):
    return bj.run(fn, *args, runner="local", options=SHARDS | options)


def members(dtype):
    if dtype == "bool":
        return jnp.asarray(RNG.integers(0, 2, (N, 3)), bool)
    values = RNG.integers(1, 3, (N, 3)) * RNG.choice([-1, 1] if dtype[0] != "u" else [1], (N, 3))
    return jnp.asarray(values, dtype)


@bj.program(clients="x")
def every_reduction(x, keys):
    """All results of ints that are exact in any dtype, so that repeated members give the truth."""
    found = {op: getattr(bj, f"reduce_{op}")(x) for op in OPS}
    by_key = {op: bj.reduce_by_key(x, keys, KEYS, op=op) for op in OPS}
    weighted = bj.reduce_weighted_mean(x, bj.map_fn(lambda v: abs(v.astype("float32")[0]), x))
    return found, by_key, weighted


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("int32", marks=pytest.mark.long), "uint8", "bool", "bfloat16"]
)
def test_a_weight_counts_its_member_as_often(dtype):
    x, w = members(dtype), jnp.asarray(np.minimum(COUNTS, 1 + (KEY_OF >= 0)))
    expected = every_reduction(jnp.repeat(x, w, axis=0), np.repeat(KEY_OF, w))
    weighted = bj.reweight(every_reduction)
    for found in (weighted(w, x, KEY_OF), jax.jit(weighted)(w, x, KEY_OF)):
        assert_same_types(found, expected)
        assert_close(found, expected, rtol=8e-3 if dtype == "bfloat16" else 1e-6)
    assert_same_bits(local(weighted, w, x, KEY_OF), jax.jit(weighted)(w, x, KEY_OF))


@pytest.mark.parametrize("name", ["reduce_argmax", "reduce_argmin"])
def test_the_best_member_is_one_that_counts(name):
    best = bj.program(clients="x")(lambda x: getattr(bj, name)(x))
    sign = 1 if name == "reduce_argmax" else -1
    x = sign * jnp.array([9.0, -jnp.inf, -jnp.inf, jnp.nan, 5.0])
    for w, expected in [
        ([1, 1, 1, 0, 1], 0), ([0, 1, 1, 0, 1], 4), ([0, 0, 1, 0, 0], 2), ([1, 1, 1, 1, 1], 3),
    ]:  # fmt: skip
        assert int(bj.reweight(best)(jnp.array(w), x)) == expected
        assert int(local(bj.reweight(best), np.array(w), np.asarray(x))) == expected


def test_a_member_that_does_not_count_never_shows():
    x = jnp.array([[1.0], [jnp.nan], [3.0], [jnp.inf]])
    w = jnp.array([1, 0, 2, 0])
    stats = bj.program(clients="x")(lambda x: [getattr(bj, f"reduce_{op}")(x) for op in OPS[:5]])
    assert_same_bits(
        bj.reweight(stats)(w, x), [np.array([v], "f4") for v in (7, np.float32(7) / 3, 3, 1, 9)]
    )


def test_float_weights_make_ints_float():
    count = bj.program(clients="x")(lambda x: bj.reduce_sum(bj.map_fn(lambda v: jnp.int32(1), x)))
    x, w = jnp.zeros(3), jnp.array([0.5, 1.0, 2.0])
    assert_same_bits(bj.reweight(count)(w, x), np.float32(3.5))
    assert_same_bits(jax.grad(bj.reweight(count))(w, x), np.ones(3, "f4"))
    assert bj.reweight(count)(w > 1, x).dtype == "int32"


def test_narrow_weights_have_wide_totals():
    """Sums of ints with float16 weights, products of int8 weights, and errors of float16 means."""
    total = bj.program(clients="x")(bj.reduce_sum)
    x = jnp.full(200, 1000)
    found = bj.reweight(total)(jnp.ones(200, "float16"), x)
    assert (found.dtype, float(found)) == ("float32", 200_000.0)
    twice = bj.reweight(bj.reweight(total))
    assert int(twice(jnp.full(200, 100, "int8"), jnp.full(200, 100, "int8"), x)) == 2 * 10**9
    mean = bj.program(clients="x")(bj.reduce_mean)
    y = (1e-3 * RNG.normal(size=1000)).astype("float16")
    for fn in (bj.standard_error(mean), functools.partial(local, bj.standard_error(mean))):
        _, error = fn(y)
        np.testing.assert_allclose(error, y.astype("f8").std() / 1000**0.5, 1e-3)


@examples(20)
@given(st.data())
def test_weights_compose(data):
    """Weights of a function with weights multiply, and vmap gives each set of them."""
    total = bj.program(clients="x")(lambda x: bj.reduce_sum(x))
    weights = st.lists(st.integers(0, 3), min_size=5, max_size=5).map(jnp.array)
    v, w = data.draw(weights), data.draw(weights)
    x = jnp.arange(1, 6)
    twice = bj.reweight(bj.reweight(total))
    assert int(twice(v, w, x)) == int((v * w * x).sum())
    both = jax.vmap(bj.reweight(total), in_axes=(0, None))(jnp.stack([v, w]), x)
    assert both.tolist() == [int((v * x).sum()), int((w * x).sum())]


def test_a_compiled_program_is_not_served_with_other_weights():
    total = jax.jit(bj.program(clients="x")(lambda x: bj.reduce_sum(x)))
    x = jnp.arange(4.0)
    assert float(total(x)) == 6
    assert float(bj.reweight(total)(jnp.array([1, 0, 0, 1]), x)) == 3
    assert float(bj.reweight(total)(jnp.array([0, 0, 0, 1]), x)) == 3
    assert float(total(x)) == 6


def test_one_of_several_placements():
    @bj.program(clients="x", servers="y")
    def both(x, y):
        return bj.reduce_sum(x, placement="clients") + bj.reduce_sum(y, placement="servers")

    x, y = jnp.arange(3.0), jnp.arange(2.0)
    assert float(bj.reweight(both, placement="servers")(jnp.array([0, 0]), x, y)) == 3
    with pytest.raises(PlacementError, match="placement="):
        bj.reweight(both)(jnp.ones(3), x, y)
    with pytest.raises(PlacementError, match="placement="):
        bj.influence(both)(x, y)


def test_what_takes_no_weights_is_refused():
    x = jnp.arange(3.0)
    program = bj.program(clients="x")
    product = program(lambda x: bj.reduce(jnp.multiply, x))
    with pytest.raises(StructureError, match="fractional number of times"):
        bj.reweight(product)(jnp.ones(3), x)
    with pytest.raises(StructureError, match="calls no reduction"):
        bj.reweight(program(lambda x: jnp.sum(bj.map_fn(jnp.sin, x))))(jnp.ones(3), x)
    total = program(lambda x: bj.reduce_sum(x))
    with pytest.raises(PlacementError, match="weights has shape"):
        bj.reweight(total)(jnp.ones(4), x)
    with pytest.raises(StructureError, match="one weight for each member"):
        bj.reweight(total)(jnp.ones((3, 2)), x)
    with pytest.raises(StructureError, match="one weight for each member"):
        bj.reweight(total)(lambda i: jnp.ones(2), x)
    unknown = program(lambda x, k: bj.reduce_by_key(x, k, op="max"))
    with pytest.raises(StructureError, match="num_keys"):
        bj.reweight(unknown)(jnp.ones(3), x, jnp.zeros(3, int))
    with pytest.raises(StructureError, match="expected a float"):
        bj.influence(program(lambda x: bj.reduce_argmax(x)))(x)


UNWEIGHTED = {
    "reduce_sum": lambda x, y: jnp.mean(y, axis=0),
    "reduce_max": lambda x, y: jnp.max(jnp.abs(y), axis=0),
    "dot_general": lambda x, y: y @ y,
    "cumsum": lambda x, y: bj.reduce_mean(jnp.cumsum(y)),
    "sort": lambda x, y: jnp.median(y, axis=0),
    "scan": lambda x, y: jax.lax.scan(lambda c, v: (0.5 * c + v, None), 0.0, y)[0],
    "scatter-add": lambda x, y: jax.ops.segment_sum(y, jnp.zeros(len(y), int), 1)[0],
    "slice": lambda x, y: jnp.sum(y[3:7], axis=0),
}


@pytest.mark.parametrize("name", UNWEIGHTED)
@pytest.mark.parametrize("transform", [bj.reweight, bj.standard_error, bj.influence])
def test_other_reductions_of_members_are_refused_with_their_line(name, transform):
    @bj.program(clients="x")
    def ratio(x, y):
        return bj.reduce_mean(x) / UNWEIGHTED[name](x, y)

    x = np.arange(1.0, N + 1, dtype="f4")
    args = (COUNTS, x, x) if transform is bj.reweight else (x, x)
    with pytest.raises(
        StagingError, match=r"test_weights.py:\d+ .* takes several members of 'clients'"
    ):
        local(transform(ratio), *args)


def test_what_needs_no_weights_runs():
    """Single members, members of another placement, and sums of derivatives."""

    @bj.program(clients="x", servers="z")
    def fit(x, y, z):
        def round_of(theta, _):
            loss = lambda theta: bj.reduce_mean((x @ theta - y) ** 2, placement="clients")
            return theta - 0.1 * jax.grad(loss)(theta), None

        theta, _ = jax.lax.scan(round_of, jnp.zeros_like(x[0]) + y[2], None, 3)
        return theta * jnp.sum(z, axis=0) + bj.reduce_by_key(y, KEY_OF, 1, placement="clients")

    x, y, z = (RNG.normal(size=shape).astype("f4") for shape in ((N, 2), N, 3))
    weighted = bj.reweight(fit, placement="clients")
    assert_close(local(weighted, COUNTS, x, y, z), jax.jit(weighted)(COUNTS, x, y, z), rtol=1e-5)
    error = bj.standard_error(fit, placement="clients")
    assert_close(local(error, x, y, z), jax.jit(error)(x, y, z), rtol=1e-4)


def test_sums_of_unknown_keys():
    by_key = bj.program(clients="x")(lambda x, k: bj.reduce_by_key(x, k, op="sum"))
    x, w = jnp.arange(N, dtype="float32"), jnp.asarray(COUNTS)
    found = bj.reweight(by_key)(w, x, KEY_OF).reduced()
    expected = by_key(x * w.astype("f4"), KEY_OF).reduced()
    assert_same_bits(found, expected)


# --- statistics with closed forms


@bj.program(clients="x")
def moments(x):
    mean = bj.reduce_mean(x)
    return mean, bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, x))


@bj.program(clients="x")
def least_squares(x, y, penalty=0.0):
    gram = bj.reduce_sum(bj.map_fn(lambda a: jnp.outer(a, a), x))
    return jnp.linalg.solve(
        gram + penalty * jnp.eye(x.shape[1]), bj.reduce_sum(bj.map_fn(lambda a, b: a * b, (x, y)))
    )


@pytest.fixture
def data():
    with jax.enable_x64(True):
        x = RNG.normal(size=(60, 3))
        yield x, x @ np.array([1.0, -2.0, 0.5]) + RNG.normal(size=60) * (1 + np.abs(x[:, 0]))


def test_error_of_a_mean_and_a_variance(data):
    x, _ = data
    residual = x - x.mean(0)
    spread = residual**2 - x.var(0)
    expected = (
        (x.mean(0), x.var(0)),
        tuple(np.sqrt((u**2).sum(0)) / len(x) for u in (residual, spread)),
    )
    for found in (bj.standard_error(moments)(x), local(bj.standard_error(moments), x)):
        assert_close(found, expected, rtol=1e-12)


def test_error_of_least_squares_is_the_sandwich(data):
    x, y = data
    bread = np.linalg.inv(x.T @ x)
    beta = bread @ x.T @ y
    meat = (x * (y - x @ beta)[:, None] ** 2).T @ x
    found = local(bj.standard_error(least_squares), x, y)
    u = bread @ (x * (y - x @ beta)[:, None]).T
    assert np.abs(u.sum(1)).max() < 1e-12  # so that centred influences are the sandwich
    assert_close(found, (beta, np.sqrt(np.diag(bread @ meat @ bread))), rtol=1e-10)


def test_folds_are_refits(data):
    x, y = data
    folds = jax.tree_util.Partial(lambda k, i: i % 5 != k, jnp.arange(5, dtype="int32"))
    fits = jax.vmap(bj.reweight(least_squares), in_axes=(0, None, None, None))
    expected = [
        least_squares(x[np.arange(60) % 5 != k], y[np.arange(60) % 5 != k], 0.3) for k in range(5)
    ]
    assert_close(local(fits, folds, x, y, 0.3), np.stack(expected), rtol=1e-12)


def test_bootstrap_agrees_with_the_closed_form(data):
    x, _ = data
    weights = bj.bootstrap_weights(jax.random.key(0), 2000)
    mean = bj.program(clients="x")(lambda x: bj.reduce_mean(x))
    means = jax.vmap(bj.reweight(mean), in_axes=(0, None))
    found = local(means, weights, x)
    assert_close(found, means(weights, x), rtol=1e-12)
    error = x.std(0) / np.sqrt(len(x))
    # The error of a standard deviation of 2,000 values is 1.6 %; four of these, and O(1/n).
    assert_close(np.asarray(found).std(0), error, rtol=4 * 0.016 + 1 / len(x))


def test_bootstrap_weights_are_poisson():
    weights = bj.bootstrap_weights(jax.random.key(1), 50)
    drawn = np.asarray(jax.vmap(lambda w: jax.vmap(w)(jnp.arange(4000)))(weights))
    counts = np.bincount(drawn.ravel(), minlength=5)[:5]
    expected = drawn.size * np.exp(-1) / np.array([1, 1, 2, 6, 24])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (
        np.abs(np.corrcoef(drawn)[np.triu_indices(50, 1)]).max() < 0.1
    )  # replicates are independent


# --- influence


@bj.program(clients="x")
def trained(x, y, start, rounds=4):
    def round_of(theta, _):
        loss = lambda theta: bj.reduce_mean(
            bj.map_fn(lambda a, b: jnp.logaddexp(0.0, -b * (a @ theta)), (x, y))
        )
        return theta - 0.5 * jax.grad(loss)(theta), None

    return jax.lax.scan(round_of, start, None, rounds)[0]


def test_influence_through_training_is_a_finite_difference(data):
    x, y = data[0], np.sign(data[1])
    start = np.zeros(3)
    found = bj.influence(trained, lambda theta: theta[0])(x, y, start)
    step = np.eye(60)[7] * 1e-5
    up, down = (bj.reweight(trained)(np.ones(60) + s, x, y, start)[0] for s in (step, -step))
    np.testing.assert_allclose(found[7], (up - down) / 2e-5, rtol=1e-6)
    assert_close(local(bj.influence(trained, lambda t: t[0]), x, y, start), found, rtol=1e-9)
    without = bj.reweight(trained)(np.ones(60) - np.eye(60)[7], x, y, start)[0]
    whole = trained(x, y, start)[0]
    np.testing.assert_allclose(whole - found[7], without, atol=0.1 * abs(whole - without))


def test_influences_of_a_tree_have_members_first(data):
    x, _ = data
    mean, spread = bj.influence(moments)(x)
    residual = x - x.mean(0)
    assert_close((mean, spread), (residual / 60, (residual**2 - x.var(0)) / 60), rtol=1e-10)


def test_error_of_an_int_is_unknown(data):
    x, _ = data
    both = bj.program(clients="x")(lambda x: (bj.reduce_argmax(x), bj.reduce_mean(x)))
    (place, _), (error, known) = bj.standard_error(both)(x)
    assert place.dtype == "int64"
    assert np.isnan(error).all()
    assert np.isfinite(known).all()
    place, error = bj.standard_error(bj.program(clients="x")(bj.reduce_argmax))(x)
    assert place.dtype == "int64"
    assert np.isnan(error).all()


# --- where members come from


def test_influences_stay_on_disk(tmp_path):
    mean = bj.program(clients="x")(lambda x: bj.reduce_mean(x))
    options = {"keep": "placed", "work_folder": str(tmp_path)}
    x = RNG.normal(size=N).astype("f4")
    found = bj.run(bj.influence(mean), x, runner="DirectRunner", options=SHARDS | options)
    assert isinstance(found, bj.Placed)
    assert_close(np.asarray(found), (x - x.mean()) / N)


def test_members_that_fail_count_nothing():
    x = np.arange(1.0, N + 1, dtype="f4")
    x[3] = np.nan
    mean = bj.program(clients="x")(lambda x: bj.reduce_mean(x))
    w = np.full(N, 0.5, "f4")
    found = local(bj.reweight(mean), w, x, on_nonfinite="drop", drop_limit=0.2)
    assert_close(found, np.delete(x, 3).mean())


def test_weights_of_a_stream_of_unknown_length():
    chunks = bj.from_chunks(lambda: iter([np.arange(5, dtype="f4"), np.arange(5, 12, dtype="f4")]))
    mean = bj.program(clients="x")(lambda x: bj.reduce_mean(x))
    found = local(functools.partial(bj.reweight(mean), lambda i: i % 2), chunks)
    assert_close(found, np.float32(6))
