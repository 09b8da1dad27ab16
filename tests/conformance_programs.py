"""Small programs for the conformance table, besides those of `programs`.

As there, each is a function of the operators `ops`, `beamjax` itself or a reference by `jax.vmap`,
and returns a function and its arguments.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import KEY, N, W, X, Y, rnd, step_loss

State = collections.namedtuple("State", "weights momentum step")
IDS = jnp.arange(N)


def program(function, *args):
    """A row that calls `function(ops, *args)` in a program over N clients."""
    return lambda ops: (ops.program({"clients": N})(lambda *xs: function(ops, *xs)), args)


def reducing(name, x=X):
    return program(lambda ops, x: getattr(ops, f"reduce_{name}")(x), x)


def in_body(body, *args):
    """A row that maps `body` over members and returns the results and their sum."""

    def run(ops, *args):
        y = ops.map_fn(body, args)
        return y, ops.reduce_sum(y)

    return program(run, *args)


def outside(function, *args):
    """A row that applies `function` to placed values between a map and a reduction."""
    tanh = lambda v: jnp.tanh(v) if jnp.issubdtype(v.dtype, jnp.floating) else v
    return program(lambda ops, x, *rest: function(ops.map_fn(tanh, x), *rest), X, *args)


def summed(x):
    """A row of every operator on members of one dtype."""

    def run(ops, x, one):
        y = ops.map_fn(lambda v: jnp.where(v == one, v, one), x)
        copies = ops.broadcast(one)
        return ops.reduce_sum(y), ops.reduce_mean(y), ops.reduce_max(y), y, copies

    return program(run, x, x[0])


def of_dtype(dtype):
    return lambda ops: summed((X * 4).astype(dtype))(ops)


def four_bits(ops):
    def run(ops, x, one):
        y = ops.map_fn(lambda v: v + one, x)
        return y, ops.reduce_sum(y.astype("int32")), ops.broadcast(one)

    x = (X * 2).astype("int4")
    return program(run, x, x[0])(ops)


# --- transformations


def transformed(transform, *args):
    return lambda ops: (transform(step_loss(ops)), args)


def vjp(ops):
    fn = step_loss(ops)
    return lambda *args: jax.vjp(fn, *args)[1](jnp.float32(2.0)), (W, X, Y)


def closure_convert(ops):
    def run(w, x, y):
        fn, consts = jax.closure_convert(lambda w: step_loss(ops)(w, x, y), w)
        return fn(w, *consts)

    return run, (W, X, Y)


# --- control flow


def switch_in_body(x, i):
    return lax.switch(i % 3, [jnp.sin, jnp.cos, lambda v: v * 2], x)


def rounds_in_body(v):
    """Rounds that take the mean over the members: the first rows are carried."""
    return lax.scan(lambda c, r: (c + lax.pmean(c * r, "clients"), c), v[0], v)


def switch_around(ops):
    fn = step_loss(ops)
    better = lambda w: w - 0.1 * jax.grad(fn)(w, X, Y)
    return lambda w: lax.switch(jnp.int32(w[0] > 0), [better, lambda w: w], w), (W,)


def fori_around(ops):
    fn = step_loss(ops)
    return lambda w: lax.fori_loop(0, 3, lambda i, w: w - 0.1 * jax.grad(fn)(w, X, Y), w), (W,)


# --- random keys


def noise(key):
    return jax.random.normal(key, (2,))


def rbg_in_body(ops):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), N)
    return in_body(noise, keys)(ops)


# --- idioms


def fedavg(ops):
    """Federated averaging with weights, and an optax optimizer on the server."""
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(0.1)

    @ops.program({"clients": N})
    def prog(w, state, x, y, examples):
        def delta(x, y):
            start = W * 0 + w
            local = lambda w, _: (w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w), None)
            return start - lax.scan(local, start, None, length=3)[0]

        mean = ops.reduce_weighted_mean(ops.map_fn(delta, (x, y)), examples)
        updates, state = optimizer.update(mean, state)
        return optax.apply_updates(w, updates), state

    return prog, (W, optimizer.init(W), X, Y, jnp.arange(1.0, N + 1))


def diloco(ops):
    """Placed state in and out: workers start from the server's weights and keep their momentum."""
    optax = pytest.importorskip("optax")
    inner, outer = optax.adamw(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)

    @ops.program({"clients": N})
    def prog(w, outer_state, inner_state, x, y):
        def steps(w, state, x, y):
            def one(carry, _):
                w, state = carry
                grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
                updates, state = inner.update(grads, state, w)
                return (optax.apply_updates(w, updates), state), None

            return lax.scan(one, (w, state), None, length=4)[0]

        start = ops.broadcast(w)
        ended, inner_state = ops.map_fn(steps, (start, inner_state, x, y))
        change = ops.reduce_mean(jax.tree.map(lambda a, b: a - b, start, ended))
        updates, outer_state = outer.update(change, outer_state, w)
        first = jnp.sum(jnp.where((jnp.arange(N) == 0)[:, None], ended, 0.0), axis=0)
        return optax.apply_updates(w, updates), outer_state, inner_state, first

    states = jax.vmap(inner.init)(jnp.tile(W, (N, 1)))
    return prog, (W, outer.init(W), states, X, Y)


