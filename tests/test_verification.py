"""Distances between floats, tolerances, and `verify` on right and wrong answers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import CASES, N, X, rnd

import beamjax
from beamjax import execution, sources
from beamjax.errors import OptionsError, StagingError, VerificationError
from beamjax.verification import (
    NAN_DISTANCE,
    absolute_difference,
    compare,
    compare_leaf,
    float_tolerance,
    ulp_distance,
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
@settings(max_examples=60, deadline=None)
@given(bits=st.integers(0, 2**64 - 1), steps=st.integers(0, 20), up=st.booleans())
@example(bits=0, steps=3, up=False)
@example(bits=1, steps=5, up=False)
def test_ulp_distance_counts_steps_of_nextafter(dtype, bits, steps, up):
    start = from_bits(bits, dtype)
    with np.errstate(invalid="ignore"):
        if np.isnan(start[0]):
            return
    goal = np.array([np.inf if up else -np.inf], dtype)
    end, taken = start, 0
    with np.errstate(all="ignore"):
        for _ in range(steps):
            following = np.nextafter(end, goal)
            # From the smallest number to zero of its sign is a step; zero to zero is none.
            taken += int((following != end)[0])
            end = following
    assert ulp_distance(start, end) == taken
    assert ulp_distance(end, start) == taken


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(0, 5))
def test_ulp_distance_agrees_with_spacing(x, steps):
    x = np.float32(x)
    moved = x
    for _ in range(steps):
        moved = moved + np.spacing(moved)
    assert ulp_distance(np.array(x), np.array(moved)) == steps


@pytest.mark.parametrize("dtype", SMALL)
def test_ulp_distance_of_small_floats_is_the_distance_of_ranks(dtype):
    width = ml_dtypes.finfo(dtype).bits
    every = np.arange(2**width, dtype=np.uint8).view(dtype)
    values = every.astype(np.float64)
    finite = ~np.isnan(values)
    ranks = np.unique(values[finite], return_inverse=True)[1].astype(np.int64)
    a, b = (x.reshape(-1) for x in np.meshgrid(every[finite], every[finite]))
    i, j = (x.reshape(-1) for x in np.meshgrid(ranks, ranks))
    np.testing.assert_array_equal(ulp_distance(a, b), np.abs(i - j).astype(np.uint64))


@pytest.mark.parametrize("dtype", STEPPED)
def test_infinity_follows_the_largest_number_and_zeros_are_one(dtype):
    largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
    assert ulp_distance(largest, np.array(np.inf, dtype)) == 1
    assert ulp_distance(np.array(-0.0, dtype), np.array(0.0, dtype)) == 0
    infinities = np.array([np.inf, -np.inf], dtype)
    assert ulp_distance(infinities, infinities[::-1])[0] > 2 * ulp_distance(largest, largest)


def test_float64_of_opposite_signs_do_not_overflow():
    a, b = np.array([np.inf]), np.array([-np.inf])
    assert ulp_distance(a, b) == 2 * 0x7FF0000000000000


def test_nan_equals_nan_of_any_payload_and_no_number():
    quiet, other = from_bits(0x7FC00000, "float32"), from_bits(0xFFC00123, "float32")
    assert ulp_distance(quiet, other) == 0
    assert absolute_difference(quiet, other) == 0
    assert ulp_distance(quiet, np.ones(1, np.float32)) == NAN_DISTANCE
    assert absolute_difference(quiet, np.ones(1, np.float32)) == np.inf


def test_complex_distance_is_of_the_worse_part():
    one = np.array(1, np.float32)
    up = np.nextafter(one, np.float32(2))
    a, b = np.array([1 + 1j], np.complex64), np.array([complex(one, up)], np.complex64)
    assert ulp_distance(a, b) == 1
    assert absolute_difference(a, b) == np.float64(up) - 1


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("int64", 2**63 - 1, -(2**63), 2**64 - 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("int8", -128, 127, 255),
        ("int4", -8, 7, 15),
        ("uint4", 15, 0, 15),
        ("bool", True, False, 1),
    ],
)
def test_integer_differences_are_exact(dtype, a, b, expected):
    a, b = np.array([a], dtype), np.array([b], dtype)
    assert absolute_difference(a, b) == np.uint64(expected)
    assert absolute_difference(b, a) == np.uint64(expected)


# --- rows


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 2.4e-5), ("float64", 3.7e-11), ("bfloat16", 0.039), ("complex64", 2.4e-5)],
)
def test_default_tolerance_is_relative_to_the_leaf(dtype, expected):
    leaf = np.array([1e-3, -2.0, 1.0], dtype)
    assert float_tolerance(leaf) == pytest.approx(2 * expected, rel=0.02)


def test_tolerance_leaves_out_what_is_not_finite():
    leaf = np.array([np.nan, np.inf, 3.0], np.float32)
    assert float_tolerance(leaf, rtol=0.5, atol=0.25) == 1.75
    assert float_tolerance(leaf[:2]) == np.finfo(np.float32).tiny


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_must_match(bad):
    good = jnp.array([bad, 1.0])
    assert compare_leaf("", good, good).passed
    assert not compare_leaf("", jnp.array([3e38, 1.0]), good, rtol=1e6).passed
    assert not compare_leaf("", -good if bad == bad else jnp.ones(2), good, rtol=1e6).passed


def test_signed_zeros_pass_with_different_bits():
    row = compare_leaf("", jnp.array([-0.0]), jnp.array([0.0]))
    assert (row.passed, row.bits_equal, row.worst_ulp) == (True, False, 0)


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.zeros((0, 3)),
        jnp.float32(2),
        jnp.arange(3),
        jnp.array(True),
        jnp.array([1j]),
        jnp.ones(2, jnp.float8_e4m3fn),
        jax.random.key(0),
        jax.random.split(jax.random.key(0), (2, 3)),
        np.zeros((2,), jax.dtypes.float0),
    ],
    ids=str,
)
def test_every_kind_of_leaf_equals_itself(leaf):
    row = compare_leaf("", leaf, leaf)
    assert (row.passed, row.bits_equal, row.worst_difference) == (True, True, 0)
    assert row.worst_ulp in (0, None)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (jnp.array([1, 2]), jnp.array([1, 3])),
        (jnp.array(True), jnp.array(False)),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=["int", "bool", "key"],
)
def test_integers_bools_and_keys_must_be_equal_whatever_the_tolerance(found, expected):
    row = compare_leaf("", found, expected, rtol=1e9, atol=1e9)
    assert not row.passed
    assert row.worst_ulp is None


def test_the_worst_element_is_named():
    expected = jnp.zeros((3, 4)).at[0, 0].set(1)
    row = compare_leaf("['w']", expected.at[2, 1].set(0.5), expected)
    assert row.worst_index == (2, 1)
    assert row.failure() == "result['w'][2, 1]: found 0.5, expected 0.0"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": jnp.zeros(2)}, r"result\['b'\]: found no leaf, expected int32\[\]"),
        (
            {"a": jnp.zeros(3), "b": 1},
            r"result\['a'\]: found float32\[3\], expected float32\[2\]",
        ),
        (
            {"a": jnp.zeros(2, jnp.int32), "b": 1},
            r"result\['a'\]: found int32\[2\], expected float32\[2\]",
        ),
        (
            {"a": jnp.zeros(2), "b": 1, "c": 2},
            r"result\['c'\]: found int32\[\], expected no leaf",
        ),
        ({"a": jnp.zeros(2), "b": 1, "c": None}, r"found the tree .*'c': None.*, expected"),
    ],
    ids=["missing", "shape", "dtype", "extra", "empty"],
)
def test_differences_of_structure_are_named(found, message):
    expected = {"a": jnp.zeros(2), "b": jnp.int32(1)}
    with pytest.raises(VerificationError, match=message):
        compare(jax.tree.map(jnp.asarray, found), expected)


# --- verify

verify_here = functools.partial(verify, runner="local")


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "value_and_grad",
        "maml",
        "keys_as_results",
        "float0_of_placed_ints",
        "bfloat16",
        "ints_and_bools",
        "none_and_dicts",
        "dataclasses_as_trees",
        "grad_of_weighted_mean",
    ],
)
def test_programs_pass(name):
    fn, args = CASES[name].build(beamjax)
    report = verify_here(fn, *args)
    assert report.ok
    assert len(report.rows) == len(jax.tree.leaves(jax.eval_shape(fn, *args)))


@beamjax.program(clients=N)
def means(w, x):
    return {
        "mean": beamjax.reduce_mean(beamjax.map_fn(lambda v: v @ w, x)),
        "count": beamjax.reduce_sum(beamjax.map_fn(lambda v: jnp.int32(1), x)),
    }


W = rnd(3)


@pytest.fixture
def answer(monkeypatch):
    """Makes the runner's answer something else."""
    run = execution.run

    def change(edit):
        monkeypatch.setattr(execution, "run", lambda *args, **kwargs: edit(run(*args, **kwargs)))

    return change


