"""F: a round of federated averaging of LeNet, on clients with unequal numbers of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import ClientProblem, Sums, Tree, opened

RATE, BATCH, CLASSES = 0.05, 8, 10
FILTERS = {"c1": (5, 5, 1, 6), "c2": (5, 5, 6, 16)}


def predict(model: Tree, images: jax.Array) -> jax.Array:
    """LeNet: scores (batch, CLASSES) of images (batch, side, side, 1)."""
    x = images
    for name, padding in (("c1", "SAME"), ("c2", "VALID")):
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, model[name], (1, 1), padding, dimension_numbers=dimensions
        )
        x = jnp.tanh(x)
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))
    x = x.reshape(len(x), -1)
    for name in ("d1", "d2"):
        x = jnp.tanh(x @ model[name])
    return x @ model["d3"]


def loss(model: Tree, batch: Tree) -> jax.Array:
    """The cross entropy, averaged over the images that are not padding."""
    scores = jax.nn.log_softmax(predict(model, batch["images"]))
    losses = -jnp.take_along_axis(scores, batch["labels"][:, None], axis=1)[:, 0]
    count = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1)
    return jnp.sum(losses, where=batch["mask"]) / count


class Cnn(ClientProblem):
    """Images and labels of all clients one after the other, and the counts of the clients."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        names = ("c1", "c2", "d1", "d2", "d3")
        self.server = {name: opened(folder, f"model-{name}") for name in names}
        self.images, self.labels = opened(folder, "images"), opened(folder, "labels")
        self.counts = opened(folder, "counts")
        self.ends = np.concatenate([[0], np.cumsum(self.counts)])
        self.functions = {"train": self.train}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        side = size["side"]
        counts = np.sort(1 + rng.binomial(size["most"] - 1, rng.beta(1, 2, size["n"])))
        counts[-1] = size["most"]
        np.save(folder / "counts.npy", counts)
        labels = rng.integers(CLASSES, size=counts.sum()).astype(np.int32)
        kinds = rng.standard_normal((CLASSES, side, side, 1), np.float32)
        noise = rng.standard_normal((len(labels), side, side, 1), np.float32)
        np.save(folder / "labels.npy", labels)
        np.save(folder / "images.npy", kinds[labels] + noise)
        flat = 16 * ((side // 2 - 4) // 2) ** 2
        dense = {"d1": (flat, 120), "d2": (120, 84), "d3": (84, CLASSES)}
        for name, shape in {**FILTERS, **dense}.items():
            scale = np.float32(np.prod(shape[:-1]) ** -0.5)
            np.save(folder / f"model-{name}.npy", scale * rng.standard_normal(shape, np.float32))

    def read(self, start: int, stop: int) -> Tree:
        """Clients padded to the next of 8, 16, 32, ... images, as many as the largest needs."""
        counts, rows = self.counts[start:stop], BATCH
        while rows < counts.max():
            rows *= 2
        at = np.minimum(self.ends[start:stop, None] + np.arange(rows), len(self.labels) - 1)
        mask = np.arange(rows) < counts[:, None]
        images = np.where(mask[..., None, None, None], self.images[at], np.float32(0))
        return {"images": images, "labels": np.where(mask, self.labels[at], 0), "mask": mask}

    def whole(self) -> Tree:
        return self.read(0, self.n)

    def train(self, model: Tree, client: Tree) -> Tree:
        """The model of a client times its images, and how many these are."""
        batches = jax.tree.map(lambda x: x.reshape(-1, BATCH, *x.shape[1:]), client)
        trained, _ = jax.lax.scan(lambda m, b: (self.client_step(m, b), None), model, batches)
        count = jnp.sum(client["mask"], dtype=jnp.float32)
        return jax.tree.map(lambda w: w * count, trained), count

    def shard_sum(self, name: str) -> Callable[[Tree, Tree], Tree]:
        """On a CPU one client after the other, which takes a third of what `vmap` takes."""
        if jax.default_backend() != "cpu":
            return super().shard_sum(name)

        def total(server: Tree, clients: Tree) -> Tree:
            each = jax.lax.map(lambda client: self.train(server, client), clients)
            return jax.tree.map(lambda x: x.sum(axis=0), each)

        return total

    def solve(self, sums: Sums) -> Tree:
        models, count = sums("train", self.server)
        return {name: np.float32(w / count) for name, w in models.items()}

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n})
        def cnn_round(model: Tree, clients: Tree) -> Tree:
            models, counts = ops.map_fn(self.train, (ops.broadcast(model), clients))
            total = ops.reduce_sum(counts)
            return jax.tree.map(lambda w: w / total, ops.reduce_sum(models))

        return cnn_round

    def source(self, bj: Any) -> Any:
        return bj.from_ragged({"images": self.images, "labels": self.labels}, self.counts)

    def client_step(self, state: Tree, batch: Tree) -> Tree:
        slope = jax.grad(loss)(state, batch)
        return jax.tree.map(lambda w, s: w - RATE * s, state, slope)

    def batches(self, fedjax: Any, client: int) -> Iterator[Tree]:
        own = slice(self.ends[client], self.ends[client + 1])
        examples = fedjax.ClientDataset({"images": self.images[own], "labels": self.labels[own]})
        for batch in examples.padded_batch(batch_size=BATCH):
            mask = batch.pop("__mask__")
            yield {**batch, "mask": mask}

    def weight(self, client: int) -> float:
        return float(self.counts[client])
