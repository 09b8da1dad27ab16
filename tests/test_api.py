"""The operators: values, trees, placements, and the message of every error."""

import functools
import operator
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import beamjax as bj

N = 5
REDUCTIONS = ["sum", "mean", "max", "min", "prod", "any", "all"]
X = jnp.arange(10.0).reshape(N, 2)

eager = lambda fn: fn
both_ways = pytest.mark.parametrize("wrap", [eager, jax.jit], ids=["eager", "jit"])


def program(fn):
    return bj.program(clients=N)(fn)


def raises(error, *parts):
    """Expects an error whose message holds these parts, in order."""
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


# --- names


def test_the_names_of_the_module():
    """Those of the page on the API, each with a docstring, and no modules of the implementation."""
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    documented = {"compress", *re.findall(r"^\.\. auto\w+:: beamjax\.(\w+)$", page, re.MULTILINE)}
    found = python("""
import beamjax as bj
import beamjax.sources, beamjax.pipelines.driver, beamjax.interpreters.stage, beamjax.doctor
for name in dir(bj):
    print(name, bool((getattr(bj, name).__doc__ or "").strip()))
""")
    names = dict(line.split() for line in found.splitlines())
    assert {name for name in names if not name.startswith("__")} == documented
    assert [name for name in documented if names[name] != "True"] == []
    assert python("from beamjax import *\nprint(*sorted(set(vars())))").split() == sorted(
        {*documented, *python("print(*vars())").split()}
    )
    assert "DryRun" in python("import beamjax as bj\nhelp(bj.dataflow)\nhelp('beamjax.planning')")


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- program


@pytest.mark.parametrize(
    "decorator",
    [
        bj.program(placements={"clients": N}),
        bj.program({"clients": N}),
        bj.program(clients=N),
        bj.program(clients=np.int64(N)),
        bj.program(placements={"clients": N}, use_abstract_mesh=False),
        bj.program(use_abstract_mesh=True, clients=N),
        bj.program({"clients": N}, silos=3),
    ],
)
def test_ways_to_write_a_program(decorator):
    run = decorator(lambda x: bj.broadcast(x, placement="clients"))
    np.testing.assert_array_equal(run(2.0), np.full(N, 2.0, "float32"))


def test_programs_keep_their_names_and_arguments():
    @bj.program(clients=N)
    def mean(x, *, scale=1.0):
        """Says what it does."""
        return scale * bj.reduce_mean(x)

    assert (mean.__name__, mean.__doc__) == ("mean", "Says what it does.")
    np.testing.assert_array_equal(mean(X, scale=2.0), [8.0, 10.0])


@pytest.mark.parametrize("n", [-1, True, 2.0, 2.5, "3", (3,), jnp.float32(2)])
def test_impossible_sizes(n):
    with raises(bj.PlacementError, "program: placement 'clients' has size", "an int >= 0"):
        bj.program(clients=n)


def test_programs_need_placements():
    for make in (lambda: bj.program(), lambda: bj.program({})):
        with raises(bj.PlacementError, "at least one placement, found none"):
            make()
    with raises(bj.PlacementError, "expected placements as a dict", "found <function"):
        bj.program(lambda x: x)
    with raises(bj.PlacementError, "name of a placement is a string, found 3"):
        bj.program({3: 3})
    with raises(bj.PlacementError, "a placement is given twice: a, a"):
        bj.program({"a": 1}, a=2)


# --- placements


def reduce_x(op):
    return lambda **kw: getattr(bj, f"reduce_{op}")(X, **kw)


OPERATORS = {
    "broadcast": lambda **kw: bj.broadcast(1.0, **kw),
    "map_fn": lambda **kw: bj.map_fn(jnp.sin, X, **kw),
    "reduce_weighted_mean": lambda **kw: bj.reduce_weighted_mean(X, X[:, 0], **kw),
    **{f"reduce_{op}": reduce_x(op) for op in REDUCTIONS},
}
each_operator = pytest.mark.parametrize("name", OPERATORS)


@each_operator
def test_operators_outside_a_program(name):
    with raises(bj.OutsideProgramError, f"{name} is only defined inside a program"):
        OPERATORS[name]()
    assert issubclass(bj.OutsideProgramError, RuntimeError)
    program(OPERATORS[name])()
    with raises(bj.OutsideProgramError, f"{name} is only defined inside a program"):
        OPERATORS[name](placement="clients")


