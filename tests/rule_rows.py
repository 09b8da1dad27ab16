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


@dataclasses.dataclass
class Group:
    args: tuple
    rows: dict


GROUPS: dict[str, Group] = {}


def group(name, *args, local=(), fold=(), gather=()):
    """Adds rows that share arguments; each is a name and a function of them."""
    rows = {}
    for kind, members in (("local", local), ("fold", fold), ("gather", gather)):
        rows |= {row: (kind, function) for row, function in dict(members).items()}
    assert name not in GROUPS
    GROUPS[name] = Group(args, rows)


# --- elementwise, at each axis, with all sorts of second operands

UNARY = {
    "abs": jnp.abs,
    "neg": lax.neg,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": lax.round,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": lax.tan,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "asinh": jnp.arcsinh,
    "cosh": jnp.cosh,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "cbrt": jnp.cbrt,
    "square": jnp.square,
    "integer_pow": lambda x: x**3,
    "is_finite": jnp.isfinite,
    "bfloat16": lambda x: x.astype("bfloat16"),
    "int32": lambda x: x.astype("int32"),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "clamp_scalars": lambda x: jnp.clip(x, -0.5, 0.5),
    "where_scalars": lambda x: jnp.where(x > 0, x, 0.0),
    "rsqrt": lambda x: lax.rsqrt(x * x + 1.0),
    "logs": lambda x: jnp.log(x * x + 1.0) + jnp.log1p(x * x),
    "sqrt": lambda x: jnp.sqrt(x * x),
    "acos": lambda x: jnp.arccos(jnp.tanh(x)),
    "asin": lambda x: jnp.arcsin(jnp.tanh(x)),
    "atanh": lambda x: jnp.arctanh(0.5 * jnp.tanh(x)),
    "acosh": lambda x: jnp.arccosh(x * x + 1.5),
    "erf_inv": lambda x: lax.erf_inv(0.5 * jnp.tanh(x)),
    "lgamma": lambda x: lax.lgamma(x * x + 1.0),
    "digamma": lambda x: lax.digamma(x * x + 1.0),
    "bessel": lambda x: lax.bessel_i0e(x),
    "bessel_i1e": lambda x: lax.bessel_i1e(x),
    "one_minus_square": lambda x: 1 - x * x,
    "bitcast": lambda x: lax.bitcast_convert_type(x, np.dtype("int32")),
    "bitcast_bytes": lambda x: lax.bitcast_convert_type(x, np.dtype("uint8")),
    "literal": lambda x: 2 * x - 1,
    "gradient": jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)),
    "stop_gradient": lax.stop_gradient,
    "optimization_barrier": lax.optimization_barrier,
    "device_put": jax.device_put,
    "copy": jnp.copy,
}

SOME = ["neg", "int32", "relu", "clamp_scalars", "where_scalars", "bitcast_bytes", "gradient"]
group("unary_1", placed(normal(N, 3, 4), 1), local=UNARY)
for axis in (0, 2):
    group(f"unary_{axis}", placed(normal(N, 3, 4), axis), local={k: UNARY[k] for k in SOME})

BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": jnp.arctan2,
    "lt": jnp.less,
    "eq": jnp.equal,
    "select": lambda x, y: lax.select(x > y, x, y),
    "nextafter": jnp.nextafter,
    "div": lambda x, y: x / (y * y + 1.0),
    "rem": lambda x, y: lax.rem(x, y * y + 1.0),
    "pow": lambda x, y: jnp.abs(x) ** jnp.abs(y),
    "reversed": lambda x, y: y - x,
    "clamp": lambda x, y: lax.clamp(y - 1.0, x, y + 1.0),
    "complex": lax.complex,
}
SPECIAL = {
    "igamma": lambda x, y: lax.igamma(x * x + 0.5, y * y + 0.5),
    "zeta": lambda x, y: lax.zeta(x * x + 1.5, y * y + 1.0),
    "polygamma": lambda x, y: lax.polygamma(jnp.round(x * x + 1), y * y + 1.0),
    "parts": lambda x, y: lax.real(lax.complex(x, y)) - lax.imag(lax.complex(x, y)),
    "conj": lambda x, y: lax.conj(lax.complex(x, y)),
    "le": lambda x, y: x <= y,
}
group("special", placed(normal(N, 3)), normal(N, 3, seed=1), local=SPECIAL)
for axis in (0, 1, 2):
    shape = [3, 4]
    shape.insert(axis, N)
    one = [3, 4]
    one.insert(axis, 1)
    x = placed(normal(N, 3, 4), axis)
    group(f"binary_placed_{axis}", x, placed(normal(N, 3, 4, seed=1), axis), local=BINARY)
    group(f"binary_server_{axis}", x, normal(*shape, seed=2), local=BINARY)
    group(
        f"binary_row_{axis}",
        x,
        normal(*one, seed=3),
        local={
            "lax_add": lambda x, y: x + jnp.broadcast_to(y, x.shape),
            "lax_mul": lax.mul,
            "lax_lt": lax.lt,
            "reversed": lambda x, y: lax.sub(y, x),
        },
    )
    group(
        f"server_predicate_{axis}",
        x,
        normal(*shape, seed=2),
        local={
            "select_placed_cases": lambda x, y: lax.select(y > 0, x, y),
            "select_scalar": lambda x, y: lax.select(y[0, 0, 0] > 0, x, y),
            "select_placed_predicate": lambda x, y: lax.select(x > 0, y, 2 * y),
            "select_n": lambda x, y: lax.select_n((x > 0).astype("int32"), y, 2 * y, x),
            "clamp_scalars": lambda x, y: lax.clamp(jnp.minimum(y[0, 0, 0], 0), x, 0.5),
            "clamp_server": lambda x, y: lax.clamp(x, y, x + 1),
        },
    )

group(
    "ints",
    placed(ints(N, 3, low=-100, high=100, dtype="int8")),
    ints(3, low=-100, high=100, dtype="int8", seed=1),
    local={
        "add": lambda x, y: x + y[None],
        "mul": lambda x, y: x * y[None],
        "not": lambda x, y: ~x,
        "and": lambda x, y: x & y[None],
        "or": lambda x, y: x | y[None],
        "xor": lambda x, y: x ^ y[None],
        "shift_left": lambda x, y: x << 2,
        "shift_right": lambda x, y: x >> 2,
        "shift_right_logical": lambda x, y: lax.shift_right_logical(x, jnp.int8(2)),
        "population_count": lambda x, y: lax.population_count(x),
        "clz": lambda x, y: lax.clz(x),
        "div": lambda x, y: x // jnp.int8(3),
        "rem": lambda x, y: x % jnp.int8(3),
    },
    fold={
        "lax_sum_wraps": lambda x, y: lax.reduce_sum_p.bind(
            x, axes=(0,), **_no_sharding(lax.reduce_sum_p)
        ),
        "lax_sum_of_both_wraps": lambda x, y: lax.reduce_sum_p.bind(
            x, axes=(0, 1), **_no_sharding(lax.reduce_sum_p)
        ),
        "lax_prod_wraps": lambda x, y: lax.reduce_prod_p.bind(
            x, axes=(0,), **_no_sharding(lax.reduce_prod_p)
        ),
        "lax_max": lambda x, y: lax.reduce_max(x, (0,)),
        "jnp_sum": lambda x, y: jnp.sum(x, 0),
        "jnp_min": lambda x, y: jnp.min(x),
        "jnp_mean": lambda x, y: jnp.sum(x, 0, dtype="float32"),
        "dot_wraps": lambda x, y: x.T @ x,
        "dot_to_int32": lambda x, y: lax.dot_general(
            x, x, (((0,), (0,)), ((), ())), preferred_element_type=np.dtype("int32")
        ),
        "uint8_sum": lambda x, y: jnp.sum(x.astype("uint8"), 0),
        "or_of_ints": lambda x, y: lax.reduce_or(x, (0,)),
        "and_of_ints": lambda x, y: lax.reduce_and(x | 6, (0,)),
        "xor_of_ints": lambda x, y: lax.reduce_xor(x, (0,)),
        "xor_of_all": lambda x, y: lax.reduce_xor(x, (0, 1)),
        "and_of_unsigned": lambda x, y: jnp.bitwise_and.reduce(x.astype("uint8") | 9),
        "or_of_transposed": lambda x, y: lax.reduce_or(x.T.astype("uint32"), (1,)),
    },
)


