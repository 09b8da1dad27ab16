"""The operators as JAX sees them: types, values and derivatives against jax.numpy, and jaxprs."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import raw
from jax.extend import core as jex

import beamjax as bj
from beamjax import _compat
from beamjax.numerics.reducers import REDUCERS, REDUCTIONS, Fold
from beamjax.ops import primitives

pytestmark = pytest.mark.versions

N = 5
OPS = [op for op, kind in REDUCTIONS.items() if not isinstance(kind, Fold)]
SMOOTH = [op for op, reducer in REDUCERS.items() if reducer.derivative]
DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "bfloat16", "float16", "float32", "complex64"]
WRAPS = {"eager": lambda fn: fn, "jit": jax.jit}
both_ways = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
opened = bj.program(clients=None)
program = bj.program(clients=N)


def reduce(op):
    return opened(getattr(bj, f"reduce_{op}"))


def over_axis_0(op):
    return functools.partial(getattr(jnp, op), axis=0)


def both(ops, of):
    """A function of one argument that gives what `of` makes of each operator, and of each `jnp`."""
    pairs = {op: (of(reduce(op)), of(over_axis_0(op))) for op in ops}
    return lambda x: {op: (ours(x), theirs(x)) for op, (ours, theirs) in pairs.items()}


def faults_of(results, where, rtol=0.0):
    """One line for each pair of results that differ."""
    faults = []
    for op, pair in results.items():
        got, want = map(jax.tree.leaves, pair)
        for a, b in zip(got, want, strict=True):
            kind = (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
            wide = np.complex128 if b.dtype.kind == "c" else np.float64
            a, b = raw(a).astype(wide), raw(b).astype(wide)
            if not kind or not np.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True):
                faults.append((where, op, a, b))
    return faults


def names(fn, *args):
    return collections.Counter(eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).eqns)


def maps_of(fn, *args):
    return [e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive.name == "bj_map"]


# --- reductions: values


def members(dtype, shape=(N, 3)):
    values = np.random.default_rng(0).integers(-4, 5, shape)
    if dtype == "complex64":
        values = values + 1j * values[::-1]
    if dtype in ("uint8", "uint32", "bool"):
        values = np.abs(values)
    return jnp.asarray(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def test_reductions_equal_jax_numpy():
    """Values, dtypes and weak types: of all dtypes, NaN and infinity, and members of no size."""
    holes = [[1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0], [2.0, 1.0, 1.0, jnp.inf, -0.0]]
    values = {dtype: members(dtype) for dtype in DTYPES}
    values |= {"holes": jnp.array(holes), "empty": jnp.zeros((N, 0, 2)), "one": jnp.ones((1, 2))}
    faults = []
    for name, x in values.items():
        ops = [op for op in OPS if not (op.startswith("arg") and name == "complex64")]
        faults += faults_of(jax.jit(both(ops, lambda f: f))(x), name)
        if name in ("int8", "bfloat16", "holes"):
            faults += faults_of(both(ops, lambda f: f)(x), (name, "eager"))
        types = jax.eval_shape(both(ops, lambda f: f), x)
        faults += [(name, op) for op, (ours, theirs) in types.items() if ours != theirs]
    assert faults == []


def test_means_of_float16_do_not_overflow():
    x = jnp.full((N, 2), 60000.0, "float16")
    for wrap in WRAPS.values():
        np.testing.assert_array_equal(wrap(reduce("mean"))(x), np.full(2, 60000.0, "float16"))
    many = jnp.ones(70000, "float16")  # More members than a float16 can count.
    got, want = (
        jax.grad(lambda v, f=f: f(v) * jnp.float16(1000.0))(many)
        for f in (reduce("mean"), over_axis_0("mean"))
    )
    np.testing.assert_array_equal(got, want)
    assert got[0] > 0


# --- reductions: derivatives

POINTS = {
    "plain": [2.0, -1.5, 0.5, 3.0],
    "ties": [2.0, 2.0, -1.0, -1.0],
    "one zero": [2.0, 0.0, 0.5, 3.0],
    "two zeros": [2.0, 0.0, 0.0, 3.0],
    "three zeros": [0.0, 0.0, 0.0, 3.0],
}
TRANSFORMS = {
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "forward twice": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse twice": lambda f: jax.jacrev(jax.grad(f)),
}


def derivatives(first_only=False):
    transforms = list(TRANSFORMS.values())[: 2 if first_only else None]
    return both(SMOOTH, lambda f: lambda x: [transform(f)(x) for transform in transforms])


def test_derivatives_equal_those_of_jax_numpy():
    faults = []
    for dtype in ("float32", "bfloat16", "float16"):
        rtol = 1e-6 if dtype == "float32" else 2e-2
        compiled = jax.jit(derivatives(dtype != "float32"))
        for name, point in POINTS.items():
            faults += faults_of(compiled(jnp.array(point, dtype)), (dtype, name), rtol)
    eager = derivatives(first_only=True)
    faults += faults_of(eager(jnp.array(POINTS["ties"])), "eager", 1e-6)
    batch = jnp.array(list(POINTS.values()))
    for axis, x in ((0, batch), (1, batch.T)):
        results = jax.jit(both(SMOOTH, lambda f, k=axis: jax.vmap(jax.grad(f), in_axes=k)))(x)
        faults += faults_of(results, ("vmap", axis), 1e-6)
    x = members("complex64", (4,))
    absolute = lambda f: jax.grad(lambda v: jnp.abs(f(v) + 1.0))
    faults += faults_of(both(["sum", "mean", "prod"], absolute)(x), "complex", 1e-5)
    assert faults == []


def test_ties_are_counted_beyond_what_a_float16_holds():
    many = jnp.ones(100_000, "float16")
    for op in ("max", "min"):
        shares = jax.grad(lambda v, op=op: reduce(op)(v) * jnp.float16(1000.0))(many)
        np.testing.assert_allclose(np.asarray(shares, "f8").sum(), 1000.0, 1e-3)
        _, tangent = jax.jvp(reduce(op), (many,), (many,))
        assert (tangent.dtype, float(tangent)) == ("float16", 1.0)


def test_reductions_without_a_derivative():
    x = jnp.array([1.0, 0.0, 2.0])
    for op, share in (("any", 2.0), ("all", 3.0)):
        value, tangent = jax.jvp(reduce(op), (x,), (x,))
        assert value == getattr(jnp, op)(x)
        assert tangent.dtype == jax.dtypes.float0
        fn = lambda v, op=op: jnp.where(reduce(op)(v), 2.0, 3.0) * v[0]
        np.testing.assert_array_equal(jax.grad(fn)(x), [share, 0.0, 0.0])
    past = lambda w, i: w * reduce("max")(i).astype(jnp.float32)
    assert jax.grad(past)(2.0, jnp.arange(4)) == 3.0


def test_derivatives_of_sum_mean_and_broadcast_are_each_other():
    x = jnp.ones((N, 3))
    transpose = jax.linear_transpose
    share = {"bj_size": 1, "convert_element_type": 1, "div": 1, "bj_broadcast": 1}
    assert names(transpose(reduce("sum"), x), jnp.ones(3)) == {"bj_broadcast": 1}
    assert names(transpose(reduce("mean"), x), jnp.ones(3)) == share
    assert names(transpose(program(bj.broadcast), jnp.ones(3)), x) == {"bj_reduce_sum": 1}
    for op in ("sum", "mean"):
        tangent = lambda v, op=op: jax.jvp(reduce(op), (v,), (v,))
        assert names(tangent, x) == {f"bj_reduce_{op}": 2}


def test_cotangents_that_are_zero_or_python_scalars():
    x = jnp.arange(1.0, 5.0)
    for op, share in {"mean": 0.25, "sum": 1.0, "max": 0.25}.items():
        _, pull = jax.vjp(reduce(op), jnp.ones(4))
        np.testing.assert_array_equal(pull(1.0)[0], np.full(4, share, np.float32))
    for op in SMOOTH:
        twice = jax.jit(lambda x, op=op: (reduce(op)(x), reduce(op)(x)))
        first = jax.jit(lambda x, twice=twice: twice(x)[0])
        expected = jax.grad(over_axis_0(op))(x)
        np.testing.assert_allclose(jax.jacrev(first)(x), expected, rtol=1e-6)


# --- map: its equation


def test_the_equation_of_a_map():
    """What a body closes over comes before what it is mapped over."""
    w, c, x = jnp.ones(3), np.arange(3, dtype="float32"), jnp.ones((N, 3))
    run = program(lambda w, x: bj.map_fn(lambda v: jnp.sum(v * w * c), x))
    (eqn,) = maps_of(run, w, x)
    params = "jaxpr num_broadcast placement n name mesh spmd_axis_name"
    assert set(eqn.params) == set(params.split())
    assert [eqn.params[name] for name in ("num_broadcast", "placement", "n")] == [2, "clients", N]
    assert eqn.params["jaxpr"].consts == []
    assert [v.aval.shape for v in eqn.invars] == [(3,), (3,), (N, 3)]
    assert [a.shape for a in eqn.params["jaxpr"].in_avals] == [(3,), (3,), (3,)]


def test_constants_of_compiled_bodies_are_operands():
    c, d = jnp.arange(3.0), np.arange(3, dtype="float32")
    body = jax.jit(lambda v: jax.jit(lambda u: jnp.sum(u * c * d))(v * c))
    run = program(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    x = jnp.arange(3.0 * N).reshape(N, 3)
    (eqn,) = maps_of(run, x)
    assert eqn.params["num_broadcast"] >= 2
    inner = list(jex.jaxprs_in_params(eqn.params))
    while inner:
        jaxpr = inner.pop()
        assert not jaxpr.constvars
        inner += jex.subjaxprs(jaxpr)
    want = lambda x: jnp.sum(jax.vmap(body)(x))
    for wrap in WRAPS.values():
        np.testing.assert_allclose(wrap(run)(x), want(x))
        np.testing.assert_allclose(wrap(jax.grad(run))(x), jax.grad(want)(x))


def square(w, x):
    return jnp.sum((w * x) ** 2)


class Scale:
    def __call__(self, v):
        return 2.0 * v


def test_names_of_maps():
    two = jnp.float32(2.0)
    bodies = [
        (functools.partial(functools.partial(square), two), "square"),
        (functools.partial(jax.jit(square), two), "square"),
        (jax.tree_util.Partial(square, two), "square"),
        (lambda v: v * 2, "<lambda>"),
        (Scale(), "Scale"),
    ]
    x = jnp.ones((N, 2))
    of = lambda fn, *args: [eqn.params["name"] for eqn in maps_of(fn, *args)]
    runs = [program(lambda x, f=f: bj.reduce_sum(bj.map_fn(f, x))) for f, _ in bodies]
    assert [of(run, x) for run in runs] == [[name] for _, name in bodies]
    assert of(lambda x: jax.jvp(runs[0], (x,), (x,)), x) == ["square", "jvp_square"]
    assert of(jax.grad(runs[0]), x) == ["square", "transpose_jvp_square"]
    assert of(jax.vmap(runs[0]), jnp.stack([x, x])) == ["square"]


def test_results_that_do_not_depend_on_a_batch_stay_unbatched():
    run = program(lambda w, x: bj.map_fn(lambda v: (v * w, v + 1.0), x))
    batched = jax.vmap(run, in_axes=(0, None), out_axes=(1, None))
    w, x = jnp.ones(4), jnp.ones((N, 2))
    (eqn,) = maps_of(batched, w, x)
    assert [a.shape for a in eqn.params["jaxpr"].out_avals] == [(4, 2), (2,)]
    assert batched(w, x)[1].shape == (N, 2)


def test_axis_names_reach_the_body():
    x = jnp.arange(2.0 * N).reshape(2, N)
    summed = program(lambda x: bj.reduce_sum(bj.map_fn(lambda v: 2.0 * jax.lax.psum(v, "i"), x)))
    np.testing.assert_array_equal(jax.vmap(summed, axis_name="i")(x), [90.0, 90.0])
    total = lambda x: jnp.sum(jax.vmap(summed, axis_name="i")(x))
    np.testing.assert_array_equal(jax.grad(total)(x), np.full((2, N), 4.0))
    index = program(lambda x: bj.reduce_max(bj.map_fn(lambda v: jax.lax.axis_index("i"), x)))
    out = jax.vmap(index, axis_name="i", in_axes=None, axis_size=2)(x[0])
    np.testing.assert_array_equal(out, [0, 1])


# --- map: dead code and effects


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
    # The second map takes x and the cotangent.
    assert [len(e.invars) for e in maps_of(jax.grad(first), 1.0)] == [3, 2]


def test_dead_maps_are_dropped():
    run = program(lambda w, x: (bj.map_fn(lambda v: (v * w, v + w), x), bj.reduce_sum(x)))
    loop = lambda w, x: jax.lax.scan(lambda c, _: (c + run(w, x)[1], None), 0.0, None, length=2)[0]
    assert "bj_map" not in str(jax.make_jaxpr(jax.grad(loop))(1.0, jnp.ones(N)))
    steps = program(lambda x: bj.map_fn(lambda v: (v > 0).astype(jnp.float32), x))
    x = jnp.ones((N, 2))
    assert len(maps_of(lambda x: jax.jvp(steps, (x,), (x,))[1], x)) == 1
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(steps(x)))(x), np.zeros((N, 2)))


def test_dead_code_keeps_effects():
    seen = []

    def body(v):
        jax.debug.callback(lambda u: seen.append(float(u)), v)
        return v * 2.0, v * 3.0

    run = program(lambda x: bj.map_fn(body, x))
    for part in (lambda x: run(x)[1], lambda x: (run(x), x)[1]):
        seen.clear()
        jax.block_until_ready(jax.jit(part)(jnp.arange(float(N))))
        jax.effects_barrier()
        assert sorted(seen) == list(range(N))


@both_ways
@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_callbacks_run_once_under_differentiation(wrap, derivative):
    seen = []

    def one(w, c, _):
        jax.debug.callback(lambda u: seen.append(float(u)), c)
        return c * w, None

    @jax.jit
    def body(w, v):
        loop = lambda: jax.lax.scan(functools.partial(one, w), v, None, length=2)[0]
        return jax.lax.cond(w > 0.0, loop, lambda: v)

    run = program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: body(w, v), x)))
    jax.block_until_ready(wrap(derivative(run))(2.0, jnp.arange(float(N))))
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(N), *(2.0 * i for i in range(N))])


# --- map: what bodies may be


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
        for wrap in WRAPS.values():
            of_w, of_x = wrap(jax.grad(run, (0, 1)))(jnp.ones(3), x)
            np.testing.assert_array_equal(of_w, N * scale)
            np.testing.assert_array_equal(of_x[0], scale)


def test_references_inside_a_body():
    def body(v):
        ref = jax.new_ref(v)
        ref[...] = ref[...] * ref[...]
        return ref[...]

    run = program(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    x = jnp.arange(float(N))
    assert jax.make_jaxpr(run)(x).effects == set()
    for wrap in WRAPS.values():
        assert wrap(run)(x) == 30.0
        np.testing.assert_array_equal(wrap(jax.grad(run))(x), 2.0 * x)
        np.testing.assert_array_equal(wrap(jax.vmap(run))(jnp.stack([x, x])), [30.0, 30.0])


def test_tangents_and_weak_types():
    run = program(lambda w, i: bj.reduce_sum(bj.map_fn(lambda v: v.astype(jnp.float32) * w, i)))
    floats = np.zeros(N, jax.dtypes.float0)
    assert jax.jvp(run, (2.0, jnp.arange(N)), (1.0, floats)) == (20.0, 10.0)
    run = program(lambda x: bj.map_fn(lambda v: (3.0, v), x))
    for wrap in WRAPS.values():
        assert [o.weak_type for o in wrap(run)(jnp.ones(N))] == [True, False]


def test_mismatched_operands_of_map():
    jaxpr, consts = primitives.trace_body(lambda v: [v], [jax.typeof(jnp.ones(3))])
    assert consts == []
    bind = functools.partial(
        primitives.bind_map, jaxpr, [], placement="clients", n=5, name="f", mesh=None
    )
    for shape in [(4, 3), (5, 4), (5,), ()]:
        with pytest.raises(bj.PlacementError, match=r"bj_map of f: .* expected \(5, 3\)"):
            jax.jit(lambda x: bind([x]))(jnp.ones(shape))
    assert bind([jnp.ones((5, 3))])[0].shape == (5, 3)


def body_of_hijax(v, w):
    """On JAX 0.12, `searchsorted` is a primitive that has to be lowered before it compiles."""
    return jnp.histogram(v * w, bins=5, range=(-2, 2))[0], jnp.searchsorted(jnp.sort(v), 0.1)


def test_primitives_of_hijax_in_bodies():
    prog = program(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: body_of_hijax(v, w), x)))
    expected = lambda w, x: jax.tree.map(
        lambda leaf: jnp.sum(leaf, 0), jax.vmap(lambda v: body_of_hijax(v, w))(x)
    )
    x = jax.random.normal(jax.random.key(0), (2, N, 9))
    for wrap in (*WRAPS.values(), jax.vmap):
        args = (jnp.ones(2), x) if wrap is jax.vmap else (jnp.float32(1.0), x[0])
        jax.tree.map(np.testing.assert_array_equal, wrap(prog)(*args), wrap(expected)(*args))


# --- symbolic sizes


def tanh_loss(n):
    return bj.program(clients=n)(
        lambda w, x: bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jnp.tanh(v * w)), x))
    )


def reductions(n):
    return bj.program(clients=n)(
        lambda w, x: [jnp.sum(getattr(bj, f"reduce_{op}")(x * w[None])) for op in SMOOTH]
    )


CASES = {
    "values": tanh_loss,
    "gradient": lambda n: jax.grad(tanh_loss(n)),
    "hessian": lambda n: jax.hessian(tanh_loss(n)),
    "gradients of reductions": lambda n: jax.jacrev(reductions(n), argnums=1),
}


@pytest.mark.parametrize("of", CASES.values(), ids=CASES)
def test_one_export_for_any_number_of_members(of):
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    specs = jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((n, 3), "float32")
    exported = jax.export.export(jax.jit(of(n)))(*specs)
    for count in (1, 2, 9):
        w = jax.random.normal(jax.random.key(0), (3,))
        x = jax.random.normal(jax.random.key(1), (count, 3))
        found, expected = exported.call(w, x), of(count)(w, x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
