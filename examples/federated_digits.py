"""Federated averaging on handwritten digits; each round is one JAX program on a Beam runner.

The 1797 digits of scikit-learn, except 360 that are held out, are distributed over 100 clients.
Some clients have many digits and some have few, mostly of two or three classes. In each round the
clients train the server's model on their own digits, and the server adds the mean change, weighted
by their numbers of digits.

    python examples/federated_digits.py --rounds=10 --runner=DirectRunner

Other flags go to beamjax (--shard_size=32) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from sklearn.datasets import load_digits

import beamjax as bj

CLIENTS, CLASSES, HELD_OUT = 100, 10, 360
BATCH, EPOCHS, CLIENT_RATE, SERVER_MOMENTUM = 8, 4, 0.3, 0.5

Model = dict[str, jax.Array]
State = dict[str, Model]  # "model" and "momentum"
Digits = dict[str, jax.Array]  # images (digits, 64), labels (digits,), mask (digits,)


@bj.program(placements={"clients": CLIENTS})
def federated_round(state: State, clients: Digits) -> tuple[State, jax.Array]:
    """Returns the state after one round, and the mean loss before it."""
    model = state["model"]  # closed over by `client`, so it becomes a broadcast

    def client(digits: Digits) -> tuple[tuple[Model, jax.Array], jax.Array]:
        change = jax.tree.map(jnp.subtract, train(model, digits), model)
        return (change, loss(model, digits)), jnp.sum(digits["mask"], dtype=jnp.float32)

    results, counts = bj.map_fn(client, clients)
    change, mean_loss = bj.reduce_weighted_mean(results, counts)
    momentum = jax.tree.map(lambda m, c: SERVER_MOMENTUM * m + c, state["momentum"], change)
    return {"model": jax.tree.map(jnp.add, model, momentum), "momentum": momentum}, mean_loss


def train(model: Model, digits: Digits) -> Model:
    """SGD over the minibatches of a client; a minibatch that is all padding has no effect."""

    def step(model: Model, batch: Digits) -> tuple[Model, None]:
        slope = jax.grad(loss)(model, batch)
        return jax.tree.map(lambda w, s: w - CLIENT_RATE * s, model, slope), None

    batches = jax.tree.map(lambda x: x.reshape(-1, BATCH, *x.shape[1:]), digits)
    return jax.lax.fori_loop(0, EPOCHS, lambda _, m: jax.lax.scan(step, m, batches)[0], model)


def loss(model: Model, digits: Digits) -> jax.Array:
    """The cross entropy, averaged over the digits that are not padding."""
    right = jax.nn.one_hot(digits["labels"], CLASSES)
    losses = -jnp.sum(right * jax.nn.log_softmax(predict(model, digits["images"])), axis=1)
    count = jnp.sum(digits["mask"], dtype=jnp.float32)
    return jnp.sum(losses, where=digits["mask"]) / jnp.maximum(count, 1)


def predict(model: Model, images: jax.Array) -> jax.Array:
    """The scores of the classes, (digits, CLASSES)."""
    hidden = jax.nn.relu(images @ model["w1"] + model["b1"][None])
    return hidden @ model["w2"] + model["b2"][None]


def first_state(seed: int) -> State:
    key1, key2 = jax.random.split(jax.random.key(seed))
    w1, w2 = jax.random.normal(key1, (64, 32)) / 8, jax.random.normal(key2, (32, CLASSES)) / 6
    model = {"w1": w1, "b1": jnp.zeros(32), "w2": w2, "b2": jnp.zeros(CLASSES)}
    return {"model": model, "momentum": jax.tree.map(jnp.zeros_like, model)}


def digits_by_client(
    images: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> tuple[bj.Source, np.ndarray]:
    """The digits of all clients, from the fewest to the most, and their numbers."""
    taste = rng.dirichlet(np.full(CLASSES, 0.3), CLIENTS) * rng.lognormal(size=(CLIENTS, 1))
    odds = taste / taste.sum(axis=0)  # (client, class)
    owner = np.array([rng.choice(CLIENTS, p=odds[:, label]) for label in labels])
    owner[:CLIENTS] = np.arange(CLIENTS)  # no client is without digits
    counts = np.bincount(owner)
    order = np.lexsort((owner, counts[owner]))  # by count, then by client
    rows = {"images": images[order], "labels": labels[order]}
    counts = np.sort(counts)
    return bj.from_ragged(rows, counts), counts  # padded to multiples of 8: whole minibatches


def main(argv: Sequence[str] | None = None) -> float:
    """Prints the accuracy on held-out digits after each round, and returns the last one."""
    parser = argparse.ArgumentParser(description="Federated averaging.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    beam = {"runner": flags.runner, "options": others}

    rng = np.random.default_rng(0)
    pixels, digits = load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    images, labels = (pixels[order] / 16).astype(np.float32), digits[order].astype(np.int32)
    clients, counts = digits_by_client(images[HELD_OUT:], labels[HELD_OUT:], rng)
    print(f"{CLIENTS} clients with {counts[0]} to {counts[-1]} digits each")
    state, accuracy = first_state(seed=0), 0.0
    for number in track(range(1, flags.rounds + 1), description="Rounds"):
        state, mean_loss = bj.run(federated_round, state, clients, **beam)
        guesses = jnp.argmax(predict(state["model"], jnp.asarray(images[:HELD_OUT])), axis=1)
        accuracy = float(np.mean(guesses == labels[:HELD_OUT]))
        print(f"round {number:2}  loss {mean_loss:.3f}  accuracy on held-out digits {accuracy:.1%}")

    print("\nOne more round:", bj.verify(federated_round, state, clients, **beam))
    return accuracy


if __name__ == "__main__":
    main()