def _no_sharding(primitive):
    """The layout parameter that newer versions of JAX ask for."""
    name = {"reduce_sum": "sum", "reduce_prod": "prod"}[primitive.name]
    (eqn,) = jax.make_jaxpr(lambda x: getattr(lax, f"reduce_{name}")(x, (0,)))(jnp.ones(2)).eqns
    return {key: value for key, value in eqn.params.items() if key != "axes"}


group(
    "bools",
    placed(ints(N, 3, high=2, dtype="bool")),
    local={
        "not": jnp.logical_not,
        "and": lambda x: x & ~x,
        "to_float": lambda x: x.astype("float32"),
        "any_1": lambda x: jnp.any(x, 1),
        "xor_1": lambda x: lax.reduce_xor(x, (1,)),
    },
    fold={
        "any": lambda x: jnp.any(x, 0),
        "all": lambda x: jnp.all(x),
        "sum": lambda x: jnp.sum(x, 0),
        "max": lambda x: jnp.max(x, 0),
        "xor": lambda x: lax.reduce_xor(x, (0,)),
        "count": lambda x: jnp.count_nonzero(x, axis=0),
    },
)

# --- shapes

for axis in (0, 1, 2):
    inserted = functools.partial(lambda axis, *dims: (*dims[:axis], N, *dims[axis:]), axis)
    group(
        f"shape_{axis}",
        placed(normal(N, 4, 6), axis),
        local={
            "transpose": lambda x: jnp.transpose(x, (2, 0, 1)),
            "swap": lambda x: jnp.swapaxes(x, 0, 2),
            "expand": lambda x: x[None, :, None],
            "squeeze": lambda x: jnp.squeeze(x[None, :, None], (0, 2)),
            "to_2d": functools.partial(
                lambda shape, x: x.reshape(shape),
                {0: (N, 24), 1: (4, N, 3, 2), 2: (2, 2, 6, N)}[axis],
            ),
            "broadcast": lambda x: jnp.broadcast_to(x, (5, *x.shape)),
            "broadcast_new_last": lambda x: jnp.broadcast_to(x[..., None], (*x.shape, 5)),
            "pad": functools.partial(
                lambda axis, x: jnp.pad(x, [(0, 0) if k == axis else (1, 2) for k in range(3)]),
                axis,
            ),
            "pad_negative": functools.partial(
                lambda axis, x: lax.pad(
                    x, 0.0, [(0, 0, 0) if k == axis else (-1, 2, 1) for k in range(3)]
                ),
                axis,
            ),
            "stack": lambda x: jnp.stack([x, -x], 1),
            "stack_last": lambda x: jnp.stack([x, -x], -1),
            "moved": lambda x: jnp.moveaxis(x, 0, -1),
        },
    )

group(
    "slices",
    placed(normal(N, 6, 7)),
    jnp.int32(2),
    local={
        "column": lambda x, i: x[:, 1],
        "strided": lambda x, i: x[:, ::2, 1::3],
        "negative_stride": lambda x, i: x[:, ::-1],
        "negative_slice": lambda x, i: x[:, -3:-1],
        "rev_last": lambda x, i: jnp.flip(x, -1),
        "unstack": lambda x, i: jnp.unstack(x, axis=1)[2],
        "split": lambda x, i: jnp.split(x, 3, axis=1)[1],
        "concatenate": lambda x, i: jnp.concatenate([x, x[:, :2]], 1),
        "concatenate_server": lambda x, i: jnp.concatenate([x, jnp.zeros((N, 1, 7))], 1),
        "dynamic_slice": lambda x, i: lax.dynamic_slice(x, (i, i, i), (N, 2, 3)),
        "dynamic_index": lambda x, i: lax.dynamic_index_in_dim(x, i, 1),
        "dynamic_update": lambda x, i: lax.dynamic_update_slice(x, jnp.ones((N, 2, 2)), (i, i, i)),
        "update_rows": lambda x, i: lax.dynamic_update_slice(x, jnp.ones((2, 6, 7)), (i, i, i)),
        "update_far_rows": lambda x, i: lax.dynamic_update_slice(
            x, jnp.ones((2, 6, 1)), (50 * i, i, 3 * i)
        ),
        "update_row": lambda x, i: x.at[i].set(1.0),
        "update_listed_rows": lambda x, i: x.at[jnp.array([3, 0, 3, -1, 50])].add(2.0),
        "update_elements": lambda x, i: x.at[jnp.array([3, 0, 3]), i].multiply(2.0),
        "update_head": lambda x, i: x.at[:3].max(0.0),
        "update_head_of_columns": lambda x, i: x.at[1:3, ::2].add(jnp.ones(7)),
        "update_clipped": lambda x, i: x.at[50 * i].set(1.0, mode="clip"),
        "update_integers": lambda x, i: (10 * x).astype("int8").at[i].set(1),
        "update_narrow": lambda x, i: x.astype("bfloat16").at[3:].add(1),
        "update_into_server": lambda x, i: lax.dynamic_update_slice(
            jnp.ones((N, 9, 9)), x, (i, i, i)
        ),
        "tile": lambda x, i: jnp.tile(x, (1, 2, 1)),
        "repeat": lambda x, i: jnp.repeat(x, 2, axis=1, total_repeat_length=12),
        "roll_1": lambda x, i: jnp.roll(x, 1, axis=1),
        "tril": lambda x, i: jnp.tril(x),
        "diff_1": lambda x, i: jnp.diff(x, axis=1),
        "diagonal": lambda x, i: jnp.diagonal(x, axis1=1, axis2=2),
    },
    fold={
        "first": lambda x, i: x[0],
        "last": lambda x, i: x[-1],
        "part_of_first": lambda x, i: x[0, 1::2, -1],
        "strided_first": lambda x, i: lax.slice(x, (0, 0, 0), (1, 6, 7), (5, 2, 3)),
        "dynamic_row": lambda x, i: lax.dynamic_index_in_dim(x, i, 0),
        "dynamic_part": lambda x, i: lax.dynamic_slice(x, (i, i, 5 * i), (1, 2, 3)),
        "far_row": lambda x, i: lax.dynamic_slice(x, (50 * i, i, i), (1, 2, 3)),
        "negative_row": lambda x, i: lax.dynamic_slice(x, (-50 * i, i, i), (1, 2, 3)),
        "integers": lambda x, i: (10 * x).astype("int8")[0],
        "unsigned": lambda x, i: (10 * jnp.abs(x)).astype("uint32")[-1],
        "flags": lambda x, i: (x > 0)[0],
        "narrow": lambda x, i: x.astype("bfloat16")[-1],
        "infinities": lambda x, i: (x / jnp.zeros(()))[0],
        "nan": lambda x, i: jnp.where(x > 0, x, jnp.nan)[0],
        "row": lambda x, i: x[3],
        "head": lambda x, i: x[:5],
        "dynamic_by_member": lambda x, i: lax.dynamic_slice(
            x, (i, i, x[0, 0, 0].astype("int32")), (2, 2, 2)
        ),
        "negative_zero": lambda x, i: (x * 0 * jnp.sign(x))[0],
        "key": lambda x, i: jax.random.split(jax.random.key(0), N)[3],
        "key_of_members": lambda x, i: jax.vmap(jax.random.key)(x[:, 0, 0].astype("int32"))[i],
    },
    gather={
        "complex_row": lambda x, i: lax.complex(x, x)[0],
        "reversed": lambda x, i: x[::-1],
        "skipping": lambda x, i: x[::2],
        "ravel": lambda x, i: x.reshape(-1),
        "roll": lambda x, i: jnp.roll(x, 1, 0),
        "concatenate_0": lambda x, i: jnp.concatenate([x, x]),
        "pad_0": lambda x, i: jnp.pad(x, 1),
        "unstack_0": lambda x, i: jnp.unstack(x)[1],
        "split_0": lambda x, i: jnp.split(x, [3])[0],
        "update_larger": lambda x, i: lax.dynamic_update_slice(jnp.ones((30, 6, 7)), x, (i, i, i)),
        "merge_with_next": lambda x, i: x.reshape(N * 6, 7),
        "diff": lambda x, i: jnp.diff(x, axis=0),
    },
)

