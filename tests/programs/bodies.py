"""Whatever JAX can do in a body, on members of all types: in a map and, summed, in a reduction.

A body is a function of `W` and of placed arguments, or of one function that gives a tuple of them.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import beamjax as bj
from programs.table import N, add, built, case, sin_jvp, sin_vjp


def normal(*shape):
    return jax.device_put(np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32))


X = normal(3)
W = jnp.asarray([0.5, -1.0, 2.0])
INTS = jax.device_put(np.arange(3 * N, dtype="int32").reshape(N, 3) * 7 % 11)


def bodies(*placed, **facts):
    """Adds the program that maps a body over members."""

    def decorate(body):
        def build(ops):
            @ops.program(placements={"clients": N})
            def prog(w, placed):
                return ops.map_fn(functools.partial(body, w), placed)

            made = placed[0]() if callable(placed[0]) else placed
            return prog, (W, made)

        add(f"body_{body.__name__}", build, **facts)
        return body

    return decorate


# --- derivatives and control flow


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, x):
    return factor * x


scaled.defvjp(lambda factor, x: (factor * x, None), lambda factor, _, ct: (ct * factor,))


def layers(w, x):
    for _ in range(3):
        x = jnp.tanh(x * w + jnp.sum(x))
    return jnp.sum(x)


@bodies(X)
def derivatives(w, x):
    policies = jax.checkpoint_policies
    saved = [None, policies.dots_saveable, policies.nothing_saveable, policies.everything_saveable]
    return [
        jax.grad(lambda v: jnp.sum(sin_vjp(v * w)))(x),
        jax.value_and_grad(lambda v: jnp.sum(scaled(2.0, v)))(x),
        jax.vmap(jax.value_and_grad(sin_jvp))(x), jax.hessian(lambda v: layers(v, w))(x),
        jax.jacfwd(jnp.cumsum)(x), jax.jacrev(jnp.cumprod)(x), jax.linearize(jnp.sin, x)[1](w),
        [jax.grad(jax.checkpoint(layers, policy=policy))(w, x) for policy in saved],
        jax.grad(lambda v: jnp.sum(lax.stop_gradient(v) * v))(x),
    ]  # fmt: skip


def collatz(x):
    start = jnp.asarray(jnp.abs(x[0]) * 9 + 2, "int32")
    step = lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] + 1)
    return lax.while_loop(lambda c: c[0] > 1, step, (start, 0))


@bodies(X)
def control_flow(w, x):
    sines = lambda w: lax.scan(lambda c, v: (jnp.sin(c * w[0] + v), None), 1.0, x, unroll=2)[0]
    larger = lambda c, v: (lax.cond(v > c, lambda: v, lambda: c), v > c)
    rounds = jnp.asarray(jnp.abs(x[0]) * 5, "int32")
    branches = [jnp.sin, jnp.cos, lambda v: v * w]
    return [
        lax.scan(lambda c, v: (c * 0.5 + v, c), 0.0, x, reverse=True), jax.grad(sines)(w),
        lax.scan(larger, x[0], x), collatz(x), lax.fori_loop(0, 4, lambda i, c: c + i * x, w),
        lax.fori_loop(0, rounds, lambda i, c: c * 1.5 + x, w),
        lax.cond(x[0] > 0, jnp.sin, lambda v: v * w, x), lax.switch(rounds - 1, branches, x),
        lax.map(lambda v: v * w, x, batch_size=2), lax.associative_scan(jnp.maximum, x * w),
    ]  # fmt: skip


# --- sorting and searching


@bodies(X, INTS)
def sorting(w, x, i):
    return [
        jnp.sort(x), jnp.sort(i, descending=True), jnp.argsort(i, stable=True),
        lax.sort((i % 2, x), num_keys=2), lax.top_k(x, 2), lax.approx_max_k(x, 2),
        jnp.unique(i, size=3, return_counts=True, fill_value=-1), jnp.argmax(x), jnp.argmin(i),
        jnp.searchsorted(jnp.sort(x), w), jnp.nonzero(i > 4, size=3, fill_value=9),
        jnp.histogram(x, bins=4, range=(-2, 2)), jnp.bincount(i, length=11), jnp.median(x),
        jnp.quantile(x, 0.3), jnp.cumsum(i), lax.cumlogsumexp(x), lax.cummax(x),
    ]  # fmt: skip


# --- transformations, and the host


def over_own_devices(w, x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    body = lambda v: lax.psum(jnp.sin(v), "i")
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x * w)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("power",))
def raised(times, x, *, power):
    return x**power * times


def references(w, x):
    ref = jax.new_ref(jnp.zeros(3))

    def add_one(i, _):
        ref[i] = x[i] * 2
        return None

    lax.fori_loop(0, 3, add_one, None)
    ref[...] += w
    return ref[...]


@bodies(X)
def transformations(w, x):
    half = "bfloat16"
    return [
        jax.vmap(lambda a: a * w)(x), jax.jit(jax.jit(jnp.sin))(x), over_own_devices(w, x),
        jax.vmap(lambda a: a - lax.pmean(a, "k"), axis_name="k")(x), raised(2, x, power=3),
        jax.jit(lambda a, b: a + b, donate_argnums=0)(x * 2, w), references(w, x),
        jax.jit(lambda a: a + 1, inline=True)(x), jax.named_call(jnp.sin, name="sine")(x),
        lax.optimization_barrier(x) + 1, jnp.nan_to_num(jnp.log(x)),
        jnp.dot(x, w, precision="highest"), lax.reduce_precision(x, 5, 7),
        jnp.dot(x.astype(half), w.astype(half), preferred_element_type="float32"),
        # Weak and strong types of results that no member changes.
        (np.float32(3), 2, 1.5, True, jnp.arange(2)),
    ]  # fmt: skip


@bodies(X)
def host(w, x):
    double = lambda v: np.asarray(v) * 2
    jax.debug.callback(lambda v: None, x)
    jax.debug.print("{}", x)
    return jax.pure_callback(double, x, x, vmap_method="expand_dims") + w


@built()
def printed_on_the_server(ops):
    def prog(x):
        total = ops.reduce_sum(x)
        jax.debug.print("{}", total[0])
        return total

    return ops.program(placements={"clients": N})(prog), (X,)


@bodies(normal(5, 3))
def signals(w, x):
    gram = x.T @ x + jnp.eye(3)
    values = jnp.linalg.eigvalsh(gram), jnp.linalg.svd(x, compute_uv=False)
    return values, jnp.abs(jnp.fft.fft(x)), jnp.convolve(x[:, 0], x[:, 1])


# --- keys of other kinds


def keys_of_kinds():
    """Made when they are needed, since JAX compiles long for them."""
    typed = [jax.random.key(5, impl=impl) for impl in ("rbg", "unsafe_rbg")]
    return tuple(jax.random.split(key, N) for key in [jax.random.PRNGKey(5), *typed])


@bodies(keys_of_kinds, plan="")
def other_keys(w, *keys):
    return [(jax.random.normal(k, (2,)), jax.random.split(k)) for k in keys]


# --- types and trees

FLOATS = "float16 bfloat16 float32 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e3m4".split()
INTEGERS = "int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bool".split()
OTHERS = ["complex64", "float4_e2m1fn", "float8_e8m0fnu"]
COMPUTE = "float16 bfloat16 float32 complex64 int8 uint8 int32 uint16".split()


def of_dtype(name):
    values = np.arange(3 * N).reshape(N, 3) % 3
    return jax.device_put(values.astype(np.float32).astype(getattr(ml_dtypes, name, name)))


@bodies({name: of_dtype(name) for name in [*FLOATS, *INTEGERS, *OTHERS]})
def dtypes(w, xs):
    typed = lambda x: (
        x, x.real.astype("float32") + w, x[::-1], x == x[0], (w * w > 1).astype(x.dtype)
    )  # fmt: skip
    computed = lambda x: (x * 2, x - x[0], jnp.sum(x), x @ x, x / x[2])
    return jax.tree.map(typed, xs), {name: computed(xs[name]) for name in COMPUTE}


Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    at: jax.Array
    unit: str = dataclasses.field(metadata={"static": True}, default="m")


class Custom:
    def __init__(self, *items):
        self.items = items


jax.tree_util.register_pytree_node(Custom, lambda c: (c.items, None), lambda _, xs: Custom(*xs))


@bodies(Pair(X, X[:, 0]), Point(X, "km"), Custom(X, (INTS, None)), {"a": [], "b": None})
def trees(w, pair, point, custom, nothing):
    swapped = Custom(custom.items[1][0], {"b": custom.items[0]})
    return Pair(pair.right, pair.left * w), Point(point.at * len(point.unit)), swapped, nothing


@bodies(X, plan="")
def no_results(w, x):
    return None


@bodies(np.zeros((N, 0, 3), np.float32), X)
def zero_sizes(w, x, y):
    return x, jnp.sum(x), x.reshape(3, 0) @ jnp.ones((0, 2)), y[:0]


# --- the function that is run


@bj.program(clients=N)
def scaled_sum(power, w, x):
    y = bj.map_fn(lambda v: w * v**power, x)
    return bj.reduce_sum(y), {"y": y, "n": bj.reduce_sum(bj.broadcast(1.0))}, w * 2


@bj.program(clients=N)
def weak_results(s, x):
    return bj.map_fn(lambda v: s * 2, x), bj.broadcast(s), bj.reduce_sum(x) * s, s


@bj.program(clients=N)
def seeded(s, x):
    return bj.map_fn(lambda v: jax.random.normal(jax.random.key(s), v.shape) * v, x)


FUNCTIONS = {
    "partial": (functools.partial(scaled_sum, 2), W, X),
    "static_argnums": (functools.partial(jax.jit(scaled_sum, static_argnums=0), 3), W, X),
    "weak_integers": (functools.partial(scaled_sum, 1), 3, INTS),
    "numpy_arguments": (functools.partial(scaled_sum, 2), np.float32(2), np.asarray(X)),
    "weak_results": (weak_results, 2.5, X),
    "random_seeds": (seeded, 7, X),
    "not_finite": (
        functools.partial(scaled_sum, 1), W,
        jnp.asarray(np.where(np.eye(N, 3, -2), np.float32([np.nan, np.inf, np.inf]), X)),
    ),
}  # fmt: skip
for name, (fn, *args) in FUNCTIONS.items():
    case(*args, called=name)(lambda *args, fn=fn: fn(*args))


# --- types in maps, reductions and broadcasts

WIDE = ["float64", "complex128", "int64", "uint64"]
ADDED = "float16 bfloat16 float32 complex64 int4 int8 int16 int32 uint8 uint16 uint32".split()


def of_types(names, ops):
    """Every operator on members of each type, and a broadcast of one of them."""

    @ops.program(placements={"clients": N})
    def prog(xs, ones, keys):
        def each(x, one):
            y = ops.map_fn(lambda v: jnp.where(v == one, v, one), x)
            keyed = ops.reduce_by_key(x, keys, 3)
            reduced = ops.reduce_max(y), ops.reduce_min(x), ops.reduce_any(x != 0)
            return ops.reduce_sum(y.astype("int32")) if x.dtype == "int4" else (
                ops.reduce_sum(x), ops.reduce_mean(x)
            ), keyed, reduced, y, ops.broadcast(one)  # fmt: skip

        return jax.tree.map(each, xs, ones)

    xs = {name: of_dtype(name) for name in names}
    return prog, (xs, {name: x[1] for name, x in xs.items()}, jnp.arange(N) % 3)


add("types", functools.partial(of_types, ADDED), promotes=True)
add(
    "wide_types", functools.partial(of_types, WIDE), promotes=True, x64=True, rtol=1e-13, atol=1e-13
)


@built()
def bools(ops):
    def prog(x):
        totals = ops.reduce_sum(x), ops.reduce_mean(x), ops.reduce_max(x), ops.reduce_prod(x)
        return totals, ops.map_fn(jnp.logical_not, x), ops.reduce_all(x)

    return ops.program(placements={"clients": N})(prog), (X > 0,)


# --- types that JAX batches in its own way

DENSE = np.zeros((N, 4, 3), np.float32)
DENSE[:, 1, 2], DENSE[:, 3, 0] = np.arange(N), 1


@built()
def sparse_members(ops):
    from jax.experimental import sparse  # Takes long to import.

    @ops.program(placements={"clients": N})
    def prog(members, one, w):
        products = ops.map_fn(lambda m: m @ w, members)
        twice = ops.map_fn(lambda m: m * 2, members)
        shared = ops.map_fn(lambda m, b: m.todense() + b.todense(), (members, ops.broadcast(one)))
        return products, twice, ops.reduce_sum(shared)

    members = sparse.BCOO.fromdense(DENSE, n_batch=1)
    return prog, (members, sparse.BCOO.fromdense(DENSE[2] + 1), jnp.arange(3.0))
