"""Programs over all members that are passes: values as `jax.jit` gives them, and nothing gathered.

There are 23 members in shards of 8, so the last shard is not full.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types
from jax import lax

import beamjax as bj
from beamjax.interpreters.placement import order_statistics

N = 23
X = jax.random.normal(jax.random.key(0), (N, 3))
W = jnp.asarray([0.5, -1.0, 2.0])


# --- scans


def mapped(x):
    return lax.map(lambda row: (jnp.sin(row @ W), row[::2]), x)


def mapped_with_numbers(x):
    return lax.map(lambda each: each[0] * each[1], (x, jnp.arange(N, dtype="float32")))


def mapped_with_a_loop(x):
    return lax.map(lambda row: lax.while_loop(lambda v: v[0] < 3, lambda v: v + 1, row), x)


def slope_of_mapped(x):
    def loss(w, x):
        return jnp.sum(lax.map(lambda row: jnp.sin(row @ w), x) ** 2)

    return jax.grad(loss, (0, 1))(W, x)


def totals_of_a_scan(x):
    def step(carry, row):
        a, b, c, d, same = carry
        small = (row * 50).astype("int8")
        return (a + row, b * row[0], jnp.maximum(c, row), small + d, same), row * same

    carry = W, jnp.float32(2), W, jnp.ones(3, "int8"), W
    return lax.scan(step, carry, x, reverse=True)


# --- running totals


def running_sums(x):
    kinds = [x, x.astype("bfloat16"), (x * 50).astype("int32"), (x * 50).astype("int8")]
    return [jnp.cumsum(kind, axis=0) for kind in kinds], lax.cumsum(x.T, axis=1, reverse=True)


def running_products(x):
    return jnp.cumprod(1 + x, axis=0), lax.cumprod((x * 9).astype("int32"), axis=0, reverse=True)


def running_extremes(x):
    x = x.at[11, 1].set(jnp.nan)
    return [scan(kind, 0) for scan in (lax.cummax, lax.cummin) for kind in (x, x.astype("int16"))]


def slope_of_running_sums(x):
    return jax.grad(lambda x: jnp.sum(jnp.cumsum(x, axis=0) ** 2))(x)


def totals_of_totals(x):
    first = jnp.cumsum(x, axis=0)
    return jnp.cumsum(first / jnp.max(first, 0, keepdims=True), axis=0)[3], jnp.sum(first)


def sums_in_rounds(x):
    def step(w, _):
        return w + bj.reduce_mean(jnp.cumsum(x * w[None], axis=0)), None

    return lax.scan(step, W, length=3)[0]


def totals_in_rounds(x):
    """Rounds without placed operators, in a loop of them and in a branch."""

    def step(w, _):
        inner = lax.fori_loop(0, 2, lambda _, v: v + jnp.mean(jnp.cumsum(x * v[None], 0), 0), w)
        return inner / 10, jnp.max(jnp.abs(jnp.diff(x + inner[None], axis=0)), 0)

    low = jnp.min(x) < 0
    return lax.scan(step, W, length=3), lax.cond(
        low, lambda: jnp.mean(jnp.cumsum(x, 0), 0), lambda: W
    )


# --- neighbours


def differences(x):
    changes = jnp.sum((x[1:] > 0) != (x[:-1] > 0), axis=0)
    return jnp.sum((x[1:] - x[:-1]) ** 2), jnp.max(jnp.abs(jnp.diff(x, axis=0)), 0), changes


def autocovariances(x):
    return x[1:].T @ x[:-1], [jnp.mean(x[h:] * x[:-h], 0) for h in range(1, 7)], jnp.sum(x[1:])


def second_differences(x):
    return jnp.mean((x[2:] - 2 * x[1:-1] + x[:-2]) ** 2, 0)


def rolled(x):
    small = (x * 50).astype("int8")
    moved = [jnp.roll(x, 1, 0), jnp.roll(small, -1, 0), jnp.roll(x > 0, 24, 0)]
    return moved, jnp.roll(x.T, -1, 1), x * jnp.roll(x, 22, 0)


def slope_of_differences(x):
    def loss(x):
        rough = jnp.sum((x[1:] - x[:-1]) ** 2)
        weighed = x[5:] * x[3:-2] * x[:-5] * jnp.arange(N - 5.0)[:, None]
        return rough + jnp.sum(jnp.sin(x - jnp.roll(x, 1, axis=0))) + jnp.sum(weighed)

    return jax.grad(loss)(x)


def returned_slices(x):
    later = jnp.roll(jnp.diff(x, axis=0) ** 2, 2, 1)
    return jnp.diff(x, axis=0), later[1:], jnp.diff(x, n=3, axis=0), (x * 50).astype("int8")[4:-2].T


def slope_of_second_differences(x):
    return jax.grad(lambda x: jnp.sum(jnp.diff(x, n=2, axis=0) ** 3))(x)


def convolved(x):
    column, kernel = x[:, 0], jnp.asarray([1.0, 2.0, -1.0, 0.5])
    both = [jnp.convolve(column, kernel, mode) for mode in ("same", "valid")]
    changes = jnp.convolve(jnp.diff(column), kernel[:2])
    return (
        both,
        changes,
        jnp.max(jnp.abs(both[1])),
        jnp.correlate(column > 0, kernel[1:] > 0, "same"),
    )


def windows(x):
    small = (x * 50).astype("int16")
    sums = [lax.reduce_window(x, 0.0, lax.add, (4, 2), (1, 1), p) for p in ("SAME", "VALID")]
    wide = lax.reduce_window(
        small, np.int16(-(2**15)), lax.max, (5, 1), (1, 1), "SAME", window_dilation=(2, 1)
    )
    low = lax.reduce_window(x[2:], jnp.inf, lax.min, (3, 1), (1, 1), ((2, 0), (0, 0)))
    return sums, wide, low, jnp.var(low, 0)


def slope_of_windows(x):
    def loss(x):
        sums = lax.reduce_window(x, 0.0, lax.add, (3, 2), (1, 1), "VALID")
        return jnp.sum(sums**2) + jnp.sum(jnp.convolve(x[:, 1], W, "same") ** 2)

    return jax.grad(loss)(x)


# --- tall matrices


def decomposed(x):
    return jnp.linalg.qr(x), jnp.linalg.svd(x - jnp.mean(x, 0, keepdims=True), full_matrices=False)


def bucketed(x):
    return jnp.linalg.lstsq(x[:, :2], x[:, 2])[0], jnp.linalg.cond(x), jnp.linalg.pinv(x)


PASSES = [
    mapped, mapped_with_numbers, mapped_with_a_loop, slope_of_mapped, totals_of_a_scan,
    running_sums, running_products, running_extremes, slope_of_running_sums, totals_of_totals,
    sums_in_rounds, totals_in_rounds, differences, autocovariances, second_differences, rolled,
    slope_of_differences, returned_slices, slope_of_second_differences, convolved, windows,
    slope_of_windows, decomposed, bucketed,
]  # fmt: skip


# --- programs that are not passes, whose members are gathered


def scan_that_reads_its_carry(x):
    return lax.scan(lambda c, row: (c * 0.5 + row, c), W, x)


def mapped_in_batches(x):
    return lax.map(jnp.sin, x, batch_size=4)


def running_logsumexp(x):
    return lax.cumlogsumexp(x, axis=0)


def convolved_past_the_ends(x):
    return jnp.convolve(x[:, 0], W)


def sorted_in_rounds(x):
    def step(w, _):
        return w + jnp.sort(x * w[None], axis=0)[7] + jnp.mean(jnp.cumsum(x, 0), 0), None

    return lax.scan(step, W, length=3)[0]


def windows_apart(x):
    return lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID")


GATHERS = [
    scan_that_reads_its_carry, mapped_in_batches, running_logsumexp, convolved_past_the_ends,
    sorted_in_rounds, windows_apart,
]  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("function", [*PASSES, *GATHERS], ids=lambda each: each.__name__)
def test_a_program_over_members(function):
    prog = bj.program(clients=N)(lambda x: function(bj.map_fn(jnp.tanh, x)))
    want = jax.jit(prog)(X)
    results = []
    for runner in ("local", "DirectRunner"):
        results.append(bj.run(prog, X, runner=runner, options={"shard_size": 8}))
        assert_same_types(results[-1], want)
        assert_close(results[-1], want)
    assert_same_bits(*results)
    gathered = bj.explain(prog, X).facts.gathered_bytes
    assert (gathered > 0) == (function in GATHERS)


@pytest.mark.parametrize("k", [1, -1, 3, -3, 7])
def test_members_are_moved_over_many_shards(k):
    n = 1_003
    x = np.arange(3 * n, dtype="int32").reshape(n, 3)
    prog = bj.program(clients=n)(lambda x: jnp.roll(bj.map_fn(lambda v: v + 1, x), k, 0))
    for options in ({"shard_size": 16}, {"shard_size": 24}, {}):
        np.testing.assert_array_equal(bj.run(prog, x, options=options), np.roll(x + 1, k, 0))
        assert bj.explain(prog, x, options=options).facts.gathered_bytes == 0


@pytest.mark.parametrize(("low", "high"), [(0, 7), (7, 0), (3, 4), (5, 5)])
def test_windows_of_members_over_many_shards(low, high):
    """Windows read up to a whole shard on either side; the last shard has two members."""
    n, width = 1_010, 8
    x = np.random.default_rng(n).integers(-1000, 1000, (n, 2)).astype("int32")

    def sums(x):
        padding = (low, high), (0, 0)
        return lax.reduce_window(x, np.int32(0), lax.add, (width, 1), (1, 1), padding)

    def fn(x):
        y = bj.map_fn(lambda v: v + 1, x)
        return sums(y[2:-1]), sums(y)[5:]

    prog = bj.program(clients=n)(fn)
    padded = np.pad(x + 1, ((low, high), (0, 0)))
    whole = np.lib.stride_tricks.sliding_window_view(padded, width, 0).sum(-1, dtype="int32")
    for options in ({"shard_size": 8}, {"shard_size": 24}, {}):
        found = bj.run(prog, x, options=options)
        np.testing.assert_array_equal(found[0], sums(jnp.asarray(x[2:-1] + 1)))
        if low + high == width - 1:
            np.testing.assert_array_equal(found[1], whole[5:])
            assert bj.explain(prog, x, options=options).facts.gathered_bytes == 0


@pytest.mark.parametrize("options", [{}, {"shard_size": 40}, {"member_loop": "loop"}], ids=str)
def test_running_sums_of_many_members(options):
    """Shards of many members, and none that is cut within a row of the table."""
    n = 20_003
    numbers = np.random.default_rng(0).integers(-(2**20), 2**20, n).astype("int32")
    shares = np.random.default_rng(1).random(n).astype("float32")
    prog = bj.program(clients=n)(lambda x: jax.tree.map(jnp.cumsum, x))
    ints, floats = bj.run(prog, (numbers, shares), options=options)
    np.testing.assert_array_equal(ints, np.cumsum(numbers, dtype="int32"))
    # The error of a sum does not grow with the number of shards.
    np.testing.assert_allclose(floats, np.cumsum(shares, dtype="float64"), rtol=5e-6)
    assert bj.explain(prog, (numbers, shares), options=options).facts.gathered_bytes == 0


def test_members_that_may_be_dropped_are_gathered():
    prog = bj.program(clients=N)(lambda x: jnp.cumsum(bj.map_fn(jnp.sum, x)))
    assert bj.explain(prog, X, options={"on_nonfinite": "drop"}).facts.gathered_bytes > 0


def test_decompositions_of_tall_matrices():
    """As good as LAPACK's, and with its signs, where columns are nearly dependent or zero first."""
    x = jax.random.normal(jax.random.key(4), (3_001, 6)) * jnp.logspace(0.0, -5.0, 6)[None]
    x = x.at[:, 4].set(x[:, 0] + 1e-4 * x[:, 5]).at[:9].set(0)
    prog = bj.program(clients=len(x))(lambda x: jnp.linalg.qr(bj.map_fn(lambda v: v + 0, x)))
    for options in ({}, {"shard_size": 16}):
        assert bj.explain(prog, x, options=options).facts.gathered_bytes == 0
        q, r = bj.run(prog, x, options=options)
        assert_close(q.T @ q, jnp.eye(6), atol=1e-5)
        assert_close(q @ r, x, atol=1e-5)
        signs = np.sign(np.diag(jax.jit(jnp.linalg.qr)(x)[1]))
        np.testing.assert_array_equal(np.sign(np.diag(r)), signs)