# --- sorts, scans, windows, reductions


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 1), "VALID")


group(
    "along_1",
    placed(normal(N, 6, 5)),
    placed(normal(N, 6, 5, seed=1)),
    local={
        "cumsum": lambda x, y: jnp.cumsum(x, 1),
        "cumprod": lambda x, y: jnp.cumprod(x, -1),
        "cummax": lambda x, y: lax.cummax(x, 1, reverse=True),
        "cummin": lambda x, y: lax.cummin(x, 2),
        "cumlogsumexp": lambda x, y: lax.cumlogsumexp(x, 1),
        "sort": lambda x, y: jnp.sort(x, 1),
        "argsort": lambda x, y: jnp.argsort(x, -1),
        "median": lambda x, y: jnp.median(x, 1),
        "sort_several": lambda x, y: lax.sort((x, y), dimension=1, num_keys=2),
        "sort_with_server": lambda x, y: lax.sort((x, jnp.ones_like(x)), dimension=2, num_keys=1),
        "top_k": lambda x, y: lax.top_k(x, 3),
        "approx_max_k": lambda x, y: lax.approx_max_k(x, 2),
        "argmax": lambda x, y: jnp.argmax(x, 1),
        "argmin": lambda x, y: jnp.argmin(x, 2),
        "sum_1": lambda x, y: jnp.sum(x, 1),
        "mean_12": lambda x, y: jnp.mean(x, (1, 2)),
        "max_2": lambda x, y: jnp.max(x, 2),
        "prod_1": lambda x, y: jnp.prod(x, 1),
        "softmax": lambda x, y: jax.nn.softmax(x, -1),
        "logsumexp": lambda x, y: jax.nn.logsumexp(x, 1),
        "var": lambda x, y: jnp.var(x, 1),
        "quantile": lambda x, y: jnp.quantile(x, 0.3, axis=1),
        "searchsorted": lambda x, y: jnp.searchsorted(jnp.arange(4.0), x),
        "interp": lambda x, y: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
        "solve": lambda x, y: jnp.linalg.solve(x[:, :5] + 9 * jnp.eye(5)[None], y[:, 1:, :2]),
        "norm": lambda x, y: jnp.linalg.norm(x, axis=2),
        "one_hot": lambda x, y: jax.nn.one_hot(jnp.argmax(x, 1), 6),
        "window_sum": lambda x, y: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 2, 1), "SAME"),
        "window_max_slope": lambda x, y: jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x),
        "window_max_change": lambda x, y: jax.jvp(pooled, (x,), (y,)),
        "polyval": lambda x, y: jnp.polyval(jnp.arange(4.0), x),
        "window_max": lambda x, y: lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "VALID"
        ),
    },
    fold={
        "sum": lambda x, y: jnp.sum(x, 0),
        "sum_all": lambda x, y: jnp.sum(x),
        "sum_02": lambda x, y: jnp.sum(x, (0, 2)),
        "max": lambda x, y: jnp.max(x, 0),
        "min_all": lambda x, y: jnp.min(x),
        "prod": lambda x, y: jnp.prod(x, 0),
        "mean": lambda x, y: jnp.mean(x, 0),
        "mean_all": lambda x, y: jnp.mean(x),
        "var_0": lambda x, y: jnp.var(x, 0),
        "logsumexp_0": lambda x, y: jax.nn.logsumexp(x, 0),
        "average": lambda x, y: jnp.average(x[:, 0, 0], weights=y[:, 0, 0] ** 2),
        "norm_0": lambda x, y: jnp.linalg.norm(x[:, 0], axis=0),
        "any": lambda x, y: jnp.any(x > 2, 0),
        "all": lambda x, y: jnp.all(x > -9),
        "vdot": lambda x, y: jnp.vdot(x[:, 0, 0], y[:, 0, 0]),
        "vdot_raveled": lambda x, y: jnp.vdot(x, y),
        "sum_raveled": lambda x, y: jnp.sum(x.T.ravel()),
        "max_raveled": lambda x, y: jnp.max(jnp.ravel(x)),
        "histogram": lambda x, y: jnp.histogram(x[:, 0, 0], bins=jnp.linspace(-1.0, 1.0, 5))[0],
        "moved_sum": lambda x, y: jnp.sum(jnp.moveaxis(x, 0, 1), (1, 2)),
        "argmax_0": lambda x, y: jnp.argmax(x, 0),
        "argmin_0": lambda x, y: jnp.argmin(jnp.round(x), 0),
        "top_k_0": lambda x, y: lax.top_k(x[:, 0, 0], 3),
        "top_k_each": lambda x, y: lax.top_k(jnp.moveaxis(x, 0, 2), 2),
        "top_k_equal": lambda x, y: lax.top_k((x[:, 0, 0] > 0).astype("int32"), 5),
        "top_k_lowest": lambda x, y: lax.top_k(jnp.full_like(x[:, 0, 0], -jnp.inf), 5),
        "top_k_of_nan": lambda x, y: lax.top_k(
            jnp.where(x > 1, jnp.nan, jnp.where(x < 0, -jnp.nan, jnp.sign(y) * 0))[:, 0].T, 5
        ),
        "top_k_of_bytes": lambda x, y: lax.top_k((9 * x[:, 0, 0]).astype("uint8"), 4),
        "top_k_of_bfloat16": lambda x, y: lax.top_k(-x[:, 0, 0].astype("bfloat16"), 5),
        "argmax_moved": lambda x, y: jnp.argmax(jnp.moveaxis(x > 1, 0, 1), 1),
    },
    gather={
        "sort_0": lambda x, y: jnp.sort(x, 0),
        "median_0": lambda x, y: jnp.median(x, 0),
        "cumsum_0": lambda x, y: jnp.cumsum(x, 0),
        "cummax_0": lambda x, y: lax.cummax(x, 0),
        "window_0": lambda x, y: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"),
        "top_many": lambda x, y: lax.top_k(x[:, 0, 0], 6),
        "scan": lambda x, y: lax.scan(lambda c, v: (c + v, None), jnp.zeros((6, 5)), x)[0],
        "map": lambda x, y: lax.map(jnp.sin, x),
        "axes_differ": lambda x, y: x[:, 0] @ y[:, 1].T,
    },
)

# --- reductions of members that are sliced or reshaped

