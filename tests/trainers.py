"""Trainers as people publish them: what they keep from round to round, some of it placed.

A trainer is a function of one round, `step(state, *batch) -> (state, metrics)`, with a first state
and the batches of some rounds.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

import beamjax as drjax

N, B, S, V, E, L = 20, 2, 5, 11, 4, 4  # replicas, rows of one, tokens, words, features, layers
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
program = functools.partial(drjax.program, placements={"diloco": N})


class Trainer(NamedTuple):
    """`build()` gives a step, its first state, and the other arguments of each round."""

    build: Callable[[], tuple[Callable[..., Any], Any, list[tuple[Any, ...]]]]
    passes: int


TRAINERS: dict[str, Trainer] = {}


def trainer(passes):
    def add(build):
        TRAINERS[build.__name__] = Trainer(build, passes)
        return build

    return add


# --- models and data


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (V, E)),
        "layers": {"w": 0.3 * jax.random.normal(keys[1], (L, E, E)), "scale": jnp.ones((L, E))},
        "head": 0.3 * jax.random.normal(keys[2], (E, V)),
    }


def apply(params, tokens, dtype=jnp.float32):
    def layer(x, p):
        return x + jnp.tanh((x * p["scale"]) @ p["w"]), None

    params = jax.tree.map(lambda p: p.astype(dtype), params)
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
    return (x @ params["head"]).astype(jnp.float32)


def loss(params, batch, dtype=jnp.float32):
    logits = apply(params, batch["inputs"], dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["mask"]
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def token_rows(rows, seed, length=S):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (rows, length)), "int32")


def batch_of(rows, seed=0):
    tokens = token_rows(rows, seed)
    mask = (tokens != 0).astype(jnp.float32)
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1), "mask": mask}


def among_replicas(batch, *shape):
    shape = shape or (B,)
    return jax.tree.map(lambda x: jnp.reshape(x, (N, *shape, *x.shape[1:])), batch)


def stacked(tree):
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (N, *jnp.shape(x))), tree)


def key(number):
    return jax.random.fold_in(jax.random.key(7), number)


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


@trainer(passes=3)
def diloco():
    @program()
    def step(state, batch, rng):
        batch = among_replicas(batch)
        replicas = (state.inner_state, batch, drjax.broadcast(rng))
        inner, metrics = drjax.map_fn(train_step, replicas)
        state = state.replace(inner_state=inner, step=inner.step[0])
        state = jax.lax.cond(state.step % 2 == 0, synchronize, lambda s: s, state)
        return state, typed_mean(metrics)

    rounds = [(batch_of(N * B, i), key(i)) for i in range(2)]
    return step, outer_state(Inner.create(ADAM, parameters())), rounds


def fragment_of(tree, number):
    """A fragment is every other layer, or all that is not in a layer."""
    if number == 0:
        return {k: v for k, v in tree.items() if k != "layers"}
    return jax.tree.map(lambda x: x[np.arange(number - 1, L, 2)], tree["layers"])


def with_fragment(tree, number, fragment):
    if number == 0:
        return tree | fragment
    rows = np.arange(number - 1, L, 2)
    layers = jax.tree.map(lambda x, new: x.at[rows].set(new), tree["layers"], fragment)
    return tree | {"layers": layers}


def fragment_step(number, state):
    """The outer step of one fragment."""
    outer = fragment_of(state.params, number)
    inner = state.inner_state.params
    if number:
        rows = np.arange(number - 1, L, 2)
        inner = jax.tree.map(lambda x: x[:, rows], inner["layers"])
    else:
        inner = fragment_of(inner, 0)
    mean = drjax.reduce_mean(jax.tree.map(lambda x, y: x[None] - y, outer, inner))
    trace, empty = state.outer_opt_state
    part = (optax.TraceState(fragment_of(trace.trace, number)), empty)
    updates, (moved, _) = OUTER.update(mean, part, outer)
    params = with_fragment(state.params, number, optax.apply_updates(outer, updates))
    trace = optax.TraceState(with_fragment(trace.trace, number, moved.trace))
    return state.replace(params=params, outer_opt_state=(trace, empty))


def fragment_to_replicas(number, state):
    def mixed(inner, fragment):
        mine = fragment_of(inner.params, number)
        fragment = jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, mine, fragment)
        return inner.replace(params=with_fragment(inner.params, number, fragment))

    outer = drjax.broadcast(fragment_of(state.params, number))
    return state.replace(inner_state=drjax.map_fn(mixed, (state.inner_state, outer)))


@trainer(passes=7)
def streaming_diloco():
    def one_of(fn, number, state):
        return jax.lax.switch(number % 3, [functools.partial(fn, i) for i in range(3)], state)

    @program()
    def step(state, batch, rng):
        keys = jax.random.split(rng, N)
        replicas = (state.inner_state, among_replicas(batch), keys)
        inner, metrics = drjax.map_fn(train_step, replicas)
        now = inner.step[0]
        state = state.replace(inner_state=inner, step=now)
        send = functools.partial(one_of, fragment_step, now)
        state = jax.lax.cond(now > 0, send, lambda s: s, state)
        receive = functools.partial(one_of, fragment_to_replicas, now - 1)
        state = jax.lax.cond(now - 1 > 0, receive, lambda s: s, state)
        return state, typed_mean(metrics)

    rounds = [(batch_of(N * B, i), key(i)) for i in range(3)]
    return step, outer_state(Inner.create(ADAM, parameters())), rounds


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, E, rngs=rngs)
        self.dense = nnx.Linear(E, E, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(E, V, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.drop(jnp.tanh(self.dense(self.embed(tokens)))))


@trainer(passes=2)
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
    return step, state, [(batch_of(N * B, i),) for i in range(2)]


# --- rounds of local steps


@trainer(passes=1)
def skipped_if_not_finite():
    """Half precision with a scale of the loss, which falls where gradients are not finite."""

    @program()
    def step(state, batch):
        params, scale = state

        def gradient(params, batch):
            grads = jax.grad(lambda p: scale * loss(p, batch, jnp.bfloat16))(params)
            finite = jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), grads)
            return grads, jnp.all(jnp.stack(jax.tree.leaves(finite)))

        grads, finite = drjax.map_fn(gradient, (drjax.broadcast(params), among_replicas(batch)))
        fine = drjax.reduce_all(finite)
        mean = jax.tree.map(lambda g: g / scale, drjax.reduce_mean(grads))
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
        params = jax.tree.map(functools.partial(jnp.where, fine), moved, params)
        return (params, jnp.where(fine, scale * 2, scale / 2)), fine

    rounds = [(batch_of(N * B, i),) for i in range(2)]
    return step, (parameters(), jnp.float32(2.0**120)), rounds


# --- optimizers whose state is the replicas' own

OPTIMIZERS = {
    "injected schedule": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.exponential_decay(0.1, 2, 0.5)
    ),
    "every other step": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "partitioned": lambda: optax.partition(
        {"fast": optax.sgd(0.1), "slow": optax.adam(1e-3)},
        {"embed": "fast", "layers": {"w": "slow", "scale": "fast"}, "head": "fast"},
    ),
}


def with_optimizer(name):
    """A replica takes part with probability 1/2, and weighs as many rows as its number."""
    optimizer = OPTIMIZERS[name]()

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
    rounds = [(batch_of(N * B, i), key(i)) for i in range(2)]
    return step, (params, stacked(optimizer.init(params))), rounds


for name in OPTIMIZERS:
    TRAINERS[name] = Trainer(functools.partial(with_optimizer, name), passes=1)
