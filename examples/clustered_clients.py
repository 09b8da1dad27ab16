"""Clustered federated learning: clients that need different models are divided into groups.

Half of the clients have mirrored digits, so no single model suits all clients. If the mean update
of a group is small while the updates of its clients are large, the group is divided in two by the
directions of the clients' gradients (F. Sattler et al., arXiv:1910.01991, sections 3 and 4). Then
each client joins the group whose model suits it best (A. Ghosh et al., arXiv:2006.04088). The first
gradient of a new client decides its group. One pass averages the models of all groups.

    python examples/clustered_clients.py --rounds=12 --runner=DirectRunner
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import beamjax as bj

CLIENTS, EACH, CLASSES, GROUPS, STEPS, RATE = 40, 40, 10, 2, 8, 0.5
Digits = tuple[jax.Array, jax.Array]  # images (digits, 64), labels (digits,)


def loss(weights: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a linear classifier."""
    logits = jax.nn.log_softmax(images @ weights)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


@bj.program(placements={"clients": None})
def train(models: jax.Array, group: jax.Array, digits: Digits) -> tuple[jax.Array, ...]:
    """The models after a round, each group's mean loss, and how far its updates agree (<= 1)."""

    def client(g: jax.Array, *data: jax.Array) -> tuple[jax.Array, ...]:
        step = lambda _, w: w - RATE * jax.grad(loss)(w, *data)
        update = jax.lax.fori_loop(0, STEPS, step, models[g]) - models[g]
        return update, jnp.linalg.norm(update), loss(models[g], *data)

    results = bj.map_fn(client, (group, *digits))
    update, norm, value = bj.reduce_by_key(results, group, GROUPS, op="mean")
    agreement = jnp.linalg.norm(update, axis=(1, 2)) / norm
    return models + jnp.nan_to_num(update), value, agreement  # NaN for a group without clients


def direction(model: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The direction of a client's first gradient."""
    slope = jax.grad(loss)(model, images, labels)
    return (slope / jnp.linalg.norm(slope)).ravel()


@bj.program(placements={"clients": None})
def cut(model: jax.Array, digits: Digits) -> tuple[jax.Array, jax.Array]:
    """The mean of the clients' directions, and the axis along which they differ most."""
    directions = bj.map_fn(lambda *d: direction(model, *d), digits)
    mean = bj.reduce_mean(directions)

    def more(_: int, v: jax.Array) -> jax.Array:  # the power method
        pulled = bj.reduce_sum(bj.map_fn(lambda d: (d - mean) * jnp.dot(d - mean, v), directions))
        return pulled / jnp.linalg.norm(pulled)

    return mean, jax.lax.fori_loop(0, 8, more, jnp.cos(jnp.arange(mean.size)))


@bj.program(placements={"clients": None})
def sides(model: jax.Array, mean: jax.Array, axis: jax.Array, digits: Digits) -> jax.Array:
    """The group of each client by its first gradient; this needs no training."""
    along = lambda *d: jnp.dot(direction(model, *d) - mean, axis)
    return bj.map_fn(lambda *d: (along(*d) > 0).astype(int), digits)


@bj.program(placements={"clients": None})
def best_group(models: jax.Array, digits: Digits) -> jax.Array:
    """The group whose model has the least loss for each client."""
    return bj.map_fn(lambda x, y: jnp.argmin(jax.vmap(lambda m: loss(m, x, y))(models)), digits)


def digits_by_client(rng: np.random.Generator) -> tuple[Digits, np.ndarray]:
    """The digits of each client, and which clients have mirrored digits."""
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))[: CLIENTS * EACH].reshape(CLIENTS, EACH)
    turned = rng.permutation(np.arange(CLIENTS) % 2)
    images = (pixels[order] / 16).astype(np.float32)
    images[turned == 1] = images[turned == 1, :, ::-1]
    return (images, labels[order].astype(np.int32)), turned


def main(argv: Sequence[str] | None = None) -> float:
    """Returns the share of clients in the group of clients with the same kind of digits."""
    parser = argparse.ArgumentParser(description="Clustered clients.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=12, help="at least 4")
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    digits, turned = digits_by_client(np.random.default_rng(0))
    known, newcomers = (tuple(x[part] for x in digits) for part in (slice(32), slice(32, None)))

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return bj.run(fn, *args, runner=flags.runner, options=others)

    models, group, base = jnp.zeros((GROUPS, 64, CLASSES)), np.zeros(32, int), None
    for number in range(flags.rounds):
        models, losses, agreement = run(train, models, group, known)
        print(f"round {number:2}: groups of {np.bincount(group)}, losses {np.round(losses, 3)}")
        if base is not None:
            group = np.asarray(run(best_group, models, known))
        elif number >= 2 and agreement[0] < 0.8:
            base, models = models[0], jnp.broadcast_to(models[0], models.shape)
            directions = run(cut, base, known)
            group = np.asarray(run(sides, base, *directions, known))
            print(f"the updates disagree ({float(agreement[0]):.2f}): cut in two")
    placed = np.asarray(run(sides, base, *directions, newcomers))
    share = float(np.mean(np.concatenate([group, placed]) == turned))
    print(f"new clients in groups {placed}; {max(share, 1 - share):.0%} are with their kind")
    return max(share, 1 - share)


if __name__ == "__main__":
    main()