def test_a_wrong_float_is_found(answer):
    answer(lambda tree: tree | {"mean": tree["mean"].at[3].add(0.01)})
    with pytest.raises(VerificationError) as error:
        verify_here(means, W, X)
    message = str(error.value)
    assert "means on local against jit: 2 leaves, 1 with equal bits, 1 past the" in message
    assert "\nresult['mean'][3]: found " in message
    assert message.count("FAILED") == 1
    assert "larger rtol or atol" in message


def test_a_wrong_integer_is_found(answer):
    answer(lambda tree: tree | {"count": tree["count"] + 1})
    with pytest.raises(VerificationError, match=r"result\['count'\]: found 8, expected 7"):
        verify_here(means, W, X, rtol=10.0)


def test_a_wider_tolerance_lets_a_difference_pass(answer):
    answer(lambda tree: tree | {"mean": tree["mean"] + 1e-3})
    report = verify_here(means, W, X, atol=2e-3)
    row = {row.path: row for row in report.rows}["['mean']"]
    assert row.worst_difference == pytest.approx(1e-3, rel=1e-2)
    assert row.worst_ulp > 100
    assert not row.bits_equal


def test_nan_is_found_and_shown(answer):
    answer(lambda tree: tree | {"mean": tree["mean"] * jnp.nan})
    with pytest.raises(VerificationError, match=r"differ  NaN  inf"):
        verify_here(means, W, X)


