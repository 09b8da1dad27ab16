"""A, B and L: linear regression by local SGD on every client, then the mean of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import ClientProblem, Sums, Tree, opened, write_rows

RATE = 0.1


def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return 0.5 * jnp.mean((x @ w - y) ** 2)


class Regression(ClientProblem):
    """x (n, rows, features) and y (n, rows) of the clients; the model is (features,)."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server = np.zeros(size["features"], np.float32)
        self.x, self.y = opened(folder, "x"), opened(folder, "y")
        self.functions = {"train": self.train}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        shape = (size["n"], size["rows"], size["features"])
        normal = lambda start, stop: rng.standard_normal((stop - start, *shape[1:]), np.float32)
        write_rows(folder / "x.npy", shape, normal)
        np.save(folder / "y.npy", opened(folder, "x") @ normal(0, 1)[0, 0])

    def read(self, start: int, stop: int) -> Tree:
        return {"x": self.x[start:stop], "y": self.y[start:stop]}

    def train(self, w: jax.Array, client: Tree) -> jax.Array:
        step = lambda _, w: self.client_step(w, client)
        return jax.lax.fori_loop(0, self.size["steps"], step, w)

    def solve(self, sums: Sums) -> Tree:
        return np.float32(sums("train", self.server) / self.n)

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n})
        def mean_model(w: jax.Array, clients: Tree) -> jax.Array:
            return ops.reduce_mean(ops.map_fn(self.train, (ops.broadcast(w), clients)))

        return mean_model

    def source(self, bj: Any) -> Any:
        return bj.from_npy({name: self.folder / f"{name}.npy" for name in ("x", "y")})

    def client_step(self, state: Tree, batch: Tree) -> Tree:
        return state - RATE * jax.grad(loss)(state, batch["x"], batch["y"])

    def batches(self, fedjax: Any, client: int) -> Iterator[Tree]:
        examples = fedjax.ClientDataset({"x": self.x[client], "y": self.y[client]})
        for _ in range(self.size["steps"]):
            yield from examples.batch(batch_size=self.size["rows"])
