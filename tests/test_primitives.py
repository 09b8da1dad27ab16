"""The primitives: types, values and derivatives against jax.numpy, and the shape of their rules."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend import core as jex
from jax.extend import source_info_util

import beamjax as bj
from beamjax import _compat, layouts, leaves, primitives
from beamjax.primitives import REDUCE_PRIMITIVES, broadcast_p, map_p, reduce_sum_p, size_p

N = 5
OPS = list(REDUCE_PRIMITIVES)
DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "bfloat16", "float16", "float32", "complex64"]

eager = lambda fn: fn
both_ways = pytest.mark.parametrize("wrap", [eager, jax.jit], ids=["eager", "jit"])


def reduce(op):
    return functools.partial(REDUCE_PRIMITIVES[op].bind, placement="clients")


def over_axis_0(op):
    return functools.partial(getattr(jnp, op), axis=0)


def program(fn):
    return bj.program(clients=N)(fn)


def names(fn, *args):
    return collections.Counter(eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).eqns)


def eqn_of(fn, *args):
    (eqn,) = (e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive is map_p)
    return eqn


# --- reductions: values


def members(dtype, shape=(N, 3), seed=0):
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    if dtype == "complex64":
        values = values + 1j * values[::-1]
    if dtype in ("uint8", "uint32", "bool"):
        values = np.abs(values)
    return jnp.asarray(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_reductions_equal_jax_numpy(op, dtype, wrap):
    if op.startswith("arg") and dtype == "complex64":
        pytest.skip("complex numbers are not ordered")
    x = members(dtype)
    got, want = wrap(reduce(op))(x), wrap(over_axis_0(op))(x)
    assert got.dtype == want.dtype
    assert jax.eval_shape(reduce(op), x) == jax.eval_shape(over_axis_0(op), x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@both_ways
@pytest.mark.parametrize("op", OPS)
def test_reductions_of_nan_and_inf(op, wrap):
    x = jnp.array([[1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0], [2.0, 1.0, 1.0, jnp.inf, -0.0]])
    np.testing.assert_array_equal(wrap(reduce(op))(x), over_axis_0(op)(x))


def test_reductions_in_64_bits():
    with jax.enable_x64(True):
        for op in OPS:
            for dtype in ("int8", "uint8", "int64", "float32", "float64"):
                x = jnp.asarray(np.arange(6).reshape(2, 3).astype(dtype))
                assert jax.eval_shape(reduce(op), x) == jax.eval_shape(over_axis_0(op), x)


@pytest.mark.parametrize("op", OPS)
def test_reductions_of_empty_members(op):
    out = reduce(op)(jnp.zeros((N, 0, 2)))
    assert out.shape == (0, 2)
    assert out.dtype == over_axis_0(op)(jnp.zeros((N, 0, 2))).dtype


def test_mean_of_float16_does_not_overflow():
    x = jnp.full((N, 2), 60000.0, "float16")
    np.testing.assert_array_equal(reduce("mean")(x), jnp.mean(x, axis=0))
    np.testing.assert_array_equal(jax.jit(reduce("mean"))(x), np.full(2, 60000.0, "float16"))


def test_gradient_of_float16_mean_over_many_members():
    x = jnp.ones(70000, "float16")
    got = jax.grad(lambda v: reduce("mean")(v) * jnp.float16(1000.0))(x)
    want = jax.grad(lambda v: jnp.mean(v) * jnp.float16(1000.0))(x)
    np.testing.assert_array_equal(got, want)
    assert got[0] > 0


# --- reductions: derivatives

POINTS = {
    "plain": [2.0, -1.5, 0.5, 3.0],
    "ties": [2.0, 2.0, -1.0, -1.0],
    "one_zero": [2.0, 0.0, 0.5, 3.0],
    "two_zeros": [2.0, 0.0, 0.0, 3.0],
    "three_zeros": [0.0, 0.0, 0.0, 3.0],
}
SMOOTH = ["sum", "mean", "max", "min", "prod"]


@both_ways
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("op", SMOOTH)
def test_first_derivatives(op, point, dtype, wrap):
    x = jnp.array(POINTS[point], dtype)
    for transform in (jax.grad, jax.jacfwd, jax.jacrev):
        got, want = (wrap(transform(f))(x) for f in (reduce(op), over_axis_0(op)))
        assert got.dtype == want.dtype == dtype
        rtol = 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=rtol)


@both_ways
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("op", SMOOTH)
def test_second_derivatives(op, point, wrap):
    x = jnp.array(POINTS[point])
    for f in (jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.grad(f))):
        got, want = wrap(f(reduce(op)))(x), f(over_axis_0(op))(x)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", SMOOTH)
def test_derivatives_under_vmap(op):
    x = jnp.stack([jnp.array(p) for p in POINTS.values()])
    for axes, batch in ((0, x), (1, x.T)):
        got = jax.vmap(jax.grad(reduce(op)), in_axes=axes)(batch)
        want = jax.vmap(jax.grad(over_axis_0(op)), in_axes=axes)(batch)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_complex_derivatives(op):
    x = members("complex64", (4,))
    got = jax.grad(lambda v: jnp.abs(reduce(op)(v) + 1.0))(x)
    want = jax.grad(lambda v: jnp.abs(over_axis_0(op)(v) + 1.0))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["any", "all"])
def test_boolean_reductions_have_no_derivative(op):
    x = jnp.array([1.0, 0.0, 2.0])
    value, tangent = jax.jvp(reduce(op), (x,), (x,))
    assert value == getattr(jnp, op)(x)
    assert tangent.dtype == jax.dtypes.float0
    grad = jax.grad(lambda v: jnp.where(reduce(op)(v), 2.0, 3.0) * v[0])(x)
    np.testing.assert_array_equal(grad, [2.0 if op == "any" else 3.0, 0.0, 0.0])


def test_extrema_of_ints_can_be_differentiated_past():
    f = lambda w, i: w * reduce("max")(i).astype(jnp.float32)
    assert jax.grad(f)(2.0, jnp.arange(4)) == 3.0


def test_derivatives_of_sum_mean_and_broadcast_are_each_other():
    x = jnp.ones((N, 3))
    transpose = lambda f, x: jax.linear_transpose(f, x)
    assert names(transpose(reduce("sum"), x), jnp.ones(3)) == {"bj_broadcast": 1}
    assert names(transpose(reduce("mean"), x), jnp.ones(3)) == {
        "bj_size": 1,
        "convert_element_type": 1,
        "div": 1,
        "bj_broadcast": 1,
    }
    broadcast = lambda s: broadcast_p.bind(s, placement="clients", n=N, mesh=None)
    assert names(transpose(broadcast, jnp.ones(3)), x) == {"bj_reduce_sum": 1}
    for op in ("sum", "mean"):
        tangent = lambda fn, v: jax.jvp(fn, (v,), (v,))
        assert names(functools.partial(tangent, reduce(op)), x) == {f"bj_reduce_{op}": 2}


@pytest.mark.parametrize("op", SMOOTH)
def test_symbolic_zero_cotangents(op):
    both = jax.jit(lambda x: (reduce(op)(x), reduce(op)(x)))
    first = jax.jit(lambda x: both(x)[0])
    x = jnp.arange(1.0, 5.0)
    np.testing.assert_allclose(jax.jacrev(first)(x), jax.grad(over_axis_0(op))(x), rtol=1e-6)


# --- size


@both_ways
def test_size(wrap):
    out = wrap(lambda: size_p.bind(placement="clients", n=N))()
    assert out.dtype == jnp.int32
    assert out.shape == ()
    assert out == N


# --- map


def test_parameters_of_map():
    w, c, x = jnp.ones(3), np.arange(3, dtype="float32"), jnp.ones((N, 3))
    run = program(lambda w, x: bj.map_fn(lambda v: jnp.sum(v * w * c), x))
    eqn = eqn_of(run, w, x)
    assert set(eqn.params) == {
        "jaxpr",
        "num_broadcast",
        "placement",
        "n",
        "name",
        "mesh",
        "spmd_axis_name",
    }
    assert eqn.params["num_broadcast"] == 2
    assert (eqn.params["placement"], eqn.params["n"]) == ("clients", N)
    assert eqn.params["jaxpr"].consts == []
    assert [v.aval.shape for v in eqn.invars] == [(3,), (3,), (N, 3)]
    assert [a.shape for a in eqn.params["jaxpr"].in_avals] == [(3,), (3,), (3,)]


def test_constants_of_jitted_bodies_are_operands():
    c, d = jnp.arange(3.0), np.arange(3, dtype="float32")
    body = jax.jit(lambda v: jax.jit(lambda u: jnp.sum(u * c * d))(v * c))
    run = program(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    x = jnp.arange(3.0 * N).reshape(N, 3)
    eqn = eqn_of(run, x)
    assert eqn.params["num_broadcast"] >= 2
    inner = list(jex.jaxprs_in_params(eqn.params))
    while inner:
        jaxpr = inner.pop()
        assert not jaxpr.constvars
        inner += jex.subjaxprs(jaxpr)
    want = lambda x: jnp.sum(jax.vmap(body)(x))
    for wrap in (eager, jax.jit):
        np.testing.assert_allclose(wrap(run)(x), want(x))
        np.testing.assert_allclose(wrap(jax.grad(run))(x), jax.grad(want)(x))


def square(w, x):
    return jnp.sum((w * x) ** 2)


class Scale:
    def __call__(self, v):
        return 2.0 * v


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (square, "square"),
        (functools.partial(functools.partial(square), jnp.float32(2.0)), "square"),
        (jax.jit(square), "square"),
        (lambda w, x: w * x, "<lambda>"),
        (jax.tree_util.Partial(square), "square"),
        (functools.lru_cache(square), "square"),
        (Scale(), "Scale"),
    ],
)
def test_names(fn, name):
    assert leaves.name_of(fn) == name


def test_names_of_derived_maps():
    body = lambda v: square(jnp.float32(3.0), v)
    body.__name__ = "body"
    run = program(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    x = jnp.ones((N, 2))
    of = lambda fn: [e.params["name"] for e in jax.make_jaxpr(fn)(x).eqns if e.primitive is map_p]
    assert of(run) == ["body"]
    assert of(lambda x: jax.jvp(run, (x,), (x,))) == ["body", "jvp_body"]
    assert of(jax.grad(run)) == ["body", "transpose_jvp_body"]
    assert of(lambda x: jax.vmap(run)(jnp.stack([x, x]))) == ["body"]


def test_source_line_is_the_users():
    run = program(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, bj.broadcast(x))))
    jaxpr = jax.make_jaxpr(run)(1.0)
    for eqn in jaxpr.eqns:
        assert __file__ in source_info_util.summarize(eqn.source_info)


def test_results_that_do_not_depend_on_a_batch_stay_unbatched():
    run = program(lambda w, x: bj.map_fn(lambda v: (v * w, v + 1.0), x))
    x = jnp.ones((N, 2))
    eqn = eqn_of(jax.vmap(run, in_axes=(0, None), out_axes=(1, None)), jnp.ones(4), x)
    assert [a.shape for a in eqn.params["jaxpr"].out_avals] == [(4, 2), (2,)]
    assert jax.vmap(run, in_axes=(0, None), out_axes=(1, None))(jnp.ones(4), x)[1].shape == (N, 2)


def test_axis_names_reach_the_body():
    x = jnp.arange(2.0 * N).reshape(2, N)
    summed = program(lambda x: bj.reduce_sum(bj.map_fn(lambda v: 2.0 * jax.lax.psum(v, "i"), x)))
    np.testing.assert_array_equal(jax.vmap(summed, axis_name="i")(x), [90.0, 90.0])
    total = lambda x: jnp.sum(jax.vmap(summed, axis_name="i")(x))
    np.testing.assert_array_equal(jax.grad(total)(x), np.full((2, N), 4.0))
    index = program(lambda x: bj.reduce_max(bj.map_fn(lambda v: jax.lax.axis_index("i"), x)))
    out = jax.vmap(index, axis_name="i", in_axes=None, axis_size=2)(x[0])
    np.testing.assert_array_equal(out, [0, 1])


def test_unused_results_and_operands_are_dropped():
    run = program(lambda w, x, y: bj.map_fn(lambda x, y: (x * w, y * 2.0, y), (x, y)))
    x = jnp.ones((N, 2))
    closed = jax.make_jaxpr(run)(1.0, x, x)
    small, used = _compat.dce(closed, [False, True, False])
    assert used == [False, False, True]
    (eqn,) = small.eqns
    assert (eqn.params["num_broadcast"], len(eqn.invars), len(eqn.outvars)) == (0, 1, 1)
    np.testing.assert_array_equal(jex.jaxpr_as_fun(small)(x)[0], 2.0 * x)
    assert _compat.dce(closed, [False] * 3)[0].eqns == []
    first = lambda w: jnp.sum(run(w, x, x)[0])
    eqns = [e for e in jax.make_jaxpr(jax.grad(first))(1.0).eqns if e.primitive is map_p]
    assert [len(e.invars) for e in eqns] == [3, 2]  # The second takes x and the cotangent.


def test_dead_maps_are_dropped():
    run = program(lambda w, x: (bj.map_fn(lambda v: (v * w, v + w), x), bj.reduce_sum(x)))
    loop = lambda w, x: jax.lax.scan(lambda c, _: (c + run(w, x)[1], None), 0.0, None, length=2)[0]
    grad = jax.make_jaxpr(jax.grad(loop))(1.0, jnp.ones(N))
    assert "bj_map" not in str(grad)


def test_dead_code_keeps_effects_and_the_rest():
    seen = []

    def body(v):
        jax.debug.callback(lambda u: seen.append(float(u)), v)
        return v * 2.0, v * 3.0

    run = program(lambda x: bj.map_fn(body, x))
    x = jnp.arange(float(N))
    jax.block_until_ready(jax.jit(lambda x: run(x)[1])(x))
    jax.effects_barrier()
    assert sorted(seen) == list(range(N))
    seen.clear()
    jax.block_until_ready(jax.jit(lambda x: (run(x), x)[1])(x))
    jax.effects_barrier()
    assert sorted(seen) == list(range(N))


def print_in_scan(seen, w, v):
    def one(c, _):
        jax.debug.callback(lambda u: seen.append(float(u)), c)
        return c * w, None

    return jax.lax.cond(w > 0.0, lambda: jax.lax.scan(one, v, None, length=2)[0], lambda: v)


@both_ways
@pytest.mark.parametrize("order", [1, 2])
def test_callbacks_run_once_under_differentiation(wrap, order):
    seen = []
    body = jax.jit(lambda w, v: print_in_scan(seen, w, v))
    run = program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: body(w, v), x)))
    derivative = {1: jax.grad, 2: jax.hessian}[order](run)
    jax.block_until_ready(wrap(derivative)(2.0, jnp.arange(float(N))))
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(N), *(2.0 * i for i in range(N))])


def test_constants_that_only_derivatives_need():
    scale = np.arange(1.0, 4.0, dtype="float32")

    @jax.custom_jvp
    def with_jvp(v):
        return v

    with_jvp.defjvp(lambda p, t: (p[0], t[0] * scale))

    @jax.custom_vjp
    def with_vjp(v):
        return v

    with_vjp.defvjp(lambda v: (v, None), lambda _, ct: (ct * jnp.asarray(scale),))
    x = jnp.ones((N, 3))
    for fn in (with_jvp, with_vjp):
        run = program(lambda w, x, fn=fn: bj.reduce_sum(bj.map_fn(lambda v: jnp.sum(fn(v * w)), x)))
        for wrap in (eager, jax.jit):
            np.testing.assert_array_equal(wrap(jax.grad(run))(jnp.ones(3), x), N * scale)
            np.testing.assert_array_equal(wrap(jax.grad(run, 1))(jnp.ones(3), x)[0], scale)


def test_references_inside_a_body():
    def body(v):
        ref = jax.new_ref(v)
        ref[...] = ref[...] * ref[...]
        return ref[...]

    run = program(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    x = jnp.arange(float(N))
    assert jax.make_jaxpr(run)(x).effects == set()
    for wrap in (eager, jax.jit):
        assert wrap(run)(x) == 30.0
        np.testing.assert_array_equal(wrap(jax.grad(run))(x), 2.0 * x)
        np.testing.assert_array_equal(wrap(jax.vmap(run))(jnp.stack([x, x])), [30.0, 30.0])


def test_float0_tangents_of_ints():
    run = program(lambda w, i: bj.reduce_sum(bj.map_fn(lambda v: v.astype(jnp.float32) * w, i)))
    i = jnp.arange(N)
    out, tangent = jax.jvp(run, (2.0, i), (1.0, np.zeros(N, jax.dtypes.float0)))
    assert (out, tangent) == (20.0, 10.0)


def test_tangents_that_vanish_bind_no_map():
    run = program(lambda x: bj.reduce_sum(bj.map_fn(lambda v: (v > 0).astype(jnp.float32), x)))
    x = jnp.ones((N, 2))
    assert names(lambda x: jax.jvp(run, (x,), (x,))[1], x)["bj_map"] == 1
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(run(x)))(x), np.zeros((N, 2)))


def test_mismatched_operands_of_map():
    jaxpr, consts = primitives.trace_body(lambda v: [v], [jax.typeof(jnp.ones(3))])
    assert consts == []
    message = r"bj_map of f: found an operand of shape \(4, 3\), expected \(5, 3\)"
    with pytest.raises(bj.PlacementError, match=message):
        jax.jit(
            lambda x: primitives.bind_map(
                jaxpr, [], [x], placement="clients", n=5, name="f", mesh=None
            )
        )(jnp.ones((4, 3)))


def test_weak_types_are_those_of_vmap():
    run = program(lambda x: bj.map_fn(lambda v: (3.0, v), x))
    for wrap in (eager, jax.jit):
        assert [o.weak_type for o in wrap(run)(jnp.ones(N))] == [True, False]


# --- symbolic sizes


def symbolic(fn_of_n, make_args):
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    exported = jax.export.export(jax.jit(fn_of_n(n)))(*make_args(jax.ShapeDtypeStruct, n))
    return exported.call, fn_of_n(N)


def tanh_loss(n):
    return bj.program(clients=n)(
        lambda w, x: bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jnp.tanh(v * w)), x))
    )


@pytest.mark.parametrize(
    "transform", [eager, jax.grad, jax.hessian], ids=["eager", "grad", "hessian"]
)
def test_symbolic_members(transform):
    spec = lambda struct, n: (struct((3,), "float32"), struct((n, 3), "float32"))
    exported, direct = symbolic(lambda n: transform(tanh_loss(n)), spec)
    args = jax.random.normal(jax.random.key(0), (3,)), jax.random.normal(jax.random.key(1), (N, 3))
    np.testing.assert_allclose(exported(*args), direct(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", SMOOTH)
def test_symbolic_members_of_reductions(op):
    run = lambda n: bj.program(clients=n)(lambda x: jnp.sum(getattr(bj, f"reduce_{op}")(x)))
    spec = lambda struct, n: (struct((n, 3), "float32"),)
    exported, direct = symbolic(lambda n: jax.grad(run(n)), spec)
    x = jax.random.normal(jax.random.key(0), (N, 3))
    np.testing.assert_allclose(exported(x), direct(x), rtol=1e-5)


def test_export_needs_no_trace_of_the_member_count():
    spec = lambda struct, n: (struct((3,), "float32"), struct((n, 3), "float32"))
    exported, _ = symbolic(lambda n: jax.grad(tanh_loss(n)), spec)
    for n in (1, 2, 9):
        args = jnp.ones(3), jnp.ones((n, 3))
        np.testing.assert_allclose(exported(*args), jax.grad(tanh_loss(n))(*args), rtol=1e-6)


# --- every primitive is made once


def test_primitives_are_shared():
    run = program(lambda x: bj.reduce_sum(bj.broadcast(x)))
    other = bj.program(silos=3)(lambda x: bj.reduce_sum(bj.broadcast(x)))
    for fn in (run, other):
        eqns = jax.make_jaxpr(fn)(1.0).eqns
        assert [e.primitive for e in eqns] == [broadcast_p, reduce_sum_p]
    assert sorted(REDUCE_PRIMITIVES) == sorted(
        ["all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum"]
    )
    assert all(p.name == f"bj_reduce_{op}" for op, p in REDUCE_PRIMITIVES.items())
    assert layouts.active_mesh("clients") is None


@pytest.mark.parametrize(("op", "share"), [("mean", 0.25), ("sum", 1.0), ("max", 0.25)])
def test_python_scalars_are_cotangents(op, share):
    reduce = getattr(bj, f"reduce_{op}")
    _, pull = jax.vjp(bj.program(clients=4)(reduce), jnp.ones(4))
    np.testing.assert_array_equal(pull(1.0)[0], np.full(4, share, np.float32))


def body_of_hijax(v, w):
    """On JAX 0.12, `searchsorted` is a primitive that has to be lowered before it compiles."""
    return jnp.histogram(v * w, bins=5, range=(-2, 2))[0], jnp.searchsorted(jnp.sort(v), 0.1)


@pytest.mark.parametrize("wrap", [eager, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_primitives_of_hijax_in_bodies(wrap):
    prog = bj.program(clients=N)(
        lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: body_of_hijax(v, w), x))
    )
    expected = lambda w, x: jax.tree.map(
        lambda leaf: jnp.sum(leaf, 0), jax.vmap(lambda v: body_of_hijax(v, w))(x)
    )
    x = jax.random.normal(jax.random.key(0), (2, N, 9))
    args = (jnp.ones(2), x) if wrap is jax.vmap else (jnp.float32(1.0), x[0])
    jax.tree.map(np.testing.assert_array_equal, wrap(prog)(*args), wrap(expected)(*args))
