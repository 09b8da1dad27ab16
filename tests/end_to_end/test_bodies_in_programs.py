"""Whatever JAX can do in a body, on each runner: tree, types and values of `jit`, equal bits."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close
from jax import lax
from jax.sharding import PartitionSpec
from programs import run_everywhere, sin_jvp, sin_vjp

import beamjax as bj

N = 11  # One full shard of 8 and a short one.


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32))


X = normal(3)
W = jnp.asarray([0.5, -1.0, 2.0])
INTS = jnp.arange(3 * N, dtype="int32").reshape(N, 3) * 7 % 11

CASES = {}
"""By name, bodies that share placed arguments: a function of `W` and those, and the arguments."""


def bodies(*placed):
    def add(function):
        CASES[function.__name__] = function, placed
        return function

    return add


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
    return jax.pure_callback(double, x, x, vmap_method="expand_dims") + w


# --- keys of other kinds


@bodies(
    jax.random.split(jax.random.PRNGKey(5), N),
    *[jax.random.split(jax.random.key(5, impl=impl), N) for impl in ("rbg", "unsafe_rbg")],
)
def other_keys(w, *keys):
    return [(jax.random.normal(k, (2,)), jax.random.split(k)) for k in keys]


# --- types and trees

FLOATS = "float16 bfloat16 float32 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e3m4".split()
INTEGERS = "int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bool".split()
OTHERS = ["complex64", "float4_e2m1fn", "float8_e8m0fnu"]
COMPUTE = "float16 bfloat16 float32 complex64 int8 uint8 int32 uint16".split()


def of_dtype(name):
    values = np.arange(3 * N).reshape(N, 3) % 3
    return jnp.asarray(values.astype(np.float32).astype(getattr(ml_dtypes, name, name)))


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


@bodies(X)
def no_results(w, x):
    return None


@bodies(jnp.zeros((N, 0, 3)), X)
def zero_sizes(w, x, y):
    return x, jnp.sum(x), x.reshape(3, 0) @ jnp.ones((0, 2)), y[:0]


# --- the table


def program_of(*names):
    @bj.program(clients=N)
    def prog(w, placed):
        return {
            name: bj.map_fn(functools.partial(CASES[name][0], w), placed[name]) for name in names
        }

    return prog, W, {name: CASES[name][1] for name in names}


@pytest.mark.versions
@pytest.mark.parametrize(
    "names",
    [("derivatives", "control_flow"), ("transformations", "trees"), ("other_keys", "zero_sizes"),
     ("host", "no_results", "sorting"), ("dtypes",)],
    ids=lambda names: names[0],
)  # fmt: skip
def test_several_maps(names):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    run_everywhere(*program_of(*names), shard_size=8)


# --- 64 bits


def widened(x):
    kinds = {"f": "float64", "i": "int64", "c": "complex128"}
    return x.astype(kinds.get(np.dtype(x.dtype).kind, x.dtype))


@pytest.mark.table
@pytest.mark.parametrize("name", "control_flow sorting transformations host".split())
def test_bodies_in_64_bits(name):
    with jax.enable_x64(True):
        prog, w, placed = program_of(name)
        args = jax.tree.map(widened, (w, placed))
        run_everywhere(prog, *args, shard_size=8, beam=name == "host")


@pytest.mark.versions
def test_types_of_64_bits():
    with jax.enable_x64(True):
        xs = {name: of_dtype(name) for name in ("float64", "complex128", "int64", "uint64")}

        @bj.program(clients=N)
        def prog(xs, scalar, y):
            body = lambda v: (v * 2, v @ v, v.real.astype("float32"), v + scalar)
            each = lambda x: (bj.map_fn(body, x), bj.reduce_sum(x), bj.reduce_mean(x))
            scaled = jax.tree.map(lambda y: y * scalar, y)
            return jax.tree.map(each, xs), bj.broadcast(y), scaled

        row = {name: x[0] / 3 if name == "float64" else x[0] for name, x in xs.items()}
        run_everywhere(prog, xs, 3, row, rtol=1e-14, atol=1e-14, shard_size=8)


# --- reductions and broadcasts of every type

REDUCE = {op: getattr(bj, f"reduce_{op}") for op in "sum mean max min prod any all".split()}


def compiles(reduce, x):
    try:
        jax.jit(bj.program(clients=N)(reduce)).lower(x).compile()
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


@pytest.mark.table
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS])
def test_reductions_and_broadcasts(dtype):
    x = of_dtype(dtype)
    reduce = {op: fn for op, fn in REDUCE.items() if compiles(fn, x)}
    if dtype not in ("int2", "uint2", "float8_e8m0fnu", "float4_e2m1fn"):
        assert {"sum", "max", "min"} & set(reduce)
    # Of single bytes `jit` rounds each sum, or overflows before it divides; a run does not.
    single = ["mean", "sum"] if dtype.startswith("float") else ["mean"]
    exact = {op: reduce.pop(op) for op in single if op in reduce and x.dtype.itemsize == 1}

    @bj.program(clients=N)
    def prog(y, x):
        return {op: fn(x) for op, fn in reduce.items()}, bj.broadcast(y), x[:, ::-1], y

    run_everywhere(prog, x[1], x, shard_size=8)
    if dtype == "float8_e8m0fnu":  # It has no zero.
        return
    for op, fn in exact.items():
        found = bj.run(bj.program(clients=N)(fn), x, runner="local", options={"shard_size": 8})
        expected = getattr(np, op)(np.asarray(x).astype(np.float64), axis=0).astype(found.dtype)
        assert_close(found, jnp.asarray(expected), rtol=1e-6, atol=0)


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
    "weak integers": (functools.partial(scaled_sum, 1), 3, INTS),
    "numpy": (functools.partial(scaled_sum, 2), np.float32(2), np.asarray(X)),
    "weak results": (weak_results, 2.5, X),
    "random seeds": (seeded, 7, X),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    fn, *args = FUNCTIONS[name]
    run_everywhere(lambda *args: fn(*args), *args, shard_size=8)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments():
    run = functools.partial(scaled_sum, 2)
    expected = jax.jit(run)(2.0, X)
    for runner in ("local", "DirectRunner"):
        found = bj.run(
            jax.jit(run, donate_argnums=1), 2.0, X.copy(), runner=runner, options={"shard_size": 8}
        )
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
