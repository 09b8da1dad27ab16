"""Training with compressed updates: ternary with error feedback, and unbiased int8, against floats.

Each client trains a small network on handwritten digits for a few steps, and the server takes the
mean of the updates. A shard of clients returns either sums of floats, or words that each hold the
sums of several compressed numbers. Ternary updates lose much in a round, so each client adds what
was lost to its next update (S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019). int8 updates are rounded at random without bias, which
needs no memory (D. Alistarh et al., "QSGD", NeurIPS 2017, section 3.1). All rounds are one `scan`:
the errors are a placed value, which stays with the workers.

    python examples/compressed_training.py --rounds=20 --runner=DirectRunner

Other flags go to beamjax (--shard_size=16) or to Beam.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import beamjax as bj

CLIENTS, EACH, WIDTH, CLASSES, STEPS, RATE = 48, 32, 32, 10, 4, 0.5
METHODS = ("floats", "int8", "ternary")

Model = dict[str, jax.Array]


def loss(model: Model, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a network with one hidden layer."""
    logits = jax.nn.log_softmax(jax.nn.relu(images @ model["in"]) @ model["out"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def trainer(method: str, rounds: int) -> Any:
    """A program from a model, images (CLIENTS, EACH, 64), labels and a key to the trained model."""

    @bj.program(placements={"clients": CLIENTS})
    def train(model: Model, images: jax.Array, labels: jax.Array, key: jax.Array) -> Model:
        def one_round(carry: Any, key: jax.Array) -> tuple[Any, None]:
            model, error, scale = carry

            def update(images: jax.Array, labels: jax.Array) -> Model:
                slopes = lambda local: jax.grad(loss)(local, images, labels)
                step = lambda _, local: jax.tree.map(
                    lambda w, s: w - RATE * s, local, slopes(local)
                )
                return jax.tree.map(jnp.subtract, jax.lax.fori_loop(0, STEPS, step, model), model)

            updates = bj.map_fn(update, (images, labels))
            if method == "floats":
                mean = bj.reduce_mean(updates)
            elif method == "int8":
                keys = jax.random.split(key, CLIENTS)
                mean, _, scale = bj.compress.reduce_mean(updates, keys, levels=15, scale=scale)
            else:
                # The largest of the last round is the scale of this: one pass a round, not two.
                mean, error, scale = bj.compress.reduce_mean(
                    updates, method="ternary", error=error, scale=scale
                )
            return (jax.tree.map(jnp.add, model, mean), error, scale), None

        nothing = jax.tree.map(lambda w: jnp.zeros((CLIENTS, *w.shape)), model)
        first = jax.tree.map(lambda w: jnp.float32(0.5), model)
        carry = (model, nothing, first)
        return jax.lax.scan(one_round, carry, jax.random.split(key, rounds))[0][0]

    return train


def digits_by_client(
    rng: np.random.Generator,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Digits by client, partly sorted by label so that clients differ; and held-out digits."""
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    order = rng.permutation(len(labels))
    train, held_out = order[: CLIENTS * EACH], order[CLIENTS * EACH :]
    half = len(train) // 2
    train[:half] = train[:half][np.argsort(labels[train[:half]], kind="stable")]
    train = np.concatenate([part.reshape(CLIENTS, -1) for part in (train[:half], train[half:])], 1)
    return (pixels[train], labels[train]), (pixels[held_out], labels[held_out])


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, int]]:
    """Returns for each method the accuracy on held-out digits, and the bytes that were reduced."""
    parser = argparse.ArgumentParser(description="Compressed training.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    digits, (images, labels) = digits_by_client(np.random.default_rng(0))
    keys = jax.random.split(jax.random.key(0))
    model = {
        "in": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "out": jax.random.normal(keys[1], (WIDTH, CLASSES)) / 6,
    }
    found = {}
    for method in METHODS:
        job = bj.launch(
            trainer(method, flags.rounds), model, *digits, jax.random.key(1),
            runner=flags.runner, options=others,
        )  # fmt: skip
        trained = job.result()
        scores = np.maximum(images @ trained["in"], 0) @ trained["out"]
        accuracy, done = float(np.mean(scores.argmax(axis=1) == labels)), job.progress().done
        found[method] = accuracy, done.bytes_reduced
        print(
            f"{method:8} accuracy {accuracy:.1%}, {done.bytes_reduced:,} bytes reduced, "
            f"{done.bytes_saved:,} saved"
        )
    return found


if __name__ == "__main__":
    main()
