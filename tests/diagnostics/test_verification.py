"""Distances between floats, tolerances, and `verify` on right and wrong answers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import N, X, rnd

import beamjax
from beamjax import execution
from beamjax.errors import OptionsError, StagingError, VerificationError
from beamjax.numerics.ulp import NAN_DISTANCE, ulp_distance
from beamjax.verification import (
    absolute_difference,
    compare,
    compare_leaf,
    float_tolerance,
    verify,
)

STEPPED = ["float16", "float32", "float64", "bfloat16"]
SMALL = [
    "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
]  # fmt: skip


def from_bits(bits, dtype):
    dtype = np.dtype(dtype)
    mask = (1 << (8 * dtype.itemsize)) - 1
    return np.array([bits & mask], f"u{dtype.itemsize}").view(dtype)


# --- distances


@pytest.mark.parametrize("dtype", STEPPED)
@settings(max_examples=60)
@given(bits=st.integers(0, 2**64 - 1), steps=st.integers(0, 20), up=st.booleans())
@example(bits=0, steps=3, up=False)
@example(bits=1, steps=5, up=False)
def test_ulp_distance_counts_steps_of_nextafter(dtype, bits, steps, up):
    start = from_bits(bits, dtype)
    goal = np.array([np.inf if up else -np.inf], dtype)
    end, taken = start, 0
    with np.errstate(all="ignore"):
        if np.isnan(start[0]):
            return
        for _ in range(steps):
            following = np.nextafter(end, goal)
            # From the smallest number to zero of its sign is a step; zero to zero is none.
            taken += int((following != end)[0])
            end = following
    assert ulp_distance(start, end) == taken
    assert ulp_distance(end, start) == taken


def test_ulp_distance_of_small_floats_is_the_distance_of_ranks():
    for dtype in SMALL:
        every = np.arange(2 ** ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype)
        values = every.astype(np.float64)
        finite = ~np.isnan(values)
        ranks = np.unique(values[finite], return_inverse=True)[1].astype(np.int64)
        a, b = (x.reshape(-1) for x in np.meshgrid(every[finite], every[finite]))
        i, j = (x.reshape(-1) for x in np.meshgrid(ranks, ranks))
        np.testing.assert_array_equal(ulp_distance(a, b), np.abs(i - j).astype(np.uint64), dtype)


def test_infinities_zeros_and_nans():
    for dtype in STEPPED:
        largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
        assert ulp_distance(largest, np.array(np.inf, dtype)) == 1
        assert ulp_distance(np.array(-0.0, dtype), np.array(0.0, dtype)) == 0
    assert ulp_distance(np.array([np.inf]), np.array([-np.inf])) == 2 * 0x7FF0000000000000
    quiet, other = from_bits(0x7FC00000, "float32"), from_bits(0xFFC00123, "float32")
    assert ulp_distance(quiet, other) == 0
    assert absolute_difference(quiet, other) == 0
    one = np.ones(1, np.float32)
    assert ulp_distance(quiet, one) == NAN_DISTANCE
    assert absolute_difference(quiet, one) == np.inf


def test_complex_distance_is_of_the_worse_part():
    one = np.array(1, np.float32)
    up = np.nextafter(one, np.float32(2))
    a, b = np.array([1 + 1j], np.complex64), np.array([complex(one, up)], np.complex64)
    assert ulp_distance(a, b) == 1
    assert absolute_difference(a, b) == np.float64(up) - 1


def test_integer_differences_are_exact():
    for dtype, a, b, expected in (
        ("int64", 2**63 - 1, -(2**63), 2**64 - 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("int8", -128, 127, 255),
        ("int4", -8, 7, 15),
        ("uint4", 15, 0, 15),
        ("bool", True, False, 1),
    ):
        a, b = np.array([a], dtype), np.array([b], dtype)
        assert absolute_difference(a, b) == np.uint64(expected)
        assert absolute_difference(b, a) == np.uint64(expected)


# --- rows


def test_the_default_tolerance_is_relative_to_the_leaf():
    for dtype, expected in (
        ("float32", 2.4e-5), ("float64", 3.7e-11), ("bfloat16", 0.039), ("complex64", 2.4e-5)
    ):  # fmt: skip
        leaf = np.array([1e-3, -2.0, 1.0], dtype)
        assert float_tolerance(leaf) == pytest.approx(2 * expected, rel=0.02)
    leaf = np.array([np.nan, np.inf, 3.0], np.float32)
    assert float_tolerance(leaf, rtol=0.5, atol=0.25) == 1.75
    assert float_tolerance(leaf[:2]) == np.finfo(np.float32).tiny


def test_leaves_that_pass_and_fail():
    for leaf in (
        jnp.zeros((0, 3)),
        jnp.float32(2),
        jnp.arange(3),
        jnp.array(True),
        jnp.array([1j]),
        jnp.ones(2, jnp.float8_e4m3fn),
        jnp.array([jnp.nan, jnp.inf, -jnp.inf]),
        jax.random.key(0),
        jax.random.split(jax.random.key(0), (2, 3)),
        np.zeros((2,), jax.dtypes.float0),
    ):
        row = compare_leaf("", leaf, leaf)
        assert (row.passed, row.bits_equal, row.worst_difference) == (True, True, 0)
        assert row.worst_ulp in (0, None)
    row = compare_leaf("", jnp.array([-0.0]), jnp.array([0.0]))
    assert (row.passed, row.bits_equal, row.worst_ulp) == (True, False, 0)
    for bad, other in ((jnp.inf, -jnp.inf), (-jnp.inf, jnp.inf), (jnp.nan, 1.0), (jnp.inf, 3e38)):
        found, expected = jnp.array([other, 1.0]), jnp.array([bad, 1.0])
        assert not compare_leaf("", found, expected, rtol=1e6).passed
        assert not compare_leaf("", expected, found, rtol=1e6).passed
    for found, expected in (  # Equal, or not: whatever the tolerance.
        (jnp.array([1, 2]), jnp.array([1, 3])),
        (jnp.array(True), jnp.array(False)),
        (jax.random.key(0), jax.random.key(1)),
    ):
        row = compare_leaf("", found, expected, rtol=1e9, atol=1e9)
        assert (row.passed, row.worst_ulp) == (False, None)
    exact, expected = compare_leaf("", 1 + jnp.zeros(2), jnp.zeros(2), atol=1.0), jnp.zeros((3, 4))
    assert (exact.passed, exact.bits_equal) == (True, False)
    assert not compare_leaf("", 1 + jnp.zeros(2), jnp.zeros(2), atol=0.999).passed
    expected = expected.at[0, 0].set(1)
    row = compare_leaf("['w']", expected.at[2, 1].set(0.5), expected)
    assert row.worst_index == (2, 1)
    assert row.failure() == "result['w'][2, 1]: found 0.5, expected 0.0"


def test_differences_of_structure_are_named():
    expected = {"a": jnp.zeros(2), "b": jnp.int32(1)}
    for change, message in (
        ({"b": None}, r"result\['b'\]: found no leaf, expected int32\[\]"),
        ({"a": jnp.zeros(3)}, r"result\['a'\]: found float32\[3\], expected float32\[2\]"),
        ({"a": jnp.zeros(2, jnp.int32)}, r"result\['a'\]: found int32\[2\], expected float32\[2\]"),
        ({"c": jnp.int32(2)}, r"result\['c'\]: found int32\[\], expected no leaf"),
        ({"c": None}, r"found the tree .*'c': None.*, expected"),
    ):
        with pytest.raises(VerificationError, match=message):
            compare(expected | change, expected)


# --- verify

verify_here = functools.partial(verify, runner="local")


@beamjax.program(clients=N)
def means(w, x):
    return {
        "mean": beamjax.reduce_mean(beamjax.map_fn(lambda v: v @ w, x)),
        "count": beamjax.reduce_sum(beamjax.map_fn(lambda v: jnp.int32(1), x)),
    }


W = rnd(3)


def test_wrong_answers_are_found(monkeypatch):
    run = execution.run

    def fails(edit, *parts, **tolerances):
        """Makes the runner's answer something else."""
        monkeypatch.setattr(execution, "run", lambda *args, **kwargs: edit(run(*args, **kwargs)))
        with pytest.raises(VerificationError) as error:
            verify_here(means, W, X, **tolerances)
        assert [part for part in parts if part not in str(error.value)] == []
        assert str(error.value).count("FAILED") <= 1

    fails(
        lambda tree: tree | {"mean": tree["mean"].at[3].add(0.01)},
        "means on local against jit: 2 leaves, 1 with equal bits, 1 past the",
        "\nresult['mean'][3]: found ", "FAILED", "larger rtol or atol",
    )  # fmt: skip
    wrong = lambda tree: tree | {"count": tree["count"] + 1}
    fails(wrong, f"result['count']: found {N + 1}, expected {N}", rtol=10.0)
    fails(lambda tree: tree | {"mean": tree["mean"] * jnp.nan}, "differ  NaN  inf")
    fails(lambda tree: tree["mean"], "result['count']: found no leaf")
    fails(lambda tree: tree | {"mean": tree["mean"] + 1e-3}, "FAILED", atol=1e-4)
    report = verify_here(means, W, X, atol=2e-3)
    row = {row.path: row for row in report.rows}["['mean']"]
    assert row.worst_difference == pytest.approx(1e-3, rel=1e-2)
    assert row.worst_ulp > 100
    assert not row.bits_equal


