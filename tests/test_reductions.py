"""Reductions by key, by a function and to the place of an extreme, on every runner."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import beamjax as bj
from beamjax import _compat, shards
from beamjax.combining import fold_members
from beamjax.dyadic import DyadicTree
from beamjax.errors import WorkerError
from beamjax.pipelines import store

N, KEYS = 21, 5
SHARDS = {"shard_size": 8}
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)), "float32")
K = jnp.asarray(RNG.integers(-2, KEYS + 2, N), "int32")
OPS = ["sum", "mean", "max", "min", "prod", "any", "all"]


def program(fn, n=N):
    return bj.program(clients=n)(fn)


def local(fn, *args):
    return bj.run(fn, *args, runner="local", options=SHARDS)


def gathers(fn, *args):
    return "nothing is gathered" not in str(bj.explain(fn, *args, options=SHARDS))


def same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def close(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        wide = np.complex128 if jnp.issubdtype(a.dtype, np.complexfloating) else np.float64
        np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol)


# --- by key: values


def by_key(op, num_keys=KEYS):
    return program(lambda x, k: bj.reduce_by_key(x, k, num_keys, op=op))


def truth(op, x, k, num_keys=KEYS):
    """NumPy's answer in the widest type, key by key."""
    x = np.asarray(x)
    empty = {"max": -np.inf, "min": np.inf}
    if x.dtype.kind in "iu":
        empty = {"max": np.iinfo(x.dtype).min, "min": np.iinfo(x.dtype).max}
    rows = []
    for key in range(num_keys):
        members = x[np.asarray(k) == key]
        if op in empty and not len(members):
            rows.append(np.full(x.shape[1:], empty[op]))
        elif op in ("sum", "prod", "mean") and x.dtype.kind not in "iuc":
            with np.errstate(all="ignore"):
                total = getattr(np, "prod" if op == "prod" else "sum")(members.astype("f8"), 0)
                rows.append(total / len(members) if op == "mean" else total)
        elif op == "mean":
            with np.errstate(all="ignore"):
                rows.append(members.sum(0) / np.float64(len(members)))
        else:
            rows.append(getattr(np, op)(members, 0))
    return np.stack(rows)


@pytest.mark.table
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "complex64"])
def test_by_key_gives_what_numpy_gives(op, dtype):
    if dtype == "complex64" and op in ("max", "min"):
        pytest.skip("NumPy has no lowest complex number")
    x = jnp.round(3 * X).astype(dtype) if dtype != "uint8" else jnp.abs(jnp.round(X)).astype(dtype)
    want = truth(op, x, K)
    for got in (by_key(op)(x, K), jax.jit(by_key(op))(x, K), local(by_key(op), x, K)):
        expected = {"any": bool, "all": bool}.get(op, dtype)
        if op == "mean" and dtype in ("int32", "uint8"):
            expected = "float32"
        assert got.dtype == expected
        wide = got.astype("float32") if dtype in ("bfloat16", "float16") else got
        rounding = {"bfloat16": 4e-3, "float16": 5e-4}.get(dtype, 2e-7)
        np.testing.assert_allclose(wide, want.astype(wide.dtype), rtol=rounding)
    assert not gathers(by_key(op), x, K) or dtype == "complex64"


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_by_key_gives_what_jax_ops_give(op):
    want = jax.jit(getattr(jax.ops, f"segment_{op}"), static_argnums=2)(X, K, KEYS)
    same_bits(jax.jit(by_key(op))(X, K), want)
    close(local(by_key(op), X, K), want)


