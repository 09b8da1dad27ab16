"""Reductions by key, by a function and to the place of an extreme: values, derivatives, runners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import beamjax as bj
from beamjax import _compat
from beamjax.errors import WorkerError
from beamjax.numerics.reducers import BY_KEY
from beamjax.runtime import shard_executor as shards

N, KEYS = 21, 8
"""Of the keys below 8 the last has no member, and keys outside of them count for nothing."""
SHARDS = {"shard_size": 8}
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)), "float32")
K = jnp.asarray([*RNG.integers(-2, KEYS - 1, N - 2), -1, KEYS], "int32")


def program(fn, n=N):
    return bj.program(clients=n)(fn)


def local(fn, *args):
    return bj.run(fn, *args, runner="local", options=SHARDS)


def gathers(fn, *args):
    return "nothing is gathered" not in str(bj.explain(fn, *args, options=SHARDS))


def members_of(tree):
    n = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(n)]


# --- by key


def by_key(op, num_keys=KEYS):
    return program(lambda x, k: bj.reduce_by_key(x, k, num_keys, op=op))


def truth(op, x):
    """NumPy's answer in the widest type, key by key."""
    x, rows = np.asarray(x), []
    wide = x if x.dtype.kind in "biuc" else x.astype("f8")
    ends = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
    low, high = (ends.min, ends.max) if ends else (-np.inf, np.inf)
    low, high = (False, True) if x.dtype == bool else (low, high)
    more = {"max": {"initial": low}, "min": {"initial": high}}.get(op, {})
    for key in range(KEYS):
        members = wide[np.asarray(K) == key]
        with np.errstate(all="ignore"):
            mean = members.sum(0) / np.float64(len(members))
            away = np.abs(members - mean) ** 2 if op in ("var", "std") else 0
            variance = np.sum(away, 0) / np.float64(len(members))
        means = {"mean": mean, "var": variance, "std": np.sqrt(variance)}
        rows.append(means[op] if op in means else getattr(np, op)(members, 0, **more))
    return np.stack(rows)


@pytest.mark.versions
def test_ops_by_key_give_what_numpy_gives_for_each_dtype():
    whole = jnp.round(3 * X)
    values = {
        **{name: whole.astype(name) for name in ("float32", "bfloat16", "float16", "int32")},
        "uint8": jnp.abs(whole).astype("uint8"),
        "bool": whole > 0,
        "complex64": jax.lax.complex(whole, whole[::-1]),
    }
    real = {name: x for name, x in values.items() if name != "complex64"}
    orders = ("max", "min")
    fn = program(
        lambda x, k: {
            op: bj.reduce_by_key({n: x[n] for n in (real if op in orders else x)}, k, KEYS, op=op)
            for op in BY_KEY
        }
    )
    compiled, ran = jax.jit(fn)(values, K), local(fn, values, K)
    faults = []
    for op in BY_KEY:
        for name in real if op in orders else values:
            expected = "bool" if op in ("any", "all") else name
            is_mean = op in ("mean", "var", "std")
            if is_mean and name in ("int32", "uint8", "bool", "complex64"):
                expected = "complex64" if (op, name) == ("mean", "complex64") else "float32"
            if op in ("sum", "prod"):
                expected = {"bool": "int32", "uint8": "uint32"}.get(name, name)
            want = truth(op, values[name])
            rounding = {"bfloat16": 4e-3, "float16": 5e-4}.get(name, 4e-7 if is_mean else 2e-7)
            for how, found in (("jit", compiled[op][name]), ("local", ran[op][name])):
                wide = np.asarray(found).astype("complex128")
                if found.dtype != expected or not np.allclose(
                    wide, want.astype("complex128"), rounding, 0, equal_nan=True
                ):
                    faults.append((op, name, how, found, want))
    assert faults == []
    assert not gathers(by_key("sum"), X, K)
    same = {op: getattr(jax.ops, f"segment_{op}")(X, K, KEYS) for op in ("sum", *orders, "prod")}
    assert_same_bits({op: by_key(op)(X, K) for op in same}, same)


