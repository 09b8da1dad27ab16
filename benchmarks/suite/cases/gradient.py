"""M: the gradient of a perceptron's loss by weights that all examples share.

The gradient of one example is an outer product for each layer. `jit` of a batch contracts over the
examples instead and never computes those, and so does beamjax.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree, opened

CLASSES = 10


def loss(weights: Tree, example: Tree) -> jax.Array:
    """The cross entropy of one example; x (features,), y ()."""
    hidden = jax.nn.relu(example["x"] @ weights["first"] + weights["bias"])
    return -jax.nn.log_softmax(hidden @ weights["second"])[example["y"]]


class Gradient(Problem):
    """Labelled images; the server has the weights of two layers."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        rng, (features, width) = np.random.default_rng(1), (size["features"], size["width"])
        self.server = {
            "first": np.float32(0.05) * rng.standard_normal((features, width), np.float32),
            "bias": np.zeros(width, np.float32),
            "second": np.float32(0.05) * rng.standard_normal((width, CLASSES), np.float32),
        }
        self.x, self.y = opened(folder, "x"), opened(folder, "y")
        self.functions = {"gradient": jax.grad(loss)}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        np.save(folder / "x.npy", rng.standard_normal((size["n"], size["features"]), np.float32))
        np.save(folder / "y.npy", rng.integers(0, CLASSES, size["n"]).astype(np.int32))

    def read(self, start: int, stop: int) -> Tree:
        return {"x": self.x[start:stop], "y": self.y[start:stop]}

    def shard_sum(self, name: str) -> Callable[[Tree, Tree], Tree]:
        """The gradient of a batch, as anyone would write it."""

        def total(weights: Tree, examples: Tree) -> jax.Array:
            return jax.vmap(loss, (None, 0))(weights, examples).sum()

        return jax.grad(total)

    def solve(self, sums: Sums) -> Tree:
        return jax.tree.map(lambda total: total / self.n, sums("gradient", self.server))

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"examples": self.n})
        def mean_loss(weights: Tree, examples: Tree) -> jax.Array:
            return ops.reduce_mean(ops.map_fn(loss, (ops.broadcast(weights), examples)))

        return jax.grad(mean_loss)

    def source(self, bj: Any) -> Any:
        return bj.from_npy({name: self.folder / f"{name}.npy" for name in ("x", "y")})