@each_operator
def test_unknown_placement(name):
    with raises(bj.PlacementError, f"{name}: unknown placement 'nobody'", "has 'clients', 'silos'"):
        bj.program(clients=N, silos=3)(OPERATORS[name])(placement="nobody")


@each_operator
def test_ambiguous_placement(name):
    with raises(ValueError, f"{name}: the program has more than one placement", "'a', 'b'"):
        bj.program(a=N, b=N)(OPERATORS[name])()
    bj.program(a=N, b=N)(OPERATORS[name])(placement="b")


def test_innermost_program_wins_and_sees_the_outer_ones():
    @bj.program(silos=3)
    def inner(x):
        return bj.broadcast(x), bj.broadcast(x, placement="clients")

    @program
    def outer(x):
        before, (own, others), after = bj.broadcast(x), inner(x), bj.broadcast(x)
        return before, own, others, after

    assert [v.shape for v in outer(1.0)] == [(5,), (3,), (5,), (5,)]


def test_inner_sizes_shadow_outer_ones():
    inner = bj.program(clients=2)(lambda: bj.broadcast(1.0, placement="clients"))
    outer = program(lambda: (inner(), bj.broadcast(1.0)))
    assert [v.shape for v in outer()] == [(2,), (5,)]


def test_programs_are_re_entrant():
    @bj.program(clients=2)
    def total(x, depth):
        return bj.reduce_sum(bj.map_fn(lambda v: total(x, depth - 1), x)) if depth else x[0]

    assert total(jnp.ones(2), 3) == 8.0


def test_exceptions_leave_no_program_behind():
    @program
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails(X)
    with pytest.raises(bj.OutsideProgramError):
        bj.broadcast(1.0)


def test_jit_does_not_serve_a_trace_of_other_placements():
    total = jax.jit(lambda x: bj.reduce_sum(bj.broadcast(x)))
    sizes = (3, 5, 3)
    assert [float(bj.program(clients=n)(total)(1.0)) for n in sizes] == [3.0, 5.0, 3.0]
    double = lambda v: 2.0 * v
    run = lambda x: bj.map_fn(double, bj.broadcast(x))
    jaxprs = [jax.make_jaxpr(bj.program(clients=n)(run))(1.0) for n in sizes]
    assert [j.out_avals[0].shape for j in jaxprs] == [(3,), (5,), (3,)]


def test_threads_do_not_see_each_other():
    barrier = threading.Barrier(8, timeout=30)

    def work(n):
        @bj.program(clients=n)
        def run(x):
            barrier.wait()
            out = jax.jit(lambda x: bj.reduce_sum(bj.broadcast(x)))(x)
            barrier.wait()
            return out, bj.reduce_sum(bj.broadcast(x))

        return [float(v) for v in run(1.0)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(1, 9))) == [[n, n] for n in range(1, 9)]


def test_threads_started_inside_a_program_are_outside():
    with ThreadPoolExecutor(1) as pool:
        run = program(lambda: pool.submit(bj.broadcast, 1.0).result())
        with pytest.raises(bj.OutsideProgramError):
            run()


# --- arguments


@pytest.mark.parametrize(
    ("name", "positional"),
    [("broadcast", 1), *((f"reduce_{op}", 1) for op in REDUCTIONS)],
)
def test_too_many_arguments(name, positional):
    message = rf"{name}\(\) takes {positional} positional argument but 2 were given"
    for call in (getattr(bj, name), program(getattr(bj, name))):
        with pytest.raises(TypeError, match=message):
            call(X, X)


def test_too_many_arguments_to_map():
    with pytest.raises(TypeError, match=r"map_fn\(\) takes 2 positional arguments but 3 were"):
        program(bj.map_fn)(jnp.sin, X, X)


@both_ways
def test_errors_of_the_mapped_function_are_its_own(wrap):
    class MineError(Exception):
        pass

    def fails(v):
        raise MineError("this and no more")

    with pytest.raises(MineError) as info:
        wrap(program(lambda x: bj.map_fn(fails, x)))(X)
    assert str(info.value) == "this and no more"


def test_errors_of_jax_name_the_mapped_function():
    def branches(v):
        return v if v > 0 else -v

    with pytest.raises(jax.errors.TracerBoolConversionError, match=f"branches at {__file__}"):
        program(lambda x: bj.map_fn(branches, x))(X[:, 0])


# --- broadcast and map


