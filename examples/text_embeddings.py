"""Nearest neighbours of texts: a flax model in a Beam pipeline, by `RunInference`.

The texts are the help topics of Python. This process trains a small network in flax to tell which
topic a passage is from; its last hidden layer is an embedding. The network then runs in Beam's
`RunInference` on new passages, as keyed elements. The pipeline counts how often the nearest
embedding among the training passages is from the same topic.

    python examples/text_embeddings.py --epochs=30 --runner=FnApiRunner

Other flags go to Beam.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import optax
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference
from flax import linen as nn

from beamjax.pipelines import JaxModelHandler

LETTERS, BUCKETS, WIDTH, TOPICS = 256, 4096, 32, 30


class Embedder(nn.Module):
    """The mean of the embeddings of groups of three letters, then a dense layer."""

    @nn.compact
    def __call__(self, letters: jax.Array) -> jax.Array:
        codes = letters.astype(jnp.int32)
        groups = (codes[:, :-2] * 961 + codes[:, 1:-1] * 31 + codes[:, 2:]) % BUCKETS
        mean = nn.Embed(BUCKETS, WIDTH)(groups).mean(axis=1)
        vector = nn.Dense(WIDTH)(nn.relu(mean))
        return vector / (jnp.linalg.norm(vector, axis=1, keepdims=True) + 1e-6)


def passages() -> tuple[np.ndarray, np.ndarray]:
    """Passages as letters, uint8 (n, LETTERS), and the number of the topic of each."""
    longest = sorted(topics.values(), key=len)[-TOPICS:]
    cut, labels = [], []
    for label, text in enumerate(longest):
        letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        count = min(len(letters) // LETTERS, 40)
        cut.append(letters[: count * LETTERS].reshape(count, LETTERS))
        labels += [label] * count
    return np.concatenate(cut), np.array(labels)


def train(texts: np.ndarray, labels: np.ndarray, epochs: int) -> Any:
    """The parameters of an embedder whose embeddings separate the topics."""
    net, optimizer = Embedder(), optax.rmsprop(3e-3)
    params = net.init(jax.random.key(0), texts[:1])
    state = (params, 0.1 * jax.random.normal(jax.random.key(1), (WIDTH, TOPICS)))

    def loss(state: Any) -> jax.Array:
        params, centres = state
        vectors: Any = net.apply(params, texts)
        scores = 10.0 * vectors @ centres
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    @jax.jit
    def step(state: Any, memory: Any) -> tuple[Any, Any]:
        updates, memory = optimizer.update(jax.grad(loss)(state), memory)
        return optax.apply_updates(state, updates), memory

    memory = optimizer.init(state)
    for _ in range(epochs):
        state, memory = step(state, memory)
    return state[0]


def main(argv: Sequence[str] | None = None) -> float:
    """Returns the share of the passages whose nearest neighbour is from the same topic."""
    parser = argparse.ArgumentParser(description="Embeddings.", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--runner", default="FnApiRunner", help="a Beam runner")
    flags, others = parser.parse_known_args(argv)
    texts, labels = passages()
    is_new = np.arange(len(texts)) % 5 == 0
    params = train(texts[~is_new], labels[~is_new], flags.epochs)
    known = np.asarray(Embedder().apply(params, texts[~is_new])), labels[~is_new]

    handler = JaxModelHandler(Embedder().apply, params, example=texts[0])
    runner = f"apache_beam.runners.portability.fn_api_runner.{flags.runner}"
    runner = runner if flags.runner == "FnApiRunner" else flags.runner
    new = list(zip(labels[is_new].tolist(), texts[is_new], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        with beam.Pipeline(runner, argv=others) as pipeline:
            (
                pipeline
                | beam.Create(new)
                | RunInference(KeyedModelHandler(handler))
                | beam.MapTuple(functools.partial(is_near, known))
                | beam.combiners.Mean.Globally()
                | beam.io.WriteToText(f"{folder}/share", shard_name_template="")
            )
        share = float(Path(folder, "share").read_text())
    print(f"{len(new)} new passages of {TOPICS} topics: {share:.1%} lie next to one of their topic")
    return share


def is_near(known: tuple[np.ndarray, np.ndarray], label: int, result: PredictionResult) -> bool:
    vectors, labels = known
    return bool(labels[np.argmax(vectors @ result.inference)] == label)


if __name__ == "__main__":
    main()