def test_keys_without_members():
    keys = jnp.full(N, 1, "int32")
    found = {op: local(by_key(op, 2), X, keys)[0, 0] for op in OPS}
    assert np.isnan(found.pop("mean"))
    assert {op: value.item() for op, value in found.items()} == {
        "sum": 0, "max": -np.inf, "min": np.inf, "prod": 1, "any": False, "all": True
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int32"])
def test_keys_of_any_int_dtype(dtype):
    info = np.iinfo(dtype)
    keys = jnp.asarray([info.min, info.max, 0, 99, 3] * 4 + [100], dtype)
    want = np.zeros(400, "float32")
    for key in np.asarray(keys).tolist():
        if 0 <= key < 400:
            want[key] += 1
    count = by_key("sum", 400)
    for got in (count(jnp.ones(N), keys), local(count, jnp.ones(N), keys)):
        np.testing.assert_array_equal(got, want)


def test_keys_of_64_bits_do_not_wrap():
    with jax.enable_x64(True):
        keys = jnp.asarray([2**32, 2**32 + 1, -(2**32), 1, 0] * 4 + [2**63 - 1], "int64")
        total = by_key("sum", 3)
        for got in (total(jnp.ones(N), keys), local(total, jnp.ones(N), keys)):
            np.testing.assert_array_equal(got, np.array([4.0, 4.0, 0.0]))
        unsigned = keys.astype("uint64")
        np.testing.assert_array_equal(local(total, jnp.ones(N), unsigned), [4.0, 4.0, 0.0])
        mean = local(by_key("mean", 3), jnp.arange(N), keys)
        assert mean.dtype == np.float64
        np.testing.assert_array_equal(mean, [11.5, 10.5, np.nan])


def test_bools_are_counted_and_trees_keep_their_shape():
    tree = {"b": X > 0, "i": (K, X)}
    fn = by_key("sum")
    got = local(fn, tree, K)
    same_bits(got["b"], jax.ops.segment_sum((X > 0).astype("int32"), K, KEYS))
    assert [leaf.shape for leaf in got["i"]] == [(KEYS,), (KEYS, 3)]
    close(got, jax.jit(fn)(tree, K))


def test_sums_by_key_are_rounded_once_whatever_the_order():
    big = np.array([1e30, 1.0, -1e30, 1e-3] + [0.0] * 4, "float32").repeat(8)
    keys = np.zeros(64, "int32")
    fn = program(lambda x, k: bj.reduce_by_key(x, k, 1), n=64)
    for order in (slice(None), slice(None, None, -1)):
        got = local(fn, big[order], keys)
        np.testing.assert_array_equal(got, np.float32(8 * (1.0 + np.float64(np.float32(1e-3)))))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("order", [1, -1])
def test_zeros_and_nan_by_key(op, order):
    x = np.zeros(32, "float32")[::order]
    x[::16] = -0.0
    x[20:24] = np.nan
    keys = np.repeat(np.arange(4, dtype="int32"), 8)
    keys[1::2] = 0
    fn = program(lambda x, k: bj.reduce_by_key(x, k, 4, op=op), n=32)
    want = jax.jit(fn)(x[::order], keys[::order])
    got = local(fn, x[::order], keys[::order])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[0:1]) | np.isnan(got[0:1]), [True])


# --- by key: transformations


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_derivatives_by_key(op):
    x, weights = jnp.round(X), jnp.arange(3.0 * KEYS).reshape(KEYS, 3)

    def expected(x):
        if op != "mean":
            return getattr(jax.ops, f"segment_{op}")(x, K, KEYS)
        return jax.ops.segment_sum(x, K, KEYS) / jax.ops.segment_sum(jnp.ones((N, 1)), K, KEYS)

    finite = lambda fn: lambda x: jnp.sum(jnp.where(jnp.isfinite(y := fn(x)), weights * y, 0.0))
    want = jax.grad(finite(expected))(x)
    fn = lambda x, k: jax.grad(finite(lambda x: by_key(op)(x, k)))(x)
    close(jax.jit(fn)(x, K), want)
    close(local(fn, x, K), want)
    assert not gathers(fn, x, K)
    forward = lambda x, k, t: jax.jvp(lambda x: by_key(op)(x, k), (x,), (t,))[1]
    close(local(forward, x, K, X), jax.jvp(expected, (x,), (X,))[1])