def test_broadcast_of_trees():
    tree = {"a": 1, "b": (2.5, None), "c": np.arange(3), "d": True, "e": jnp.ones((2, 0))}
    out = program(bj.broadcast)(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for got, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        want = jnp.asarray(leaf)
        assert got.dtype == want.dtype
        assert got.weak_type == want.weak_type
        np.testing.assert_array_equal(got, np.broadcast_to(want, (N, *want.shape)))


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@both_ways
def test_map_unpacks_tuples_only(wrap):
    add = lambda x, y: x + y
    assert_equal = np.testing.assert_array_equal
    assert_equal(wrap(program(lambda x: bj.map_fn(add, (x, x))))(X), 2.0 * X)
    assert_equal(wrap(program(lambda x: bj.map_fn(add, Point(x, x))))(X), 2.0 * X)
    assert_equal(wrap(program(lambda x: bj.map_fn(lambda v: v[0] + v[1], [x, x])))(X), 2.0 * X)
    assert_equal(wrap(program(lambda x: bj.map_fn(lambda v: v["x"], {"x": x})))(X), X)
    assert_equal(wrap(program(lambda x: bj.map_fn(lambda v: v, ({"x": x},))["x"]))(X), X)
    assert_equal(wrap(program(lambda w: bj.map_fn(lambda: w, ())))(2.0), np.full(N, 2.0))


class Scaler:
    def __call__(self, v):
        return 2.0 * v

    def method(self, v):
        return 2.0 * v


@pytest.mark.parametrize(
    "fn",
    [
        Scaler(),
        Scaler().method,
        functools.partial(jnp.multiply, 2.0),
        functools.partial(functools.partial(lambda s, v, *, t: s * v * t, 1.0), t=2.0),
        jax.jit(lambda v: 2.0 * v),
        jax.tree_util.Partial(jnp.multiply, 2.0),
        lambda *args, **kwargs: 2.0 * args[0],
        lambda v, unused=None: v + v,
        operator.methodcaller("__mul__", 2.0),
    ],
)
def test_anything_callable_is_mapped(fn):
    np.testing.assert_array_equal(program(lambda x: bj.map_fn(fn, x))(X), 2.0 * X)


@both_ways
def test_map_closes_over_anything(wrap):
    key, table = jax.random.key(0), np.arange(2.0)

    def body(v):
        noise = jax.random.normal(key, (2,))
        return v * table.astype("float32") + noise + scale

    scale = 3.0
    out = wrap(program(lambda x: bj.map_fn(body, x)))(X)
    np.testing.assert_allclose(out, jax.vmap(body)(X), rtol=1e-6)


def test_map_takes_numpy_and_gives_what_vmap_gives():
    body = lambda v: {"a": v[0], "b": None, "c": (2, 3.0, np.arange(2), True)}
    got = program(lambda x: bj.map_fn(body, x))(np.asarray(X))
    want = jax.vmap(body)(X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        np.testing.assert_array_equal(g, w)


def test_empty_trees():
    run = program(lambda x: (bj.map_fn(lambda v: None, x), bj.broadcast({}), bj.reduce_sum(())))
    assert run(X) == (None, {}, ())


def test_temperature_example():
    over = lambda threshold, value: jax.lax.cond(value > threshold, lambda: 1.0, lambda: 0.0)

    @bj.program(placements={"clients": 100})
    def share_over(threshold, values):
        return bj.reduce_mean(bj.map_fn(over, (bj.broadcast(threshold), values)))

    values = jax.random.uniform(jax.random.PRNGKey(2), shape=[100])
    assert share_over(jnp.array(0.5), values) == jnp.mean((values > 0.5).astype(jnp.float32))


# --- reductions


@both_ways
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_of_trees(op, wrap):
    tree = {"float": X, "int": [jnp.arange(N, dtype="uint8")], "bool": X > 3.0, "none": None}
    got = wrap(program(getattr(bj, f"reduce_{op}")))(tree)
    want = jax.tree.map(lambda v: getattr(jnp, op)(v, axis=0), tree)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=1e-6)


# --- weighted means

WEIGHTS = {
    "float": np.array([1.0, 0.0, 2.0, 0.5, 3.0], "float32"),
    "int": np.array([1, 0, 2, 5, 3]),
    "uint8": np.array([100, 100, 100, 0, 250], "uint8"),
    "bool": np.array([True, False, True, True, False]),
    "bfloat16": np.array([1.0, 0.0, 2.0, 0.5, 3.0], ml_dtypes.bfloat16),
}


@both_ways
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"]
)
def test_weighted_means_equal_numpy(dtype, weights, wrap):
    w = WEIGHTS[weights]
    x = jnp.asarray(np.arange(N * 6).reshape(N, 2, 3) % 5).astype(dtype)
    got = wrap(program(bj.reduce_weighted_mean))(x, w)
    with jax.numpy_dtype_promotion("standard"):
        products = (x[..., 0, 0] * w).dtype
    assert got.dtype == (products if jnp.issubdtype(products, jnp.inexact) else "float32")
    wide = "complex64" if dtype == "complex64" else "float32"
    want = np.average(np.asarray(x.astype(wide)), axis=0, weights=w.astype("float32"))
    rtol = 1e-6 if got.dtype in ("float32", "complex64") else 1e-2
    np.testing.assert_allclose(np.asarray(got.astype(wide)), want, rtol=rtol)


