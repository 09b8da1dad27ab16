"""Variances and standard deviations: those of NumPy in float64, with derivatives and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, examples
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj

N = 37
MEMBERS = np.arange(N)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(3, 2, (N, 3)), "float32")


def program(fn, n=N):
    return bj.program(m=n)(fn)


def local(fn, *args, shard_size=8):
    return bj.run(fn, *args, runner="local", options={"shard_size": shard_size})


def spread(x):
    return bj.reduce_var(x), bj.reduce_std(x, ddof=1)


def spread_in_jax(x):
    return jnp.var(x, axis=0), jnp.std(x, axis=0, ddof=1)


@pytest.mark.versions
def test_dtypes_and_values_are_those_of_numpy():
    values = {
        **{name: X.astype(name) for name in ("float32", "bfloat16", "float16", "int32", "uint8")},
        "bool": X > 3,
        "complex64": jax.lax.complex(X, X[::-1]),
    }
    fn = program(lambda x: jax.tree.map(spread, x))
    types = jax.eval_shape(lambda x: jax.tree.map(spread_in_jax, x), values)
    for found in (jax.jit(fn)(values), local(fn, values)):
        for name, (var, std) in found.items():
            assert (var.dtype, std.dtype) == (types[name][0].dtype, types[name][1].dtype), name
            wide = np.asarray(values[name]).astype("c16" if name == "complex64" else "f8")
            rtol = {"bfloat16": 4e-3, "float16": 5e-4}.get(name, 3e-7)
            np.testing.assert_allclose(
                np.asarray(var).astype("f8"), wide.var(0), rtol, err_msg=name
            )
            np.testing.assert_allclose(
                np.asarray(std).astype("f8"), wide.std(0, ddof=1), rtol, err_msg=name
            )


@examples(2)
@given(st.integers(0, 2**32), st.sampled_from([0, 1e3, 1e6, 1e8]), st.integers(2, 300))
def test_a_large_mean_costs_no_digits(seed, mean, n):
    """`jnp.var` loses all digits of the third and fourth."""
    rng = np.random.default_rng(seed)
    x = (mean + 8 * rng.integers(-9, 10, (n, 2)) + rng.normal(size=(n, 2))).astype("f4")
    found = local(program(bj.reduce_var, n), x, shard_size=64)
    np.testing.assert_allclose(found, x.astype("f8").var(0), 1e-6)


def test_a_mean_of_1e8_in_float64():
    x = 1e8 + RNG.integers(-1, 2, (1000, 2))
    with jax.enable_x64(True):
        found = local(program(bj.reduce_var, 1000), x, shard_size=64)
        by_key = program(lambda x, k: bj.reduce_by_key(x, k, op="var"), 1000)
        keyed = local(by_key, x, np.arange(1000) % 2).arrays()["value"]
    away = x - 1e8
    np.testing.assert_allclose(found, away.var(0), 1e-14)
    rows = [away[k::2] for k in (0, 1)]  # Whose sums are exact.
    assert_same_bits(
        keyed, np.stack([(500 * (d * d).sum(0) - d.sum(0) ** 2) / 500**2 for d in rows])
    )


def test_shards_and_runners_give_the_same_bits():
    x = np.asarray(RNG.normal(1e4, 1, (300, 2)), "f4")
    fn = program(spread, 300)
    expected = local(fn, x)
    for size in (16, 64, 512):
        assert_same_bits(local(fn, x, shard_size=size), expected)
    assert_same_bits(bj.run(fn, x, runner="DirectRunner", options={"shard_size": 64}), expected)


@pytest.mark.parametrize("name", ["reduce_var", "reduce_argmax"])
def test_rounds_that_sum_in_the_same_pass(name):
    """A pass of a round has accumulators and a function reduction, which merge apart on Beam."""

    @bj.program(m=N)
    def rounds(x):
        def one(c, _):
            y = bj.map_fn(lambda v: jnp.sin(v * c), x)
            return c + bj.reduce_mean(y)[0], getattr(bj, name)(y)

        return jax.lax.scan(one, jnp.float32(1), None, 2)

    expected = local(rounds, X)
    assert_close(expected, jax.jit(rounds)(X), 1e-5, 1e-5)
    found = bj.run(rounds, X, runner="DirectRunner", options={"shard_size": 8})
    assert_same_bits(found, expected)


def test_one_pass_and_nothing_gathered():
    plan = str(bj.explain(program(spread), X))
    assert "1 pass over members" in plan
    assert "nothing is gathered" in plan


def test_steps_have_the_line_of_the_user():
    for fn in (
        program(lambda x: bj.reduce_var(x)),
        jax.grad(program(lambda x: sum(bj.reduce_std(x)))),
    ):
        steps = bj.explain(fn, X).to_json()["steps"]
        lines = [line for step in steps for line in step["lines"]]
        assert lines
        assert [line for line in lines if not line.startswith(f"{__file__}:")] == []


def test_nan_infinity_and_too_few_members():
    x = X.at[3, 0].set(jnp.nan).at[5, 1].set(jnp.inf)
    for found in (jax.jit(program(spread))(x), local(program(spread), x)):
        assert [np.isnan(leaf).tolist() for leaf in found] == [[True, True, False]] * 2
    for n in (0, 1):
        fn = program(lambda x: (bj.reduce_var(x, ddof=1), bj.reduce_std(x, ddof=2)), n)
        for found in (fn(X[:n]), local(fn, X[:n])):
            assert np.isnan(found).all()
    assert_same_bits(np.asarray(program(bj.reduce_var, 1)(X[:1])), np.zeros(3, "f4"))


@pytest.mark.versions
def test_derivatives():
    def loss(fn):
        return lambda s, x: sum(jnp.sum(jnp.sin(y) * y) for y in fn(jnp.tanh(x * s) + x))

    own, ref = loss(program(spread)), loss(spread_in_jax)
    for derivative in (
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.hessian(f),
        lambda f: jax.jacfwd(f, argnums=1),
        lambda f: jax.hessian(f, argnums=1),
        lambda f: lambda s, x: jax.vmap(f, (0, None))(jnp.stack([s, -s]), x),
    ):
        expected = jax.jit(derivative(ref))(jnp.float32(0.7), X)
        assert_close(jax.jit(derivative(own))(jnp.float32(0.7), X), expected, 1e-4, 1e-4)
    gradient = jax.grad(own, argnums=(0, 1))
    expected = jax.jit(gradient)(jnp.float32(0.7), X)
    assert_close(local(gradient, jnp.float32(0.7), X), expected, 1e-5, 1e-5)
    z = jax.lax.complex(X, X[::-1])
    own, ref = (lambda z, f=f: f(z * z)[0].sum() for f in (program(spread), spread_in_jax))
    assert_close(jax.jit(jax.grad(own))(z), jax.jit(jax.grad(ref))(z), 1e-5, 1e-5)


def test_weights():
    """Ints count members; one with weight 0 changes nothing, whatever it is."""
    w = RNG.integers(0, 4, N)
    x = X.at[np.argmin(w)].set(jnp.nan)
    fn, repeated = bj.reweight(program(spread)), np.repeat(np.asarray(x), w, axis=0).astype("f8")
    expected = repeated.var(0), repeated.std(0, ddof=1)
    for found in (jax.jit(fn)(w, x), local(fn, w, x)):
        np.testing.assert_allclose(found, expected, 1e-6)
    # The influence of a member on a variance, in closed form.
    away = (np.asarray(X, "f8") - np.asarray(X, "f8").mean(0)) ** 2
    influence = (away - away.mean(0)) / N
    np.testing.assert_allclose(bj.influence(program(bj.reduce_var))(X), influence, 1e-4, 1e-6)
    _, error = local(bj.standard_error(program(bj.reduce_var)), X)
    np.testing.assert_allclose(error, np.sqrt((influence**2).sum(0)), 1e-5)
    weights = bj.bootstrap_weights(jax.random.key(0), 5)
    replicas = jax.vmap(bj.reweight(program(bj.reduce_std)), (0, None))(weights, X)
    assert replicas.shape == (5, 3)
    assert np.isfinite(replicas).all()


def test_members_that_are_dropped_do_not_count():
    x = np.asarray(X).copy()
    x[[2, 20]] = np.nan
    options = {"shard_size": 8, "on_nonfinite": "drop"}
    found = bj.run(program(spread), x, runner="local", options=options)
    left = np.delete(x, [2, 20], 0).astype("f8")
    np.testing.assert_allclose(found, (left.var(0), left.std(0, ddof=1)), 1e-6)


def test_by_key_with_derivatives_and_weights():
    """Keys without members give NaN, and no NaN in the derivatives."""
    keys, w = RNG.integers(0, 4, N), RNG.integers(0, 3, N)
    fn = program(lambda x: bj.reduce_by_key(x, keys, 5, op="std")[:4])

    def ref(x, of=MEMBERS):
        return jnp.stack([jnp.std(x[of[keys[of] == k]], axis=0) for k in range(4)])

    slopes = [jax.grad(lambda x, f=f: (f(x) ** 3).sum()) for f in (fn, ref)]
    for found in (slopes[0](X), local(slopes[0], X)):
        assert_close(found, slopes[1](X), 1e-5, 1e-5)
    assert_close(local(bj.reweight(fn), w, X), ref(X, np.repeat(MEMBERS, w)), 1e-6, 1e-6)
    assert_same_bits(bj.run(fn, X, runner="DirectRunner"), bj.run(fn, X, runner="local"))