def test_totals_by_key_outgrow_the_dtype_of_the_members():
    x = {"int8": jnp.full(300, 100, "int8"), "uint8": jnp.full(300, 200, "uint8")}
    keys = jnp.arange(300) % 2
    expected = {
        op: {name: jnp.stack([getattr(jnp, op)(v[k::2]) for k in (0, 1)]) for name, v in x.items()}
        for op in ("sum", "mean")
    }
    total = program(lambda x, k: {op: bj.reduce_by_key(x, k, 2, op=op) for op in expected}, 300)
    for found in (jax.jit(total)(x, keys), local(total, x, keys)):
        assert_same_bits(found, expected)
    unknown = program(lambda x, k: bj.reduce_by_key(x, k), 300)
    assert_same_bits(jax.jit(unknown)(x, keys).reduced()["value"], expected["sum"])


def test_keys_of_any_int_dtype():
    dtypes = ["int8", "uint8", "int16", "uint16", "uint32", "int32", "int64", "uint64"]
    with jax.enable_x64(True):
        keys = {}
        for dtype in dtypes:
            info = np.iinfo(dtype)
            ends = [2**32, -(2**32), 2**32 + 1] if dtype == "int64" else [99, 99, 99]
            odd = [info.min, info.max, 0, 99, 3, *ends]
            keys[dtype] = jnp.asarray((odd * 4)[:N], dtype)
        count = program(lambda k: {n: bj.reduce_by_key(jnp.ones(N), k[n], 400) for n in k})
        mean = program(lambda x, k: bj.reduce_by_key(x, k, 3, op="mean"))
        expected = {}
        for name, each in keys.items():
            wanted = [key for key in map(int, np.asarray(each).tolist()) if 0 <= key < 400]
            expected[name] = jnp.asarray(np.bincount(wanted, minlength=400), "float64")
        assert_same_bits(jax.jit(count)(keys), expected)
        assert_same_bits(local(count, keys), expected)
        found = local(mean, jnp.arange(N), keys["int64"])
        places = [np.flatnonzero(np.asarray(keys["int64"]) == key) for key in range(3)]
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, [places[0].mean(), np.nan, np.nan])


def test_trees_by_key_keep_their_shape():
    tree = {"b": X > 0, "i": (K, X[:, :0], [])}
    found = local(by_key("sum"), tree, K)
    assert_close(found, jax.jit(by_key("sum"))(tree, K))
    assert [leaf.shape for leaf in jax.tree.leaves(found["i"])] == [(KEYS,), (KEYS, 0)]


def test_sums_by_key_are_rounded_once_whatever_the_order():
    big = np.array([1e30, 1.0, -1e30, 1e-3] + [0.0] * 4, "float32").repeat(8)
    keys = np.zeros(64, "int32")
    fn = program(lambda x, k: bj.reduce_by_key(x, k, 1), n=64)
    for order in (slice(None), slice(None, None, -1)):
        found = local(fn, big[order], keys)
        np.testing.assert_array_equal(found, np.float32(8 * (1.0 + np.float64(np.float32(1e-3)))))


def test_zeros_and_nan_by_key():
    x = np.zeros((32, 2), "float32")
    x[::16] = -0.0
    x[20:24] = np.nan
    x[:, 1] = x[::-1, 0]
    keys = np.repeat(np.arange(4, dtype="int32"), 8)
    keys[1::2] = 0
    fn = program(lambda x, k: [bj.reduce_by_key(x, k, 4, op=op) for op in ("max", "min")], n=32)
    found, want = local(fn, x, keys), jax.jit(fn)(x, keys)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isnan(a).any()
        np.testing.assert_array_equal(np.signbit(a) | np.isnan(a), np.signbit(b) | np.isnan(b))


