"""Convolutional networks on clients of unequal size, and the time of a round.

The network is LeNet, or similar to VGG with `--network=vgg`. scikit-learn's handwritten digits of
8 x 8 pixels are distributed over clients, of which some have many and some have few. Each client is
padded to one of a few lengths, with a mask, and clients of similar size share a shard.

    python examples/cnn_clients.py --rounds=5 --workers=2 --runner=DirectRunner

Other flags go to beamjax (--shard_size=8) or to Beam.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.example_libraries import stax
from sklearn.datasets import load_digits

import beamjax as bj

HELD_OUT, EPOCHS, BATCH, RATE = 297, 2, 8, 0.15

Digits = dict[str, jax.Array]  # images (digits, 8, 8, 1), labels (digits,), mask (digits,)


def network(convolutions: Sequence[int | None]) -> Any:
    """3 x 3 convolutions with these channels (None halves the image), then two dense layers."""
    layers: list[Any] = []
    for channels in convolutions:
        if channels is None:
            layers.append(stax.MaxPool((2, 2), strides=(2, 2)))
        else:
            layers += [stax.Conv(channels, (3, 3), padding="SAME"), stax.Relu]
    return stax.serial(*layers, stax.Flatten, stax.Dense(84), stax.Relu, stax.Dense(10))


NETWORKS = {
    "lenet": network([6, None, 16, None]),
    "vgg": network([16, 16, None, 32, 32, None, 64, 64, None]),
}


def make_round(predict: Any, clients: int) -> Any:
    """The program of a round for a network."""

    def loss(model: Any, digits: Digits) -> jax.Array:
        """The cross entropy, averaged over the digits that are not padding."""
        scores = predict(model, digits["images"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, digits["labels"])
        count = jnp.sum(digits["mask"], dtype=jnp.float32)
        return jnp.sum(losses, where=digits["mask"]) / jnp.maximum(count, 1)

    @bj.program(placements={"clients": clients})
    def cnn_round(model: Any, data: Digits) -> tuple[Any, jax.Array]:
        """The model after a round, and the loss before it, weighted by the clients' digits."""

        def client(digits: Digits) -> tuple[tuple[Any, jax.Array], jax.Array]:
            def step(model: Any, batch: Digits) -> tuple[Any, None]:
                slope = jax.grad(loss)(model, batch)
                return jax.tree.map(lambda w, s: w - RATE * s, model, slope), None

            batches = jax.tree.map(lambda x: x.reshape(-1, BATCH, *x.shape[1:]), digits)
            trained = jax.lax.fori_loop(
                0, EPOCHS, lambda _, m: jax.lax.scan(step, m, batches)[0], model
            )
            return (trained, loss(model, digits)), jnp.sum(digits["mask"], dtype=jnp.float32)

        results, counts = bj.map_fn(client, data)
        return bj.reduce_weighted_mean(results, counts)

    return cnn_round


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Returns the accuracy on held-out digits after each round."""
    parser = argparse.ArgumentParser(description="Networks on clients.", allow_abbrev=False)
    parser.add_argument("--network", choices=NETWORKS, default="lenet")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes of DirectRunner")
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, options = parser.parse_known_args(argv)
    if flags.workers > 1:
        options += ["--direct_running_mode=multi_processing"]
        options += [f"--direct_num_workers={flags.workers}"]
    rng = np.random.default_rng(0)
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels[order].astype(np.int32)
    shares = rng.dirichlet(np.ones(flags.clients))
    counts = np.sort(1 + rng.multinomial(len(labels) - HELD_OUT - flags.clients, shares))
    clients = bj.from_ragged({"images": images[HELD_OUT:], "labels": labels[HELD_OUT:]}, counts)

    start, predict = NETWORKS[flags.network]
    _, model = start(jax.random.key(0), (1, 8, 8, 1))
    program, accuracies = make_round(predict, flags.clients), []
    size = sum(x.size for x in jax.tree.leaves(model))
    described = f"{flags.clients} clients of {counts[0]} to {counts[-1]} digits"
    print(f"{flags.network}, {size:,} weights; {described}")
    for number in range(1, flags.rounds + 1):
        began = time.perf_counter()
        model, value = bj.run(program, model, clients, runner=flags.runner, options=options)
        seconds = time.perf_counter() - began
        guesses = jnp.argmax(predict(model, images[:HELD_OUT]), axis=1)
        accuracies.append(float(np.mean(guesses == labels[:HELD_OUT])))
        print(f"round {number}: loss {value:.3f}, accuracy {accuracies[-1]:.1%}, {seconds:.2f} s")
    return accuracies


if __name__ == "__main__":
    main()
