"""Compressed values against the theory of stochastic rounding, and their means on every runner."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import beamjax as bj
from beamjax.errors import OutsideProgramError, PlacementError, StructureError
from beamjax.ops import compress
from beamjax.ops.compress import bits_for, compressed_p, fields_of, num_words, pack, unpack

N, SIZE = 24, 50
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, SIZE)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(5), N)
DRAWS = 4000
Z = 5.0
"""Standard errors that a mean may be off; 50 values are past it once in 30,000 runs."""


def float64(x):
    return np.asarray(x).astype(np.float64)


# --- integers in the fields of words: exact sums of all of them by one sum


def test_sums_of_words_are_the_sums_of_all_fields():
    """Also at the ends of the range, where a negative field lends from all above it."""
    cases = [(0, 1, False), (1, 3, True), (40, 1, False), (33, 129, True), (40, 300, False)]
    for size, members, x64 in cases:
        values = RNG.integers(-127, 128, size)
        values[::3] = np.where(values[::3] < 0, -127, 127)
        with jax.enable_x64(x64):
            bits = bits_for(127 * members)
            words = pack(jnp.asarray(values, np.int8), bits)
            assert words.shape == (num_words(size, bits),)
            assert words.dtype == (np.int64 if x64 else np.int32)
            sums = np.asarray(words) * np.array(members, words.dtype)  # which wrap around as sums
            found = unpack(jnp.asarray(sums), bits, size)
        np.testing.assert_array_equal(found, values * members)


def test_extremes_of_fields_come_back():
    for bits in (2, 3, 8, 9, 16, 17, 31, 32):
        largest = 2 ** (bits - 1) - 1
        values = jnp.asarray([largest, -largest, 0, -largest, largest, -1, 1], np.int32)
        np.testing.assert_array_equal(unpack(pack(values, bits), bits, 7), values)
    assert [bits_for(n) for n in (1, 127, 128, 127 * 258)] == [2, 8, 9, 16]
    assert [fields_of(b) for b in (2, 8, 9, 16, 32, 33)] == [16, 4, 3, 2, 1, 0]
    values = np.arange(-30, 30, dtype=np.int32).reshape(3, 4, 5)
    words = jax.vmap(jax.vmap(lambda v: pack(v, 7)))(values)
    np.testing.assert_array_equal(unpack(words, 7, 5), values)


def test_marked_words_are_as_they_are_under_each_transformation():
    words = jnp.arange(12, dtype=np.int32).reshape(3, 4)
    mark = lambda x: compressed_p.bind(x, instead=8)
    for fn in (mark, jax.jit(mark), jax.vmap(mark)):
        np.testing.assert_array_equal(fn(words), words)
    (eqn,) = jax.make_jaxpr(jax.vmap(mark))(words).eqns
    assert eqn.params["instead"] == 24


# --- one array


def variance(x, scale, levels):
    """Of stochastic rounding: that of a draw between the two levels about each value."""
    step = scale / levels
    part = np.abs(x) / step
    fraction = part - np.floor(part)
    return step**2 * fraction * (1 - fraction)


def assert_unbiased(draws, truth, expected_variance):
    """Means within Z standard errors, and variances within Z of theirs, by the theory."""
    draws, truth = float64(draws), float64(truth)
    error = np.sqrt(expected_variance / len(draws))
    rounding = 1e-6 * np.abs(draws).max()
    assert np.all(np.abs(draws.mean(axis=0) - truth) <= Z * error + rounding)
    found = np.mean((draws - truth) ** 2, axis=0)
    # Of a draw between two values the fourth moment is at most the square of the step over 4
    # times the variance, so the standard error of the variance is at most this.
    step = np.ptp(draws, axis=0) + rounding
    spread = np.sqrt(expected_variance * step**2 / len(draws))
    assert np.all(np.abs(found - expected_variance) <= Z * spread + rounding**2)


def unrounded(codes):
    """Before what is restored is rounded to the dtype of what was compressed."""
    return codes.codes.astype(np.float32) / codes.levels * codes.scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stochastic_rounding_is_unbiased_with_the_variance_of_theory(dtype):
    x = jnp.asarray(X[0], dtype)
    keys = jax.random.split(jax.random.key(1), DRAWS)
    values = float64(x)
    for levels in (1, 2, 7, 127):
        draw = lambda key, levels=levels: unrounded(compress.int8(x, key, levels=levels))
        expected = variance(values, np.abs(values).max(), levels)
        assert_unbiased(jax.vmap(draw)(keys), values, expected)


@functools.cache
def compressed(levels, dtype):
    """Codes of one array, and what they are restored to."""

    def fn(x, key):
        x = x.astype(dtype)
        nearest = compress.int8(x, levels=levels)
        packed, plain = compress.ternary(x, key), compress.int8(x, key, levels=1)
        restored = [compress.decompress(codes) for codes in (nearest, packed, plain)]
        return x, nearest, packed, restored

    return jax.jit(fn)


@settings(max_examples=50)
@given(
    x=hnp.arrays(
        np.float32,
        (3, 11),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    ),
    way=st.sampled_from([(1, "float32"), (5, "bfloat16"), (127, "float32")]),
    seed=st.integers(0, 9),
)
def test_the_nearest_level_is_half_a_step_away_and_ternary_has_one_in_two_bits(x, way, seed):
    x, codes, packed, restored = compressed(*way)(x, jax.random.key(seed))
    assert (codes.codes.dtype, codes.codes.shape, codes.levels) == (np.int8, x.shape, way[0])
    assert [(each.dtype, each.shape) for each in restored] == [(x.dtype, x.shape)] * 3
    step = float(codes.scale) / codes.levels
    assert np.all(np.abs(float64(unrounded(codes)) - float64(x)) <= step / 2 * (1 + 1e-5))
    assert packed.codes.nbytes == 4 * 3
    assert packed.nbytes == packed.codes.nbytes + 4
    np.testing.assert_array_equal(restored[1], restored[2])


def test_zeros_are_zeros_and_numbers_that_are_not_finite_are_nan():
    for fn in (compress.int8, compress.ternary):
        for key in (None, jax.random.key(0)):
            restored = jax.jit(lambda x, fn=fn, key=key: compress.decompress(fn(x, key)))
            for small in (np.zeros(3), [1e-42, -1e-44, 0]):
                np.testing.assert_array_equal(restored(np.float32(small)), [0, 0, 0])
            for bad in (np.nan, np.inf, -np.inf):
                assert np.all(np.isnan(restored(np.float32([1.0, bad, 0.0]))))


def test_trees_draw_each_leaf_apart_and_keep_their_structure():
    tree = {"a": X[0], "b": (X[0], jnp.ones(())), "c": jnp.zeros((2, 0))}
    codes = compress.int8(tree, jax.random.key(0))
    assert not np.array_equal(codes["a"].codes, codes["b"][0].codes)
    found = compress.decompress({"codes": codes, "plain": X[1]})
    np.testing.assert_allclose(found["codes"]["a"], X[0], atol=0.04)
    np.testing.assert_array_equal(found["plain"], X[1])
    assert compress.nbytes(codes) == 2 * (SIZE + 4) + 5 + 4
    assert compress.nbytes(jax.eval_shape(compress.int8, tree)) == compress.nbytes(codes)


def test_codes_go_through_jit_vmap_and_grad():
    key = jax.random.key(0)
    for fn in (compress.int8, compress.ternary):
        there_and_back = lambda x, k, fn=fn: compress.decompress(fn(x, k))
        compiled, batched = jax.jit(there_and_back), jax.vmap(fn)(X[:4], KEYS[:4])
        np.testing.assert_allclose(compiled(X[0], key), there_and_back(X[0], key), rtol=1e-6)
        assert batched.scale.shape == (4,)
        apart = np.stack([compiled(X[i], KEYS[i]) for i in range(4)])
        np.testing.assert_allclose(compress.decompress(batched), apart, rtol=1e-6)
        slope = jax.jit(jax.grad(lambda x, f=compiled: jnp.sum(f(x, key))))
        np.testing.assert_array_equal(slope(X[0]), np.zeros(SIZE))


# --- means


@bj.program(placements={"clients": None})
def mean(x, keys=None, error=None, scale=None, method="int8", levels=None):
    # A map of the user before, as in a program.
    x = bj.map_fn(lambda v: v, x)
    return compress.reduce_mean(x, keys, method=method, levels=levels, error=error, scale=scale)


jitted = jax.jit(mean, static_argnames=("method", "levels"))


def call(x, k, e):
    return {
        "stochastic": mean(x, k),
        "ternary": mean(x, k, method="ternary"),
        "feedback": mean(x, None, e, method="ternary"),
        "given scale": mean(x, k, e, jnp.float32(2.0)),
        "few levels": mean(x, None, e, levels=5),
    }


@pytest.mark.versions
def test_all_runners_give_the_same_bits_and_those_of_jit_but_for_rounding():
    """The integers are the same; XLA may fuse the floats that come of them in another way."""
    error, options = 0.01 * X[::-1], {"shard_size": 8}
    found = bj.run(call, X, KEYS, error, runner="local", options=options)
    assert_same_bits(bj.run(call, X, KEYS, error, options=options), found)
    assert_close(found, jax.jit(call)(X, KEYS, error), 1e-6, 1e-6)
    with jax.enable_x64(True):
        x = jnp.asarray(X, np.float64)
        found = bj.run(mean, x, runner="local")
        assert found.mean.dtype == np.float64
        assert_close(found, jax.jit(mean)(x), 1e-6, 1e-6)
        np.testing.assert_allclose(found.mean, X.mean(0), atol=0.02)
        codes = compress.int8(1e200 * x[0])
        assert codes.scale.dtype == np.float64
        restored = compress.decompress(codes)
        assert restored.dtype == np.float64
        step = float(jnp.abs(1e200 * x[0]).max()) / 254 * 1.000001
        np.testing.assert_allclose(restored, 1e200 * x[0], atol=step)


@pytest.mark.parametrize(("method", "levels"), [("ternary", 1), ("int8", 127)])
def test_the_mean_is_unbiased_with_the_variance_of_theory(method, levels):
    @jax.jit
    def draw(key):
        return mean(X, jax.random.split(key, N), method=method).mean

    draws = jax.lax.map(draw, jax.random.split(jax.random.key(3), DRAWS))
    x = float64(X)
    expected = variance(x, np.abs(x).max(), levels).mean(axis=0) / N
    found = float64(draws)
    assert np.all(np.abs(found.mean(0) - x.mean(0)) <= Z * np.sqrt(expected / DRAWS) + 1e-6)
    # Means of 24 draws are nearly normal: the variance of a variance is 2 v ** 2 / draws.
    assert np.all(np.abs(found.var(axis=0) / expected - 1) <= Z * math.sqrt(2.5 / DRAWS))


def test_without_keys_the_mean_is_that_of_the_nearest_levels():
    found = jitted(X)
    scale = np.abs(X).max()
    nearest = np.round(float64(X) / scale * 127)
    np.testing.assert_allclose(found.mean, nearest.mean(0) / 127 * scale, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.error, X - nearest / 127 * scale, atol=1e-6)
    assert found.scale == scale
    cut = jitted(X, scale=jnp.float32(0.5))
    assert np.all(np.abs(cut.mean) <= 0.5)
    assert cut.scale == scale
    both = np.asarray(cut.mean) + np.mean(cut.error, axis=0)
    np.testing.assert_allclose(both, X.mean(0), atol=1e-6)


def test_the_mean_and_the_error_make_up_the_members():
    """The rule of error feedback: mean + mean of the errors = mean of what was given."""
    rounding = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
    for n, size, levels, dtype in [
        (1, 3, 127, "float32"), (40, 5, 3, "float32"), (7, 3, 1, "bfloat16"), (24, 0, 9, "float16")
    ]:  # fmt: skip
        x = jnp.asarray(RNG.normal(size=(n, size, 2)), dtype)
        found = jitted(x, jax.random.split(jax.random.key(n), n), levels=levels)
        assert found.mean.dtype == x.dtype
        assert found.error.dtype == np.float32
        both = float64(found.mean) + float64(found.error).mean(axis=0)
        np.testing.assert_allclose(both, float64(x).mean(axis=0), atol=4 * rounding[dtype])


def test_each_leaf_and_each_batch_has_a_scale_of_its_own():
    x = {"big": 1e6 * X, "small": X[:, :3].astype(jnp.bfloat16)}
    found = jitted(x, KEYS)
    np.testing.assert_allclose(found.mean["big"], x["big"].mean(0), atol=1e6 * 0.02)
    assert found.mean["small"].dtype == jnp.bfloat16
    assert set(found.scale) == {"big", "small"}
    several = np.stack([X, 3 * X[::-1], 0 * X])
    found = jax.jit(jax.vmap(mean))(several)
    for i, x in enumerate(several):
        np.testing.assert_allclose(found.mean[i], jitted(x).mean, rtol=1e-6, atol=1e-6)
    assert_close(bj.run(jax.vmap(mean), several, runner="local"), found, 1e-6, 1e-6)


def test_members_that_are_not_finite_show_in_the_mean_unless_they_are_dropped():
    for scale in (None, 2.0):
        for bad in (np.nan, np.inf):
            x = X.copy()
            x[3, 4] = bad
            found = jitted({"bad": x, "good": X}, scale=scale and {"bad": scale, "good": scale})
            assert np.all(np.isnan(found.mean["bad"]))
            assert np.all(np.isfinite(found.mean["good"]))
    x[3] = np.nan
    found = bj.run(mean, x, options={"on_nonfinite": "drop", "shard_size": 8})
    assert_close(found.mean, jitted(np.delete(X, 3, axis=0)).mean, 1e-6, 1e-6)


def test_the_derivative_is_that_of_the_mean():
    weight = jnp.arange(SIZE, dtype=np.float32)
    for call in (
        lambda x, e: mean(x, KEYS, e).mean,
        lambda x, e: jax.vmap(lambda s: mean(x * s, None, e).mean)(jnp.ones(2))[1],
    ):
        both = jax.grad(lambda x, e, f=call: jnp.sum(f(x, e) * weight), (0, 1))
        slopes = jax.jit(both)(X, 0 * X)
        for slope in slopes:
            np.testing.assert_allclose(slope, np.broadcast_to(weight / N, X.shape), rtol=1e-6)
        grad = jax.grad(lambda x, e, f=call: jnp.sum(f(x, e) * weight))
        ran = bj.run(grad, X, 0 * X, runner="local")
        np.testing.assert_allclose(ran, slopes[0], rtol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(mean(x).error) + jnp.sum(mean(x).scale))
    np.testing.assert_array_equal(jax.jit(slope)(X), 0 * X)


def test_the_error_is_a_placed_value_that_rounds_carry():
    """Gradient descent on the mean of |w - c|^2 / 2 over members, by ternary slopes."""
    centres = np.random.default_rng(3).normal(size=(N, 6)).astype(np.float32) * 10

    @bj.program(placements={"clients": N})
    def train(w, error, centres, feedback, rate):
        def step(carry, _):
            w, error = carry
            slopes = bj.map_fn(lambda c: w - c, centres)
            found = compress.reduce_mean(slopes, method="ternary", error=error)
            return (w - rate * found.mean, feedback * found.error), None

        return jax.lax.scan(step, (w, error), length=300)[0][0]

    args = np.zeros(6, np.float32), np.zeros_like(centres), centres, np.float32(1), np.float32(0.1)
    distance = lambda w: np.linalg.norm(float64(w) - float64(centres).mean(axis=0))
    mended = jax.jit(train)(*args)
    biased = distance(jax.jit(train)(*args[:3], np.float32(0), args[4]))
    assert biased > 1
    # The members differ by tens, so steps are of this size, and errors stay below one step.
    assert distance(mended) < 0.2 * biased
    # A code that flips by the last bit of a sum changes all that follows, but not where it ends.
    assert distance(bj.run(train, *args, runner="local")) < 0.2 * biased


# --- bytes


def partial_edges(explanation):
    """Bytes of what the pass over members hands on, by the edges."""
    return sum(e.nbytes for e in explanation.facts.edges if e.source.startswith("map_"))


def test_explain_and_the_job_tell_how_many_bytes_are_less():
    plain = bj.program(clients=N)(lambda x: bj.reduce_mean(bj.map_fn(lambda v: v, x)))
    before = bj.explain(plain, X)
    call = lambda x: mean(x, scale=jnp.float32(3.0), method="ternary").mean
    after = bj.explain(call, X)
    # 24 members of -1, 0, 1 need 6 bits: 5 values a word, 10 words, a count, and the new scale.
    assert before.facts.partial_bytes == 4 * SIZE
    assert after.facts.partial_bytes == 4 * 10 + 4 + 4
    assert after.facts.saved_bytes == 4 * SIZE - 4 * 10
    assert partial_edges(after) < partial_edges(before) / 3
    assert "saved" not in str(before)
    assert "saved                  160 B a shard, by compression" in str(after)
    for runner in ("local", "DirectRunner"):
        job = bj.launch(call, X, runner=runner, options={"shard_size": 8})
        job.result()
        done = job.progress().done
        assert done.bytes_reduced == 3 * after.facts.partial_bytes
        assert done.bytes_saved == 3 * after.facts.saved_bytes


def test_codes_that_are_broadcast_or_returned_take_fewer_bytes():
    model = RNG.normal(size=4000).astype(np.float32)

    @bj.program(placements={"clients": N})
    def sent(codes, x):
        return bj.map_fn(lambda v: v + compress.decompress(codes)[:SIZE], x)

    assert bj.explain(sent, compress.int8(model), X).facts.broadcast_bytes == 4000 + 4
    assert bj.explain(sent, compress.ternary(model), X).facts.broadcast_bytes == 1000 + 4
    coded = bj.program(clients=N)(lambda x: bj.map_fn(compress.int8, x))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(bj.run(coded, X, runner="local"))) == N * 54


# --- misuse


def test_calls_that_make_no_sense_are_refused():
    with pytest.raises(OutsideProgramError):
        compress.reduce_mean(X)
    for levels in (0, 128, 1.0, True):
        with pytest.raises(StructureError, match=r"int8: found levels=.*, expected an int from 1"):
            compress.int8(X, levels=levels)
    for dtype in ("int32", "bool", "complex64"):
        with pytest.raises(StructureError, match=rf"x\['w'\] has dtype {dtype}, expected real"):
            compress.ternary({"w": jnp.zeros(3, dtype)})
    growing = {"keys": KEYS, "error": X, "method": "ternary"}
    for given_, error, message in [
        ({"method": "int4"}, StructureError, "found method 'int4', expected 'int8' or"),
        ({"levels": 200}, StructureError, "found levels=200"),
        ({"error": [X]}, StructureError, "found error of the tree"),
        ({"error": X[:3]}, PlacementError, r"error has shape \(3, 50\)"),
        ({"scale": [1.0]}, StructureError, "found scale of the tree"),
        ({"keys": KEYS[:4]}, PlacementError, r"keys has shape \(4,\)"),
        (growing, StructureError, "grows from call to call. Leave out the keys, or take more lev"),
    ]:
        with pytest.raises(error, match=message):
            mean(X, **given_)
    many = bj.program(clients=2**25)(lambda x: compress.reduce_mean(x))
    with pytest.raises(StructureError, match="take fewer levels"):
        jax.eval_shape(many, jax.ShapeDtypeStruct((2**25, 1), np.float32))