def test_sources_and_keys_are_read_whole():
    keys = jax.random.split(jax.random.key(1), N)

    @beamjax.program(clients=N)
    def noisy(w, data):
        body = lambda x, key: jnp.sum(x @ w) * jax.random.uniform(key)
        return beamjax.reduce_sum(beamjax.map_fn(body, (data["x"], data["key"])))

    source = beamjax.from_arrays({"x": np.asarray(X), "key": keys})
    assert verify_here(noisy, W, source).ok
    assert verify_here(noisy, W, {"x": X, "key": keys}).ok


def test_impossible_arguments():
    with pytest.raises(StagingError, match="ShapeDtypeStruct"):
        verify_here(means, W, jax.ShapeDtypeStruct(X.shape, X.dtype))
    for options in ({"rtol": -1.0}, {"atol": float("nan")}):
        with pytest.raises(OptionsError, match=r"[ra]tol: found .*, expected a number >= 0"):
            verify_here(means, W, X, **options)
    assert verify_here(means, W, X, rtol=1e-3, atol=0).ok


# --- the report


def test_the_report_is_aligned_and_its_html_is_escaped():
    lines = str(verify_here(means, W, X)).splitlines()
    assert lines[0].startswith("means on local against jit: 2 leaves, ")
    assert lines[0].endswith("all within the tolerance")
    assert lines[2].endswith("ok")

    @beamjax.program(clients=N)
    def prog(x):
        return {"<b>": beamjax.reduce_sum(x)}

    text = verify_here(prog, X)._repr_html_()
    assert "result[&#x27;&lt;b&gt;&#x27;]" in text
    assert "<b>" not in text