def test_weighted_means_of_trees():
    x = {"a": X, "b": jnp.arange(float(N)), "c": jnp.ones((N, 3, 2))}
    w = jnp.arange(1.0, N + 1)
    mean = program(bj.reduce_weighted_mean)
    want = jax.tree.map(lambda v: jnp.average(v, axis=0, weights=w), x)
    for weights in (w, jax.tree.map(lambda _: w, x)):
        got = mean(x, weights)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    pair = mean((x["a"], [x["a"], x["c"]]), (w, jnp.ones(N)))
    np.testing.assert_allclose(pair[0], want["a"], rtol=1e-6)
    np.testing.assert_allclose(pair[1][0], jnp.mean(X, axis=0), rtol=1e-6)


def test_weights_of_trailing_axes():
    x, w = jnp.arange(30.0).reshape(N, 3, 2), jnp.arange(10.0).reshape(N, 2)
    want = np.sum(np.asarray(x) * np.asarray(w)[:, None], 0) / np.sum(np.asarray(w), 0)
    np.testing.assert_allclose(program(bj.reduce_weighted_mean)(x, w), want, rtol=1e-6)


def test_weights_with_more_axes_than_values():
    x, w = jnp.arange(float(N)), jnp.arange(10.0).reshape(N, 2)
    got = program(bj.reduce_weighted_mean)({"a": x, "b": jnp.ones((N, 1))}, w)
    want = np.sum(np.asarray(x)[:, None] * np.asarray(w), 0) / np.sum(np.asarray(w), 0)
    assert got["a"].shape == got["b"].shape == (2,)
    np.testing.assert_allclose(got["a"], want, rtol=1e-6)
    np.testing.assert_allclose(got["b"], np.ones(2), rtol=1e-6)


def test_weak_weights_keep_the_dtype_of_values():
    def mean(x, w):
        return bj.reduce_weighted_mean(x, jnp.broadcast_to(w, (N,)))

    got = jax.jit(program(mean))(jnp.ones(N, "bfloat16"), 2.0)
    assert got.dtype == "bfloat16"
    assert got == 1


def test_complex_weights():
    x, w = jnp.arange(5.0), jnp.arange(5).astype("complex64") + 1.0j
    got = program(bj.reduce_weighted_mean)(x, w)
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(got, np.average(np.arange(5.0), weights=np.asarray(w)), rtol=1e-6)


def test_weights_that_sum_to_zero():
    assert np.isnan(program(bj.reduce_weighted_mean)(jnp.ones(N), jnp.zeros(N)))


def test_float16_means_with_large_int_weights():
    got = program(bj.reduce_weighted_mean)(jnp.ones(N, "float16"), jnp.full(N, 1_000_000))
    assert got == np.float16(1.0)


def test_weighted_mean_is_one_map():
    mean = program(bj.reduce_weighted_mean)
    jaxpr = jax.make_jaxpr(mean)({"a": X, "b": X}, jnp.arange(N))
    names = [eqn.primitive.name for eqn in jaxpr.eqns if eqn.primitive.name.startswith("bj_")]
    assert names == ["bj_map", *["bj_reduce_sum"] * 3]


# --- programs written for DrJAX