def segments(op, x):
    """The reduction by `jax.ops`, to be differentiated."""
    if op == "mean":
        return jax.ops.segment_sum(x, K, KEYS) / jax.ops.segment_sum(jnp.ones((N, 1)), K, KEYS)
    if op == "prod":
        rows = [jnp.prod(x[np.flatnonzero(np.asarray(K) == key)], 0) for key in range(KEYS)]
        return jnp.stack(rows)
    return getattr(jax.ops, f"segment_{op}")(x, K, KEYS)


def derivatives_of(fn, ops):
    """The slopes of a function of an op and members, and its tangents."""
    weights = jnp.arange(3.0 * KEYS).reshape(KEYS, 3)

    def of(op, x):
        finite = lambda x: jnp.sum(
            jnp.where(jnp.isfinite(y := fn(op, x)), weights * jnp.sin(y), 0.0)
        )
        return jax.grad(finite)(x), jax.jvp(lambda x: fn(op, x), (x,), (x,))[1]

    return lambda x: {op: of(op, x) for op in ops}


@pytest.mark.versions
def test_derivatives_by_key():
    """Also where an extreme is had twice, and where one, two or three factors are zero."""
    ops = ["sum", "mean", "max", "min", "prod"]
    mine = np.flatnonzero(np.asarray(K) == 1)
    x = jnp.round(2 * X) / 2
    for column in range(3):
        x = x.at[mine[: column + 1], column].set(0.0)
    fn = derivatives_of(program(lambda op, x: bj.reduce_by_key(x, K, KEYS, op=op)), ops)
    want = jax.jit(derivatives_of(segments, ops))(x)
    for found in (jax.jit(fn)(x), local(fn, x)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), found, want)
    assert not gathers(fn, x)


@pytest.mark.table
def test_second_derivatives_of_products_by_key():
    for zeros in range(3):
        x = (1 + X).at[np.flatnonzero(np.asarray(K) == 1)[:zeros], 0].set(0.0)
        hessian = lambda fn: jax.jit(jax.hessian(lambda v: jnp.sum(jnp.sin(fn("prod", v)))))
        ours = program(lambda op, v: bj.reduce_by_key(v, K, KEYS, op=op))
        found, want = hessian(ours)(x), hessian(segments)(x)
        np.testing.assert_allclose(found, want, 1e-3, 1e-4)


def test_vmap_by_key():
    axes = [(0, None), (None, 0), (0, 0), (1, 0)]
    ops = ["sum", "mean", "min", "prod", "any"]
    several = {0: jnp.stack([X, 2 * X]), 1: jnp.stack([X, 2 * X], 1)}
    pick = lambda v, axis, i: v if axis is None else jnp.take(v, i, axis)

    def batched(x, keys):
        return {
            f"{op} {at}": jax.vmap(by_key(op), in_axes=at)(
                x[at[0]] if at[0] is not None else x[0][0], keys if at[1] == 0 else keys[0]
            )
            for at in axes
            for op in ops
        }

    keys = jnp.stack([K, K + 1])
    want = {}
    for at in axes:
        for op in ops:
            x, k = (several.get(at[0], X), keys if at[1] == 0 else K)
            want[f"{op} {at}"] = jnp.stack(
                [by_key(op)(pick(x, at[0], i), pick(k, at[1], i)) for i in (0, 1)]
            )
    assert_close(jax.jit(batched)(several, keys), want, 1e-5, 0)
    assert_close(local(batched, several, keys), want, 1e-5, 0)
    assert not gathers(batched, several, keys)


# --- by a function


def affine(left, right):
    """x -> s·x + t, the left one after the right one."""
    return {"s": left["s"] * right["s"], "t": left["s"] * right["t"] + left["t"]}