group(
    "sliced",
    placed(normal(N, 4)),
    placed(ints(N, seed=1)),
    normal(4, 3, seed=2),
    fold={
        "sum": lambda x, k, w: jnp.sum(x[:8], 0),
        "mean_of_all": lambda x, k, w: jnp.mean(x[2:10]),
        "max": lambda x, k, w: jnp.max(x[1:], 0),
        "min_of_columns": lambda x, k, w: jnp.min(x[1:, 1:3], 0),
        "prod": lambda x, k, w: jnp.prod(x[:-1, 0]),
        "any": lambda x, k, w: jnp.any(x[3:] > 1, 0),
        "all": lambda x, k, w: jnp.all(x[3:, ::2] > -2),
        "var": lambda x, k, w: jnp.var(x[:8], 0),
        "computed": lambda x, k, w: jnp.sum(jnp.tanh(x[:8] @ w), 0),
        "transposed": lambda x, k, w: jnp.sum(jnp.exp(x.T[:, 4:]), 1),
        "vmapped": lambda x, k, w: jnp.mean(jax.vmap(lambda v: jnp.max(v @ w))(x[4:])),
        "gram": lambda x, k, w: x[:7].T @ jnp.square(x[:7]),
        "regression": lambda x, k, w: jnp.linalg.solve(
            x[:8].T @ x[:8] + jnp.eye(4), x[:8].T @ k[:8].astype("float32")
        ),
        "split": lambda x, k, w: (jnp.sum(x[:7], 0), jnp.max(x[4:], 0)),
        "halves": lambda x, k, w: jnp.sum(x[:6], 0) - jnp.sum(x[6:], 0),
        "segments": lambda x, k, w: jax.ops.segment_sum(x[:9], k[:9], 4),
        "segment_max": lambda x, k, w: jax.ops.segment_max(x[2:], k[2:], 4),
        "counted": lambda x, k, w: jnp.sum(x[2:] * jnp.arange(9.0)[:, None], 0),
        "drawn": lambda x, k, w: jnp.sum(x[2:] * jax.random.normal(jax.random.key(0), (9, 4)), 0),
        "outside_nan": lambda x, k, w: jnp.sum(jnp.where(jnp.arange(N) > 8, jnp.nan, x[:, 0])[:8]),
        "outside_inf": lambda x, k, w: (x / jnp.arange(float(N))[:, None])[1:].T @ x[1:],
        "integers": lambda x, k, w: jnp.sum(k[1:].astype("uint8") * 99),
        "bfloat16": lambda x, k, w: jnp.sum(x[1:].astype("bfloat16"), 0),
        "gradient": lambda x, k, w: jax.grad(
            lambda w: jnp.mean((jax.nn.relu(x[:8] @ w)[:, 0] - k[:8].astype("float32")) ** 2)
        )(w),
        "convolved": lambda x, k, w: jax.grad(lambda w: jnp.sum(conv_rows(jnp.tanh(x[1:]), w)))(
            w[:2]
        ),
        "held_out": lambda x, k, w: [
            jnp.mean(jnp.argmax(part @ w, 1) == keys)
            for part, keys in ((x[:8], k[:8]), (x[2:], k[2:]))
        ],
    },
    local={
        "gradient_of_members": lambda x, k, w: jax.grad(
            lambda x: jnp.mean(jnp.tanh(x[:8] @ w) ** 2)
        )(x),
    },
)
group(
    "sliced_and_whole",
    placed(normal(N, 4)),
    placed(ints(N, seed=1)),
    normal(4, 3, seed=2),
    gather={
        "scan": lambda x, k, w: jnp.cumsum(x[:8], 0),
        "rows": lambda x, k, w: x[:8],
        "rows_too": lambda x, k, w: (x[:8], jnp.sum(x[:8], 0)),
        "neighbours": lambda x, k, w: jnp.sum(jnp.abs(x[1:] - x[:-1])),
        "with_server": lambda x, k, w: jnp.sum(x[:8] * jnp.concatenate([w, w])[:, :1], 0),
    },
)


def conv_rows(x, kernel):
    return lax.conv_general_dilated(x[:, None], kernel[:, None], (1,), "SAME")


M = 12
group(
    "reshaped",
    placed(normal(M, 4)),
    placed(normal(M, 2, 3, seed=1), 1),
    normal(4, seed=2),
    fold={
        "all": lambda x, y, w: jnp.sum(x.reshape(3, 4, 4)),
        "all_members": lambda x, y, w: jnp.max(x.reshape(3, 4, 4), (0, 1)),
        "mean_1": lambda x, y, w: jnp.mean(x.reshape(3, 4, 4), 1),
        "sum_0": lambda x, y, w: jnp.sum(x.reshape(3, 4, 4), 0),
        "max_1": lambda x, y, w: jnp.max(x.reshape(2, 6, 4), 1),
        "min_middle": lambda x, y, w: jnp.min(x.reshape(2, 3, 2, 4), (1, 3)),
        "sum_outer": lambda x, y, w: jnp.sum(x.reshape(2, 3, 2, 2, 2), (0, 2, 4)),
        "prod_1": lambda x, y, w: jnp.prod(x.reshape(4, 3, 4), 1),
        "any_1": lambda x, y, w: jnp.any(x.reshape(4, 3, 4) > 1, 1),
        "all_0": lambda x, y, w: jnp.all(x.reshape(4, 3, 4) < 1, 0),
        "with_ones": lambda x, y, w: jnp.sum(x.reshape(1, 3, 1, 4, 4, 1), (0, 3)),
        "keeping_ones": lambda x, y, w: jnp.sum(x.reshape(1, 12, 4, 1), 1),
        "merged": lambda x, y, w: jnp.sum(x.reshape(24, 2), 0),
        "merged_too_far": lambda x, y, w: jnp.sum(x.reshape(6, 8), 0),
        "merged_and_cut": lambda x, y, w: jnp.max(x.reshape(3, 8, 2), 1),
        "merged_flat": lambda x, y, w: jnp.sum(x.reshape(2, 24), 1),
        "computed": lambda x, y, w: jnp.sum(jnp.tanh(x.ravel()) ** 2),
        "two": lambda x, y, w: jnp.sum(jnp.where(x.ravel() > 0, jnp.exp(x.ravel()), 1.0)),
        "norm": lambda x, y, w: jnp.linalg.norm(2 * x.reshape(-1), jnp.inf),
        "inside": lambda x, y, w: jnp.sum(y.reshape(2, 3, 4, 3), 1),
        "inside_too": lambda x, y, w: jnp.sum(y.reshape(2, 3, 12), (0, 2)),
        "both_ways": lambda x, y, w: (jnp.sum(x.reshape(3, 16), 1), jnp.sum(x.reshape(4, 12), 1)),
        "integers": lambda x, y, w: jnp.sum((9 * x).astype("int8").reshape(3, 16) * 3, 1),
        "bytes": lambda x, y, w: lax.reduce_max((9 * x).astype("uint8").reshape(3, 16), (1,)),
        "bits": lambda x, y, w: lax.reduce_or((9 * x).astype("int8").reshape(3, 16), (0, 1)),
        "bfloat16": lambda x, y, w: jnp.mean(x.astype("bfloat16").reshape(3, 4, 4), 1),
        "complex": lambda x, y, w: jnp.sum(lax.complex(x, -x).reshape(3, 4, 4), 1),
        "argmax": lambda x, y, w: jnp.argmax(x),
        "argmin": lambda x, y, w: jnp.argmin(y),
        "argmax_of_axes": lambda x, y, w: jnp.unravel_index(jnp.argmax(y), y.shape),
        "argmax_equal": lambda x, y, w: jnp.argmax(jnp.round(y)),
        "argmax_bools": lambda x, y, w: jnp.argmax(x > 1.5),
        "argmax_none": lambda x, y, w: jnp.argmax(x > 99),
        "argmin_of_nan": lambda x, y, w: jnp.argmin(jnp.where(x > 1, jnp.nan, x)),
        "argmax_of_lowest": lambda x, y, w: jnp.argmax(jnp.full_like(x, -jnp.inf)),
        "argmax_bytes": lambda x, y, w: lax.argmax(x.ravel().astype("int8"), 0, np.dtype("uint8")),
        "nanargmin": lambda x, y, w: jnp.nanargmin(jnp.where(x < 0, jnp.nan, x)),
    },
    local={
        "gradient_of_members": lambda x, y, w: jax.grad(lambda x: jnp.sum(jnp.tanh(x.ravel())))(x),
        "and_back": lambda x, y, w: jnp.sin(x.ravel()).reshape(x.shape),
    },
)
group(
    "reshaped_and_whole",
    placed(normal(M, 4)),
    placed(normal(M, 2, 3, seed=1), 1),
    normal(4, seed=2),
    gather={
        "again": lambda x, y, w: jnp.sum(x.reshape(3, 16).reshape(6, 8), 1),
        "rows": lambda x, y, w: x.reshape(3, 16),
        "sums_too": lambda x, y, w: (x.reshape(3, 16), jnp.sum(x.reshape(3, 16), 1)),
        "sorted_too": lambda x, y, w: (jnp.sort(x.ravel()), jnp.sum(x.ravel())),
        "flat": lambda x, y, w: x.reshape(-1) * 2,
        "weighted": lambda x, y, w: jnp.sum(x.reshape(3, 4, 4) * w[None, :, None]),
        "complex_extremes": lambda x, y, w: jnp.max(lax.complex(x, -x).reshape(3, 4, 4), 1),
        "bits_of_rows": lambda x, y, w: lax.reduce_or((9 * x).astype("int8").reshape(3, 16), (1,)),
        "too_many_rows": lambda x, y, w: jnp.sum(x.reshape(2, 24), 0),
    },
)

