"""Named programs, each with arguments, for tests of all kinds.

A case is a function of the operators `ops`: `beamjax` itself, or `reference`, which computes the
same with `jax.vmap` and `jax.numpy`. It returns a function and its arguments. `eqns` says which
primitives of beamjax the jaxpr of that function holds, how many of each.
"""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types

import beamjax as bj
from beamjax.diagnostics.fact_types import walk_facts

N, M = 7, 11  # Sizes of placements; no other axis in this file has one of these sizes.

# --- the reference


def _vmap(fn, arg, *, placement=None):
    size = {None: N, "clients": N, "outer": N, "a": N, "inner": M, "b": M}[placement]
    call = lambda v: fn(*v) if isinstance(arg, tuple) else fn(v)
    return jax.vmap(call, axis_size=size, axis_name=placement or "clients")(arg)


def _over_members(function):
    return lambda x, *, placement=None: jax.tree.map(lambda leaf: function(leaf, axis=0), x)


def _weighted_mean(x, w, *, placement=None):
    return jax.tree.map(lambda v: jnp.average(v, axis=0, weights=w), x)


def _by_key(x, keys, num_keys, *, op="sum", placement=None):
    return jax.tree.map(lambda v: getattr(jax.ops, f"segment_{op}")(v, keys, num_keys), x)


def _by_a_function(combine, x, *, placement=None):
    members = [jax.tree.map(lambda v, i=i: v[i], x) for i in range(len(jax.tree.leaves(x)[0]))]
    return functools.reduce(combine, members)


def _broadcast(x, *, placement=None):
    return _vmap(lambda: x, (), placement=placement)


reference = types.SimpleNamespace(
    program=lambda placements: lambda fn: fn,
    broadcast=_broadcast,
    map_fn=_vmap,
    reduce_sum=_over_members(jnp.sum),
    reduce_mean=_over_members(jnp.mean),
    reduce_max=_over_members(jnp.max),
    reduce_min=_over_members(jnp.min),
    reduce_prod=_over_members(jnp.prod),
    reduce_any=_over_members(jnp.any),
    reduce_all=_over_members(jnp.all),
    reduce_weighted_mean=_weighted_mean,
    reduce_argmax=_over_members(jnp.argmax),
    reduce_argmin=_over_members(jnp.argmin),
    reduce_by_key=_by_key,
    reduce=_by_a_function,
)


# --- data and parts


def rnd(*shape, seed=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), shape)


KEY = jax.random.key(3)
W, X, Y = rnd(3), rnd(N, 5, 3, seed=1), rnd(N, 5, seed=2)
WS = rnd(4, 3, seed=3)


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def step_loss(ops):
    """The mean over clients of the loss after one step of gradient descent."""

    @ops.program({"clients": N})
    def prog(w, x, y):
        stepped = lambda x, y: loss(w - 0.1 * jax.grad(loss)(w, x, y), x, y)
        return ops.reduce_mean(ops.map_fn(stepped, (x, y)))

    return prog


def sum_over(ops, body):
    """The program (w, x) -> sum over clients of body(w, x)."""

    @ops.program({"clients": N})
    def prog(w, x):
        return ops.reduce_sum(ops.map_fn(lambda v: body(w, v), x))

    return prog


@jax.custom_vjp
def sin_vjp(x):
    return jnp.sin(x)


sin_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2.0 * jnp.cos(x) * ct,))


@jax.custom_jvp
def sin_jvp(x):
    return jnp.sin(x)