def in_tree(combine, members):
    """Neighbours first, then neighbours of these."""
    while len(members) > 1:
        pairs = [members[i : i + 2] for i in range(0, len(members), 2)]
        members = [combine(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return members[0]


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
    "no elements": (lambda a, b: a + b, jnp.zeros((N, 0))),
    "one leaf of a tree": (lambda a, b: [a[0] + b[0]], [K]),
}


@pytest.mark.versions
def test_exact_functions_give_the_value_in_order():
    start = {"s": jnp.asarray([5, 2], "int32"), "t": jnp.asarray([1, 0], "int32")}

    def every(values, start):
        found = {name: bj.reduce(combine, values[name]) for name, (combine, _) in EXACT.items()}
        started = bj.reduce(affine, values["affine"], start)
        return found, started, bj.reduce(jnp.add, values["switches"], 0)

    values = {name: x for name, (_, x) in EXACT.items()}
    want = {name: functools.reduce(fn, members_of(x)) for name, (fn, x) in EXACT.items()}
    want = want, functools.reduce(affine, [start, *members_of(values["affine"])]), jnp.sum(K)
    fn = program(every)
    for found in (jax.jit(fn)(values, start), local(fn, values, start)):
        assert jax.tree.structure(found) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, found, want)
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, want)
    assert not gathers(fn, values, start)


def test_any_number_of_members_has_one_order_of_calls():
    """Digits in base 67 and, as it is not associative at all, subtraction, on nine sizes."""
    sizes = [1, 2, 3, 7, 8, 9, 16, 17, 33]
    joined = lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1])
    minus = lambda a, b: a - b

    @bj.program(placements={f"p{n}": n for n in sizes})
    def fn(digits, floats):
        return {
            str(n): (
                bj.reduce(joined, digits[str(n)], placement=f"p{n}"),
                bj.reduce(minus, floats[str(n)], placement=f"p{n}"),
            )
            for n in sizes
        }

    for x64 in (False, True):
        with jax.enable_x64(x64):
            digits = {
                str(n): (jnp.arange(n, dtype="uint32"), jnp.full(n, 67, "uint32")) for n in sizes
            }
            floats = {str(n): jnp.asarray(RNG.normal(size=(n, 2))) for n in sizes}
            want = {
                n: (in_tree(joined, members_of(digits[n])), in_tree(minus, members_of(floats[n])))
                for n in digits
            }
            for n, pairs in digits.items():
                first = functools.reduce(joined, members_of(pairs))
                assert [int(v) for v in first] == [int(v) for v in want[n][0]]
            assert_same_bits(local(fn, digits, floats), want)
            if not x64:
                assert_same_bits(jax.jit(fn)(digits, floats), want)


def test_functions_close_over_server_values_and_constants():
    table = np.array([2, 3], "int32")
    fold = lambda a, b: jax.random.fold_in(a, jax.random.bits(b) >> np.uint32(1))

    @program
    def fn(w, x, keys):
        scale = bj.reduce_max(x)
        return bj.reduce(lambda a, b: a + b + w * table * scale, x), bj.reduce(fold, keys)

    x = jnp.asarray(RNG.integers(0, 5, (N, 2)), "int32")
    keys = jax.random.split(jax.random.key(0), N)
    want = functools.reduce(lambda a, b: a + b + 7 * table * x.max(0), members_of(x))
    want = want, in_tree(jax.jit(fold), list(keys))
    for found in (jax.jit(fn)(7, x, keys), local(fn, 7, x, keys)):
        assert_same_bits(found, want)


def test_nothing_is_called_on_padding():
    """Padding repeats a member; a function that sees it divides by zero."""
    fn = program(lambda x: bj.reduce(lambda a, b: a + b + 1 / (a - b), x), 9)
    x = jnp.arange(9.0)
    found = local(fn, x)
    assert np.isfinite(found)
    assert_close(found, jax.jit(fn)(x))


def soft(w):
    return lambda a, b: {"s": a["s"] * b["s"], "t": jnp.tanh(w * a["t"]) * b["s"] + b["t"]}


def smooth_of(n):
    return program(lambda w, x: bj.reduce(soft(w), x), n)


def smooth_truth(w, x):
    return in_tree(soft(w), members_of(x))


