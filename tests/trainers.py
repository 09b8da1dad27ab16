"""Trainers that keep state from round to round, some of it placed, as users write them.

A trainer is a function of one round, `step(state, *batch) -> (state, metrics)`, with a first state
and the batches of some rounds. What a round returns is what the next one takes, so that the placed
results of one are the placed inputs of the other.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import beamjax as drjax

N, ROUNDS, D, B = 6, 3, 4, 10  # workers, rounds, features, rows of a worker


@dataclasses.dataclass(frozen=True)
class Trainer:
    """`passes` over the workers in a round, and how many `gathered` bytes, by `build()`."""

    build: Callable[[], tuple[Callable, Any, list[tuple]]]
    passes: int
    gathered: int = 0


TRAINERS: dict[str, Trainer] = {}


def trainer(passes, **kwargs):
    def add(build):
        TRAINERS[build.__name__] = Trainer(build, passes, **kwargs)
        return build

    return add


def workers(fn):
    return drjax.program(placements={"workers": N})(fn)


# --- a model and its data

KEY = jax.random.key(0)


def rnd(seed, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, seed), shape)


def parameters(seed=0):
    return {
        "hidden": {"w": 0.5 * rnd(seed, D, 3), "b": jnp.zeros(3)},
        "out": 0.5 * rnd(seed + 1, 3),
    }


def apply(params, x):
    return jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["out"]


def loss(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def placed_batches():
    return [(rnd(10 + r, N, B, D), rnd(20 + r, N, B)) for r in range(ROUNDS)]


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (N, *jnp.shape(leaf))), tree)


# --- optimizer states of workers

OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "injected_schedule": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.exponential_decay(0.1, 2, 0.5)
    ),
    "every_other_step": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "partitioned": lambda: optax.partition(
        {"fast": optax.sgd(0.1), "slow": optax.adam(1e-3)},
        {"hidden": {"w": "slow", "b": "fast"}, "out": "fast"},
    ),
}


def _with_optimizer(name):
    optimizer = OPTIMIZERS[name]()

    def local(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @workers
    def step(state, x, y):
        params, states = state
        trained, states, values = drjax.map_fn(local, (drjax.broadcast(params), states, x, y))
        return (drjax.reduce_mean(trained), states), drjax.reduce_mean(values)

    params = parameters()
    return step, (params, stacked(optimizer.init(params))), placed_batches()


for _name in OPTIMIZERS:
    TRAINERS[f"worker_{_name}"] = Trainer(functools.partial(_with_optimizer, _name), passes=1)


# --- keys


@trainer(passes=1)
def keys_kept_by_workers():
    @workers
    def step(state, x, y):
        def local(state, x, y):
            params, key = state
            key, use = jax.random.split(key)
            keep = jax.random.bernoulli(use, 0.5, (D,))
            grads = jax.grad(loss)(params, jnp.where(keep, x, 0.0), y)
            return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), keep

        state, kept = drjax.map_fn(local, (state, x, y))
        return state, drjax.reduce_sum(kept)

    keys = jax.random.split(jax.random.key(1), N)
    return step, (stacked(parameters()), keys), placed_batches()


# --- who takes part


@trainer(passes=1)
def sampled_workers():
    """A worker takes part with probability 1/2, weighs as many rows as it has, or none at all."""

    @workers
    def step(state, x, y):
        params, key = state
        key, use = jax.random.split(key)
        picked = jax.random.uniform(use, (N,)) < 0.5
        rows = jnp.arange(N, dtype=jnp.float32)  # the first has none
        weights = jnp.where(picked, rows, 0.0)
        grads = drjax.map_fn(jax.grad(loss), (drjax.broadcast(params), x, y))
        mean = drjax.reduce_weighted_mean(grads, weights)
        total = drjax.reduce_sum(weights)
        move = lambda p, g: jnp.where(total > 0, p - 0.1 * g, p)
        return (jax.tree.map(move, params, mean), key), drjax.reduce_sum(picked)

    return step, (parameters(), jax.random.key(1)), placed_batches()


# --- counts and flags


@trainer(passes=1)
def counts_and_flags():
    @workers
    def step(metrics, x, y):
        def local(m, x, y):
            value = jnp.mean((jnp.sum(x, axis=1) - y) ** 2)
            return {
                "rows": m["rows"] + jnp.sum(y > 0, dtype=jnp.uint8),
                "diverged": m["diverged"] | ~jnp.isfinite(value),
                "best": jnp.minimum(m["best"], value.astype(jnp.bfloat16)),
                "histogram": m["histogram"].at[jnp.clip(value.astype(jnp.int32), 0, 7)].add(1),
            }

        metrics = drjax.map_fn(local, (metrics, x, y))
        rows, mean = drjax.reduce_sum(metrics["rows"]), drjax.reduce_mean(metrics["rows"])
        diverged, best = drjax.reduce_any(metrics["diverged"]), drjax.reduce_min(metrics["best"])
        return metrics, (rows, mean, diverged, best, drjax.reduce_sum(metrics["histogram"]))

    metrics = {
        "rows": jnp.zeros(N, jnp.uint8),
        "diverged": jnp.zeros(N, jnp.bool_),
        "best": jnp.full(N, jnp.inf, jnp.bfloat16),
        "histogram": jnp.zeros((N, 8), jnp.int32),
    }
    return step, metrics, placed_batches()
