"""Members outside of `map_fn`: what a program does with placed values that a map made.

There are 23 members in shards of 8, so the last shard is not full.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import beamjax as bj
from programs.table import add, rnd

N = 23
X = rnd(N, 3)
W = jnp.asarray([0.5, -1.0, 2.0])
Y = jnp.asarray(np.asarray(X)[:, 0] * 0.3 + 1)
K = jnp.asarray(np.arange(N) % 3)
ROWS = jnp.asarray([3, 0, 3, 19, -1, 25])


def placed(*args, **facts):
    """Adds a function of members that a map made, and of further arguments."""

    def decorate(fn):
        def build(ops):
            mapped = lambda x, *rest: fn(ops.map_fn(jnp.tanh, x), *rest)
            return ops.program(placements={"clients": N})(mapped), (X, *args)

        add(fn.__name__, build, **facts)
        return fn

    return decorate


# --- what stays at the members, and what is reduced


@placed(W, plan="maps 3")
def elementwise(x, w):
    first = jnp.where((jnp.arange(N) == 0)[:, None], x, 0.0)
    others = x[:, ::2], x.at[:, 0].add(1.0), jnp.swapaxes(x, 0, 1).reshape(3, 1, N)
    return x * w[None] - x, first, x @ w, others, jax.nn.softmax(x, 0)


@placed(K, Y, plan="maps 2")
def reduced(x, k, y):
    gram, sums = x.T @ x, (jnp.sum(x, 0), jnp.mean(x, 0), jnp.max(x, 0))
    segments = jax.ops.segment_sum(x, k, 3), jnp.bincount(k, length=3)
    moments = jnp.cov(x, rowvar=False), jnp.corrcoef(x.T), jnp.std(x, 0, ddof=1)
    counts = jnp.histogram(x, bins=4)[0], jnp.histogram(x[:, 0], bins=5, range=(-1, 1))
    solved = jnp.average(x, 0, weights=y), jnp.linalg.solve(gram, x.T @ y)
    return gram, sums, segments, moments, counts, solved, jax.nn.logsumexp(x, 0)


@placed(plan="maps 2")
def at_each_member(x):
    squares = jax.vmap(jnp.outer)(x, x)
    system = squares + jnp.eye(3)[None]
    solved = jnp.linalg.solve(system, x[..., None]), jnp.linalg.inv(system), jnp.linalg.det(system)
    centred = jax.vmap(lambda v: v - lax.pmean(v, "i"), axis_name="i")(x)
    return solved, jnp.digitize(x, jnp.linspace(-1, 1, 5)), centred


@placed(jnp.asarray([0, 2, 2]))
def picked(x, i):
    return x[3], x[i]


@placed(plan="maps 2")
def derivatives_of_rows(x):
    total = lambda x: (x[3] ** 2).sum() + (x[2:5] ** 3).sum() + (x[ROWS] ** 2).sum()
    return jax.grad(lambda x: total(x) + (x**2).sum())(x)


@placed(plan="maps 2")
def the_highest_members(x):
    return x.at[lax.top_k(x[:, 0], 3)[1]].set(0.0)


# --- scans


@placed()
def mapped(x):
    def loop(row):
        return lax.while_loop(lambda v: v[0] < 3, lambda v: v + 1, row)

    numbered = lax.map(lambda each: each[0] * each[1], (x, jnp.arange(N, dtype="float32")))
    return lax.map(lambda row: (jnp.sin(row @ W), row[::2], loop(row)), x), numbered


@placed()
def totals_of_a_scan(x):
    def step(carry, row):
        a, b, c, d, same = carry
        small = (row * 50).astype("int8")
        return (a + row, b * row[0], jnp.maximum(c, row), small + d, same), row * same

    carry = W, jnp.float32(2), W, jnp.ones(3, "int8"), W
    return lax.scan(step, carry, x, reverse=True)


@placed(plan="maps 2")
def running_totals(x):
    kinds = [x, x.astype("bfloat16"), (x * 50).astype("int32"), (x * 50).astype("int8")]
    sums = [jnp.cumsum(kind, axis=0) for kind in kinds], lax.cumsum(x.T, axis=1, reverse=True)
    products = jnp.cumprod(1 + x, axis=0), lax.cumprod(kinds[2] // 5, axis=0, reverse=True)
    x = x.at[11, 1].set(jnp.nan)
    extremes = [f(kind, 0) for f in (lax.cummax, lax.cummin) for kind in (x, x.astype("int16"))]
    return sums, products, extremes, lax.associative_scan(jnp.add, x), lax.cumlogsumexp(x)


@placed(plan="maps 4")
def totals_of_totals(x):
    first = jnp.cumsum(x, axis=0)
    return jnp.cumsum(first / jnp.max(first, 0, keepdims=True), axis=0)[3], jnp.sum(first)


@placed(own=True, plan="maps 3, loops 1")
def sums_in_rounds(x):
    def step(w, _):
        return w + bj.reduce_mean(jnp.cumsum(x * w[None], axis=0)), None

    return lax.scan(step, W, length=3)[0]


@placed(plan="maps 7, loops 2, branches 1")
def totals_in_rounds(x):
    """Rounds without placed operators, in a loop of them and in a branch."""

    def step(w, _):
        inner = lax.fori_loop(0, 2, lambda _, v: v + jnp.mean(jnp.cumsum(x * v[None], 0), 0), w)
        return inner / 10, jnp.max(jnp.abs(jnp.diff(x + inner[None], axis=0)), 0)

    low = jnp.min(x) < 0
    return lax.scan(step, W, length=3), lax.cond(
        low, lambda: jnp.mean(jnp.cumsum(x, 0), 0), lambda: W
    )


@placed(plan="maps 1, gathers 1")
def sorted_in_rounds(x):
    def step(w, _):
        return w + jnp.sort(x * w[None], axis=0)[7] + jnp.mean(jnp.cumsum(x, 0), 0), None

    return lax.scan(step, W, length=3)[0]


# --- neighbours


@placed(plan="maps 2")
def differences(x):
    changes = jnp.sum((x[1:] > 0) != (x[:-1] > 0), axis=0)
    first = jnp.sum((x[1:] - x[:-1]) ** 2), jnp.max(jnp.abs(jnp.diff(x, axis=0)), 0), changes
    lagged = x[1:].T @ x[:-1], [jnp.mean(x[h:] * x[:-h], 0) for h in range(1, 7)], jnp.sum(x[1:])
    return first, lagged, jnp.mean((x[2:] - 2 * x[1:-1] + x[:-2]) ** 2, 0)


@placed(plan="maps 2")
def rolled(x):
    small = (x * 50).astype("int8")
    moved = [jnp.roll(x, 1, 0), jnp.roll(small, -1, 0), jnp.roll(x > 0, 24, 0)]
    return moved, jnp.roll(x.T, -1, 1), x * jnp.roll(x, 22, 0)


@placed(plan="maps 4")
def returned_slices(x):
    later = jnp.roll(jnp.diff(x, axis=0) ** 2, 2, 1)
    return jnp.diff(x, axis=0), later[1:], jnp.diff(x, n=3, axis=0), (x * 50).astype("int8")[4:-2].T


@placed(guarded=True, plan="maps 2")
def parts_and_reversed(x):
    def of_parts(x):
        return [jnp.sum(jnp.sin(part) ** (i + 1)) for i, part in enumerate(jnp.array_split(x, 3))]

    weights = jnp.arange(N, dtype=x.dtype)
    reverse = jnp.sum(x[::-1] * jnp.cos(x)[::-1], 0), weights @ x[::-1], jnp.flip(jnp.tanh(x))
    small = jnp.cumsum((x * 50).astype("int8")[::-1], 0)[::-1]
    return of_parts(x), jax.grad(lambda x: sum(of_parts(x)))(x), reverse, small


@placed(guarded=True, plan="maps 2")
def concatenated(x):
    twice, weights = jnp.concatenate([x, jnp.sin(x)]), jnp.arange(2.0 * N, dtype=x.dtype)
    rows = jnp.concatenate([x[:4], x[::-1], W[None]])
    entries = x.ravel()[7], x.ravel()[jnp.asarray(3)]
    return (
        jnp.var(twice, 0),
        weights @ twice,
        jnp.max(rows, 0),
        jnp.mean(jnp.tile(x, (2, 1))),
        entries,
    )


@placed(plan="maps 3")
def windows(x):
    column, kernel = x[:, 0], jnp.asarray([1.0, 2.0, -1.0, 0.5])
    both = [jnp.convolve(column, kernel, mode) for mode in ("same", "valid")]
    changes = jnp.convolve(jnp.diff(column), kernel[:2]), jnp.max(jnp.abs(both[1]))
    small = (x * 50).astype("int16")
    sums = [lax.reduce_window(x, 0.0, lax.add, (4, 2), (1, 1), p) for p in ("SAME", "VALID")]
    wide = lax.reduce_window(
        small, np.int16(-(2**15)), lax.max, (5, 1), (1, 1), "SAME", window_dilation=(2, 1)
    )
    low = lax.reduce_window(x[2:], jnp.inf, lax.min, (3, 1), (1, 1), ((2, 0), (0, 0)))
    found = jnp.correlate(column > 0, kernel[1:] > 0, "same")
    return both, changes, found, sums, wide, low, jnp.var(low, 0)


@placed(plan="maps 5")
def downsampled(x):
    def pooled(x, op, start, width, stride, padding="SAME"):
        return lax.reduce_window(x, start, op, (width, 1), (stride, 1), padding)

    def convolved(x, stride):
        kernel = jnp.asarray([1.0, 2.0, -1.0])[None, None]
        return lax.conv_general_dilated(x.T[:, None], kernel, (stride,), "SAME")[:, 0].T

    slices = x[::2], x[1::3] * jnp.arange(8.0)[:, None], x[::2][1::2], jnp.sum(x[::2] ** 2, 0)
    small = pooled((x * 50).astype("int16"), lax.max, np.int16(-(2**15)), 3, 3, "VALID")
    pools = pooled(x, lax.add, 0.0, 3, 2), small, pooled(x, lax.add, 0.0, 5, 10)
    wavelet = jnp.sum((x[:-1:2] - x[1::2]) ** 2), x[:-1:2].T @ x[1::2]
    loss = lambda x: jnp.sum(jnp.sin(convolved(convolved(x, 2), 2))) + jnp.sum(x[1::2] ** 3)
    sums = lambda x: jnp.sum(pooled(x, lax.add, 0.0, 3, 2) ** 2)
    return slices, pools, wavelet, convolved(x, 3), jax.grad(loss)(x), jax.grad(sums)(x)


@placed(plan="maps 3")
def more_rows_than_members(x):
    column, kernel = x[:, 0], jnp.asarray([1.0, 2.0, -1.0, 0.5])
    full = jnp.convolve(column, kernel)
    of_all = jnp.sum(jnp.tanh(full) ** 2), jnp.max(full), full @ jnp.arange(N + 3.0)
    parts = full[:N] * column, full[1 : N + 1], full[3:], full[3:N], jnp.convolve(full, kernel)
    whole = jnp.correlate((column * 50).astype("int32"), jnp.arange(4), "full")
    padded = jnp.pad(column, (2, 2), "edge"), jnp.pad(x, ((1, 2), (0, 0)), constant_values=3.0)
    changes = jnp.diff(x, axis=0, prepend=x[:1]), jnp.concatenate([x[:1] * 2, x[:-1]]) * x
    slope = jax.grad(lambda v: jnp.sum(jnp.convolve(v, kernel) ** 2))(column)
    return full, of_all, parts, whole, padded, jnp.convolve(padded[0], kernel), changes, slope


@placed(plan="maps 5")
def slopes(x):
    """Derivatives by all members of what is computed of scans, neighbours and windows."""

    def of_neighbours(x):
        rough = jnp.sum((x[1:] - x[:-1]) ** 2) + jnp.sum(jnp.diff(x, n=2, axis=0) ** 3)
        weighed = x[5:] * x[3:-2] * x[:-5] * jnp.arange(N - 5.0)[:, None]
        return rough + jnp.sum(jnp.sin(x - jnp.roll(x, 1, axis=0))) + jnp.sum(weighed)

    def of_windows(x):
        sums = lax.reduce_window(x, 0.0, lax.add, (3, 2), (1, 1), "VALID")
        return jnp.sum(sums**2) + jnp.sum(jnp.convolve(x[:, 1], W, "same") ** 2)

    of_mapped = lambda w, x: jnp.sum(lax.map(lambda row: jnp.sin(row @ w), x) ** 2)
    of_sums = lambda x: jnp.sum(jnp.cumsum(x, axis=0) ** 2)
    by_rows = [jax.grad(each)(x) for each in (of_neighbours, of_windows, of_sums)]
    return by_rows, jax.grad(of_mapped, (0, 1))(W, x)


@placed(plan="maps 3")
def slopes_of_scans(x):
    products = lambda x: jnp.sum(jnp.cumprod(1 + x, axis=0) ** 2)
    softer = lambda x: jnp.sum(jnp.sin(lax.cumlogsumexp(x.T, axis=1)))
    return [jax.value_and_grad(each)(x) for each in (products, softer)]


@placed(plan="maps 3")
def tall_matrices(x):
    singular = jnp.linalg.svd(x - jnp.mean(x, 0, keepdims=True), full_matrices=False)
    solved = jnp.linalg.lstsq(x[:, :2], x[:, 2])[0], jnp.linalg.cond(x), jnp.linalg.pinv(x)
    return jnp.linalg.qr(x), singular, solved


# --- what a body closes over


@placed(own=True, plan="maps 2")
def bodies_that_close_over_few_members(x):
    deviation = bj.reduce_sum(bj.map_fn(lambda v: (v - x.mean(0)) ** 2, x))
    near = bj.map_fn(lambda v: ((v[None] - x[:4]) ** 2).sum(-1), x)
    return deviation, near, bj.map_fn(lambda v: v * jnp.max(x @ W) + x[0] + jnp.ones(3), x)


@placed(own=True, plan="maps 2, gathers 1")
def bodies_that_close_over_all_members(x):
    return bj.map_fn(lambda v: ((v[None] - x) ** 2).sum(-1).min() + x[0].sum(), x)


@placed(own=True, plan="maps 5")
def quantiles(x):
    def spread(scale):
        found = bj.quantile(bj.map_fn(lambda v: v * scale, x), [0.1, 0.5, 0.9])
        return jnp.sum(found[2] - found[0])

    keys = bj.map_fn(lambda v: jnp.argmax(v), x)
    return bj.quantile(x, 0.5, keys=keys, num_keys=4), jax.value_and_grad(spread)(jnp.float32(2))


# --- what is computed of all members at once: `rule_rows` has a row of each


@placed(plan="maps 2, gathers 2")
def gathered(x):
    in_order = jnp.sort(x, 0), jnp.median(x, 0), x.at[jnp.argsort(x[:, 0])[:3]].set(0.0)
    one_by_one = lax.scan(lambda c, row: (c * 0.5 + row, c), W, x)
    batches = lax.map(jnp.sin, x, batch_size=4)
    return in_order, one_by_one, batches, jnp.concatenate([x, x]), x @ x.T