def smooth_args(n):
    return jnp.float32(0.7), {"s": 1 + X[:n, 0] / 9, "t": X[:n, 1]}


def loss(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(*args)))


DERIVED = {
    "value and grad": lambda f: jax.value_and_grad(loss(f), (0, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "jvp of one": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
    "hessian": lambda f: jax.hessian(loss(f)),
}
MORE = {
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "jacrev": lambda f: jax.jacrev(f, 1),
    "fwd of fwd": lambda f: jax.jacfwd(jax.jacfwd(loss(f))),
    "rev of fwd": lambda f: jax.jacrev(jax.jacfwd(loss(f))),
    "rev of rev": lambda f: jax.jacrev(jax.grad(loss(f))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), 1),
}


@pytest.mark.parametrize(
    ("derived", "n"),
    [(DERIVED, 10), pytest.param(DERIVED | MORE, N, marks=pytest.mark.table)],
    ids=["some", "all"],
)
def test_derivatives_by_a_function(derived, n):
    every = lambda f: lambda *args: {name: of(f)(*args) for name, of in derived.items()}
    args = smooth_args(n)
    fn, want = every(smooth_of(n)), jax.jit(every(smooth_truth))(*args)
    assert_close(jax.jit(fn)(*args), want, 2e-4)
    assert_close(local(fn, *args), want, 2e-4)
    forward = lambda *args: [DERIVED[name](smooth_of(n))(*args) for name in ("jvp", "jvp of one")]
    assert not gathers(forward, *args)


@pytest.mark.versions
def test_derivatives_beside_ints():
    """The place of the largest value has no derivative, the value itself has."""
    best = lambda a, b: jax.tree.map(lambda x, y: jnp.where(b[0] > a[0], y, x), a, b)
    fn = program(lambda x, i: bj.reduce(best, (x, i)))
    found = jax.jit(jax.grad(lambda x, i: fn(x, i)[0]))(X[:, 0], jnp.arange(N))
    np.testing.assert_array_equal(found, np.arange(N) == np.argmax(X[:, 0]))
    value, tangent = jax.jvp(lambda x: fn(x, jnp.arange(N)), (X[:, 0],), (jnp.ones(N),))
    assert (tangent[0], tangent[1].dtype) == (1.0, jax.dtypes.float0)
    assert value[1] == np.argmax(X[:, 0])


def test_vmap_by_a_function():
    w, x = smooth_args(10)
    smooth = smooth_of(10)
    args = jnp.stack([w, w / 2]), {"s": jnp.stack([x["s"], x["s"] / 2], 1), "t": x["t"]}
    rows = jax.tree.map(lambda v: jnp.stack([v, v / 2]), x)

    def batched(w, x, rows):
        return (
            jax.vmap(smooth, in_axes=(0, None))(w, jax.tree.map(lambda v: v[0], rows)),
            jax.vmap(smooth, in_axes=(None, 0))(w[0], rows),
            jax.vmap(smooth, in_axes=(0, {"s": 1, "t": None}))(w, x),
        )

    first = jax.tree.map(lambda v: v[0], rows)
    singles = [
        [smooth_truth(args[0][i], first) for i in (0, 1)],
        [smooth_truth(w, jax.tree.map(lambda v, i=i: v[i], rows)) for i in (0, 1)],
        [smooth_truth(args[0][i], {"s": args[1]["s"][:, i], "t": x["t"]}) for i in (0, 1)],
    ]
    want = tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair) for pair in singles)
    assert_close(jax.jit(batched)(*args, rows), want, 1e-5)
    assert_close(local(batched, *args, rows), want, 1e-5)
    assert not gathers(batched, *args, rows)


def test_a_reduction_that_is_not_used_is_dropped():
    fn = program(lambda x: (bj.reduce(lambda a, b: a, x), bj.reduce_sum(x))[1])
    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    assert "bj_reduce[" in str(jaxpr)
    closed = jax.extend.core.ClosedJaxpr(jaxpr, [])
    assert "bj_reduce[" not in str(_compat.dce(closed, [True])[0])
    ordered = "in the order of the members, the same bits on any runner"
    assert ordered not in str(bj.explain(fn, X))
    assert ordered in str(bj.explain(smooth_of(N), *smooth_args(N), options=SHARDS))


