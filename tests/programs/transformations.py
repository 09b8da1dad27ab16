"""Transformations of JAX around programs, and what is in their bodies.

`eqns` says what the jaxpr holds: after any transformation a program is made of maps of one member,
broadcasts and reductions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from programs.table import (
    KEY,
    WS,
    M,
    N,
    Pair,
    W,
    X,
    Y,
    add,
    built,
    counted,
    loss,
    rnd,
    sin_jvp,
    sin_vjp,
    step_loss,
    sum_over,
)  # fmt: skip

FORWARD = counted(map=1, reduce_mean=1)
GRAD = counted(map=2, reduce_mean=1, size=1, broadcast=1, reduce_sum=1)
GRAD_SUM = counted(map=2, reduce_sum=2, broadcast=1)

# --- transformations of a loss

vmap = functools.partial(functools.partial, jax.vmap)
summed = lambda fn: lambda *args: jnp.sum(fn(*args))
saves_dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
over_models = vmap(in_axes=(0, None, None))
better = lambda fn: lambda w, x, y: fn(w - 0.1 * jax.grad(fn)(w, x, y), x, y)
tangent = lambda fn: lambda *args: jax.jvp(fn, args, (jnp.ones_like(W), X, Y))
linear = lambda fn: lambda w, x, y: jax.linearize(lambda w: fn(w, x, y), w)[1](w)
pulled_back = lambda fn: lambda *args: jax.vjp(fn, *args)[1](jnp.float32(2.0))
BATCHED_FIRST = W, rnd(4, N, 5, 3), rnd(4, N, 5)
BATCHED_SECOND = WS, rnd(N, 4, 5, 3), rnd(N, 5, 4)


def converted(fn):
    def run(w, x, y):
        closed, consts = jax.closure_convert(lambda w: fn(w, x, y), w)
        return closed(w, *consts)

    return run


def by_rate(fn):
    """The gradient of the loss after a round, with respect to the rate of learning."""
    after = lambda rate, w: fn(w - rate * jax.grad(fn)(w, X, Y), X, Y)
    return lambda w, x, y: jax.grad(after)(jnp.float32(0.1), w)


def exported(fn):
    fn = jax.jit(jax.grad(fn))
    return lambda *args: jax.export.deserialize(jax.export.export(fn)(*args).serialize()).call(
        *args
    )


MAML = counted(map=5, reduce_mean=2, size=2, broadcast=3, reduce_sum=3)
BY_RATE = counted(map=4, reduce_mean=2, size=2, broadcast=2, reduce_sum=2)
HESSIAN = GRAD | counted(map=4, reduce_mean=2, reduce_sum=2)
TANGENT = counted(map=2, reduce_mean=2)

# name: the plan, what the jaxpr holds, the transformation, its arguments if not W, X, Y
OF_LOSS = {
    "plain": ("maps 1", FORWARD, lambda fn: fn),
    "grad_server": ("maps 1", GRAD, jax.grad),
    "grad_placed": ("maps 1", GRAD, lambda fn: jax.grad(fn, argnums=(0, 1, 2))),
    "value_and_grad": ("maps 1", GRAD, jax.value_and_grad),
    "vjp": ("maps 1", GRAD, pulled_back),
    "jvp": ("maps 1", TANGENT, tangent),
    "linearize": ("maps 1", TANGENT, linear),
    "vmap_server": ("maps 1", FORWARD, over_models, WS, X, Y),
    "vmap_placed_first": ("maps 1", FORWARD, vmap(in_axes=(None, 0, 0)), *BATCHED_FIRST),
    "vmap_placed_second": ("maps 1", FORWARD, vmap(in_axes=(0, 1, 2)), *BATCHED_SECOND),
    "vmap_grad": ("maps 1", GRAD, lambda fn: over_models(jax.grad(fn)), WS, X, Y),
    "grad_vmap": ("maps 1", GRAD, lambda fn: jax.grad(summed(over_models(fn))), WS, X, Y),
    "hessian": ("maps 1", HESSIAN, jax.hessian),
    "maml": ("maps 3", MAML, lambda fn: jax.grad(better(fn))),
    "by_rate": ("maps 2", BY_RATE, by_rate),
    "jit_around": ("maps 2", GRAD, lambda fn: jax.grad(lambda *args: jax.jit(fn)(*args) ** 2)),
    "checkpoint_around": ("maps 1", GRAD, lambda fn: jax.grad(jax.checkpoint(fn))),
    "checkpoint_with_policy": ("maps 1", GRAD, lambda fn: jax.grad(saves_dots(fn))),
    "named": ("maps 1", FORWARD, jax.named_call),
    "closure_convert": ("maps 1", FORWARD, converted),
    "exported": ("", None, exported),
}


def of_loss(transform, args):
    return lambda ops: (transform(step_loss(ops)), args)


for name, (plan, eqns, transform, *args) in OF_LOSS.items():
    strays = ("transpose",) if name == "vmap_placed_first" else ()
    build = of_loss(transform, tuple(args) or (W, X, Y))
    add(name, build, plan=plan, eqns=eqns, strays=strays)


# --- derivatives of what is in a body


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


def differentiable(w, x):
    """Numbers whose derivatives are taken together, each a row of the Jacobian."""
    tanh_sum = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    sines = jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x @ w)
    frozen = jax.lax.stop_gradient(x @ w) * jnp.sum(w)
    numbers = [
        tanh_sum(w, x), jax.jit(tanh_sum)(w, x), jax.checkpoint(tanh_sum)(w, x),
        jnp.sum(sin_vjp(x @ w)), jnp.sum(jax.nn.relu(sin_jvp(x @ w))), branches(w, x),
        jnp.sum(sines), solved(w, x), jnp.sum(frozen), *local_steps(w, x),
    ]  # fmt: skip
    return jnp.stack(numbers)


# name: the plan, what the jaxpr holds, a body, the transformation of the sum over clients of it
IN_BODY = {
    "jacrev": ("maps 1", GRAD_SUM, differentiable, jax.jacrev),
    "jacfwd": ("maps 1", counted(map=2, reduce_sum=2), halvings, jax.jacfwd),
    "in_body": (
        "maps 1",
        counted(map=1, reduce_sum=2),
        lambda w, x: (jax.grad(lambda w: jnp.sum(sin_vjp(x @ w)))(w), doubled(w, x)),
        lambda fn: fn,
    ),
}
for name, (plan, eqns, body, transform) in IN_BODY.items():
    build = lambda ops, body=body, transform=transform: (transform(sum_over(ops, body)), (W, X))
    add(name, build, plan=plan, eqns=eqns)


@built(eqns=counted(map=2, reduce_sum=2))
def custom_vjp_of_programs(ops):
    forward = sum_over(ops, lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    backward = sum_over(ops, lambda ct, x: ct * jnp.sum(x, axis=0))
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda w, x: (forward(w, x), x), lambda x, ct: (backward(ct, x), None))
    return jax.grad(fn), (W, X)


@built(strays=("broadcast_in_dim",), eqns=counted(map=2, reduce_sum=1))
def vjp_of_placed_result(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        return ops.map_fn(lambda v: jnp.tanh(v @ w), x)

    return lambda w, x: jax.vjp(prog, w, x)[1](jnp.ones((N, 5))), (W, X)


@built(eqns=counted(broadcast=1, map=1, reduce_sum=1))
def linear_transpose(ops):
    prog = sum_over(ops, lambda w, x: x @ w)
    return lambda w, x, ct: jax.linear_transpose(lambda w: prog(w, x), w)(ct), (W, X, rnd(5))


# --- operators and placements


@built()
def reductions(ops):
    @ops.program(placements={"clients": N})
    def prog(x, i):
        weighted = ops.reduce_weighted_mean(x, jnp.arange(1.0, N + 1))
        return (
            ops.reduce_sum(x), ops.reduce_mean(x), ops.reduce_mean(i), ops.reduce_max(x),
            ops.reduce_min(i), ops.reduce_prod(x), ops.reduce_any(x > 2), ops.reduce_all(x > -9),
            ops.reduce_sum(i), weighted,
        )  # fmt: skip

    return prog, (X, jnp.arange(N) * 3 - 7)


@built(plan="maps 2")
def variances(ops):
    """With its derivative; both passes read the members once for all of them."""

    @ops.program(placements={"clients": N})
    def prog(w, x, i):
        spread = ops.reduce_var(ops.map_fn(lambda v: v @ w, x))
        return jnp.sum(spread), (ops.reduce_std(x, ddof=1), ops.reduce_var(i), ops.reduce_std(x))

    return jax.value_and_grad(prog, has_aux=True), (W, X, jnp.arange(N) * 3 - 7)


@built(eqns=counted(map=4, reduce_sum=5, broadcast=2), plan="maps 2")
def two_placements(ops):
    @ops.program(placements={"a": N, "b": M})
    def prog(w, xa, xb):
        of_a = ops.map_fn(lambda v: jnp.tanh(v @ w), xa, placement="a")
        total = ops.reduce_sum(of_a, placement="a")
        of_b = ops.map_fn(lambda v: jnp.sin(v @ w) + total, xb, placement="b")
        return jnp.sum(ops.reduce_sum(of_b, placement="b"))

    return jax.grad(prog), (W, X, rnd(M, 5, 3))


@built(eqns=GRAD_SUM)
def nested_placements(ops):
    @ops.program(placements={"outer": N, "inner": M})
    def prog(w, x):
        def one(xs):
            of_inner = ops.map_fn(lambda v: jnp.tanh(v @ w), xs, placement="inner")
            return jnp.sin(ops.reduce_sum(of_inner, placement="inner"))

        return ops.reduce_sum(ops.map_fn(one, x, placement="outer"), placement="outer")

    return jax.grad(prog), (W, rnd(N, M, 3))


@built(eqns=GRAD_SUM)
def nested_programs(ops):
    @ops.program(placements={"inner": M})
    def inner(w, xs):
        return ops.reduce_sum(ops.map_fn(lambda v: jnp.tanh(v @ w), xs))

    return jax.grad(sum_over(ops, lambda w, xs: jnp.sin(inner(w, xs)))), (W, rnd(N, M, 3))


@built(eqns=counted(broadcast=2, map=2, reduce_mean=1, size=1, reduce_sum=1))
def broadcast_then_map(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        dots = lambda w, x: jnp.sum(jnp.tanh(x @ w))
        return ops.reduce_mean(ops.map_fn(dots, (ops.broadcast(w), x)))

    return jax.grad(prog), (W, X)


@built(eqns=counted(map=1, reduce_sum=1))
def map_without_operands(ops):
    @ops.program(placements={"clients": N})
    def prog(w):
        return ops.reduce_sum(ops.map_fn(lambda: jnp.tanh(w), ()))

    return prog, (W,)


@built(eqns=counted(map=1, reduce_sum=4))
def constant_results(ops):
    return sum_over(ops, lambda w, x: (jnp.sum(w), jnp.ones(2), 3.0, np.arange(3.0))), (W, X)


# --- derivatives of reductions


@built(eqns=counted(map=4, reduce_max=1, reduce_sum=2, broadcast=1), plan="maps 3")
def grad_of_max(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        return jnp.sum(ops.reduce_max(ops.map_fn(lambda v: v @ w, x)))

    return jax.grad(prog), (W, X)


@built(strays=("add_any",), eqns=counted(map=4, reduce_sum=3, broadcast=2), plan="maps 2")
def grad_of_weighted_mean(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x, weights):
        values = ops.map_fn(lambda v: jnp.sum(jnp.tanh(v @ w)), x)
        return ops.reduce_weighted_mean(values, weights)

    return jax.grad(prog, argnums=(0, 2)), (W, X, jnp.arange(1.0, N + 1))


@built(
    strays=("broadcast_in_dim", "gather", "scatter-add"),
    eqns=counted(map=5, reduce_sum=1),
    plan="maps 2",
)
def grad_by_key(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        scores = ops.map_fn(lambda v: jnp.tanh(v @ w), x)
        keys = ops.map_fn(lambda v: jnp.argmax(v[0]), x)
        return jnp.sum(ops.reduce_by_key(scores, keys, 4) ** 2)

    return jax.grad(prog), (W, X)


@built(
    strays=("broadcast_in_dim", "scatter-max"),
    eqns=counted(map=3, reduce_argmax=1, reduce_argmin=1),
)
def extremes_by_key_and_their_places(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        scores = ops.map_fn(lambda v: jnp.tanh(v @ w), x)
        keys = ops.map_fn(lambda v: jnp.argmin(v[:, 0]), x)
        best = ops.reduce_by_key(scores, keys, 4, op="max")
        return best, ops.reduce_argmax(scores), ops.reduce_argmin(scores)

    return prog, (W, X)


@built(eqns=counted(map=1, reduce=1))
def affine_maps_in_order(ops):
    @ops.program(placements={"clients": N})
    def prog(w, x):
        maps = ops.map_fn(lambda v: (jnp.tanh(v @ w), jnp.sin(v[:, 0])), x)
        return ops.reduce(lambda a, b: (a[0] * b[0] * w[0], a[1] * b[0] * w[0] + b[1]), maps)

    return prog, (W, X)


@built(eqns=counted(map=2, reduce=2))
def tangents_in_order(ops):
    prog, args = affine_maps_in_order(ops)
    return lambda w, x: jax.jvp(prog, (w, x), (jnp.ones(3), x))[1], args


# --- keys, trees and types


@built(eqns=GRAD_SUM)
def keys_placed_and_closed_over(ops):
    def prog(w, key, keys, x):
        def body(w, kx):
            drawn = jax.random.normal(kx[0], (5,)) + jax.random.normal(key, (5,))
            return jnp.sum((kx[1] @ w) * drawn)

        return sum_over(ops, body)(w, [keys, x])

    return jax.grad(prog), (W, KEY, jax.random.split(KEY, N), X)


@built(strays=("random_unwrap",), eqns=counted(map=1))
def keys_as_results(ops):
    @ops.program(placements={"clients": N})
    def prog(keys):
        return jax.random.key_data(ops.map_fn(lambda k: jax.random.split(k, 3), keys))

    return prog, (jax.random.split(KEY, N),)


@built(eqns=counted(broadcast=1, map=1, reduce_sum=1))
def keys_broadcast_and_batched(ops):
    @ops.program(placements={"clients": N})
    def prog(key, ids):
        draw = lambda k, i: jax.random.normal(jax.random.fold_in(k, i), (3,))
        return ops.reduce_sum(ops.map_fn(draw, (ops.broadcast(key), ids)))

    return jax.vmap(prog, in_axes=(0, None)), (jax.random.split(KEY, 4), jnp.arange(N))


@built(eqns=counted(map=2, reduce_sum=4, broadcast=2))
def trees(ops):
    def body(w, d):
        pair = Pair(jnp.tanh(d["pair"].a @ w["k"]), d["pair"].b * 2.0, d["pair"].tag)
        return {"loss": jnp.sum(d["x"] @ w["k"]), "none": None, "pair": pair}

    prog = sum_over(ops, body)

    def total(*args):
        out = prog(*args)
        return out["loss"] + jnp.sum(out["pair"].a) + jnp.sum(out["pair"].b)

    return jax.grad(total), ({"k": W, "q": None}, {"x": X, "z": None, "pair": Pair(X, Y)})


@built(eqns=counted(map=2, reduce_sum=3, broadcast=1), plan="maps 2")
def ints_and_bools(ops):
    def body(w, leaves):
        x, i, b = leaves
        return {"float": jnp.where(b, x @ w, 0.0)[i], "int": i + 1}

    prog = sum_over(ops, body)

    def product(w, leaves):
        out = prog(w, leaves)
        return out["float"] * out["int"].astype(jnp.float32)

    return jax.grad(product), (W, [X, jnp.arange(N) % 5, jnp.arange(N) % 2 == 0])


@built(strays=("broadcast_in_dim",), eqns=GRAD_SUM)
def gradients_of_integers(ops):
    body = lambda ws, i: ws[0][i % 3] * i.astype(jnp.float32) * ws[1].astype(jnp.float32)
    grad = jax.grad(sum_over(ops, body), argnums=(0, 1), allow_int=True)
    return lambda *args: grad(*args)[0], ([W, jnp.int32(3)], jnp.arange(N))