@pytest.mark.table
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_derivatives_of_products_by_key(zeros):
    """Against `jnp.prod` of the members of each key."""
    x = (1 + X).at[np.flatnonzero(np.asarray(K) == 1)[:zeros], 0].set(0.0)

    def expected(x):
        rows = [jnp.prod(x[np.flatnonzero(np.asarray(K) == key)], 0) for key in range(KEYS)]
        return jnp.sum(jnp.sin(jnp.stack(rows)))

    fn = lambda x, k: jnp.sum(jnp.sin(by_key("prod")(x, k)))
    close(jax.jit(jax.grad(fn))(x, K), jax.grad(expected)(x), 1e-4)
    close(local(jax.grad(fn), x, K), jax.grad(expected)(x), 1e-4)
    assert not gathers(jax.grad(fn), x, K)
    if zeros < 3:
        np.testing.assert_allclose(
            jax.jit(jax.hessian(fn))(x, K), jax.hessian(expected)(x), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0)])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "prod", "any"])
def test_vmap_by_key(op, axes):
    x = jnp.stack([X, 2 * X], axes[0]) if axes[0] is not None else X
    k = jnp.stack([K, K + 1]) if axes[1] is not None else K
    fn = jax.vmap(by_key(op), in_axes=axes)
    pick = lambda v, axis, i: v if axis is None else jnp.take(v, i, axis)
    want = jnp.stack([by_key(op)(pick(x, axes[0], i), pick(k, axes[1], i)) for i in (0, 1)])
    close(jax.jit(fn)(x, k), want)
    close(local(fn, x, k), want)
    assert not gathers(fn, x, k)


# --- by a function


def affine(left, right):
    """x -> s·x + t, the left one after the right one."""
    return {"s": left["s"] * right["s"], "t": left["s"] * right["t"] + left["t"]}


def in_order(combine, members):
    return functools.reduce(combine, members)


def in_tree(combine, members):
    while len(members) > 1:
        pairs = [members[i : i + 2] for i in range(0, len(members), 2)]
        members = [combine(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return members[0]


def members_of(tree):
    n = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(n)]


EXACT = {
    "matrices": (jnp.matmul, jnp.asarray(RNG.integers(-3, 4, (N, 2, 2)), "int32")),
    "wrapping": (lambda a, b: a * b, jnp.asarray(RNG.integers(0, 256, (N, 3)), "uint8")),
    "affine": (
        affine,
        {k: jnp.asarray(RNG.integers(-3, 4, (N, 2)), "int32") for k in ("s", "t")},
    ),
    "first": (lambda a, b: a, (X, K)),
    "last": (lambda a, b: b, (X, K)),
    "bfloat16": (jnp.maximum, X.astype("bfloat16")),
    "bools": (lambda a, b: a ^ b, X > 0),
    "complex": (
        lambda a, b: a * b,
        jnp.asarray(RNG.choice([1, 1j, -1, -1j], (N, 3)).astype("complex64")),
    ),
    "best": (
        lambda a, b: jax.tree.map(lambda x, y: jnp.where(b[0] < a[0], y, x), a, b),
        (K, jnp.arange(N), K * 2),
    ),
    "switches": (lambda a, b: jax.lax.cond(a > b, lambda: a, lambda: b), K),
    "no_elements": (lambda a, b: a + b, jnp.zeros((N, 0))),
    "one_leaf_of_a_tree": (lambda a, b: [a[0] + b[0]], [K]),
}


@pytest.mark.table
@pytest.mark.parametrize("name", EXACT)
def test_exact_functions_give_the_value_in_order(name):
    combine, x = EXACT[name]
    fn = program(lambda x: bj.reduce(combine, x))
    want = in_order(combine, members_of(x))
    for got in (fn(x), jax.jit(fn)(x), local(fn, x)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    assert not gathers(fn, x)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 63])
def test_any_number_of_members(n):
    text = jnp.arange(n)  # A list of digits in base 67, to the left the first.
    joined = lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1])
    with jax.enable_x64(True):
        x = (text.astype("uint32"), jnp.full(n, 67, "uint32"))
        fn = program(lambda x: bj.reduce(joined, x), n)
        want = in_order(joined, members_of(x))
        for got in (jax.jit(fn)(x), local(fn, x)):
            same_bits(got, want)


@pytest.mark.parametrize("x64", [False, True])
def test_inexact_functions_have_one_order_of_calls(x64):
    """Subtraction is not associative at all, so that each other order of calls would show."""
    with jax.enable_x64(x64):
        x = jnp.asarray(RNG.normal(size=(N, 2)))
        for n in (5, 8, 11, 16, N):
            fn = program(lambda x: bj.reduce(lambda a, b: a - b, x), n)
            want = in_tree(lambda a, b: a - b, members_of(x[:n]))
            for got in (fn(x[:n]), jax.jit(fn)(x[:n]), local(fn, x[:n])):
                same_bits(got, want)


