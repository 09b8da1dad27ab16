"""Training with compressed updates: in 8 bits with error feedback, and ternary, against floats.

Each client sends its update as small integers and a scale; the server takes the mean.

* 8 bits: a number is rounded to the nearest of 255 levels, and the client adds what is lost to its
  next update (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).
* Ternary: a number becomes -1, 0 or 1 times the scale at random, with the number as expectation,
  after clipping at 2.5 standard deviations (Wen et al., "TernGrad", NeurIPS 2017).

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
BITS = {"floats": 32, "8 bits": 8, "ternary": 2}  # of a number, by codec
decoded = lambda codes, scale: codes.astype(scale.dtype) * scale

Model = dict[str, jax.Array]


def eight_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns int8 codes of the shape of `x`, and the number that a code of 1 stands for."""
    scale = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(x.dtype).tiny) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def ternary(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes of -1, 0 and 1 as int8, whose expectation is `x / scale`, and the scale."""
    x = jnp.clip(x, -2.5 * jnp.std(x), 2.5 * jnp.std(x))
    scale = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(x.dtype).tiny)
    is_one = jax.random.uniform(key, x.shape, x.dtype) < jnp.abs(x) / scale
    return jnp.where(is_one, jnp.sign(x), 0).astype(jnp.int8), scale


def sent(method: str, update: Model, error: Model, key: jax.Array) -> tuple[Model, Model]:
    """Returns what the server decodes from a client's update, and what the client still owes."""
    if method == "8 bits":
        whole = jax.tree.map(jnp.add, update, error)
        received = jax.tree.map(lambda x: decoded(*eight_bits(x)), whole)
        return received, jax.tree.map(jnp.subtract, whole, received)
    if method == "ternary":
        keys = dict(zip(update, jax.random.split(key, len(update)), strict=True))
        return jax.tree.map(lambda x, key: decoded(*ternary(x, key)), update, keys), error
    return update, error


def loss(model: Model, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a network with one hidden layer."""
    logits = jax.nn.log_softmax(jax.nn.relu(images @ model["in"]) @ model["out"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def trainer(method: str, rounds: int) -> Any:
    """A program from a model, images (CLIENTS, EACH, 64), labels and a key to the trained model."""

    @bj.program(placements={"clients": CLIENTS})
    def train(model: Model, images: jax.Array, labels: jax.Array, key: jax.Array) -> Model:
        def one_round(carry: Any, key: jax.Array) -> tuple[Any, None]:
            model, error = carry

            def client(images: jax.Array, labels: jax.Array, error: Model, key: jax.Array) -> Any:
                slope = jax.grad(lambda model: loss(model, images, labels))
                step = lambda _, w: jax.tree.map(lambda w, g: w - RATE * g, w, slope(w))
                update = jax.tree.map(jnp.subtract, jax.lax.fori_loop(0, STEPS, step, model), model)
                return sent(method, update, error, key)

            keys = jax.random.split(key, CLIENTS)
            received, error = bj.map_fn(client, (images, labels, error, keys))
            return (jax.tree.map(jnp.add, model, bj.reduce_mean(received)), error), None

        nothing = jax.tree.map(lambda w: jnp.zeros((CLIENTS, *w.shape)), model)
        return jax.lax.scan(one_round, (model, nothing), jax.random.split(key, rounds))[0][0]

    return train


def digits_by_client(rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns images and labels by client, and those that are held out."""
    pixels, labels = load_digits(return_X_y=True)
    order, n = rng.permutation(len(labels)), CLIENTS * EACH
    arrays = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return [x[:n].reshape(CLIENTS, EACH, *x.shape[1:]) for x in arrays], [x[n:] for x in arrays]


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, int]]:
    """Returns for each codec the accuracy on held-out digits, and the bytes of an update."""
    parser = argparse.ArgumentParser(description="Compressed training.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    digits, (images, labels) = digits_by_client(np.random.default_rng(0))
    keys = jax.random.split(jax.random.key(0))
    normal = jax.random.normal
    model = {"in": normal(keys[0], (64, WIDTH)) / 8, "out": normal(keys[1], (WIDTH, CLASSES)) / 6}
    found = {}
    for method, bits in BITS.items():
        arguments = trainer(method, flags.rounds), model, *digits, jax.random.key(1)
        trained = bj.run(*arguments, runner=flags.runner, options=others)
        scores = np.maximum(images @ trained["in"], 0) @ trained["out"]
        accuracy = float(np.mean(scores.argmax(axis=1) == labels))
        nbytes = sum(-(-bits * w.size // 8) + 4 * (bits < 32) for w in model.values())
        found[method] = accuracy, nbytes
        print(f"{method:8} accuracy {accuracy:.1%}, {nbytes:,} bytes an update")
    return found


if __name__ == "__main__":
    main()