def k_means(ops):
    points, centres = rnd(N, 6, 3, seed=8), rnd(2, 3, seed=9)

    @ops.program({"clients": N})
    def prog(centres, points):
        def assign(points):
            distance = jnp.sum((points[:, None] - centres[None]) ** 2, -1)
            nearest = jnp.argmin(distance, 1)
            sums = jax.ops.segment_sum(points, nearest, 2)
            return sums, jax.ops.segment_sum(jnp.ones(6), nearest, 2)

        sums, counts = ops.reduce_sum(ops.map_fn(assign, points))
        return sums / jnp.maximum(counts, 1.0)[:, None]

    return prog, (centres, points)


def private_sum(ops):
    """Clipped gradients, summed, with noise that is drawn once on the server."""

    @ops.program({"clients": N})
    def prog(w, key, x, y):
        def clipped(x, y):
            grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
            return grads / jnp.maximum(1.0, jnp.linalg.norm(grads))

        total = ops.reduce_sum(ops.map_fn(clipped, (x, y)))
        return total + 0.1 * jax.random.normal(key, total.shape)

    return prog, (W, KEY, X, Y)


def hyperparameters(ops):
    """The gradient of the loss after a round, with respect to the rate of learning."""
    fn = step_loss(ops)
    after = lambda rate, w: fn(w - rate * jax.grad(fn)(w, X, Y), X, Y)
    return jax.grad(after), (jnp.float32(0.1), W)


def flax_struct(ops):
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class Train:
        weights: jax.Array
        step: jax.Array
        name: str = struct.field(pytree_node=False, default="linear")

    @ops.program({"clients": N})
    def prog(state, x):
        change = ops.reduce_mean(ops.map_fn(lambda v: jnp.mean(v @ state.weights) * W, x))
        return state.replace(weights=state.weights - change, step=state.step + 1)

    return prog, (Train(W, jnp.int32(0)), X)


def named_tuples(ops):
    @ops.program({"clients": N})
    def prog(state, x):
        change = ops.reduce_mean(ops.map_fn(lambda v: jnp.tanh(v @ state.weights)[0] * W, x))
        momentum = state.momentum * 0.9 + change
        return State(state.weights - momentum, momentum, state.step + 1)

    return prog, (State(W, W * 0, jnp.int32(0)), X)


def monte_carlo(ops):
    """No input but a key: each member draws its own numbers."""

    @ops.program({"clients": N})
    def prog(key):
        draw = lambda i: jnp.maximum(jax.random.normal(jax.random.fold_in(key, i), (8,)), 0.0)
        payoff = ops.map_fn(lambda i: jnp.mean(draw(i)), jnp.arange(N))
        return ops.reduce_mean(payoff), ops.reduce_mean(payoff**2)

    return prog, (KEY,)


def covariance(ops):
    x = rnd(N, 3, seed=5)

    @ops.program({"clients": N})
    def prog(x):
        x = ops.map_fn(jnp.tanh, x)
        centred = x - jnp.mean(x, axis=0, keepdims=True)
        return centred.T @ centred / (N - 1)

    return prog, (x,)


def debug_print(ops):
    def body(v):
        jax.debug.print("{}", v[0, 0])
        return v

    return in_body(body, X)(ops)


def debug_print_on_server(ops):
    def run(ops, x):
        total = ops.reduce_sum(x)
        jax.debug.print("{}", total[0, 0])
        return total

    return program(run, X)(ops)


def pure_callback(ops):
    double = lambda v: jax.pure_callback(
        lambda v: np.asarray(v) * 2, v, v, vmap_method="sequential"
    )
    return in_body(double, X)(ops)


def matrices(x):
    return jnp.einsum("ki,kj->ij", x, x) + jnp.eye(3)