# --- products, all ways of pairing

group(
    "products",
    placed(normal(N, 4, 5)),
    placed(normal(N, 5, 3, seed=1)),
    normal(5, 3, seed=2),
    normal(N, seed=3),
    local={
        "batch": lambda x, y, w, s: x @ y,
        "right_server": lambda x, y, w, s: x @ w,
        "left_server": lambda x, y, w, s: jnp.matmul(w.T, y.swapaxes(1, 2).swapaxes(1, 2)),
        "batch_server": lambda x, y, w, s: jnp.einsum("nij,n->ni", x, s),
        "server_batch": lambda x, y, w, s: jnp.einsum("n,nij->nji", s, x),
        "bilinear": lambda x, y, w, s: jnp.einsum("nij,jk,nlk->nil", x, w, y),
        "outer": lambda x, y, w, s: jnp.einsum("nij,nkl->nikjl", x, y),
        "free_left": lambda x, y, w, s: jnp.einsum("nij,jk->kin", x, w),
        "free_right": lambda x, y, w, s: jnp.einsum("jk,njl->knl", w, y),
        "norms": lambda x, y, w, s: jnp.einsum("nij,nij->n", x, x),
        "kernels": lambda x, y, w, s: jax.vmap(lambda a, b: jnp.tanh(a @ w).T @ (a @ b))(x, y),
        "tensordot": lambda x, y, w, s: jnp.tensordot(x, w, axes=[[2], [0]]),
    },
    fold={
        "contract": lambda x, y, w, s: jnp.einsum("nij,nkl->ijkl", x, y),
        "gram": lambda x, y, w, s: x[:, 0].T @ x[:, 0],
        "weighted": lambda x, y, w, s: jnp.einsum("n,nij->ij", s, x),
        "weighted_right": lambda x, y, w, s: jnp.einsum("nij,n->ij", x, s),
        "flattened": lambda x, y, w, s: jnp.vdot(x, x),
        "contract_two": lambda x, y, w, s: jnp.einsum("nij,njk->ik", x, y),
        "bfloat16": lambda x, y, w, s: x[:, 0].astype("bfloat16").T @ x[:, 0].astype("bfloat16"),
        "float16": lambda x, y, w, s: x[:, 0].astype("float16").T @ x[:, 0].astype("float16"),
        "highest": lambda x, y, w, s: jnp.einsum(
            "ni,nj->ij", x[:, 0], y[:, :, 0], precision="highest"
        ),
        "algorithm": lambda x, y, w, s: jnp.einsum(
            "ni,nj->ij", x[:, 0], y[:, :, 0], precision=lax.DotAlgorithmPreset.F32_F32_F32
        ),
    },
    gather={
        "pairs": lambda x, y, w, s: x[:, 0] @ x[:, 1].T,
        "distances": lambda x, y, w, s: jnp.sum((x[:, None, 0] - x[None, :, 0]) ** 2, -1),
    },
)

NHWC = ("NHWC", "HWIO", "NHWC")
conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 2), padding="SAME")


def conv_loss(kernel, images):
    return jnp.sum(jnp.tanh(conv(images, kernel, dimension_numbers=NHWC)))


group(
    "convolutions",
    placed(normal(N, 6, 6, 2)),
    normal(3, 3, 2, 4, seed=1),
    local={
        "max_pool_gradient": lambda x, k: jax.grad(
            lambda x: jnp.sum(
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2
            )
        )(x),
        "nhwc": lambda x, k: conv(x, k, dimension_numbers=NHWC),
        "grouped": lambda x, k: conv(x, k[:, :, :1], dimension_numbers=NHWC, feature_group_count=2),
        "nchw": lambda x, k: conv(x.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1)),
        "batch_inside": lambda x, k: conv(
            x.transpose(1, 2, 0, 3), k, dimension_numbers=("HWNC", "HWIO", "HWNC")
        ),
        "gradient": lambda x, k: jax.vmap(jax.grad(lambda x: conv_loss(k, x[None])))(x),
        "pooling": lambda x, k: (
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        ),
    },
    fold={"kernel_gradient": lambda x, k: jax.grad(conv_loss)(k, x)},
    gather={
        "kernel_by_member": lambda x, k: jax.vmap(
            lambda x: conv(x[None], x[:3, :3, :, None], dimension_numbers=NHWC)
        )(x),
        "over_members": lambda x, k: conv(x.transpose(1, 0, 2, 3), k, dimension_numbers=NHWC),
    },
)

group(
    "kernels_along_members",
    normal(2, 6, 6, 3),
    placed(normal(N, 2, 2, 3, seed=1)),
    local={"filters": lambda x, k: conv(x, k, dimension_numbers=("NHWC", "OHWI", "NHWC"))},
    gather={"spatial": lambda x, k: conv(x, k, dimension_numbers=("NHWC", "HWOI", "NHWC"))},
)

# --- indexing