def test_another_tree_is_found(answer):
    answer(lambda tree: tree["mean"])
    with pytest.raises(VerificationError, match=r"result\['count'\]: found no leaf"):
        verify_here(means, W, X)


def test_sources_and_keys_are_read_whole():
    keys = jax.random.split(jax.random.key(1), N)

    @beamjax.program(clients=N)
    def noisy(w, data):
        body = lambda x, key: jnp.sum(x @ w) * jax.random.uniform(key)
        return beamjax.reduce_sum(beamjax.map_fn(body, (data["x"], data["key"])))

    source = sources.from_arrays({"x": np.asarray(X), "key": keys})
    assert verify_here(noisy, W, source).ok
    assert verify_here(noisy, W, {"x": X, "key": keys}).ok


def test_abstract_arguments_are_refused():
    with pytest.raises(StagingError, match="ShapeDtypeStruct"):
        verify_here(means, W, jax.ShapeDtypeStruct(X.shape, X.dtype))


@pytest.mark.parametrize("options", [{"rtol": -1.0}, {"atol": float("nan")}], ids=str)
def test_impossible_tolerances(options):
    with pytest.raises(OptionsError, match=r"[ra]tol: found .*, expected a number >= 0"):
        verify_here(means, W, X, **options)


# --- the report


def test_the_table_is_aligned_and_plain():
    lines = str(verify_here(means, W, X)).splitlines()
    assert lines[0].startswith("means on local against jit: 2 leaves, ")
    assert lines[0].endswith("all within the tolerance")
    starts = [line.index(cell) for line, cell in zip(lines[1:], ("type", "int32[]", "float32[5]"),
                                                      strict=True)]  # fmt: skip
    assert len(set(starts)) == 1
    assert lines[2].endswith("ok")


def test_the_html_is_escaped():
    @beamjax.program(clients=N)
    def prog(x):
        return {"<b>": beamjax.reduce_sum(x)}

    text = verify_here(prog, X)._repr_html_()
    assert "result[&#x27;&lt;b&gt;&#x27;]" in text
    assert "<b>" not in text
