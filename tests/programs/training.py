"""Training: idioms of a few lines, and trainers as people publish them.

A trainer gives a function of one round, `step(state, *batch) -> (state, metrics)`, and its
arguments; what it keeps from round to round is placed in part. The types of its state stay the
same, or a round would be staged anew each time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx, struct

import beamjax as drjax
from programs.table import KEY, W, X, Y, add, built, rnd
from programs.table import N as CLIENTS

# --- idioms


@built(promotes=True)
def fedavg(ops):
    """Federated averaging with weights, and an optax optimizer on the server."""
    optimizer = optax.adam(0.1)

    @ops.program(placements={"clients": CLIENTS})
    def prog(w, state, x, y, examples):
        def delta(x, y):
            local = lambda w, _: (w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w), None)
            return w - jax.lax.scan(local, w, None, length=3)[0]

        mean = ops.reduce_weighted_mean(ops.map_fn(delta, (x, y)), examples)
        updates, state = optimizer.update(mean, state)
        return optax.apply_updates(w, updates), state

    return prog, (W, optimizer.init(W), X, Y, jnp.arange(1.0, CLIENTS + 1))


@built(promotes=True)
def linen_and_momentum(ops):
    model, optimizer = linen.Dense(4), optax.sgd(1e-2, momentum=0.9)
    params = model.init(jax.random.key(1), X[0])

    @ops.program(placements={"clients": CLIENTS})
    def prog(params, state, x):
        value = lambda params, x: jnp.mean(model.apply(params, x) ** 2)
        grads = ops.reduce_mean(ops.map_fn(lambda x: jax.grad(value)(params, x), x))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    return prog, (params, optimizer.init(params), X)


@built()
def k_means(ops):
    @ops.program(placements={"clients": CLIENTS})
    def prog(centres, points):
        def assign(points):
            distance = jnp.sum((points[:, None] - centres[None]) ** 2, -1)
            nearest = jnp.argmin(distance, 1)
            sums = jax.ops.segment_sum(points, nearest, 2)
            return sums, jax.ops.segment_sum(jnp.ones(6), nearest, 2)

        sums, counts = ops.reduce_sum(ops.map_fn(assign, points))
        return sums / jnp.maximum(counts, 1.0)[:, None]

    return prog, (rnd(2, 3, seed=9), rnd(CLIENTS, 6, 3, seed=8))


@built()
def private_sum(ops):
    """Clipped gradients, summed, with noise that is drawn once on the server."""

    @ops.program(placements={"clients": CLIENTS})
    def prog(w, key, x, y):
        def clipped(x, y):
            grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
            return grads / jnp.maximum(1.0, jnp.linalg.norm(grads))

        total = ops.reduce_sum(ops.map_fn(clipped, (x, y)))
        return total + 0.1 * jax.random.normal(key, total.shape)

    return prog, (W, KEY, X, Y)


@built()
def monte_carlo(ops):
    """No input but a key: each member draws its own numbers, or the server draws those of all."""

    @ops.program(placements={"clients": CLIENTS})
    def prog(key):
        draw = lambda i: jnp.maximum(jax.random.normal(jax.random.fold_in(key, i), (8,)), 0.0)
        payoff = ops.map_fn(lambda i: jnp.mean(draw(i)), jnp.arange(CLIENTS))
        split = ops.map_fn(jax.random.normal, jax.random.split(key, CLIENTS))
        drawn = ops.reduce_sum(jax.random.normal(key, (CLIENTS, 3)))
        return ops.reduce_mean(payoff), ops.reduce_mean(payoff**2), drawn, split

    return prog, (KEY,)


N, B, S, V, E, L = 20, 2, 5, 11, 4, 4  # replicas, rows of one, tokens, words, features, layers
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
program = functools.partial(drjax.program, placements={"diloco": N})


def trainer(plan="maps 1"):
    """Adds the first round of a trainer."""

    def decorate(build):
        add(build.__name__, lambda ops: build(), plan=plan, own=True, promotes=True)
        return build

    return decorate


# --- models and data


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (V, E)),
        "layers": {"w": 0.3 * jax.random.normal(keys[1], (L, E, E)), "scale": jnp.ones((L, E))},
        "head": 0.3 * jax.random.normal(keys[2], (E, V)),
    }


def apply(params, tokens):
    def layer(x, p):
        return x + jnp.tanh((x * p["scale"]) @ p["w"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
    return x @ params["head"]


def loss(params, batch):
    logits = apply(params, batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["mask"]
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def batch_of(rows):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (rows, S)), "int32")
    mask = (tokens != 0).astype(jnp.float32)
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1), "mask": mask}


def among_replicas(batch):
    return jax.tree.map(lambda x: jnp.reshape(x, (N, B, *x.shape[1:])), batch)


def stacked(tree):
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (N, *jnp.shape(x))), tree)


# --- DiLoCo


class Inner(struct.PyTreeNode):
    params: Any
    opt_state: Any
    step: Any
    tx: Any = struct.field(pytree_node=False)

    @classmethod
    def create(cls, tx, params):
        return cls(params, tx.init(params), jnp.zeros((), jnp.int32), tx)

    def apply_gradients(self, grads):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(params=params, opt_state=opt_state, step=self.step + 1)


class Outer(struct.PyTreeNode):
    inner_state: Any
    params: Any
    outer_opt_state: Any
    step: Any


def outer_state(inner):
    params = inner.params
    return Outer(stacked(inner), params, OUTER.init(params), jnp.zeros((), jnp.int32))


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def train_step(state, batch, rng):
    dropped = jax.random.bernoulli(jax.random.fold_in(rng, state.step), 0.2, (B, S))
    batch = batch | {"mask": jnp.where(dropped, 0.0, batch["mask"])}
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    metrics = {"loss": value.astype(jnp.bfloat16), "norm": norm_of(grads)}
    return state.apply_gradients(grads), metrics


def synchronize(state):
    outer = drjax.broadcast(state.params)
    delta = jax.tree.map(lambda x, y: y - x, state.inner_state.params, outer)
    updates, opt_state = OUTER.update(drjax.reduce_mean(delta), state.outer_opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    inner = drjax.map_fn(lambda s: s.replace(params=params), state.inner_state)
    return state.replace(params=params, outer_opt_state=opt_state, inner_state=inner)


def typed_mean(tree):
    return jax.tree.map(lambda x: (x / N).astype(x.dtype), drjax.reduce_sum(tree))


ADAM = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
)


def inner_after_a_step():
    """The next step sends and receives."""
    return Inner.create(ADAM, parameters()).replace(step=jnp.ones((), jnp.int32))


@trainer("maps 3, branches 1")
def diloco():
    @program()
    def step(state, batch, rng):
        batch = among_replicas(batch)
        replicas = (state.inner_state, batch, drjax.broadcast(rng))
        inner, metrics = drjax.map_fn(train_step, replicas)
        state = state.replace(inner_state=inner, step=inner.step[0])
        state = jax.lax.cond(state.step % 2 == 0, synchronize, lambda s: s, state)
        return state, typed_mean(metrics)

    return step, (outer_state(inner_after_a_step()), batch_of(N * B), jax.random.key(7))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, E, rngs=rngs)
        self.dense = nnx.Linear(E, E, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(E, V, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.drop(jnp.tanh(self.dense(self.embed(tokens)))))


@trainer("maps 2")
def modules_with_generators():
    """A state of `nnx` with counters of its generators; the metrics of each replica by masks."""
    graph, weights, rest = nnx.split(Network(nnx.Rngs(0, dropout=1)), nnx.Param, ...)
    tx = optax.adam(1e-2)

    def local_step(state, batch):
        def objective(model):
            logits = model(batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        model = nnx.merge(graph, state["params"], state["rest"])
        value, grads = nnx.value_and_grad(objective)(model)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt": opt}, value

    @program()
    def step(state, batch):
        state, losses = drjax.map_fn(local_step, (state, among_replicas(batch)))
        mean = drjax.reduce_mean(state["params"])
        metrics = {f"loss/{i}": drjax.reduce_sum(losses * (jnp.arange(N) == i)) for i in (0, N - 1)}
        return state | {"params": drjax.broadcast(mean)}, metrics

    state = stacked({"params": weights, "rest": rest, "opt": tx.init(weights)})
    return step, (state, batch_of(N * B))


# --- optimizers whose state is the replicas' own


def optimizer_of_several():
    """A schedule that is injected, and steps that are taken every other time."""
    schedule = optax.exponential_decay(0.1, 2, 0.5)
    fast = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    slow = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation()
    layers = {"w": "slow", "scale": "fast"}
    parts = {"embed": "fast", "layers": layers, "head": "slow"}
    return optax.partition({"fast": fast, "slow": slow}, parts)


@trainer()
def weighed_replicas():
    """A replica takes part with probability 1/2, and weighs as many rows as its number."""
    optimizer = optimizer_of_several()

    def local(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @program()
    def step(state, batch, rng):
        params, states = state
        replicas = (drjax.broadcast(params), states, among_replicas(batch))
        trained, states, values = drjax.map_fn(local, replicas)
        picked = jax.random.uniform(rng, (N,)) < 0.5
        weights = jnp.where(picked, jnp.arange(N, dtype=jnp.float32), 0.0)
        mean = drjax.reduce_weighted_mean(trained, weights)
        return (mean, states), (drjax.reduce_mean(values), drjax.reduce_sum(picked))

    params = parameters()
    return step, ((params, stacked(optimizer.init(params))), batch_of(N * B), jax.random.key(7))