for mode in ("clip", "fill", "promise_in_bounds"):
    bound = 5 if mode == "promise_in_bounds" else 9
    low = 0 if mode == "promise_in_bounds" else -9
    group(
        f"indexing_{mode}",
        placed(normal(N, 5, 4)),
        placed(ints(N, 3, low=low, high=bound, seed=2)),
        ints(3, low=low, high=bound, seed=3),
        normal(5, 4, seed=4),
        local={
            "server_index": functools.partial(lambda m, x, i, j, t: x.at[:, j].get(mode=m), mode),
            "vmapped": functools.partial(
                lambda m, x, i, j, t: jax.vmap(lambda v, i: v.at[i].get(mode=m))(x, i), mode
            ),
            "table": functools.partial(lambda m, x, i, j, t: t.at[i].get(mode=m), mode),
            "table_pairs": functools.partial(
                lambda m, x, i, j, t: t.at[i, jnp.clip(i, 0, 3)].get(mode=m), mode
            ),
            "set": functools.partial(
                lambda m, x, i, j, t: jax.vmap(lambda v, i: v.at[i[:1]].set(7.0, mode=m))(x, i),
                mode,
            ),
            "add": functools.partial(
                lambda m, x, i, j, t: jax.vmap(lambda v, i: v.at[i].add(1.0, mode=m))(x, i), mode
            ),
            "mul_server_index": functools.partial(
                lambda m, x, i, j, t: x.at[:, j].mul(2.0, mode=m), mode
            ),
            "min_max": functools.partial(
                lambda m, x, i, j, t: jax.vmap(
                    lambda v, i: v.at[i].min(0.0, mode=m).at[i].max(-0.5, mode=m)
                )(x, i),
                mode,
            ),
            "set_into_server": functools.partial(
                lambda m, x, i, j, t: jax.vmap(lambda i: t.at[i[:1]].set(7.0, mode=m))(i), mode
            ),
            "set_members": functools.partial(lambda m, x, i, j, t: x.at[j].set(0.0, mode=m), mode),
            "set_slab": functools.partial(
                lambda m, x, i, j, t: x.at[j, 1:4].add(1.0, mode=m), mode
            ),
            "set_column": functools.partial(
                lambda m, x, i, j, t: x.at[:, 1].set(0.0, mode=m), mode
            ),
            "set_rows": functools.partial(
                lambda m, x, i, j, t: jnp.zeros((N, 5, 4)).at[:, 1].set(x[:, 0], mode=m), mode
            ),
        },
        fold={
            "histogram": functools.partial(
                lambda m, x, i, j, t: jnp.zeros(5).at[i].add(1.0, mode=m), mode
            ),
            "into_table": functools.partial(
                lambda m, x, i, j, t: t.at[i[:, 0]].add(x[:, 0], mode=m), mode
            ),
            "all_of_them": functools.partial(
                lambda m, x, i, j, t: t.at[i].add(x[:, :3], mode=m), mode
            ),
            "max_into_table": functools.partial(
                lambda m, x, i, j, t: t.at[i[:, 0]].max(x[:, 0], mode=m), mode
            ),
            "min_into_table": functools.partial(
                lambda m, x, i, j, t: t.at[i].min(x[:, :3], mode=m), mode
            ),
            "product_into_table": functools.partial(
                lambda m, x, i, j, t: t.at[i[:, 0]].multiply(x[:, 0], mode=m), mode
            ),
            "rows": functools.partial(lambda m, x, i, j, t: x.at[j].get(mode=m), mode),
            "rows_far_out": functools.partial(
                lambda m, x, i, j, t: x.at[jnp.stack([j[0] + 50, j[1], -j[0] - 50])].get(mode=m),
                mode,
            ),
            "parts_of_rows": functools.partial(
                lambda m, x, i, j, t: x.at[j, :, j].get(mode=m), mode
            ),
        },
    )

group(
    "indexing",
    placed(normal(N, 5, 4)),
    placed(ints(N, 5, high=4, seed=2)),
    normal(20, 4, seed=4),
    local={
        "take_along_axis": lambda x, i, t: jnp.take_along_axis(x, i[..., None], axis=2),
        "take_along_axis_1": lambda x, i, t: jnp.take_along_axis(x, i[:, :, None] % 4, axis=1),
        "vmapped_scalar": lambda x, i, t: jax.vmap(lambda v, i: v[i[0], i[1]])(x, i),
        "vmapped_slice": lambda x, i, t: jax.vmap(
            lambda v, i: lax.dynamic_slice(v, (i[0], i[1]), (2, 2))
        )(x, i),
        "vmapped_update": lambda x, i, t: jax.vmap(
            lambda v, i: lax.dynamic_update_slice(v, jnp.ones((2, 2)), (i[0], i[1]))
        )(x, i),
        "embedding": lambda x, i, t: jnp.take(t, i, axis=0),
        "embedding_gradient_of_members": lambda x, i, t: jax.vmap(
            lambda i, v: jax.grad(lambda t: jnp.sum(t[i] * v))(t)
        )(i, x),
        "segment_sum_by_member": lambda x, i, t: jax.vmap(
            lambda v, i: jax.ops.segment_sum(v, i, 3)
        )(x, i),
        "one_hot": lambda x, i, t: jax.nn.one_hot(i, 4),
        "nan_to_num": lambda x, i, t: jnp.nan_to_num(x / (i[..., None].astype("float32"))),
        "bincount": lambda x, i, t: jax.vmap(lambda i: jnp.bincount(i, length=4))(i),
    },
    fold={
        "segment_sum": lambda x, i, t: jax.ops.segment_sum(x, i[:, 0], 4),
        "segment_sum_by_range": lambda x, i, t: jax.ops.segment_sum(x, jnp.arange(N) % 4, 4),
        "sorted_segments": lambda x, i, t: jax.ops.segment_sum(
            x, jnp.arange(N) // 3, 4, indices_are_sorted=True
        ),
        "unique_segments": lambda x, i, t: jax.ops.segment_sum(
            x, jnp.arange(N), 20, unique_indices=True, indices_are_sorted=True
        ),
        "embedding_gradient": lambda x, i, t: jax.grad(lambda t: jnp.sum(t[i] * x))(t),
        "bfloat16_table": lambda x, i, t: (
            jnp.ones((4, 5, 4), "bfloat16").at[i[:, 0]].add(x.astype("bfloat16"))
        ),
        "count": lambda x, i, t: jnp.bincount(i[:, 0], length=4),
        "segment_max": lambda x, i, t: jax.ops.segment_max(x, i[:, 0], 4),
        "segment_min": lambda x, i, t: jax.ops.segment_min(x, i[:, 0], 4),
        "segment_prod": lambda x, i, t: jax.ops.segment_prod(x, i[:, 0], 4),
        "segments_without_members": lambda x, i, t: jax.ops.segment_min(x, i[:, 0] - 2, 9),
        "segment_max_of_nan": lambda x, i, t: jax.ops.segment_max(
            jnp.where(x > 1, jnp.nan, -0.0), i[:, 0], 4
        ),
        "segments_of_bools": lambda x, i, t: (
            jax.ops.segment_max(x > 0, i[:, 0], 4),
            jax.ops.segment_min(x > 0, i[:, 0], 4),
        ),
        "segments_of_bytes": lambda x, i, t: [
            f(jnp.abs(99 * x).astype("uint8"), i[:, 0], 5)
            for f in (jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_prod)
        ],
        "segments_of_bfloat16": lambda x, i, t: [
            f(x.astype("bfloat16"), i[:, 0], 5) for f in (jax.ops.segment_max, jax.ops.segment_prod)
        ],
        "product_with_bfloat16_table": lambda x, i, t: (
            jnp.full((4, 5, 4), 2, "bfloat16").at[i[:, 0]].mul(x.astype("bfloat16"))
        ),
        "gradient_of_segment_max": lambda x, i, t: jax.grad(
            lambda t: jnp.sum(jax.ops.segment_max(jnp.round(x) * t, i[:, 0], 4))
        )(jnp.ones((1, 5, 4))),
    },
    gather={
        "member_by_member": lambda x, i, t: x[i[:, 0]],
        "segment_max_of_complex": lambda x, i, t: jax.ops.segment_max(
            lax.complex(x, -x), i[:, 0], 4
        ),
    },
)

# --- by a function


def joined(left, right):
    return {"a": left["a"] @ right["a"], "b": left["a"] @ right["b"] + left["b"]}


group(
    "by_a_function",
    placed(ints(N, 2, 2, seed=3), 1),
    placed(ints(N, 2, seed=4)),
    ints(2, seed=5),
    fold={
        "matrices": lambda x, y, w: bj.reduce(jnp.matmul, jnp.moveaxis(x, 1, 0)),
        "affine_maps": lambda x, y, w: bj.reduce(joined, {"a": jnp.moveaxis(x, 1, 0), "b": y}),
        "initial": lambda x, y, w: bj.reduce(lambda a, b: a - b + 2 * b, y, w),
        "closure": lambda x, y, w: bj.reduce(lambda a, b: a + b + w, y),
        "last": lambda x, y, w: bj.reduce(lambda a, b: b, y),
        "tangents": lambda x, y, w: jax.jvp(
            lambda v, u: bj.reduce(lambda a, b: a * b + u, v), (y / 3, 0.1), (y / 2, 1.0)
        ),
        "batched": lambda x, y, w: jax.vmap(
            lambda v, u: bj.reduce(lambda a, b: a + b * u, v), in_axes=(1, 0)
        )(y, w),
        "one_of_two": lambda x, y, w: bj.reduce(lambda a, b: (b[1], a[1] + b[1]), (y, y))[0],
    },
    gather={
        "gradient": lambda x, y, w: jax.grad(lambda v: jnp.sum(bj.reduce(lambda a, b: a * b, v)))(
            y / 3
        ),
    },
)