def test_functions_close_over_server_values_and_constants():
    table = np.array([2, 3], "int32")

    @bj.program(clients=N)
    def fn(w, x):
        scale = bj.reduce_max(x)
        return bj.reduce(lambda a, b: a + b + w * table * scale, x)

    x = jnp.asarray(RNG.integers(0, 5, (N, 2)), "int32")
    want = in_order(lambda a, b: a + b + 7 * table * x.max(0), members_of(x))
    for got in (jax.jit(fn)(7, x), local(fn, 7, x), bj.run(fn, 7, x, options=SHARDS)):
        same_bits(got, want)


def test_a_starting_value_counts_once_from_the_left():
    combine, x = EXACT["affine"]
    fn = program(lambda x, start: bj.reduce(combine, x, start))
    start = {"s": jnp.asarray([5, 2], "int32"), "t": jnp.asarray([1, 0], "int32")}
    want = in_order(combine, [start, *members_of(x)])
    same_bits(jax.jit(fn)(x, start), want)
    same_bits(local(fn, x, start), want)
    total = program(lambda x: bj.reduce(jnp.add, x, 0))
    same_bits(local(total, K), jnp.sum(K))


def test_keys_of_random_numbers_are_values_too():
    keys = jax.random.split(jax.random.key(0), N)
    mixed = lambda a, b: jax.random.fold_in(a, jax.random.bits(b) >> np.uint32(1))
    fn = program(lambda keys: bj.reduce(mixed, keys))
    want = jax.random.key_data(in_tree(mixed, list(keys)))
    for got in (jax.jit(fn)(keys), local(fn, keys), bj.run(fn, keys, options=SHARDS)):
        same_bits(jax.random.key_data(got), want)


def test_nothing_is_called_on_padding():
    """Padding repeats a member; a function that sees it divides by zero."""
    fn = program(lambda x: bj.reduce(lambda a, b: a + b + 1 / (a - b), x), 9)
    x = jnp.arange(9.0)
    got = local(fn, x)
    assert np.isfinite(got)
    close(got, jax.jit(fn)(x))


# --- by a function: transformations


def soft(w):
    return lambda a, b: {"s": a["s"] * b["s"], "t": jnp.tanh(w * a["t"]) * b["s"] + b["t"]}


@bj.program(clients=N)
def smooth(w, x):
    return bj.reduce(soft(w), x)


def smooth_truth(w, x):
    return in_tree(soft(w), members_of(x))


SMOOTH = (jnp.float32(0.7), {"s": 1 + X[:, 0] / 9, "t": X[:, 1]})


def loss(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(*args)))


TRANSFORMED = {
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "jvp_of_one": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "jacrev": lambda f: jax.jacrev(f, 1),
    "hessian": lambda f: jax.hessian(loss(f)),
    "fwd_of_fwd": lambda f: jax.jacfwd(jax.jacfwd(loss(f))),
    "rev_of_fwd": lambda f: jax.jacrev(jax.jacfwd(loss(f))),
    "rev_of_rev": lambda f: jax.jacrev(jax.grad(loss(f))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), 1),
}


@pytest.mark.table
@pytest.mark.parametrize("name", TRANSFORMED)
def test_derivatives_by_a_function(name):
    want = TRANSFORMED[name](smooth_truth)(*SMOOTH)
    fn = TRANSFORMED[name](smooth)
    close(jax.jit(fn)(*SMOOTH), want, 2e-4)
    if name in ("grad", "jvp", "jvp_of_one", "hessian"):
        close(local(fn, *SMOOTH), want, 2e-4)
    if name.startswith("jvp"):
        assert not gathers(fn, *SMOOTH)