# --- the place of an extreme


@pytest.mark.versions
@pytest.mark.parametrize("x64", [False, True])
def test_the_first_extreme(x64):
    places = [(), (3,), (20,), (9, 17), (16, 18), (0, 20)]
    with jax.enable_x64(x64):
        x = {name: jnp.round(X).astype(name) for name in ("float32", "bfloat16", "int8")}
        x |= {name: jnp.abs(jnp.round(X)).astype(name) for name in ("uint32", "bool")}
        x["nan"] = jnp.concatenate([X[:, :1]] * len(places), 1)
        for column, rows in enumerate(places):
            x["nan"] = x["nan"].at[np.array(rows, int), column].set(np.nan)
        x["inf"] = jnp.concatenate([jnp.full((N, 1), v) for v in (np.inf, -np.inf)], 1)
        names = ("argmax", "argmin")
        fn = program(lambda x: [jax.tree.map(getattr(bj, f"reduce_{name}"), x) for name in names])
        plain = program(
            lambda x: [
                jax.tree.map(lambda v, name=name: getattr(jnp, name)(v, axis=0), placed)
                for name in names
                for placed in [bj.map_fn(lambda v: v, x)]
            ]
        )
        want = [jax.tree.map(lambda v, a=a: getattr(jnp, a)(v, axis=0), x) for a in names]
        for found in (jax.jit(fn)(x), local(fn, x), local(plain, x)):
            assert_same_bits(found, want)
        assert not gathers(fn, x)
        assert not gathers(plain, x)


def test_the_place_of_an_extreme_has_no_derivative():
    fn = program(lambda x: jnp.sum(x[bj.reduce_argmax(x)[0]]))
    np.testing.assert_array_equal(jax.grad(fn)(X).sum(), 3.0)
    batched = jax.vmap(program(bj.reduce_argmin), in_axes=1)
    assert_same_bits(local(batched, X), jnp.argmin(X, 0))


# --- meshes


def everything(w, x, k):
    scale = bj.reduce_mean(x)
    joined = bj.reduce(lambda a, b: jnp.tanh(a * w + b - scale * a), x)
    centred = bj.map_fn(lambda v: v - joined, x)
    return {
        "joined": joined,
        "again": bj.reduce(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, centred)),
        "place": bj.reduce_argmax(centred),
        "keys": {op: bj.reduce_by_key(x, k, 9, op=op) for op in BY_KEY},
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, marks=pytest.mark.table), jax.jit], ids=["eager", "jit"]
)
def test_on_a_mesh(kind, wrap):
    fn = program(everything, 16)
    total = lambda w, x, k: sum(jnp.sum(jnp.tanh(v)) for v in fn(w, x, k)["again"])
    grads, args = jax.grad(total, (0, 1)), (jnp.float32(0.3), X[:16], K[:16])
    both = lambda *args: (fn(*args), grads(*args))
    want = jax.jit(both)(*args)
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        args = on(args[0]), on(args[1], "clients"), on(args[2], "clients")
        assert_close(wrap(both)(*args), want, 1e-4)


# --- what is refused