def products(*dims):
    """Products of pairs, reduced over `dims`: each sum counts with the product of all before it."""
    pairs = lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1])
    return lambda x, y, w: lax.reduce((x, y), (w[0], w[1]), pairs, dims)


group(
    "by_a_lax_function",
    placed(ints(N, 3, 4, low=-3, seed=3)),
    placed(ints(N, 3, 4, low=-3, seed=4)),
    ints(2, low=1, seed=5),
    local={
        "of_each": products(1),
        "of_both_others": products(2, 1),
    },
    fold={
        "pairs": products(0),
        "pairs_02": products(0, 2),
        "pairs_all": products(2, 0, 1),
        "or": lambda x, y, w: lax.reduce(x, w[0], lambda a, b: a | b | 8, (0,)),
        "sum_from_one": lambda x, y, w: lax.reduce(x, np.int32(1), lax.add, (0,)),
        "bytes": lambda x, y, w: lax.reduce(
            x.astype("int8"), np.int8(5), lambda a, b: a + 17 * b - 16 * b, (0, 1)
        ),
        "floats": lambda x, y, w: lax.reduce(x / 8, 0.0, lambda a, b: a + b + a * b, (0,)),
        "narrow": lambda x, y, w: lax.reduce(
            x.astype("bfloat16"), jnp.bfloat16(-9), lambda a, b: jnp.where(a > b, a, b), (0, 1, 2)
        ),
        "place": lambda x, y, w: lax.reduce(
            (x[:, 0, 0], jnp.arange(N)),
            (np.int32(-9), np.int32(0)),
            lambda a, b: [jnp.where(b[0] > a[0], v, u) for u, v in zip(a, b, strict=True)],
            (0,),
        ),
        "of_server_pairs": lambda x, y, w: lax.reduce(
            (x, jnp.ones_like(x)),
            (w[0], w[1]),
            lambda a, b: (a[0] + b[0] * b[1], a[1] * b[1]),
            (0,),
        ),
    },
    gather={
        # JAX makes of it a tree of slices.
        "tangents": lambda x, y, w: jax.jvp(
            lambda v: lax.reduce(v, 1.0, lambda a, b: a * b, (0,)), (x / 2,), (y / 2,)
        ),
        # Rows before columns: each row of the result holds some of all members.
        "members_last": lambda x, y, w: products(0, 1)(x.swapaxes(0, 1), y.swapaxes(0, 1), w),
        "no_entries": lambda x, y, w: products(0, 1)(x[:, :0], y[:, :0], w),
    },
)

# --- linear algebra


def spd(*batch):
    a = np.asarray(normal(*batch, 4, 4, seed=9))
    return a @ a.swapaxes(-1, -2) + 4 * np.eye(4, dtype="float32")


group(
    "linear_algebra",
    placed(spd(N)),
    placed(normal(N, 4, 2)),
    spd(),
    local={
        "cholesky": lambda a, b, s: jnp.linalg.cholesky(a),
        "qr": lambda a, b, s: jnp.abs(jnp.linalg.qr(a)[1]),
        "eigh": lambda a, b, s: jnp.linalg.eigvalsh(a),
        "svd": lambda a, b, s: jnp.linalg.svd(b, compute_uv=False),
        "triangular_solve": lambda a, b, s: lax.linalg.triangular_solve(
            a, b, left_side=True, lower=True
        ),
        "triangular_server_right": lambda a, b, s: jax.vmap(
            lambda a: lax.linalg.triangular_solve(a, s, left_side=True, lower=True)
        )(a),
        "lu": lambda a, b, s: lax.linalg.lu(a),
        "permutation": lambda a, b, s: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], 4),
        "det": lambda a, b, s: jnp.linalg.slogdet(a)[1],
        "fft": lambda a, b, s: jnp.fft.fft(a, axis=2),
        "fft2": lambda a, b, s: jnp.fft.fft2(a),
        "rfft": lambda a, b, s: jnp.fft.rfft(a[:, 0]),
        "irfft": lambda a, b, s: jnp.fft.irfft(a[:, 0]),
        "householder": lambda a, b, s: lax.linalg.householder_product(a, a[:, 0]),
        "tridiagonal": lambda a, b, s: lax.linalg.tridiagonal_solve(
            a[:, 0].at[:, 0].set(0.0), a[:, 1] + 9.0, a[:, 2].at[:, -1].set(0.0), b
        ),
        "complex": lambda a, b, s: jnp.abs(lax.complex(a, a) @ lax.complex(b, b).conj()),
    },
    fold={
        "complex_sum": lambda a, b, s: jnp.sum(lax.complex(b, b), 0),
        "complex_gram": lambda a, b, s: jnp.einsum(
            "nij,nik->jk", lax.complex(b, b), lax.complex(b, b)
        ),
    },
    gather={
        "fft_0": lambda a, b, s: jnp.fft.fft(b, axis=0),
        "qr_0": lambda a, b, s: jnp.linalg.qr(b[:, 0])[1],
        "triangular_server": lambda a, b, s: jax.vmap(
            lambda b: lax.linalg.triangular_solve(s, b, left_side=True, lower=True)
        )(b),
        "fftn": lambda a, b, s: jnp.fft.fftn(a),
        "svd_0": lambda a, b, s: jnp.linalg.svd(b[:, 0])[1],
    },
)

# --- random keys

group(
    "keys",
    placed(jax.random.split(KEY, N)),
    placed(jnp.arange(1.0, N + 1)),
    KEY,
    local={
        "split": lambda k, x, s: jax.vmap(lambda k: jax.random.split(k, 3))(k),
        "bits": lambda k, x, s: jax.vmap(lambda k: jax.random.bits(k, (3,)))(k),
        "normal": lambda k, x, s: jax.vmap(lambda k: jax.random.normal(k, (3,)))(k),
        "uniform": lambda k, x, s: jax.vmap(lambda k: jax.random.uniform(k, (2, 2)))(k),
        "fold_in": lambda k, x, s: jax.vmap(jax.random.fold_in, (0, None))(k, 3),
        "fold_server": lambda k, x, s: jax.vmap(jax.random.fold_in, (None, 0))(
            s, x.astype("uint32")
        ),
        "fold_range": lambda k, x, s: (
            jax.vmap(jax.random.fold_in, (None, 0))(s, jnp.arange(N)) == k
        ),
        "data": lambda k, x, s: jax.random.key_data(k),
        "clone": lambda k, x, s: jax.random.clone(k),
        "wrapped": lambda k, x, s: jax.random.wrap_key_data(jax.random.key_data(k) + jnp.uint32(1)),
        "seeded": lambda k, x, s: jax.vmap(jax.random.key)(x.astype("uint32")),
        "gamma": lambda k, x, s: jax.vmap(jax.random.gamma)(k, x),
        "bernoulli": lambda k, x, s: jax.vmap(jax.random.bernoulli)(k),
        "split_server": lambda k, x, s: (jax.random.split(s, N) == k) & (x > 0),
        "split_pairs": lambda k, x, s: (
            (jax.random.split(s, (N, 2)) == k[:, None]) & (x > 0)[:, None]
        ),
        "draw_server": lambda k, x, s: jax.random.normal(s, (N,)) * x,
        "mask": lambda k, x, s: jax.random.bernoulli(s, 0.5, (N,)) & (x > 3),
        # Each draw depends on its place among the others, which a shard does not know.
    },
    gather={
        "gamma_of_one_key": lambda k, x, s: jax.random.gamma(s, x),
        "shuffled": lambda k, x, s: jax.random.permutation(s, x),
    },
)