def test_derivatives_beside_ints():
    """The place of the largest value has no derivative, the value itself has."""
    best = lambda a, b: jax.tree.map(lambda x, y: jnp.where(b[0] > a[0], y, x), a, b)
    fn = program(lambda x, i: bj.reduce(best, (x, i)))
    got = jax.jit(jax.grad(lambda x, i: fn(x, i)[0]))(X[:, 0], jnp.arange(N))
    np.testing.assert_array_equal(got, np.arange(N) == np.argmax(X[:, 0]))
    value, tangent = jax.jvp(lambda x: fn(x, jnp.arange(N)), (X[:, 0],), (jnp.ones(N),))
    assert (tangent[0], tangent[1].dtype) == (1.0, jax.dtypes.float0)
    assert value[1] == np.argmax(X[:, 0])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, {"s": 1, "t": None})])
def test_vmap_by_a_function(axes):
    w, x = SMOOTH
    stack = lambda leaf, axis: leaf if axis is None else jnp.stack([leaf, leaf / 2], axis)
    pick = lambda leaf, axis, i: leaf if axis is None else jnp.take(leaf, i, axis)
    x_axes = axes[1] if isinstance(axes[1], dict) else dict.fromkeys(x, axes[1])
    args = stack(w, axes[0]), {k: stack(x[k], x_axes[k]) for k in x}
    fn = jax.vmap(smooth, in_axes=(axes[0], x_axes))
    want = [
        smooth(pick(args[0], axes[0], i), {k: pick(args[1][k], x_axes[k], i) for k in x})
        for i in (0, 1)
    ]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)
    close(jax.jit(fn)(*args), want)
    close(local(fn, *args), want)
    assert not gathers(fn, *args)


def test_what_nobody_reads_is_dropped():
    fn = program(lambda x: (bj.reduce(lambda a, b: a, x), bj.reduce_sum(x))[1])
    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    assert "bj_reduce[" in str(jaxpr)
    closed = jax.extend.core.ClosedJaxpr(jaxpr, [])
    assert "bj_reduce[" not in str(_compat.dce(closed, [True])[0])
    assert "combin" not in str(bj.explain(fn, X))


# --- the place of an extreme


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool"])
@pytest.mark.parametrize("x64", [False, True])
def test_the_first_extreme(name, dtype, x64):
    with jax.enable_x64(x64):
        x = jnp.abs(jnp.round(X)) if dtype in ("uint32", "bool") else jnp.round(X)
        x = x.astype(dtype)
        fn = program(getattr(bj, f"reduce_{name}"))
        want = getattr(jnp, name)(x, axis=0)
        for got in (fn(x), jax.jit(fn)(x), local(fn, x)):
            same_bits(got, want)
        plain = program(lambda x: getattr(jnp, name)(bj.map_fn(lambda v: v, x), axis=0))
        same_bits(local(plain, x), want)
        assert not gathers(fn, x)
        assert not gathers(plain, x)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("places", [(), (3,), (20,), (9, 17), (16, 18), (0, 20)])
def test_the_first_nan_is_the_extreme(name, places):
    x = X.at[np.array(places, int), 1].set(np.nan).at[:, 2].set(-np.inf).at[:, 0].set(np.inf)
    fn = program(getattr(bj, f"reduce_{name}"))
    np.testing.assert_array_equal(local(fn, x), getattr(np, name)(x, axis=0))
    np.testing.assert_array_equal(jax.jit(fn)(x), getattr(np, name)(x, axis=0))


def test_the_place_of_an_extreme_has_no_derivative():
    fn = program(lambda x: jnp.sum(x[bj.reduce_argmax(x)[0]]))
    np.testing.assert_array_equal(jax.grad(fn)(X).sum(), 3.0)
    batched = jax.vmap(program(bj.reduce_argmin), in_axes=1)
    same_bits(local(batched, X), jnp.argmin(X, 0))


# --- runners


def everything(w, x, k):
    scale = bj.reduce_mean(x)
    joined = bj.reduce(lambda a, b: jnp.tanh(a * w + b - scale * a), x)
    centred = bj.map_fn(lambda v: v - joined, x)
    return {
        "joined": joined,
        "again": bj.reduce(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, centred)),
        "place": bj.reduce_argmax(centred),
        "keys": {op: bj.reduce_by_key(x, k, 9, op=op) for op in OPS},
    }