# --- order statistics


def special_values(dtype):
    x = jax.random.normal(jax.random.key(2), (101, 3)) * 50
    x = x.at[4, 0].set(jnp.inf).at[5:9, 0].set(-jnp.inf).at[3, 1].set(jnp.nan)
    x = x.at[6:60, 2].set(0.0).at[8, 2].set(-0.0)
    return (x if jnp.issubdtype(dtype, jnp.floating) else jnp.nan_to_num(x)).astype(dtype)


def picked_in_order(x):
    rows = jnp.sort(x, 0)
    found = [rows[:3], rows[-1], rows[50], jnp.sort(x.T, 1)[:, 7]]
    if jnp.issubdtype(x.dtype, jnp.floating):
        found += [jnp.median(x, 0), jnp.quantile(x, jnp.asarray([0.1, 0.93], x.dtype), axis=0)]
    return found


@pytest.mark.versions
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint16", "int16"])
def test_members_in_order(monkeypatch, dtype):
    """The same values as sorting gives, not only nearly."""
    monkeypatch.setattr(order_statistics, "MIN_BYTES", 0)
    x = special_values(dtype)
    prog = bj.program(clients=len(x))(lambda x: picked_in_order(bj.map_fn(lambda v: v * 1, x)))
    assert bj.explain(prog, x).facts.gathered_bytes == 0
    for runner in ("local", "DirectRunner"):
        found = bj.run(prog, x, runner=runner, options={"shard_size": 16})
        assert_close(found, jax.jit(prog)(x), rtol=0, atol=0)


def test_few_members_are_sorted_on_the_server_and_explain_says_why():
    reasons = []
    for function in (jnp.median, jnp.sort):
        prog = bj.program(clients=N)(lambda x, f=function: f(bj.map_fn(jnp.tanh, x), axis=0))
        (gather,) = [s for s in bj.explain(prog, X).facts.steps if s.kind == "Gather"]
        reasons.append(gather.reason)
    assert "less than 1.0 MiB" in reasons[0]
    assert reasons[1] == "sort mixes members"


def test_medians_of_many_members_are_counted():
    x = np.random.default_rng(0).normal(size=300_001).astype("float32")
    prog = bj.program(clients=len(x))(lambda x: jnp.median(bj.map_fn(lambda v: v + 0, x)))
    assert bj.explain(prog, x).facts.gathered_bytes == 0
    assert bj.run(prog, x) == np.median(x)
    few = bj.program(clients=N)(lambda x: jnp.median(bj.map_fn(jnp.sum, x)))
    assert bj.explain(few, X).facts.gathered_bytes > 0