sin_jvp.defjvp(lambda p, t: (sin_jvp(*p), 3.0 * jnp.cos(p[0]) * t[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: jax.Array
    b: jax.Array
    tag: str = dataclasses.field(metadata={"static": True}, default="tag")


# --- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, what its jaxpr holds, and what JAX puts next to it on placed values.

    `eqns` is None for a function that can't be traced.
    """

    build: Callable
    eqns: dict[str, int] | None
    strays: frozenset[str] = frozenset()


CASES: dict[str, Case] = {}


def case(strays=(), called=None, **eqns):
    def add(build):
        counts = {f"bj_{name}": count for name, count in eqns.items()}
        CASES[called or build.__name__] = Case(build, counts or None, frozenset(strays))
        return build

    return add


FORWARD = {"map": 1, "reduce_mean": 1}
GRAD = {"map": 2, "reduce_mean": 1, "size": 1, "broadcast": 1, "reduce_sum": 1}
GRAD_SUM = {"map": 2, "reduce_sum": 2, "broadcast": 1}


vmap = functools.partial(functools.partial, jax.vmap)
summed = lambda fn: lambda *args: jnp.sum(fn(*args))
saves_dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
over_models = vmap(in_axes=(0, None, None))
better = lambda fn: lambda w, x, y: fn(w - 0.1 * jax.grad(fn)(w, x, y), x, y)
tangent = lambda fn: lambda *args: jax.jvp(fn, args, (jnp.ones_like(W), X, Y))
linear = lambda fn: lambda w, x, y: jax.linearize(lambda w: fn(w, x, y), w)[1](w)
BATCHED_FIRST = W, rnd(4, N, 5, 3), rnd(4, N, 5)
BATCHED_SECOND = WS, rnd(N, 4, 5, 3), rnd(N, 5, 4)

# name: what the jaxpr holds, the transformation of `step_loss`, its arguments if not W, X, Y
OF_LOSS = {
    "plain": (FORWARD, lambda fn: fn),
    "grad_server": (GRAD, jax.grad),
    "grad_placed": (GRAD, lambda fn: jax.grad(fn, argnums=(0, 1, 2))),
    "value_and_grad": (GRAD, jax.value_and_grad),
    "jvp": ({"map": 2, "reduce_mean": 2}, tangent),
    "linearize": ({"map": 2, "reduce_mean": 2}, linear),
    "vmap_server": (FORWARD, over_models, WS, X, Y),
    "vmap_placed_first": (FORWARD, vmap(in_axes=(None, 0, 0)), *BATCHED_FIRST),
    "vmap_placed_second": (FORWARD, vmap(in_axes=(0, 1, 2)), *BATCHED_SECOND),
    "vmap_grad": (GRAD, lambda fn: over_models(jax.grad(fn)), WS, X, Y),
    "grad_vmap": (GRAD, lambda fn: jax.grad(summed(over_models(fn))), WS, X, Y),
    "hessian": (GRAD | {"map": 4, "reduce_mean": 2, "reduce_sum": 2}, jax.hessian),
    "maml": (
        {"map": 5, "reduce_mean": 2, "size": 2, "broadcast": 3, "reduce_sum": 3},
        lambda fn: jax.grad(better(fn)),
    ),
    "jit_around": (GRAD, lambda fn: jax.grad(lambda *args: jax.jit(fn)(*args) ** 2)),
    "checkpoint_around": (GRAD, lambda fn: jax.grad(jax.checkpoint(fn))),
    "checkpoint_with_policy": (GRAD, lambda fn: jax.grad(saves_dots(fn))),
}


def of_loss(transform, args):
    return lambda ops: (transform(step_loss(ops)), args)


for name, (counts, transform, *args) in OF_LOSS.items():
    strays = ["transpose"] if name == "vmap_placed_first" else []
    case(strays, name, **counts)(of_loss(transform, tuple(args) or (W, X, Y)))


def local_steps(w, x):
    one = lambda w, _: (w - 0.1 * jax.grad(loss)(w, x, x[:, 0]), None)
    return jax.lax.scan(one, w, None, length=4)[0]


def halvings(w, x):
    return jax.lax.while_loop(lambda c: jnp.sum(jnp.abs(c)) > 0.5, lambda c: c * 0.7, x @ w)


def branches(w, x):
    squares = lambda v: jnp.sum(v * v)
    return jax.lax.cond(x[0, 0] > 0, lambda v: jnp.sum(jnp.sin(v)), squares, x @ w)


def solved(w, x):
    gram = x.T @ x + jnp.eye(3)
    return jnp.sum(jnp.linalg.solve(gram, w) + jnp.linalg.cholesky(gram)[0])


def doubled(w, x):
    ref = jax.new_ref(x @ w)
    ref[...] = ref[...] * 2.0
    return ref[...]


tanh_sum = lambda w, x: jnp.sum(jnp.tanh(x @ w))
sines = lambda w, x: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x @ w))

# name: what the jaxpr holds, a body, the transformation of the sum over clients of it
IN_BODY = {
    "jacrev": (GRAD_SUM, lambda w, x: jnp.tanh(x @ w), jax.jacrev),
    "jacfwd": ({"map": 2, "reduce_sum": 2}, lambda w, x: jnp.tanh(x @ w), jax.jacfwd),
    "jit_in_body": (GRAD_SUM, jax.jit(tanh_sum), jax.grad),
    "checkpoint_in_body": (GRAD_SUM, jax.checkpoint(tanh_sum), jax.grad),
    "custom_vjp_in_body": (GRAD_SUM, lambda w, x: jnp.sum(sin_vjp(x @ w)), jax.grad),
    "custom_jvp_in_body": (GRAD_SUM, lambda w, x: jnp.sum(jax.nn.relu(sin_jvp(x @ w))), jax.grad),
    "grad_of_custom_vjp_in_body": (
        {"map": 1, "reduce_sum": 1},
        lambda w, x: jax.grad(lambda w: jnp.sum(sin_vjp(x @ w)))(w),
        lambda fn: fn,
    ),
    "scan_in_body": (GRAD_SUM, local_steps, jax.jacrev),
    "while_in_body": ({"map": 2, "reduce_sum": 2}, halvings, jax.jacfwd),
    "cond_in_body": (GRAD_SUM, branches, jax.grad),
    "fori_in_body": (GRAD_SUM, sines, jax.grad),
    "reference_in_body": ({"map": 1, "reduce_sum": 1}, doubled, lambda fn: fn),
    "linear_algebra": (GRAD_SUM, solved, jax.grad),
    "stop_gradient": (
        GRAD_SUM,
        lambda w, x: jnp.sum(jax.lax.stop_gradient(x @ w) * jnp.sum(w)),
        jax.grad,
    ),
}


def in_body(body, transform):
    return lambda ops: (transform(sum_over(ops, body)), (W, X))


for name, (counts, body, transform) in IN_BODY.items():
    case((), name, **counts)(in_body(body, transform))


@case(map=2, reduce_sum=2)
def custom_vjp_of_programs(ops):
    forward = sum_over(ops, lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    backward = sum_over(ops, lambda ct, x: ct * jnp.sum(x, axis=0))
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda w, x: (forward(w, x), x), lambda x, ct: (backward(ct, x), None))
    return jax.grad(fn), (W, X)


@case(**GRAD)
def scan_of_rounds(ops):
    fn = step_loss(ops)

    def run(w, x, y):
        def one(w, _):
            value, grads = jax.value_and_grad(fn)(w, x, y)
            return w - 0.1 * grads, value

        return jax.lax.scan(one, w, None, length=3)

    return run, (W, X, Y)


@case(size=1, broadcast=2, map=2, reduce_sum=2)
def grad_of_scan_of_rounds(ops):
    fn = step_loss(ops)

    def run(w, x, y):
        one = lambda w, _: (w - 0.1 * jax.grad(fn)(w, x, y), None)
        return jnp.sum(jax.lax.scan(one, w, None, length=3)[0])

    return jax.grad(run), (W, X, Y)


@case(**GRAD)
def scan_over_placed(ops):
    fn = step_loss(ops)

    def run(w, xs, y):
        return jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(fn)(w, x, y), None), w, xs)[0]

    return run, (W, rnd(3, N, 5, 3), Y)


@case(map=3, reduce_mean=2, size=1, broadcast=1, reduce_sum=1)
def while_of_rounds(ops):
    fn = step_loss(ops)

    def run(w, x, y):
        more = lambda c: (c[1] < 5) & (fn(c[0], x, y) > 0.0)
        one = lambda c: (c[0] - 0.1 * jax.grad(fn)(c[0], x, y), c[1] + 1)
        return jax.lax.while_loop(more, one, (w, 0))

    return run, (W, X, Y)


@case(**GRAD)
def cond_around(ops):
    fn = step_loss(ops)

    def run(w, x, y):
        return jax.lax.cond(w[0] > 0, lambda w: jax.grad(fn)(w, x, y), lambda w: w, w)

    return run, (W, X, Y)


@case(strays=["broadcast_in_dim"], **GRAD)
def grad_of_cond_around(ops):
    fn = step_loss(ops)

    def run(w, x, y):
        return jax.lax.cond(w[0] > 0, lambda w: fn(w, x, y), lambda w: jnp.sum(w), w)

    return jax.grad(run), (W, X, Y)


@case(**GRAD_SUM)
def keys_placed(ops):
    body = lambda w, kx: jnp.sum((kx[1] @ w) * jax.random.normal(kx[0], (5,)))
    return jax.grad(sum_over(ops, body)), (W, [jax.random.split(KEY, N), X])


@case(strays=["random_unwrap"], map=1)
def keys_as_results(ops):
    @ops.program({"clients": N})
    def prog(keys):
        return jax.random.key_data(ops.map_fn(lambda k: jax.random.split(k, 3), keys))

    return prog, (jax.random.split(KEY, N),)


@case(**GRAD_SUM)
def keys_closed_over(ops):
    def prog(w, key, x):
        noisy = sum_over(ops, lambda w, v: jnp.sum(jax.random.normal(key, (3,)) * w) * jnp.sum(v))
        return noisy(w, x)

    return jax.grad(prog), (W, KEY, X)


@case(broadcast=1, map=1, reduce_sum=1)
def keys_broadcast(ops):
    @ops.program({"clients": N})
    def prog(key, ids):
        draw = lambda k, i: jax.random.normal(jax.random.fold_in(k, i), (3,))
        return ops.reduce_sum(ops.map_fn(draw, (ops.broadcast(key), ids)))

    return prog, (KEY, jnp.arange(N))


@case(map=1, reduce_sum=1)
def keys_batched(ops):
    prog = sum_over(ops, lambda key, x: jax.random.normal(key, (3,)) * jnp.sum(x))
    return jax.vmap(prog, in_axes=(0, None)), (jax.random.split(KEY, 4), X)


@case(map=4, reduce_sum=5, broadcast=2)
def two_placements(ops):
    @ops.program({"a": N, "b": M})
    def prog(w, xa, xb):
        of_a = ops.map_fn(lambda v: jnp.tanh(v @ w), xa, placement="a")
        total = ops.reduce_sum(of_a, placement="a")
        of_b = ops.map_fn(lambda v: jnp.sin(v @ w) + total, xb, placement="b")
        return jnp.sum(ops.reduce_sum(of_b, placement="b"))

    return jax.grad(prog), (W, X, rnd(M, 5, 3))


@case(**GRAD_SUM)
def nested_placements(ops):
    @ops.program({"outer": N, "inner": M})
    def prog(w, x):
        def one(xs):
            of_inner = ops.map_fn(lambda v: jnp.tanh(v @ w), xs, placement="inner")
            return jnp.sin(ops.reduce_sum(of_inner, placement="inner"))

        return ops.reduce_sum(ops.map_fn(one, x, placement="outer"), placement="outer")

    return jax.grad(prog), (W, rnd(N, M, 3))


@case(**GRAD_SUM)
def nested_programs(ops):
    @ops.program({"inner": M})
    def inner(w, xs):
        return ops.reduce_sum(ops.map_fn(lambda v: jnp.tanh(v @ w), xs, placement="inner"))

    return jax.grad(sum_over(ops, lambda w, xs: jnp.sin(inner(w, xs)))), (W, rnd(N, M, 3))


@case(**GRAD_SUM)
def none_and_dicts(ops):
    body = lambda w, d: {"loss": jnp.sum(d["x"] @ w["k"]), "none": None}
    prog = sum_over(ops, body)
    return jax.grad(lambda *args: prog(*args)["loss"]), ({"k": W, "q": None}, {"x": X, "z": None})


@case(map=2, reduce_sum=3, broadcast=1)
def dataclasses_as_trees(ops):
    prog = sum_over(ops, lambda w, p: Pair(jnp.tanh(p.a @ w), p.b * 2.0, p.tag))

    def total(w, p):
        out = prog(w, p)
        return jnp.sum(out.a) + jnp.sum(out.b)

    return jax.grad(total), (W, Pair(X, Y))


@case(map=1, reduce_mean=2)
def flax_and_optax(ops):
    linen, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")
    model, optimizer = linen.Dense(4), optax.sgd(1e-2, momentum=0.9)
    params = model.init(jax.random.key(1), X[0])

    @ops.program({"clients": N})
    def prog(params, state, x):
        value = lambda params, x: jnp.mean(model.apply(params, x) ** 2)
        grads = ops.reduce_mean(ops.map_fn(lambda x: jax.grad(value)(params, x), x))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    return prog, (params, optimizer.init(params), X)


@case(map=2, reduce_mean=1, size=1, broadcast=1, reduce_sum=2)
def flax_nnx(ops):
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))

    @ops.program({"clients": N})
    def prog(state, x):
        value = lambda x: jnp.mean(nnx.merge(graph, state)(x) ** 2)
        return ops.reduce_mean(ops.map_fn(value, x))

    return jax.grad(prog), (nnx.to_pure_dict(state), X)


@case(map=2, reduce_sum=3, broadcast=1)
def ints_and_bools(ops):
    def body(w, leaves):
        x, i, b = leaves
        return {"float": jnp.where(b, x @ w, 0.0)[i], "int": i + 1}

    prog = sum_over(ops, body)

    def product(w, leaves):
        out = prog(w, leaves)
        return out["float"] * out["int"].astype(jnp.float32)

    return jax.grad(product), (W, [X, jnp.arange(N) % 5, jnp.arange(N) % 2 == 0])


@case(strays=["broadcast_in_dim"], **GRAD_SUM)
def float0_of_placed_ints(ops):
    prog = sum_over(ops, lambda w, i: w[i % 3] * i.astype(jnp.float32))
    grad = jax.grad(prog, argnums=(0, 1), allow_int=True)
    return lambda *args: grad(*args)[0], (W, jnp.arange(N))


@case(**GRAD_SUM)
def float0_of_server_ints(ops):
    prog = sum_over(ops, lambda ws, x: jnp.sum(x @ ws[0]) * ws[1].astype(jnp.float32))
    grad = jax.grad(prog, allow_int=True)
    return lambda *args: grad(*args)[0], ([W, jnp.int32(3)], X)


@case(map=4, reduce_max=1, reduce_sum=2, broadcast=1)
def grad_of_max(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        return jnp.sum(ops.reduce_max(ops.map_fn(lambda v: v @ w, x)))

    return jax.grad(prog), (W, X)


@case(strays=["add_any"], map=4, reduce_sum=3, broadcast=2)
def grad_of_weighted_mean(ops):
    @ops.program({"clients": N})
    def prog(w, x, weights):
        values = ops.map_fn(lambda v: jnp.sum(jnp.tanh(v @ w)), x)
        return ops.reduce_weighted_mean(values, weights)

    return jax.grad(prog, argnums=(0, 2)), (W, X, jnp.arange(1.0, N + 1))


@case(map=1, reduce_sum=4)
def constant_results(ops):
    return sum_over(ops, lambda w, x: (jnp.sum(w), jnp.ones(2), 3.0, np.arange(3.0))), (W, X)


@case(map=1, reduce_sum=1)
def callback_in_body(ops):
    def body(w, x):
        jax.debug.callback(lambda value: None, jnp.sum(x))
        return jnp.sum(x @ w)

    return sum_over(ops, body), (W, X)


@case(broadcast=2, map=2, reduce_mean=1, size=1, reduce_sum=1)
def broadcast_then_map(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        dots = lambda w, x: jnp.sum(jnp.tanh(x @ w))
        return ops.reduce_mean(ops.map_fn(dots, (ops.broadcast(w), x)))

    return jax.grad(prog), (W, X)


@case(strays=["broadcast_in_dim"], map=2, reduce_sum=1)
def vjp_of_placed_result(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        return ops.map_fn(lambda v: jnp.tanh(v @ w), x)

    return lambda w, x: jax.vjp(prog, w, x)[1](jnp.ones((N, 5))), (W, X)


@case(broadcast=1, map=1, reduce_sum=1)
def linear_transpose(ops):
    prog = sum_over(ops, lambda w, x: x @ w)
    return lambda w, x, ct: jax.linear_transpose(lambda w: prog(w, x), w)(ct), (W, X, rnd(5))


@case(map=1, reduce_sum=1)
def map_without_operands(ops):
    @ops.program({"clients": N})
    def prog(w):
        return ops.reduce_sum(ops.map_fn(lambda: jnp.tanh(w), ()))

    return prog, (W,)


@case(strays=["broadcast_in_dim", "gather", "scatter-add"], map=5, reduce_sum=1)
def grad_by_key(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        scores = ops.map_fn(lambda v: jnp.tanh(v @ w), x)
        keys = ops.map_fn(lambda v: jnp.argmax(v[0]), x)
        return jnp.sum(ops.reduce_by_key(scores, keys, 4) ** 2)

    return jax.grad(prog), (W, X)


@case(strays=["broadcast_in_dim", "scatter-max"], map=3, reduce_argmax=1, reduce_argmin=1)
def extremes_by_key_and_their_places(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        scores = ops.map_fn(lambda v: jnp.tanh(v @ w), x)
        keys = ops.map_fn(lambda v: jnp.argmin(v[:, 0]), x)
        best = ops.reduce_by_key(scores, keys, 4, op="max")
        return best, ops.reduce_argmax(scores), ops.reduce_argmin(scores)

    return prog, (W, X)


@case(map=1, reduce=1)
def affine_maps_in_order(ops):
    @ops.program({"clients": N})
    def prog(w, x):
        maps = ops.map_fn(lambda v: (jnp.tanh(v @ w), jnp.sin(v[:, 0])), x)
        return ops.reduce(lambda a, b: (a[0] * b[0] * w[0], a[1] * b[0] * w[0] + b[1]), maps)

    return prog, (W, X)


@case(map=2, reduce=2)
def tangents_in_order(ops):
    prog, args = affine_maps_in_order(ops)
    return lambda w, x: jax.jvp(prog, (w, x), (jnp.ones(3), x))[1], args


@case()
def exported(ops):
    fn = jax.jit(jax.grad(step_loss(ops)))

    def run(*args):
        return jax.export.deserialize(jax.export.export(fn)(*args).serialize()).call(*args)

    return run, (W, X, Y)


# --- checks


def step_kinds(fn, *args, **options):
    """How many steps of each kind the plan has, as `bj.explain` shows it."""
    facts = bj.explain(fn, *args, options=options).facts
    return collections.Counter(step.kind for step in walk_facts(facts.steps))


def run_everywhere(fn, *args, rtol=5e-5, atol=5e-5, beam=True, **options):
    """Runs a program once with `jit`, runner "local" and Beam, and returns the result of "local".

    Asserts the types and values of `jit`, and that Beam gives the same bits as "local".
    """
    expected = jax.jit(fn)(*args)
    local = bj.run(fn, *args, runner="local", options=options)
    assert_same_types(local, expected)
    assert_close(local, expected, rtol, atol)
    if beam:
        found = bj.run(fn, *args, options=options)
        assert_same_types(found, expected)
        assert_same_bits(found, local)
    return local