@pytest.fixture(name="expected", scope="module")
def run_everything():
    keys = jnp.asarray(RNG.integers(-1, 9, 100), "int32")
    args = (jnp.float32(0.3), jnp.asarray(RNG.normal(size=(100, 3)), "float32"), keys)
    fn = program(everything, 100)
    return fn, args, local(fn, *args)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--direct_num_workers=2", "--direct_running_mode=multi_threading"],
        ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
        ["--direct_runner_bundle_repeat=1"],
    ],
    ids=["one", "threads", "processes", "retries"],
)
def test_every_runner_gives_the_same_bits(expected, flags):
    fn, args, want = expected
    assert not gathers(fn, *args)
    close(jax.jit(fn)(*args), want, 1e-4)
    same_bits(bj.run(fn, *args, options=["--shard_size=8", *flags]), want)


def test_values_that_are_files_give_the_same_bits(expected, monkeypatch):
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    fn, args, want = expected
    same_bits(bj.run(fn, *args, options=SHARDS), want)


# --- the algebra of partials


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 40), bundles=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_partials_merge_in_any_order(count, bundles, seed):
    """Strings are joined with their brackets, so that the order of calls shows."""
    rng = random.Random(seed)
    join = lambda a, b: [np.asarray(f"({a[0]}{b[0]})")]
    shards = [np.asarray(chr(200 + i)) for i in range(count)]
    trees = [DyadicTree(join) for _ in range(bundles)]
    for i in rng.sample(range(count), count):
        rng.choice(trees).add([shards[i]], i)
    rng.shuffle(trees)
    while len(trees) > 1:
        first, second = trees.pop(), trees.pop(rng.randrange(len(trees)))
        first.merge(second)
        trees.append(first)
    assert str(trees[0].fold()[0]) == str(in_tree(join, [[s] for s in shards])[0])


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), level=st.integers(0, 4))
def test_shards_make_the_tree_of_all_members(n, level):
    """Of shards of 2^l members, with padding, comes what comes of all members at once."""
    combine = lambda a, b: [a[0] * 2 - b[0] * 3]
    x = np.random.default_rng(n).integers(-100, 100, n).astype("int32")
    size = 1 << level
    tree = DyadicTree(lambda a, b: [np.asarray(c) for c in combine(a, b)])
    for index, start in enumerate(range(0, n, size)):
        shard = x[start : start + size]
        padded = np.concatenate([shard, np.full(size - len(shard), 7, "int32")])
        tree.add([np.asarray(v) for v in fold_members(combine, [padded], len(shard))], index)
    (want,) = fold_members(combine, [jnp.asarray(x)])
    np.testing.assert_array_equal(tree.fold()[0], want)


def test_a_shard_twice_is_an_error():
    tree = DyadicTree(lambda a, b: a)
    tree.add([np.ones(2)], 3)
    with pytest.raises(WorkerError, match="twice"):
        tree.add([np.ones(2)], 3)


# --- on a mesh


def everything_and_gradients():
    fn = program(everything, 16)
    total = lambda w, x, k: sum(jnp.sum(jnp.tanh(v)) for v in fn(w, x, k)["again"])
    return fn, jax.grad(total, (0, 1)), (jnp.float32(0.3), X[:16], K[:16])


@pytest.fixture(name="on_one_device", scope="module")
def run_on_one_device():
    fn, grads, args = everything_and_gradients()
    return jax.jit(fn)(*args), jax.jit(grads)(*args)


@pytest.mark.table
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_on_a_mesh(kind, wrap, on_one_device):
    fn, grads, args = everything_and_gradients()
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        args = on(args[0]), on(args[1], "clients"), on(args[2], "clients")
        close((wrap(fn)(*args), wrap(grads)(*args)), on_one_device, 1e-4)


