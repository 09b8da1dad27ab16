"""Members outside of `map_fn`: what a program does with placed values that a map made.

There are 23 members in shards of 8, so the last shard is not full.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import beamjax as bj
from programs.table import add, built, rnd

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
    batches = lax.map(jnp.sin, x, batch_size=4)
    return lax.map(lambda row: (jnp.sin(row @ W), row[::2], loop(row)), x), numbered, batches


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
    return sums, products, extremes, lax.cumlogsumexp(x)


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
        return inner / 10, jnp.max(jnp.abs(jnp.cumsum(x + inner[None], axis=0)), 0)

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

KERNEL = jnp.asarray([1.0, 2.0, -1.0, 0.5])


@built(plan="maps 2")
def neighbours(ops):
    def of_neighbours(x):
        x = ops.map_fn(jnp.tanh, x)
        kinds = [x[:, 0] > 0, (x * 50).astype("int8"), x.astype("bfloat16"), lax.complex(x, -x)]
        around = [ops.neighbours(kind, 2, 1, wrap=True) for kind in kinds]
        change = ops.map_fn(lambda v: v[1] - v[0], ops.neighbours(x, before=1, fill=1.5))
        smooth = ops.map_fn(lambda v: jnp.convolve(v[:, 0], KERNEL, "valid"), ops.neighbours(x, 3))
        return around, change, smooth, ops.reduce_max(ops.map_fn(jnp.abs, change))

    return ops.program(placements={"clients": N})(of_neighbours), (X,)


@built(plan="maps 3")
def slopes_of_neighbours(ops):
    @ops.program(placements={"clients": N})
    def rough(x, fill):
        x = ops.map_fn(jnp.tanh, x)
        around = ops.neighbours(x, 1, 2), ops.neighbours(x, 4, fill=fill), ops.neighbours(x, 0, 1)
        weights = jnp.asarray([1.0, -2.0, 0.5, 1.5])[:, None]
        sums = lambda a, b, c: jnp.sum((weights * a) ** 2) + jnp.sum(jnp.sin(b)) * jnp.prod(c)
        return ops.reduce_sum(ops.map_fn(sums, around))

    return jax.value_and_grad(rough, argnums=(0, 1)), (X, jnp.float32(0.5))


@built(plan="maps 2, loops 1")
def neighbours_in_rounds(ops):
    """Diffusion on a ring."""

    @ops.program(placements={"clients": N})
    def diffused(x):
        def step(x, _):
            around = ops.neighbours(x, 1, 1, wrap=True)
            return ops.map_fn(lambda v: v[1] + 0.1 * (v[0] - 2 * v[1] + v[2]), around), None

        return lax.scan(step, x, length=3)[0]

    return diffused, (X,)


@placed(plan="maps 3")
def slopes(x):
    """Derivatives by all members of what is computed of scans."""
    of_mapped = lambda w, x: jnp.sum(lax.map(lambda row: jnp.sin(row @ w), x) ** 2)
    of_sums = lambda x: jnp.sum(jnp.cumsum(x, axis=0) ** 2)
    return jax.grad(of_sums)(x), jax.grad(of_mapped, (0, 1))(W, x)


@placed()
def entries(x):
    return x.ravel()[7], x.ravel()[jnp.asarray(3)]


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


@placed(plan="maps 1, gathers 1")
def shifted(x):
    moved = jnp.roll(x, 1, 0), jnp.diff(x, axis=0), x[::-1], x[2:] * x[:-2]
    windows = lax.reduce_window(x, 0.0, lax.add, (3, 1), (2, 1), "SAME")
    full = jnp.convolve(x[:, 0], KERNEL), jnp.correlate(x[:, 1], KERNEL, "same")
    parts = [jnp.sum(jnp.sin(part), 0) for part in jnp.array_split(x, 3)]
    return moved, windows, full, parts, jnp.pad(x, ((1, 2), (0, 0))), jnp.mean(x[:20], 0)


@placed(plan="maps 1, gathers 3")
def scanned_by_a_function(x):
    linear = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    # Running sums that begin anew at flagged members: leaves of unlike dtypes.
    anew = lambda a, b: (jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1])
    products = lambda x: jnp.sum(jnp.cumprod(1 + x, axis=0) ** 2)
    softer = lambda x: jnp.sum(jnp.sin(lax.cumlogsumexp(x.T, axis=1)))
    slopes = jax.grad(products)(x), jax.grad(softer)(x)
    sums = lax.associative_scan(anew, (x[:, 0], x[:, 1] > 0.5))[0]
    return lax.associative_scan(linear, (jnp.full_like(x, 0.9), x))[1], sums, slopes


@placed(plan="maps 2, gathers 2")
def gathered(x):
    in_order = jnp.sort(x, 0), jnp.median(x, 0), x.at[jnp.argsort(x[:, 0])[:3]].set(0.0)
    one_by_one = lax.scan(lambda c, row: (c * 0.5 + row, c), W, x)
    return in_order, one_by_one, jnp.concatenate([x, x]), x @ x.T
