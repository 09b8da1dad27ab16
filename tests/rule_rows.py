"""Small programs on placed operands, grouped by what they read: a table for `test_rules`.

`local` rows are computed in shards, `fold` rows are reduced in shards, and `gather` rows bring
their operands to the server.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import beamjax as bj

N = 11  # One full shard of 8 and a short one.
KEY = jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Placed:
    """An argument (n, ...) whose members a row sees along `axis`."""

    value: jax.Array
    axis: int = 0


def placed(value, axis=0):
    return Placed(jnp.asarray(value), axis)


def normal(*shape, dtype="float32", seed=0):
    draws = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jnp.asarray(draws, dtype)


def ints(*shape, low=0, high=4, dtype="int32", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(low, high, shape), dtype)


def first_members(x, count):
    """`x[:count, :1]` by a gather that names only the second dimension."""
    dimensions = lax.GatherDimensionNumbers((0, 1, 2), (), (1,))
    return lax.gather(x, jnp.zeros(1, "int32"), dimensions, (count, 1, *x.shape[2:]))


GROUPS: dict[str, tuple] = {}


def group(name, *args, **functions):
    """Adds rows that share arguments: by what they read, a function that gives a list of them."""
    assert name not in GROUPS
    GROUPS[name] = args, functions


# --- elementwise, at each axis, with all sorts of second operands

ROUNDED = [jnp.abs, lax.neg, jnp.sign, jnp.floor, jnp.ceil, lax.round, jnp.square, jnp.isfinite]
SMOOTH = [
    jnp.exp, jnp.exp2, jnp.expm1, jnp.tanh, jnp.sin, jnp.cos, lax.tan, jnp.arctan, jnp.sinh,
    jnp.arcsinh, jnp.cosh, jax.nn.sigmoid, lax.erf, lax.erfc, jnp.cbrt, lax.bessel_i0e,
    lax.bessel_i1e, jax.nn.gelu,
]  # fmt: skip
ABOVE_ONE = [lax.rsqrt, jnp.sqrt, jnp.log, jnp.log1p, jnp.arccosh, lax.lgamma, lax.digamma]
BELOW_ONE = [jnp.arccos, jnp.arcsin, jnp.arctanh, lax.erf_inv]
SAME = [lax.stop_gradient, lax.optimization_barrier, jax.device_put, jnp.copy]

group(
    "unary", placed(normal(N, 3, 4), 1),
    local=lambda x: [
        [f(x) for f in ROUNDED + SMOOTH + SAME], [f(1.5 + x * x) for f in ABOVE_ONE],
        [f(0.9 * jnp.tanh(x)) for f in BELOW_ONE], lax.reduce_precision(x, 5, 7), x**3, 2 * x - 1,
    ],
)  # fmt: skip
for axis in (0, 1, 2):
    group(
        f"unary_{axis}", placed(normal(N, 3, 4), axis),
        local=lambda x: [
            -x, x.astype("int32"), x.astype("bfloat16"), jax.nn.relu(x), jnp.clip(x, -0.5, 0.5),
            jnp.where(x > 0, x, 0.0), lax.bitcast_convert_type(x, np.dtype("int32")),
            lax.bitcast_convert_type(x, np.dtype("uint8")),
            jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))(x),
        ],
    )  # fmt: skip


def pairs(x, y):
    return [
        x + y, x - y, y - x, x * y, jnp.maximum(x, y), jnp.minimum(x, y), jnp.arctan2(x, y), x < y,
        x == y, lax.select(x > y, x, y), jnp.nextafter(x, y), x / (y * y + 1.0),
        lax.rem(x, y * y + 1.0), jnp.abs(x) ** jnp.abs(y), lax.clamp(y - 1.0, x, y + 1.0),
        lax.complex(x, y),
    ]  # fmt: skip


group(
    "special", placed(normal(N, 3)), normal(N, 3, seed=1),
    local=lambda x, y: [
        lax.igamma(x * x + 0.5, y * y + 0.5), lax.zeta(x * x + 1.5, y * y + 1.0),
        lax.polygamma(jnp.round(x * x + 1), y * y + 1.0), lax.conj(lax.complex(x, y)),
        lax.real(lax.complex(x, y)) - lax.imag(lax.complex(x, y)), x <= y,
    ],
)  # fmt: skip
group(
    "rare", placed(normal(N, 3)), normal(N, 3, seed=1),
    local=lambda x, y: [
        lax.igammac(x * x + 0.5, y * y + 0.5), lax.igamma_grad_a(x * x + 0.5, y * y + 0.5),
        x.at[:, 0].subtract(2.0), lax.betainc(x * x + 0.5, y * y + 0.5, 0.5 + 0.4 * jnp.tanh(x)),
        lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 1), "VALID"),
        jax.grad(lambda x: jnp.sum(x * jnp.sin(x)))(x),
    ],
)  # fmt: skip
for axis in (0, 1, 2):
    shape = [3, 4]
    shape.insert(axis, N)
    one = [3, 4]
    one.insert(axis, 1)
    x = placed(normal(N, 3, 4), axis)
    group(f"binary_placed_{axis}", x, placed(normal(N, 3, 4, seed=1), axis), local=pairs)
    group(f"binary_server_{axis}", x, normal(*shape, seed=2), local=pairs)
    group(f"binary_row_{axis}", x, normal(*one, seed=3),
        local=lambda x, y: [
            x + jnp.broadcast_to(y, x.shape), lax.mul(x, y), lax.lt(x, y), lax.sub(y, x),
        ],
    )  # fmt: skip
    group(f"server_predicate_{axis}", x, normal(*shape, seed=2),
        local=lambda x, y: [
            lax.select(y > 0, x, y), lax.select(y[0, 0, 0] > 0, x, y), lax.select(x > 0, y, 2 * y),
            lax.select_n((x > 0).astype("int32"), y, 2 * y, x),
            lax.clamp(jnp.minimum(y[0, 0, 0], 0), x, 0.5), lax.clamp(x, y, x + 1),
        ],
    )  # fmt: skip

group(
    "ints", placed(ints(N, 3, low=-100, high=100, dtype="int8")),
    ints(3, low=-100, high=100, dtype="int8", seed=1),
    local=lambda x, y: [
        x + y[None], x * y[None], ~x, x & y[None], x | y[None], x ^ y[None], x << 2, x >> 2,
        lax.shift_right_logical(x, jnp.int8(2)), lax.population_count(x), lax.clz(x),
        x // jnp.int8(3), x % jnp.int8(3),
    ],
    fold=lambda x, y: [
        lax.reduce_sum_p.bind(x, axes=(0,), **_no_sharding(lax.reduce_sum_p)),
        lax.reduce_sum_p.bind(x, axes=(0, 1), **_no_sharding(lax.reduce_sum_p)),
        lax.reduce_prod_p.bind(x, axes=(0,), **_no_sharding(lax.reduce_prod_p)),
        lax.reduce_max(x, (0,)), jnp.sum(x, 0), jnp.min(x), jnp.sum(x, 0, dtype="float32"), x.T @ x,
        lax.dot_general(x, x, (((0,), (0,)), ((), ())), preferred_element_type=np.dtype("int32")),
        jnp.sum(x.astype("uint8"), 0), lax.reduce_or(x, (0,)), lax.reduce_and(x | 6, (0,)),
        lax.reduce_xor(x, (0,)), lax.reduce_xor(x, (0, 1)),
        jnp.bitwise_and.reduce(x.astype("uint8") | 9), lax.reduce_or(x.T.astype("uint32"), (1,)),
    ],
)  # fmt: skip


def _no_sharding(primitive):
    """The layout parameter that newer versions of JAX ask for."""
    name = {"reduce_sum": "sum", "reduce_prod": "prod"}[primitive.name]
    (eqn,) = jax.make_jaxpr(lambda x: getattr(lax, f"reduce_{name}")(x, (0,)))(jnp.ones(2)).eqns
    return {key: value for key, value in eqn.params.items() if key != "axes"}


group("bools", placed(ints(N, 3, high=2, dtype="bool")),
    local=lambda x: [
        jnp.logical_not(x), x & ~x, x.astype("float32"), jnp.any(x, 1), lax.reduce_xor(x, (1,)),
    ],
    fold=lambda x: [
        jnp.any(x, 0), jnp.all(x), jnp.sum(x, 0), jnp.max(x, 0), lax.reduce_xor(x, (0,)),
        jnp.count_nonzero(x, axis=0),
    ],
)  # fmt: skip

# --- shapes


def shapes(axis, *merged):
    others = lambda one, all_others: [one if k == axis else all_others for k in range(3)]
    group(
        f"shape_{axis}", placed(normal(N, 4, 6), axis),
        local=lambda x: [
            jnp.transpose(x, (2, 0, 1)), jnp.swapaxes(x, 0, 2), jnp.moveaxis(x, 0, -1),
            x[None, :, None], jnp.squeeze(x[None, :, None], (0, 2)), x.reshape(merged),
            jnp.broadcast_to(x, (5, *x.shape)), jnp.broadcast_to(x[..., None], (*x.shape, 5)),
            jnp.pad(x, others((0, 0), (1, 2))), lax.pad(x, 0.0, others((0, 0, 0), (-1, 2, 1))),
            jnp.stack([x, -x], 1), jnp.stack([x, -x], -1),
        ],
    )  # fmt: skip


shapes(0, N, 24)
shapes(1, 4, N, 3, 2)
shapes(2, 2, 2, 6, N)

group("slices", placed(normal(N, 6, 7)), jnp.int32(2),
    local=lambda x, i: [
        x[:, 1], x[:, ::2, 1::3], x[:, ::-1], x[:, -3:-1], jnp.flip(x, -1),
        jnp.unstack(x, axis=1)[2], jnp.split(x, 3, axis=1)[1], jnp.concatenate([x, x[:, :2]], 1),
        jnp.concatenate([x, jnp.zeros((N, 1, 7))], 1), lax.dynamic_slice(x, (i, i, i), (N, 2, 3)),
        lax.dynamic_index_in_dim(x, i, 1),
        lax.dynamic_update_slice(x, jnp.ones((N, 2, 2)), (i, i, i)),
        lax.dynamic_update_slice(x, jnp.ones((2, 6, 7)), (i, i, i)),
        lax.dynamic_update_slice(x, jnp.ones((2, 6, 1)), (50 * i, i, 3 * i)), x.at[i].set(1.0),
        x.at[jnp.array([3, 0, 3, -1, 50])].add(2.0), x.at[jnp.array([3, 0, 3]), i].multiply(2.0),
        x.at[:3].max(0.0), x.at[1:3, ::2].add(jnp.ones(7)), x.at[50 * i].set(1.0, mode="clip"),
        (10 * x).astype("int8").at[i].set(1), x.astype("bfloat16").at[3:].add(1),
        lax.dynamic_update_slice(jnp.ones((N, 9, 9)), x, (i, i, i)), jnp.tile(x, (1, 2, 1)),
        jnp.repeat(x, 2, axis=1, total_repeat_length=12), jnp.roll(x, 1, axis=1), jnp.tril(x),
        jnp.diff(x, axis=1), jnp.diagonal(x, axis1=1, axis2=2),
    ],
    fold=lambda x, i: [
        x[0], x[-1], x[0, 1::2, -1], lax.slice(x, (0, 0, 0), (1, 6, 7), (5, 2, 3)),
        lax.dynamic_index_in_dim(x, i, 0), lax.dynamic_slice(x, (i, i, 5 * i), (1, 2, 3)),
        lax.dynamic_slice(x, (50 * i, i, i), (1, 2, 3)),
        lax.dynamic_slice(x, (-50 * i, i, i), (1, 2, 3)), (10 * x).astype("int8")[0],
        (10 * jnp.abs(x)).astype("uint32")[-1], (x > 0)[0], x.astype("bfloat16")[-1],
        (x / jnp.zeros(()))[0], jnp.where(x > 0, x, jnp.nan)[0], x[3], x[:5],
        lax.dynamic_slice(x, (i, i, x[0, 0, 0].astype("int32")), (2, 2, 2)),
        (x * 0 * jnp.sign(x))[0], jnp.split(x, [3])[0], jax.random.split(jax.random.key(0), N)[3],
        jax.vmap(jax.random.key)(x[:, 0, 0].astype("int32"))[i],
    ],
    gather=lambda x, i: [
        lax.complex(x, x)[0], x[::-1], x[::2], x.reshape(-1), jnp.split(x, [3])[1],
        jnp.concatenate([x, x]), jnp.pad(x, 1), jnp.unstack(x)[1], jnp.roll(x, 1, (0, 1)),
        jnp.concatenate([x[1:], x[:1], x[:1]]),
        lax.dynamic_update_slice(jnp.ones((30, 6, 7)), x, (i, i, i)), x.reshape(N * 6, 7),
        first_members(x, 4),
    ],
)  # fmt: skip

# --- sorts, scans, windows, reductions


group("across", placed(normal(N, 3)), normal(N, 3, seed=1),
    local=lambda x, c: [
        jax.grad(lambda x: jnp.sum(jnp.sort(x.T, axis=0) * c.T))(x),
        jax.grad(lambda x: jnp.sum(jnp.median(x.T, axis=0) * c[:, 0]))(x),
        jax.grad(lambda x: jnp.sum(jnp.percentile(x.T, 10.0, axis=0) * c[:, 0]))(x),
        jnp.take_along_axis(x.T, jnp.argsort(x.T, axis=0), axis=0),
        jax.grad(lambda x: jnp.sum(jnp.take_along_axis(x.T, jnp.argsort(c.T, 0), 0) ** 2))(x),
    ],
)  # fmt: skip


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 1), "VALID")


group("along_1", placed(normal(N, 6, 5)), placed(normal(N, 6, 5, seed=1)),
    local=lambda x, y: [
        jnp.cumsum(x, 1), jnp.cumprod(x, -1), lax.cummax(x, 1, reverse=True), lax.cummin(x, 2),
        lax.cumlogsumexp(x, 1), jnp.sort(x, 1), jnp.argsort(x, -1), jnp.median(x, 1),
        lax.sort((x, y), dimension=1, num_keys=2),
        lax.sort((x, jnp.ones_like(x)), dimension=2, num_keys=1), lax.top_k(x, 3),
        lax.approx_max_k(x, 2), jnp.argmax(x, 1), jnp.argmin(x, 2), jnp.sum(x, 1),
        jnp.mean(x, (1, 2)), jnp.max(x, 2), jnp.prod(x, 1), jax.nn.softmax(x, -1),
        jax.nn.logsumexp(x, 1), jnp.var(x, 1), jnp.quantile(x, 0.3, axis=1),
        jnp.searchsorted(jnp.arange(4.0), x), jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
        jnp.linalg.solve(x[:, :5] + 9 * jnp.eye(5)[None], y[:, 1:, :2]), jnp.linalg.norm(x, axis=2),
        jax.nn.one_hot(jnp.argmax(x, 1), 6),
        lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 2, 1), "SAME"),
        jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x), jax.jvp(pooled, (x,), (y,)),
        jnp.polyval(jnp.arange(4.0), x),
        lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "VALID"),
        jnp.cumsum(x, 0), jnp.cumprod(1 + x.T / 9, 2), lax.cummax(x, 0, reverse=True),
        jnp.cumsum(x > 0, 0), lax.cumlogsumexp(x, 0), lax.cumlogsumexp(x.T, 2, reverse=True),
        lax.cumlogsumexp(jnp.where(x > 0, x, -jnp.inf), 0),
        lax.cumlogsumexp(x.astype("bfloat16"), 0),
        jnp.cumsum((x * 99).astype("int8"), 0), lax.cummin((x * 9).astype("uint32"), 0),
        lax.map(jnp.sin, x), lax.map(jnp.sin, x, batch_size=4),
        lax.scan(lambda c, v: (c + v[0], v * 2), jnp.zeros(5), x)[1],
        jax.vmap(lambda v: v - lax.pmean(v, "i"), axis_name="i")(x),
    ],
    fold=lambda x, y: [
        jnp.sum(x, 0), jnp.sum(x), jnp.sum(x, (0, 2)), jnp.max(x, 0), jnp.min(x), jnp.prod(x, 0),
        jnp.mean(x, 0), jnp.mean(x), jnp.var(x, 0), jax.nn.logsumexp(x, 0),
        jnp.average(x[:, 0, 0], weights=y[:, 0, 0] ** 2), jnp.linalg.norm(x[:, 0], axis=0),
        jnp.any(x > 2, 0), jnp.all(x > -9), jnp.vdot(x[:, 0, 0], y[:, 0, 0]), jnp.vdot(x, y),
        jnp.sum(x.T.T.ravel()), jnp.max(jnp.ravel(x)),
        jnp.histogram(x[:, 0, 0], bins=jnp.linspace(-1.0, 1.0, 5))[0],
        jnp.sum(jnp.moveaxis(x, 0, 1), (1, 2)), jnp.argmax(x, 0), jnp.argmin(jnp.round(x), 0),
        lax.argmax(x, 0, np.int8),
        lax.top_k(x[:, 0, 0], 3), lax.top_k(jnp.moveaxis(x, 0, 2), 2),
        lax.top_k((x[:, 0, 0] > 0).astype("int32"), 5),
        lax.top_k(jnp.full_like(x[:, 0, 0], -jnp.inf), 5),
        lax.top_k(jnp.select([x > 1, x < 0], [jnp.nan, -jnp.nan], jnp.sign(y) * 0)[:, 0].T, 5),
        lax.top_k((9 * x[:, 0, 0]).astype("uint8"), 4),
        lax.top_k(-x[:, 0, 0].astype("bfloat16"), 5), jnp.argmax(jnp.moveaxis(x > 1, 0, 1), 1),
        lax.scan(lambda c, v: (jnp.maximum(c, v), None), jnp.zeros((6, 5)), x)[0],
        [jax.vmap(lambda v, f=f: f(v, "i"), axis_name="i", out_axes=None)((x * 99).astype("int8"))
         for f in (lax.psum, lax.pmax, lax.pmin)],
    ],
    gather=lambda x, y: [
        jnp.sort(x, 0), jnp.median(x, 0), lax.top_k(x[:, 0, 0], 6), lax.top_k(x[:, 0, 0], 0),
        lax.scan(lambda c, v: (c * v + 1, None), jnp.zeros((6, 5)), x)[0], x[:, 0] @ y[:, 1].T,
        lax.scan(lambda previous, v: (v, v - previous), jnp.zeros((6, 5)), x)[0],
        lax.scan(lambda previous, v: (v, previous), jnp.zeros((6, 5)), x)[1],
        lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"), jnp.diff(x, 2, 0),
        jnp.convolve(x[:, 0, 0], jnp.arange(3.0), "same"), lax.associative_scan(jnp.add, x),
    ],
)  # fmt: skip

group("tall_matrices", placed(normal(N, 3)), normal(N, seed=1),
    local=lambda x, y: [jnp.linalg.qr(x)[0], jnp.linalg.svd(x, full_matrices=False)[0]],
    fold=lambda x, y: [
        jnp.linalg.qr(x)[1], jnp.linalg.qr(x, mode="r"), jnp.linalg.svd(x, compute_uv=False),
        jnp.linalg.lstsq(x, y)[0], jnp.linalg.cond(x),
    ],
    gather=lambda x, y: [
        jnp.linalg.qr(x, mode="complete")[1], jnp.linalg.svd(x.T, full_matrices=False)[1],
        jnp.linalg.qr(jnp.concatenate([x, x], 1))[1],
    ],
)  # fmt: skip

# --- reductions of members that are sliced or reshaped

group("sliced", placed(normal(N, 4)), placed(ints(N, seed=1)),
    fold=lambda x, k: [
        jnp.sum(x[:5], 0), jnp.mean(x[3:8]), jnp.prod(x[:4, 0]), jnp.sum(jnp.tanh(x)[:5] * 2, 0),
        jax.ops.segment_sum(x[:5], k[:5], 4), jax.grad(lambda x: jnp.sum(x[:5] ** 2))(x),
    ],
    gather=lambda x, k: [
        jnp.sum(x[:8], 0), jnp.sum(jnp.abs(x[1:] - x[:-1])), jnp.sum(x[::-1] ** 2, 0), x[:8],
        [jnp.sum(jnp.tanh(part), 0) for part in jnp.array_split(x, 3)], jnp.sort(x[:8], 0),
        jnp.sum(jnp.concatenate([x, 2 * x]), 0), jnp.cumsum(x[:8], 0), jnp.diff(x, axis=0),
    ],
)  # fmt: skip


M = 12
group("reshaped", placed(normal(M, 4)), placed(normal(M, 2, 3, seed=1), 1), normal(4, seed=2),
    fold=lambda x, y, w: [
        jnp.sum(x.reshape(24, 2), 0), jnp.sum(x.reshape(1, 12, 4, 1), 1),
        jnp.prod(x.reshape(24, 2), (0, 1)), jnp.sum(y.reshape(2, 36), 1),
        jnp.max(y.reshape(2, 36, 1), (0, 1)), jnp.sum(jnp.tanh(x.ravel()) ** 2),
        jnp.sum(jnp.where(x.ravel() > 0, jnp.exp(x.ravel()), 1.0)),
        jnp.sum(x.ravel() * jnp.repeat(w, M)), jnp.sum(x.ravel() + jnp.arange(4.0 * M)),
        jnp.linalg.norm(2 * x.reshape(-1), jnp.inf), x.ravel() @ jnp.sin(x).ravel(),
        x.reshape(24, 2).T @ x.reshape(24, 2), jnp.var(x.ravel()),
        jnp.sum((9 * x).astype("int8").reshape(24, 2) * 3, 0),
        lax.reduce_max((9 * x).astype("uint8").reshape(-1), (0,)),
        lax.reduce_or((9 * x).astype("int8").reshape(24, 2), (0,)),
        jnp.mean(x.astype("bfloat16").reshape(-1)), jnp.any(x.ravel() > 1),
        jnp.sum(lax.complex(x, -x).reshape(24, 2), 0), jnp.argmax(x),
        jnp.unravel_index(jnp.argmin(x), x.shape), jnp.argmax(jnp.round(x)), jnp.argmax(x > 1.5),
        jnp.argmax(x > 99), jnp.argmin(jnp.where(x > 1, jnp.nan, x)),
        jnp.argmax(jnp.full_like(x, -jnp.inf)),
        lax.argmax(x.ravel().astype("int8"), 0, np.dtype("uint8")),
        jnp.nanargmin(jnp.where(x < 0, jnp.nan, x)), lax.top_k(x.ravel(), 5),
        jax.ops.segment_sum(x.ravel(), (9 * x.ravel()).astype("int32") % 5, 5), x.ravel()[30],
        x.ravel()[7:18:2], x.ravel()[jnp.argmax(w)], lax.dynamic_slice(x.ravel(), (45,), (9,)),
        lax.dynamic_slice(jnp.sin(x).ravel(), (jnp.argmin(w).astype("uint8"),), (6,)),
    ],
    local=lambda x, y, w: [
        jax.grad(lambda x: jnp.sum(jnp.tanh(x.ravel())))(x), jnp.sin(x.ravel()).reshape(x.shape),
        jnp.cumsum(x.reshape(24, 2), 1).reshape(M, 2, 2), (x.reshape(24, 2) @ w[:2]).reshape(M, 2),
    ],
)  # fmt: skip
group(
    "reshaped_and_whole", placed(normal(M, 4)), placed(normal(M, 2, 3, seed=1), 1),
    normal(4, seed=2),
    gather=lambda x, y, w: [
        jnp.sum(x.reshape(3, 16).reshape(6, 8), 1), x.reshape(3, 16),
        (x.reshape(3, 16), jnp.sum(x.reshape(3, 16), 1)), (jnp.sort(x.ravel()), jnp.sum(x.ravel())),
        x.reshape(-1) * 2, jnp.sum(x.reshape(3, 4, 4) * w[None, :, None]),
        jnp.max(lax.complex(x, -x).reshape(3, 4, 4), 1), jnp.mean(x.reshape(3, 4, 4), 1),
        lax.reduce_or((9 * x).astype("int8").reshape(3, 16), (1,)), jnp.sum(x.reshape(2, 24), 0),
        jnp.argmin(y), jnp.sum(y.reshape(2, 3, 12), (0, 2)), jnp.cumsum(x.ravel())[-1],
        jnp.sum(x.T.ravel()),
    ],
)  # fmt: skip

# --- products, all ways of pairing

group(
    "products", placed(normal(N, 4, 5)), placed(normal(N, 5, 3, seed=1)), normal(5, 3, seed=2),
    normal(N, seed=3),
    local=lambda x, y, w, s: [
        x @ y, x @ w, jnp.matmul(w.T, y.swapaxes(1, 2).swapaxes(1, 2)),
        jnp.einsum("nij,n->ni", x, s), jnp.einsum("n,nij->nji", s, x),
        jnp.einsum("nij,jk,nlk->nil", x, w, y), jnp.einsum("nij,nkl->nikjl", x, y),
        jnp.einsum("nij,jk->kin", x, w), jnp.einsum("jk,njl->knl", w, y),
        jnp.einsum("nij,nij->n", x, x), jax.vmap(lambda a, b: jnp.tanh(a @ w).T @ (a @ b))(x, y),
        jnp.tensordot(x, w, axes=[[2], [0]]),
    ],
    fold=lambda x, y, w, s: [
        jnp.einsum("nij,nkl->ijkl", x, y), x[:, 0].T @ x[:, 0], jnp.einsum("n,nij->ij", s, x),
        jnp.einsum("nij,n->ij", x, s), jnp.vdot(x, x), jnp.einsum("nij,njk->ik", x, y),
        x[:, 0].astype("bfloat16").T @ x[:, 0].astype("bfloat16"),
        x[:, 0].astype("float16").T @ x[:, 0].astype("float16"),
        jnp.einsum("ni,nj->ij", x[:, 0], y[:, :, 0], precision="highest"),
        jnp.einsum("ni,nj->ij", x[:, 0], y[:, :, 0], precision=lax.DotAlgorithmPreset.F32_F32_F32),
    ],
    gather=lambda x, y, w, s: [
        x[:, 0] @ x[:, 1].T, jnp.sum((x[:, None, 0] - x[None, :, 0]) ** 2, -1),
    ],
)  # fmt: skip

NHWC = ("NHWC", "HWIO", "NHWC")
conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 2), padding="SAME")


def window(x, init, op):
    return lax.reduce_window(x, init, op, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def conv_loss(kernel, images):
    return jnp.sum(jnp.tanh(conv(images, kernel, dimension_numbers=NHWC)))


group("convolutions", placed(normal(N, 6, 6, 2)), normal(3, 3, 2, 4, seed=1),
    local=lambda x, k: [
        jax.grad(lambda x: jnp.sum(window(x, -jnp.inf, lax.max) ** 2))(x),
        conv(x, k, dimension_numbers=NHWC),
        conv(x, k[:, :, :1], dimension_numbers=NHWC, feature_group_count=2),
        conv(x.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1)),
        conv(x.transpose(1, 2, 0, 3), k, dimension_numbers=("HWNC", "HWIO", "HWNC")),
        jax.vmap(jax.grad(lambda x: conv_loss(k, x[None])))(x),
        window(x, 0.0, lax.add) / 4,
    ],
    fold=lambda x, k: [jax.grad(conv_loss)(k, x)],
    gather=lambda x, k: [
        jax.vmap(lambda x: conv(x[None], x[:3, :3, :, None], dimension_numbers=NHWC))(x),
        conv(x.transpose(1, 0, 2, 3), k, dimension_numbers=NHWC),
    ],
)  # fmt: skip

group("kernels_along_members", normal(2, 6, 6, 3), placed(normal(N, 2, 2, 3, seed=1)),
    local=lambda x, k: [conv(x, k, dimension_numbers=("NHWC", "OHWI", "NHWC"))],
    gather=lambda x, k: [conv(x, k, dimension_numbers=("NHWC", "HWOI", "NHWC"))],
)  # fmt: skip

# --- indexing


def indexing(m, low, high):
    group(
        f"indexing_{m}", placed(normal(N, 5, 4)), placed(ints(N, 3, low=low, high=high, seed=2)),
        ints(3, low=low, high=high, seed=3), normal(5, 4, seed=4),
        local=lambda x, i, j, t: [
            x.at[:, j].get(mode=m), jax.vmap(lambda v, i: v.at[i].get(mode=m))(x, i),
            t.at[i].get(mode=m), t.at[i, jnp.clip(i, 0, 3)].get(mode=m),
            jax.vmap(lambda v, i: v.at[i[:1]].set(7.0, mode=m))(x, i),
            jax.vmap(lambda v, i: v.at[i].add(1.0, mode=m))(x, i), x.at[:, j].mul(2.0, mode=m),
            jax.vmap(lambda v, i: v.at[i].min(0.0, mode=m).at[i].max(-0.5, mode=m))(x, i),
            jax.vmap(lambda i: t.at[i[:1]].set(7.0, mode=m))(i), x.at[j].set(0.0, mode=m),
            x.at[j, 1:4].add(1.0, mode=m), x.at[:, 1].set(0.0, mode=m),
            jnp.zeros((N, 5, 4)).at[:, 1].set(x[:, 0], mode=m),
        ],
        fold=lambda x, i, j, t: [
            jnp.zeros(5).at[i].add(1.0, mode=m), t.at[i[:, 0]].add(x[:, 0], mode=m),
            t.at[i].add(x[:, :3], mode=m), t.at[i[:, 0]].max(x[:, 0], mode=m),
            t.at[i].min(x[:, :3], mode=m), t.at[i[:, 0]].multiply(x[:, 0], mode=m),
            x.at[j].get(mode=m), x.at[j, :, j].get(mode=m),
            x.at[jnp.stack([j[0] + 50, j[1], -j[0] - 50])].get(mode=m),
        ],
    )  # fmt: skip


indexing("clip", -9, 9)
indexing("fill", -9, 9)
indexing("promise_in_bounds", 0, 5)

SEGMENTS = [jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_prod]
group(
    "indexing", placed(normal(N, 5, 4)), placed(ints(N, 5, high=4, seed=2)), normal(20, 4, seed=4),
    local=lambda x, i, t: [
        jnp.take_along_axis(x, i[..., None], axis=2),
        jnp.take_along_axis(x, i[:, :, None] % 4, axis=1),
        jax.vmap(lambda v, i: v[i[0], i[1]])(x, i),
        jax.vmap(lambda v, i: lax.dynamic_slice(v, (i[0], i[1]), (2, 2)))(x, i),
        jax.vmap(lambda v, i: lax.dynamic_update_slice(v, jnp.ones((2, 2)), (i[0], i[1])))(x, i),
        jnp.take(t, i, axis=0),
        jax.vmap(lambda i, v: jax.grad(lambda t: jnp.sum(t[i] * v))(t))(i, x),
        jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, 3))(x, i), jax.nn.one_hot(i, 4),
        jnp.nan_to_num(x / (i[..., None].astype("float32"))),
        jax.vmap(lambda i: jnp.bincount(i, length=4))(i),
    ],
    fold=lambda x, i, t: [
        jax.ops.segment_sum(x, i[:, 0], 4), jax.ops.segment_sum(x, jnp.arange(N) % 4, 4),
        jax.ops.segment_sum(x, jnp.arange(N) // 3, 4, indices_are_sorted=True),
        jax.ops.segment_sum(x, jnp.arange(N), 20, unique_indices=True, indices_are_sorted=True),
        jax.grad(lambda t: jnp.sum(t[i] * x))(t),
        jnp.ones((4, 5, 4), "bfloat16").at[i[:, 0]].add(x.astype("bfloat16")),
        jnp.bincount(i[:, 0], length=4), jax.ops.segment_max(x, i[:, 0], 4),
        jax.ops.segment_min(x, i[:, 0], 4), jax.ops.segment_prod(x, i[:, 0], 4),
        jax.ops.segment_min(x, i[:, 0] - 2, 9),
        jax.ops.segment_max(jnp.where(x > 1, jnp.nan, -0.0), i[:, 0], 4),
        (jax.ops.segment_max(x > 0, i[:, 0], 4), jax.ops.segment_min(x > 0, i[:, 0], 4)),
        [f(jnp.abs(99 * x).astype("uint8"), i[:, 0], 5) for f in SEGMENTS],
        [f(x.astype("bfloat16"), i[:, 0], 5) for f in SEGMENTS],
        jnp.full((4, 5, 4), 2, "bfloat16").at[i[:, 0]].mul(x.astype("bfloat16")),
        jax.grad(lambda t: jnp.sum(jax.ops.segment_max(jnp.round(x) * t[None], i[:, 0], 4)))(t[:5]),
    ],
    gather=lambda x, i, t: [x[i[:, 0]], jax.ops.segment_max(lax.complex(x, -x), i[:, 0], 4)],
)  # fmt: skip

# --- by a function


def joined(left, right):
    return {"a": left["a"] @ right["a"], "b": left["a"] @ right["b"] + left["b"]}


group(
    "by_a_function", placed(ints(N, 2, 2, seed=3), 1), placed(ints(N, 2, seed=4)), ints(2, seed=5),
    fold=lambda x, y, w: [
        bj.reduce(jnp.matmul, jnp.moveaxis(x, 1, 0)),
        bj.reduce(joined, {"a": jnp.moveaxis(x, 1, 0), "b": y}),
        bj.reduce(lambda a, b: a - b + 2 * b, y, w), bj.reduce(lambda a, b: a + b + w, y),
        bj.reduce(lambda a, b: b, y),
        jax.jvp(lambda v, u: bj.reduce(lambda a, b: a * b + u, v), (y / 3, 0.1), (y / 2, 1.0)),
        jax.vmap(lambda v, u: bj.reduce(lambda a, b: a + b * u, v), in_axes=(1, 0))(y, w),
        bj.reduce(lambda a, b: (b[1], a[1] + b[1]), (y, y))[0],
    ],
    gather=lambda x, y, w: [jax.grad(lambda v: jnp.sum(bj.reduce(lambda a, b: a * b, v)))(y / 3)],
)  # fmt: skip


def products(*dims):
    """Products of pairs, reduced over `dims`: each sum counts with the product of all before it."""
    pairs = lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1])
    return lambda x, y, w: lax.reduce((x, y), (w[0], w[1]), pairs, dims)


group(
    "by_a_lax_function", placed(ints(N, 3, 4, low=-3, seed=3)),
    placed(ints(N, 3, 4, low=-3, seed=4)), ints(2, low=1, seed=5),
    local=lambda *args: [products(1)(*args), products(2, 1)(*args)],
    fold=lambda x, y, w: [
        products(0)(x, y, w), products(0, 2)(x, y, w), products(2, 0, 1)(x, y, w),
        lax.reduce(x, w[0], lambda a, b: a | b | 8, (0,)),
        lax.reduce(x, np.int32(1), lax.add, (0,)),
        lax.reduce(x.astype("int8"), np.int8(5), lambda a, b: a + 17 * b - 16 * b, (0, 1)),
        lax.reduce(x / 8, 0.0, lambda a, b: a + b + a * b, (0,)),
        lax.reduce(
            x.astype("bfloat16"), jnp.bfloat16(-9), lambda a, b: jnp.where(a > b, a, b), (0, 1, 2)
        ),
        lax.reduce(
            (x[:, 0, 0], jnp.arange(N)), (np.int32(-9), np.int32(0)),
            lambda a, b: [jnp.where(b[0] > a[0], v, u) for u, v in zip(a, b, strict=True)], (0,),
        ),
        lax.reduce(
            (x, jnp.ones_like(x)), (w[0], w[1]),
            lambda a, b: (a[0] + b[0] * b[1], a[1] * b[1]), (0,),
        ),
    ],
    gather=lambda x, y, w: [
        # JAX makes of it a tree of slices.
        jax.jvp(lambda v: lax.reduce(v, 1.0, lambda a, b: a * b, (0,)), (x / 2,), (y / 2,)),
        # Rows before columns: each row of the result holds some of all members.
        products(0, 1)(x.swapaxes(0, 1), y.swapaxes(0, 1), w),
        products(0, 1)(x[:, :0], y[:, :0], w),
    ],
)  # fmt: skip

# --- linear algebra


def spd(*batch):
    a = np.asarray(normal(*batch, 4, 4, seed=9))
    return a @ a.swapaxes(-1, -2) + 4 * np.eye(4, dtype="float32")


group("linear_algebra", placed(spd(N)), placed(normal(N, 4, 2)), spd(),
    local=lambda a, b, s: [
        jnp.linalg.cholesky(a), jnp.abs(jnp.linalg.qr(a)[1]), jnp.linalg.eigvalsh(a),
        jnp.linalg.svd(b, compute_uv=False),
        lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        jax.vmap(lambda a: lax.linalg.triangular_solve(a, s, left_side=True, lower=True))(a),
        lax.linalg.lu(a), lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], 4),
        jnp.linalg.slogdet(a)[1], jnp.fft.fft(a, axis=2), jnp.fft.fft2(a), jnp.fft.rfft(a[:, 0]),
        jnp.fft.irfft(a[:, 0]), lax.linalg.householder_product(a, a[:, 0]),
        lax.linalg.tridiagonal_solve(
            a[:, 0].at[:, 0].set(0.0), a[:, 1] + 9.0, a[:, 2].at[:, -1].set(0.0), b
        ),
        jnp.abs(lax.complex(a, a) @ lax.complex(b, b).conj()),
    ],
    fold=lambda a, b, s: [
        jnp.sum(lax.complex(b, b), 0),
        jnp.einsum("nij,nik->jk", lax.complex(b, b), lax.complex(b, b)),
    ],
    gather=lambda a, b, s: [
        jnp.fft.fft(b, axis=0),
        jax.vmap(lambda b: lax.linalg.triangular_solve(s, b, left_side=True, lower=True))(b),
        jnp.fft.fftn(a), jnp.linalg.svd(b[:, 0])[1],
    ],
)  # fmt: skip

# --- random keys

group("keys", placed(jax.random.split(KEY, N)), placed(jnp.arange(1.0, N + 1)), KEY,
    local=lambda k, x, s: [
        jax.vmap(lambda k: jax.random.split(k, 3))(k),
        jax.vmap(lambda k: jax.random.bits(k, (3,)))(k),
        jax.vmap(lambda k: jax.random.normal(k, (3,)))(k),
        jax.vmap(lambda k: jax.random.uniform(k, (2, 2)))(k),
        jax.vmap(jax.random.fold_in, (0, None))(k, 3),
        jax.vmap(jax.random.fold_in, (None, 0))(s, x.astype("uint32")),
        jax.vmap(jax.random.fold_in, (None, 0))(s, jnp.arange(N)) == k, jax.random.key_data(k),
        jax.random.clone(k), jax.random.wrap_key_data(jax.random.key_data(k) + jnp.uint32(1)),
        jax.vmap(jax.random.key)(x.astype("uint32")), jax.vmap(jax.random.gamma)(k, x),
        jax.vmap(jax.random.bernoulli)(k), (jax.random.split(s, N) == k) & (x > 0),
        (jax.random.split(s, (N, 2)) == k[:, None]) & (x > 0)[:, None],
        jax.random.normal(s, (N,)) * x, jax.random.bernoulli(s, 0.5, (N,)) & (x > 3),
    ],
    gather=lambda k, x, s: [jax.random.gamma(s, x), jax.random.permutation(s, x)],
)  # fmt: skip

group(
    "rbg_keys", placed(jax.random.key_data(jax.random.split(jax.random.key(1, impl="rbg"), N))),
    local=lambda d: [
        jax.random.wrap_key_data(d, impl="rbg"),
        jax.vmap(jax.random.fold_in, (0, None))(jax.random.wrap_key_data(d, impl="rbg"), 3),
    ],
    gather=lambda d: [
        jax.vmap(lambda d: jax.random.normal(jax.random.wrap_key_data(d, impl="rbg"), (3,)))(d),
        jax.vmap(jax.random.fold_in, (0, None))(jax.random.wrap_key_data(d, impl="unsafe_rbg"), 3),
    ],
)  # fmt: skip

# --- values that shards make themselves, next to placed ones

group("created", placed(normal(N, 3)), normal(3, seed=1),
    local=lambda x, w: [
        x + jnp.arange(float(N))[:, None],
        (jnp.arange(N, dtype="uint8") * jnp.uint8(50))[:, None] + (x > 0).astype("uint8"),
        x * lax.broadcasted_iota("float32", (N, 3), 1), jnp.eye(N)[:, :3] + x,
        jnp.zeros_like(x) + x, bj.broadcast(w) * x, x * jnp.linspace(0.0, 1.0, N)[:, None],
        jnp.outer(jnp.arange(float(N)), w) + x, jnp.full((N,), w[0]) + x[:, 0],
        jnp.where(jnp.arange(N)[:, None] == N - 1, x, 0.0), jnp.tri(N, 3) * x,
        jnp.tile(w, (N, 1)) * x, jnp.tile(w[:1], (N, 3)) * x,
        jnp.tile(jnp.outer(jnp.arange(float(N)), w), (1, 2))[:, 1:4] * x, jnp.stack([w] * N) * x,
        jnp.stack([w] * N, axis=1).T * x, jnp.stack([w] * (N - 1) + [-w]) * x,
        jnp.stack([jnp.arange(float(N))] * 3, axis=1) * x,
    ],
)  # fmt: skip

# --- dimensions as long as the placement, n = 1, n = 8, and no data at all

for n in (1, 8):
    group(f"cube_{n}", placed(normal(n, n, n), 1), normal(n, n, n, seed=1), normal(n, n, seed=2),
        local=lambda x, y, w: [
            x + y, x.transpose(2, 0, 1), jnp.where(x > 0, x, y), lax.clamp(y, x, y),
            lax.select(jnp.broadcast_to(y[:1, :, :1] > 0, y.shape), x, y), jnp.sum(x, 0),
            jnp.sum(x, 2), jnp.einsum("abc,ebc->bae", x, y), x @ w, x[None] * 2, jnp.cumsum(x, 0),
            jnp.sort(x, 2), x + w[None], x.reshape(*x.shape, 1),
        ],
        fold=lambda x, y, w: [jnp.sum(x, 1), jnp.sum(x), jnp.einsum("abc,bd->acd", x, w)],
    )  # fmt: skip

group("one_member", placed(normal(1, 3)), normal(5, 3, seed=1),
    local=lambda x, y: [x[:1], jnp.stack([x, x], 1), x * y[:1], x[None]],
    fold=lambda x, y: [jnp.sum(x, 0), jnp.mean(x)],
    gather=lambda x, y: [
        x + y, x[0], x.squeeze(0), x.reshape(3), lax.mul(x, y), jnp.broadcast_to(x, (5, 3)),
        x.reshape(-1) * 2.0, x[::2], x[::2][1:],
    ],
)  # fmt: skip

group("empty_members", placed(normal(N, 0, 3)),
    local=lambda x: [
        x + 1, jnp.sum(x, 1), x.reshape(N, 3, 0), jnp.concatenate([x, x], 1),
        jnp.einsum("nij,nik->njk", x, x),
    ],
    fold=lambda x: [jnp.sum(x, 0), jnp.sum(x), jnp.einsum("nij,nkl->ijkl", x, x)],
)  # fmt: skip

group("bfloat16", placed(normal(N, 64, dtype="bfloat16")),
    local=lambda x: [x * 2, jnp.sum(x, 1), jnp.exp(x), x @ jnp.ones((64, 2), "bfloat16")],
    fold=lambda x: [
        jnp.sum(x, 0), jnp.sum(x), x.T @ x, jnp.max(x, 0), jnp.prod(x, 0), jnp.mean(x, 0),
    ],
)  # fmt: skip

# The last member is repeated as padding: its infinities and NaNs must count once, or not at all.
last = jnp.asarray(
    np.where(np.arange(N)[:, None] == N - 1, [np.inf, -np.inf, np.nan], 1.0), "float32"
)
first = jnp.asarray(np.where(np.arange(N)[:, None] == 0, [np.inf, np.nan, 2.0], 1.0), "float32")
for name, x in {"last": last, "first": first}.items():
    group(f"infinite_{name}", placed(x),
        local=lambda x: [x * 2, jnp.sum(x, 1)],
        fold=lambda x: [
            jnp.sum(x, 0), jnp.max(x, 0), jnp.min(x, 0), jnp.prod(x, 0), x.T @ x,
            jnp.einsum("n,ni->i", jnp.arange(float(N)), x), jnp.any(jnp.isnan(x), 0),
            jnp.sum(jnp.isinf(x), 0), jax.ops.segment_sum(x, jnp.arange(N) % 3, 3),
            jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0), 0),
        ],
    )  # fmt: skip