# --- what is refused


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bj.reduce_by_key(X, X[:, 0], 3), bj.StructureError, r"keys of type float32\[21\]"),
        (lambda: bj.reduce_by_key(X, X > 0, 3), bj.StructureError, r"keys of type bool\[21, 3\]"),
        (lambda: bj.reduce_by_key(X, K[:4], 3), bj.PlacementError, r"keys has shape \(4,\)"),
        (lambda: bj.reduce_by_key(X, 1, 3), bj.PlacementError, r"keys has shape \(\)"),
        (lambda: bj.reduce_by_key(X[:4], K, 3), bj.PlacementError, r"x has shape \(4, 3\)"),
        (lambda: bj.reduce_by_key(X, K, 0), bj.StructureError, "num_keys 0, expected"),
        (lambda: bj.reduce_by_key(X, K, True), bj.StructureError, "num_keys True"),
        (lambda: bj.reduce_by_key(X, K, 2.0), bj.StructureError, "num_keys 2.0"),
        (lambda: bj.reduce_by_key(X, K, 3, op="median"), bj.StructureError, "one of sum, mean"),
        (lambda: bj.reduce_by_key({"w": "x"}, K, 3), bj.StructureError, r"x\['w'\] is of type str"),
        (
            lambda: bj.reduce_by_key([jax.random.split(jax.random.key(0), N)], K, 3),
            bj.StructureError,
            r"x\[0\] has dtype key<fry>, expected numbers",
        ),
        (lambda: bj.reduce(jnp.add, X[:3]), bj.PlacementError, r"reduce: x has shape \(3, 3\)"),
        (
            lambda: bj.reduce(lambda a, b: (a, b), X),
            bj.StructureError,
            r"what <lambda> returns is a tree PyTreeDef\(\(\*, \*\)\), expected PyTreeDef\(\*\)",
        ),
        (
            lambda: bj.reduce(lambda a, b: {"w": jnp.sum(a["w"])}, {"w": X}),
            bj.StructureError,
            r"what <lambda> returns\['w'\] has type float32\[\], expected float32\[3\], as the "
            r"members of x\['w'\]",
        ),
        (
            lambda: bj.reduce(lambda a, b: a.astype("float16"), X),
            bj.StructureError,
            r"has type float16\[3\], expected float32\[3\]",
        ),
        (lambda: bj.reduce(lambda a, b: "x", X), bj.StructureError, "of type str"),
        (
            lambda: bj.reduce(jnp.add, X, jnp.zeros(2)),
            bj.StructureError,
            r"identity has type float32\[2\], expected float32\[3\]",
        ),
        (
            lambda: bj.reduce(jnp.add, K, jnp.zeros(())),
            bj.StructureError,
            r"identity has type float32\[\], expected int32\[\]",
        ),
        (lambda: bj.reduce(jnp.add, K, [0]), bj.StructureError, "identity is a tree"),
        (
            lambda: bj.reduce(lambda a, b: [jax.debug.print("{}", a), a + b][1], K),
            bj.StructureError,
            "the function <lambda> has side effects",
        ),
        (
            lambda: bj.reduce(lambda a, b: a + jax.new_ref(jnp.zeros(3))[...] + REF[...], X),
            bj.StructureError,
            "reduce: the function <lambda> closes over a value of type Ref",
        ),
        (lambda: bj.reduce_argmax(X[:2]), bj.PlacementError, r"x has shape \(2, 3\)"),
    ],
)  # fmt: skip
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        program(call)()


REF = jax.new_ref(jnp.zeros(3))


@pytest.mark.parametrize("name", ["reduce", "reduce_by_key", "reduce_argmax", "reduce_argmin"])
def test_outside_of_a_program(name):
    args = {"reduce": (jnp.add, X), "reduce_by_key": (X, K, 3)}.get(name, (X,))
    with pytest.raises(bj.OutsideProgramError, match=f"{name} is only defined"):
        getattr(bj, name)(*args)


def test_the_plan_tells_of_functions():
    text = str(bj.explain(smooth, *SMOOTH, options=SHARDS))
    assert "in the order of the members, the same bits on any runner" in text


def test_an_error_in_a_function_names_the_step():
    def broken(a, b):
        return a + b

    fn = program(lambda x: bj.reduce(broken, x))

    def fail(*args):
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        real = shards.load_body
        patch.setattr(
            shards,
            "load_body",
            lambda key, body, *rest: fail if body.name == "broken" else real(key, body, *rest),
        )
        with pytest.raises(
            WorkerError, match=r"map_clients_0', reduction by 'broken': .*no memory"
        ):
            local(fn, X)