REF = jax.new_ref(jnp.zeros(3))
TREE, PLACED = bj.StructureError, bj.PlacementError
REFUSED = [
    (lambda: bj.reduce_by_key(X, X[:, 0], 3), TREE, r"keys of type float32\[21\]"),
    (lambda: bj.reduce_by_key(X, X > 0, 3), TREE, r"keys of type bool\[21, 3\]"),
    (lambda: bj.reduce_by_key(X, K[:4], 3), PLACED, r"keys has shape \(4,\)"),
    (lambda: bj.reduce_by_key(X, 1, 3), PLACED, r"keys has shape \(\)"),
    (lambda: bj.reduce_by_key(X[:4], K, 3), PLACED, r"x has shape \(4, 3\)"),
    (lambda: bj.reduce_by_key(X, K, 0), TREE, "num_keys 0, expected"),
    (lambda: bj.reduce_by_key(X, K, True), TREE, "num_keys True"),
    (lambda: bj.reduce_by_key(X, K, 2.0), TREE, "num_keys 2.0"),
    (lambda: bj.reduce_by_key(X, K, 3, op="median"), TREE, "one of sum, mean"),
    (lambda: bj.reduce_by_key({"w": "x"}, K, 3), TREE, r"x\['w'\] is of type str"),
    (
        lambda: bj.reduce_by_key([jax.random.split(jax.random.key(0), N)], K, 3),
        TREE,
        r"x\[0\] has dtype key<fry>, expected numbers",
    ),
    (lambda: bj.reduce(jnp.add, X[:3]), PLACED, r"reduce: x has shape \(3, 3\)"),
    (lambda: bj.reduce(lambda a, b: (a, b), X), TREE, r"is a tree .*, expected PyTreeDef\(\*\)"),
    (
        lambda: bj.reduce(lambda a, b: {"w": jnp.sum(a["w"])}, {"w": X}),
        TREE,
        r"returns\['w'\] has type float32\[\], expected float32\[3\], as the members of x\['w'\]",
    ),
    (lambda: bj.reduce(lambda a, b: a.astype("float16"), X), TREE, r"float16\[3\], expected float"),
    (lambda: bj.reduce(lambda a, b: "x", X), TREE, "of type str"),
    (lambda: bj.reduce(jnp.add, X, jnp.zeros(2)), TREE, r"identity .* float32\[2\], expected floa"),
    (lambda: bj.reduce(jnp.add, K, jnp.zeros(())), TREE, r"float32\[\], expected int32\[\]"),
    (lambda: bj.reduce(jnp.add, K, [0]), TREE, "identity is a tree"),
    (
        lambda: bj.reduce(lambda a, b: [jax.debug.print("{}", a), a + b][1], K),
        TREE,
        "<lambda> has side effects",
    ),
    (
        lambda: bj.reduce(lambda a, b: a + jax.new_ref(jnp.zeros(3))[...] + REF[...], X),
        TREE,
        "<lambda> closes over a value of type Ref",
    ),
    (lambda: bj.reduce_argmax(X[:2]), PLACED, r"x has shape \(2, 3\)"),
]


@pytest.mark.versions
def test_calls_that_make_no_sense_are_refused():
    for call, error, message in REFUSED:
        with pytest.raises(error, match=message):
            program(call)()
    for name in ("reduce", "reduce_by_key", "reduce_argmax", "reduce_argmin"):
        args = {"reduce": (jnp.add, X), "reduce_by_key": (X, K, 3)}.get(name, (X,))
        with pytest.raises(bj.OutsideProgramError, match=f"{name} is only defined"):
            getattr(bj, name)(*args)


def test_an_error_in_a_function_names_the_step(monkeypatch):
    def broken(a, b):
        return a + b

    def fail(*args):
        raise RuntimeError("no memory")

    real = shards.load_body
    load = lambda key, body, *a, **k: fail if body.name == "broken" else real(key, body, *a, **k)
    monkeypatch.setattr(shards, "load_body", load)
    with pytest.raises(WorkerError, match=r"map_clients_0', reduction by 'broken': .*no memory"):
        local(program(lambda x: bj.reduce(broken, x)), X)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_means_of_two_bits_are_sums_of_floats(dtype):
    x = jnp.asarray(np.arange(36).reshape(12, 3) % 2, dtype)
    mean = bj.run(bj.program(clients=12)(bj.reduce_mean), x, options={"shard_size": 8})
    expected = np.asarray(x).astype(np.float64).mean(axis=0).astype(x.dtype)
    assert_same_bits(mean, jnp.asarray(expected))
