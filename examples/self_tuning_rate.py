"""Learning rates that tune themselves: gradients through rounds of federated averaging.

The program trains a classifier of digits for some rounds, in a `scan`, and returns its loss on
digits that the clients held out. `jax.value_and_grad` of the whole program gives the gradient of
that loss by the learning rates (D. Maclaurin et al., "Gradient-based hyperparameter optimization
through reversible learning", ICML 2015; here JAX stores the rounds). `bj.run` takes it as it takes
any function, so the passes of the backward sweep run on the workers too.

    python examples/self_tuning_rate.py --steps=8 --runner=DirectRunner

Other flags go to beamjax (--shard_size=32) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import beamjax as bj

CLIENTS, EACH, CLASSES, ROUNDS, LOCAL_STEPS = 40, 44, 10, 4, 3

Rates = dict[str, jax.Array]  # logarithms: "client" and "server"
Digits = tuple[jax.Array, jax.Array]  # images (digits, 64), labels (digits,)


@bj.program(placements={"clients": CLIENTS})
def held_out_loss(rates: Rates, training: Digits, held_out: Digits) -> jax.Array:
    """The mean loss on the clients' held-out digits after some rounds."""
    client_rate, server_rate = jnp.exp(rates["client"]), jnp.exp(rates["server"])

    def round_(weights: jax.Array, _: None) -> tuple[jax.Array, None]:
        def change(images: jax.Array, labels: jax.Array) -> jax.Array:
            def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
                return w - client_rate * jax.grad(loss)(w, images, labels), None

            return jax.lax.scan(step, weights, length=LOCAL_STEPS)[0] - weights

        return weights + server_rate * bj.reduce_mean(bj.map_fn(change, training)), None

    weights, _ = jax.lax.scan(round_, jnp.zeros((64, CLASSES)), length=ROUNDS)
    return bj.reduce_mean(bj.map_fn(lambda x, y: loss(weights, x, y), held_out))


def loss(weights: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a linear classifier."""
    return -jnp.mean(jnp.take_along_axis(
        jax.nn.log_softmax(images @ weights), labels[:, None], axis=1
    ))  # fmt: skip


def digits_by_client() -> tuple[Digits, Digits]:
    """Training and held-out digits of the clients, most of which have few classes."""
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = np.argsort(labels + rng.normal(scale=2.5, size=len(labels)))[: CLIENTS * EACH]
    order = rng.permuted(order.reshape(CLIENTS, EACH), axis=1)
    images, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return (images[:, :32], labels[:, :32]), (images[:, 32:], labels[:, 32:])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Returns the held-out loss after each step of the rates."""
    parser = argparse.ArgumentParser(description="Tuning of rates.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    training, held_out = digits_by_client()
    slope = jax.value_and_grad(held_out_loss)
    rates = {"client": jnp.log(0.05), "server": jnp.log(0.5)}
    losses = []
    for step in range(flags.steps):
        value, slopes = bj.run(
            slope, rates, training, held_out, runner=flags.runner, options=others
        )
        losses.append(float(value))
        shown = ", ".join(f"{name} {float(jnp.exp(rate)):.3f}" for name, rate in rates.items())
        print(f"step {step}: rates {shown}; loss on held-out digits {losses[-1]:.4f}")
        rates = jax.tree.map(lambda r, s: r - jnp.clip(2 * s, -0.5, 0.5), rates, slopes)
    return losses


if __name__ == "__main__":
    main()
