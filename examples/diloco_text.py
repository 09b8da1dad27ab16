"""DiLoCo: workers train a small language model and communicate only every few dozen steps.

Each worker has its own part of the text (Python's own help texts) and its own AdamW, whose state is
a placed value that the next round takes as an argument. In a round, each worker takes its inner
steps on its own. Then the server takes a step along the mean change, with Nesterov momentum
(A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1). The model is a small causal transformer on bytes.

    python examples/diloco_text.py --rounds=6 --runner=DirectRunner

Other flags go to beamjax (--checkpoint=/tmp/diloco) or to Beam.
"""

import argparse
import time
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import beamjax as bj

WORKERS, INNER_STEPS, BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 4, 20, 8, 64, 64, 4, 2, 128

Model = dict[str, Any]
inner = optax.adamw(3e-3, weight_decay=0.01)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)


@bj.program(placements={"workers": WORKERS})
def round_(
    model: Model, outer_state: Any, inner_states: Any, texts: jax.Array
) -> tuple[Model, Any, Any, jax.Array]:
    """One round; texts (WORKERS, INNER_STEPS, BATCH, LENGTH + 1) are bytes."""

    def worker(state: Any, batches: jax.Array) -> tuple[Model, Any, jax.Array]:
        def step(carry: tuple[Model, Any], batch: jax.Array) -> tuple[tuple[Model, Any], jax.Array]:
            local, state = carry
            value, slopes = jax.value_and_grad(loss)(local, batch)
            updates, state = inner.update(slopes, state, local)
            return (optax.apply_updates(local, updates), state), value

        (local, state), losses = jax.lax.scan(step, (model, state), batches)
        return jax.tree.map(jnp.subtract, model, local), state, jnp.mean(losses)

    changes, inner_states, losses = bj.map_fn(worker, (inner_states, texts))
    mean_change, mean_loss = bj.reduce_mean((changes, losses))
    updates, outer_state = outer.update(mean_change, outer_state)
    return optax.apply_updates(model, updates), outer_state, inner_states, mean_loss


def loss(model: Model, text: jax.Array) -> jax.Array:
    """The mean cross entropy of each byte given the bytes before it, in nats."""
    given, wanted = text[:, :-1].astype(int), text[:, 1:].astype(int)
    x = model["bytes"][given] + model["places"][None]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in model["layers"]:
        q, k, v = jnp.split(norm(x) @ layer["in"], 3, axis=-1)
        q, k, v = (jnp.reshape(y, (*y.shape[:2], HEADS, WIDTH // HEADS)) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(norm(x) @ model["bytes"].T)
    return -jnp.mean(jnp.take_along_axis(logits, wanted[..., None], axis=-1))


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def first_model(key: jax.Array) -> Model:
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    shapes = {"in": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    places = draw(LENGTH, WIDTH) * 0.1
    return {"bytes": draw(VOCABULARY, WIDTH), "places": places, "layers": layers}


def batches(rng: np.random.Generator) -> np.ndarray:
    """The texts that each worker reads in a round, from its own part of the text."""
    text = "".join(topics.values()).encode("ascii", "replace")
    parts = np.array_split(np.frombuffer(text, np.uint8), WORKERS)
    windows = [np.lib.stride_tricks.sliding_window_view(part, LENGTH + 1) for part in parts]
    return np.stack([w[rng.integers(len(w), size=(INNER_STEPS, BATCH))] for w in windows])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Returns the mean loss of each round, in bits per byte."""
    parser = argparse.ArgumentParser(description="DiLoCo.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    model, rng, losses = first_model(jax.random.key(0)), np.random.default_rng(0), []
    outer_state = outer.init(model)
    states = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), inner.init(model))
    for number in range(flags.rounds):
        began = time.perf_counter()
        model, outer_state, states, value = bj.run(
            round_, model, outer_state, states, batches(rng), runner=flags.runner, options=others
        )
        losses.append(float(value) / float(np.log(2)))
        seconds = time.perf_counter() - began
        print(f"round {number}: {losses[-1]:.3f} bits per byte, {seconds:.1f} s")
    return losses


if __name__ == "__main__":
    main()