def local_steps(lib):
    @lib.program(placements={"clients": N})
    def run(w, x, y):
        def loss(w, x, y):
            return jnp.mean((jnp.dot(x, w) - y) ** 2)

        def client(w, x, y):
            for _ in range(2):
                w = w - 0.1 * jax.grad(loss)(w, x, y)
            return w, loss(w, x, y)

        ws, losses = lib.map_fn(client, (lib.broadcast(w), x, y))
        mean, total = lib.reduce_mean(losses), lib.reduce_sum(losses)
        return lib.reduce_weighted_mean(ws, jnp.arange(1.0, N + 1)), mean, total

    return run


@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda run: run,
        jax.jit,
        lambda run: jax.grad(lambda *args: run(*args)[1]),
        lambda run: jax.jacrev(lambda *args: run(*args)[0], argnums=(0, 1)),
        lambda run: jax.vmap(run, in_axes=(0, None, None)),
    ],
    ids=["eager", "jit", "grad", "jacrev", "vmap"],
)
def test_drjax_programs_run_unchanged(transform, request):
    drjax = pytest.importorskip("drjax")
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((4, 2) if "vmap" in request.node.name else (2,)), (N, 3, 2), (N, 3)
    args = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = transform(local_steps(drjax))(*args)
    got = transform(local_steps(bj))(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


# --- errors about values


@both_ways
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_need_members(op, wrap):
    reduce = wrap(program(getattr(bj, f"reduce_{op}")))
    with raises(
        bj.PlacementError,
        f"reduce_{op}: x['b'][0] has shape (4, 3), expected (5, ...)",
        "'clients' has 5 members",
    ):
        reduce({"a": X, "b": [jnp.ones((4, 3))]})
    with raises(bj.PlacementError, f"reduce_{op}: x has shape (), expected (5, ...)"):
        reduce(2.0)


@both_ways
def test_map_needs_members(wrap):
    run = wrap(program(lambda *arg: bj.map_fn(lambda *a: a, arg)))
    with raises(bj.PlacementError, "map_fn: arg[1]['y'] has shape (3,), expected (5, ...)"):
        run(X, {"x": X, "y": jnp.ones(3)})
    with raises(bj.PlacementError, "map_fn: arg[1] has shape ()", "broadcast it"):
        run(X, 1.0)


@pytest.mark.parametrize("leaf", ["text", object(), {1, 2}, np.array(["a"] * N), lambda: 1])
def test_leaves_that_are_no_arrays(leaf):
    kind = type(leaf).__name__
    calls = {
        f"broadcast: x['k'] is of type {kind}": lambda: bj.broadcast({"k": leaf}),
        f"map_fn: arg['k'] is of type {kind}": lambda: bj.map_fn(lambda v: v, {"k": leaf}),
        f"reduce_sum: x[0] is of type {kind}": lambda: bj.reduce_sum([leaf]),
        f"reduce_weighted_mean: w is of type {kind}": lambda: bj.reduce_weighted_mean(X, leaf),
        f"map_fn: the result of body['k'] is of type {kind}": lambda: bj.map_fn(body, X),
    }

    def body(v):
        return {"k": leaf}

    for message, call in calls.items():
        with raises(bj.StructureError, message, "expected an array or a scalar"):
            program(call)()


def test_placed_references_are_refused():
    def run(x):
        ref = jax.new_ref(jnp.zeros(()))
        return bj.map_fn(lambda v: v + ref[...], x)

    with raises(bj.StructureError, "map_fn: the mapped function closes over a value of type Ref"):
        jax.jit(program(run))(X)


def test_weights_that_do_not_fit():
    mean = program(bj.reduce_weighted_mean)
    with raises(bj.PlacementError, "reduce_weighted_mean: w has shape (), expected (5, ...)"):
        mean(X, 1.0)
    with raises(bj.PlacementError, "reduce_weighted_mean: w['a'] has shape (2,), expected (5, "):
        mean({"a": X}, {"a": jnp.ones(2)})
    with raises(
        bj.StructureError, "weights of shape (5, 3) don't fit x['a'] of shape (5, 2): (3,)", "(2,)"
    ):
        mean({"a": X}, jnp.ones((N, 3)))
    with raises(bj.StructureError, "the tree of weights", "nor a prefix of it"):
        mean({"a": X}, {"b": jnp.ones(N)})


# --- imports


def test_importing_beamjax_imports_no_beam_and_starts_no_backend():
    code = "import sys, beamjax; assert 'apache_beam' not in sys.modules"
    environment = {**os.environ, "JAX_PLATFORMS": "none_that_could_start"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
