"""E: a model of 100 MB that goes to all clients and comes back from each, changed, for a mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree, opened

RATE = 0.1


def loss(weights: jax.Array, client: Tree) -> jax.Array:
    return jnp.mean((jnp.tanh(client["x"] @ weights) - client["y"]) ** 2)


class Wide(Problem):
    """x and y (n, rows, width) of the clients; the model is (width, width)."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server = opened(folder, "weights")
        self.x, self.y = opened(folder, "x"), opened(folder, "y")
        self.functions = {"train": self.train}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        width = size["width"]
        for name in ("x", "y"):
            shape = (size["n"], size["rows"], width)
            np.save(folder / f"{name}.npy", rng.standard_normal(shape, np.float32))
        weights = rng.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        np.save(folder / "weights.npy", weights)

    def read(self, start: int, stop: int) -> Tree:
        return {"x": self.x[start:stop], "y": self.y[start:stop]}

    def train(self, weights: jax.Array, client: Tree) -> jax.Array:
        return weights - RATE * jax.grad(loss)(weights, client)

    def solve(self, sums: Sums) -> Tree:
        total = sums("train", self.server)
        return np.divide(total, self.n, out=total).astype(np.float32)

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n})
        def mean_model(weights: jax.Array, clients: Tree) -> jax.Array:
            return ops.reduce_mean(ops.map_fn(self.train, (ops.broadcast(weights), clients)))

        return mean_model

    def source(self, bj: Any) -> Any:
        return bj.from_npy({name: self.folder / f"{name}.npy" for name in ("x", "y")})