group(
    "rbg_keys",
    placed(jax.random.key_data(jax.random.split(jax.random.key(1, impl="rbg"), N))),
    local={
        "wrap": lambda d: jax.random.wrap_key_data(d, impl="rbg"),
        "fold_in": lambda d: jax.vmap(jax.random.fold_in, (0, None))(
            jax.random.wrap_key_data(d, impl="rbg"), 3
        ),
    },
    gather={
        "normal": lambda d: jax.vmap(
            lambda d: jax.random.normal(jax.random.wrap_key_data(d, impl="rbg"), (3,))
        )(d),
        "unsafe_fold_in": lambda d: jax.vmap(jax.random.fold_in, (0, None))(
            jax.random.wrap_key_data(d, impl="unsafe_rbg"), 3
        ),
    },
)

# --- values that shards make themselves, next to placed ones

group(
    "created",
    placed(normal(N, 3)),
    normal(3, seed=1),
    local={
        "arange": lambda x, w: x + jnp.arange(float(N))[:, None],
        "arange_uint8": lambda x, w: (
            (jnp.arange(N, dtype="uint8") * jnp.uint8(50))[:, None] + (x > 0).astype("uint8")
        ),
        "iota_1": lambda x, w: x * lax.broadcasted_iota("float32", (N, 3), 1),
        "eye_rows": lambda x, w: jnp.eye(N)[:, :3] + x,
        "zeros": lambda x, w: jnp.zeros_like(x) + x,
        "broadcast": lambda x, w: bj.broadcast(w) * x,
        "linspace": lambda x, w: x * jnp.linspace(0.0, 1.0, N)[:, None],
        "computed": lambda x, w: jnp.outer(jnp.arange(float(N)), w) + x,
        "full": lambda x, w: jnp.full((N,), w[0]) + x[:, 0],
        "mask": lambda x, w: jnp.where(jnp.arange(N)[:, None] == N - 1, x, 0.0),
        "triangle": lambda x, w: jnp.tri(N, 3) * x,
        "tiled": lambda x, w: jnp.tile(w, (N, 1)) * x,
        "tiled_both": lambda x, w: jnp.tile(w[:1], (N, 3)) * x,
        "tiled_not_copied": lambda x, w: (
            jnp.tile(jnp.outer(jnp.arange(float(N)), w), (1, 2))[:, 1:4] * x
        ),
        "stacked": lambda x, w: jnp.stack([w] * N) * x,
        "stacked_1": lambda x, w: jnp.stack([w] * N, axis=1).T * x,
        "stacked_others": lambda x, w: jnp.stack([w] * (N - 1) + [-w]) * x,
        "stacked_across": lambda x, w: jnp.stack([jnp.arange(float(N))] * 3, axis=1) * x,
    },
)

# --- dimensions as long as the placement, n = 1, n = 8, and no data at all

for n in (1, 8):
    group(
        f"cube_{n}",
        placed(normal(n, n, n), 1),
        normal(n, n, n, seed=1),
        normal(n, n, seed=2),
        local={
            "add": lambda x, y, w: x + y,
            "transpose": lambda x, y, w: x.transpose(2, 0, 1),
            "where": lambda x, y, w: jnp.where(y > 0, x, y),
            "clamp": lambda x, y, w: lax.clamp(y, x, y),
            "select_row": lambda x, y, w: lax.select(
                jnp.broadcast_to(y[:1, :, :1] > 0, y.shape), x, y
            ),
            "sum_0": lambda x, y, w: jnp.sum(x, 0),
            "sum_2": lambda x, y, w: jnp.sum(x, 2),
            "batch": lambda x, y, w: jnp.einsum("abc,ebc->bae", x, y),
            "free": lambda x, y, w: x @ w,
            "expand": lambda x, y, w: x[None] * 2,
            "cumsum": lambda x, y, w: jnp.cumsum(x, 0),
            "sort": lambda x, y, w: jnp.sort(x, 2),
            "same_rank": lambda x, y, w: x + w[:, :, None] + w[None],
            "reshape_1": lambda x, y, w: x.reshape(*x.shape, 1),
        },
        fold={
            "sum_1": lambda x, y, w: jnp.sum(x, 1),
            "all": lambda x, y, w: jnp.sum(x),
            "contract": lambda x, y, w: jnp.einsum("abc,bd->acd", x, w),
        },
    )

group(
    "one_member",
    placed(normal(1, 3)),
    normal(5, 3, seed=1),
    local={
        "head": lambda x, y: x[:1],
        "pair": lambda x, y: jnp.stack([x, x], 1),
        "row": lambda x, y: x * y[:1],
        "expand": lambda x, y: x[None],
    },
    fold={"sum": lambda x, y: jnp.sum(x, 0), "mean": lambda x, y: jnp.mean(x)},
    gather={
        "stretched": lambda x, y: x + y,
        "first": lambda x, y: x[0],
        "squeeze": lambda x, y: x.squeeze(0),
        "reshape": lambda x, y: x.reshape(3),
        "lax_stretched": lambda x, y: lax.mul(x, y),
        "broadcast": lambda x, y: jnp.broadcast_to(x, (5, 3)),
        "flat": lambda x, y: x.reshape(-1) * 2.0,
    },
)

group(
    "empty_members",
    placed(normal(N, 0, 3)),
    local={
        "add": lambda x: x + 1,
        "sum_1": lambda x: jnp.sum(x, 1),
        "reshape": lambda x: x.reshape(N, 3, 0),
        "concatenate": lambda x: jnp.concatenate([x, jnp.ones((N, 1, 3))], 1),
        "product": lambda x: jnp.einsum("nij,nik->njk", x, x),
    },
    fold={
        "sum": lambda x: jnp.sum(x, 0),
        "all": lambda x: jnp.sum(x),
        "gram": lambda x: jnp.einsum("nij,nkl->ijkl", x, x),
    },
)

group(
    "bfloat16",
    placed(normal(N, 64, dtype="bfloat16")),
    local={
        "mul": lambda x: x * 2,
        "sum_1": lambda x: jnp.sum(x, 1),
        "exp": jnp.exp,
        "product": lambda x: x @ jnp.ones((64, 2), "bfloat16"),
    },
    fold={
        "sum": lambda x: jnp.sum(x, 0),
        "sum_all": lambda x: jnp.sum(x),
        "gram": lambda x: x.T @ x,
        "max": lambda x: jnp.max(x, 0),
        "prod": lambda x: jnp.prod(x, 0),
        "mean": lambda x: jnp.mean(x, 0),
    },
)

# The last member is repeated as padding: its infinities and NaNs must count once, or not at all.
last = jnp.asarray(
    np.where(np.arange(N)[:, None] == N - 1, [np.inf, -np.inf, np.nan], 1.0), "float32"
)
first = jnp.asarray(np.where(np.arange(N)[:, None] == 0, [np.inf, np.nan, 2.0], 1.0), "float32")
for name, x in {"last": last, "first": first}.items():
    group(
        f"infinite_{name}",
        placed(x),
        local={"mul": lambda x: x * 2, "sum_1": lambda x: jnp.sum(x, 1)},
        fold={
            "sum": lambda x: jnp.sum(x, 0),
            "max": lambda x: jnp.max(x, 0),
            "min": lambda x: jnp.min(x, 0),
            "prod": lambda x: jnp.prod(x, 0),
            "gram": lambda x: x.T @ x,
            "weighted": lambda x: jnp.einsum("n,ni->i", jnp.arange(float(N)), x),
            "any": lambda x: jnp.any(jnp.isnan(x), 0),
            "count": lambda x: jnp.sum(jnp.isinf(x), 0),
            "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.arange(N) % 3, 3),
            "finite": lambda x: jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0), 0),
        },
    )
