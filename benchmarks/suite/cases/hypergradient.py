"""H: the slope of the final loss in the learning rates, through rounds of federated averaging.

For beamjax and jit it is `jax.value_and_grad` of the program. A map-reduce has no gradient, so the
other ways are given what their users would have to derive: `backward` sums what the clients add to
the slopes in a round, and `solve` goes through the rounds in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree, opened

CLASSES = 10


def loss(weights: jax.Array, client: Tree) -> jax.Array:
    """The mean cross entropy of a linear classifier; x (images, features), y (images,)."""
    logs = jax.nn.log_softmax(client["x"] @ weights)
    return -jnp.mean(jnp.take_along_axis(logs, client["y"][:, None], axis=1))


class Hypergradient(Problem):
    """Images and labels of the clients; the server has the logarithms of two rates."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server = {"client": np.float32(np.log(0.05)), "server": np.float32(np.log(0.5))}
        self.x, self.y = opened(folder, "x"), opened(folder, "y")
        self.functions = {"change": self.change, "backward": self.backward, "loss": self.last}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        n, images, features = size["n"], size["images"], size["features"]
        x = rng.standard_normal((n, images, features), np.float32)
        np.save(folder / "x.npy", x)
        scores = x @ rng.standard_normal((features, CLASSES), np.float32)
        np.save(folder / "y.npy", scores.argmax(axis=-1).astype(np.int32))

    def read(self, start: int, stop: int) -> Tree:
        return {"x": self.x[start:stop], "y": self.y[start:stop]}

    def change(self, server: Tree, client: Tree) -> jax.Array:
        """What local steps change in the weights."""
        rate, weights = server

        def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            return w - jnp.exp(rate) * jax.grad(loss)(w, client), None

        return jax.lax.scan(step, weights, length=self.size["steps"])[0] - weights

    def backward(self, server: Tree, client: Tree) -> Tree:
        """The slopes of a client's change in (rate, weights), times one in the change."""
        *at, slope = server
        return jax.vjp(lambda at: self.change(at, client), tuple(at))[1](slope)[0]

    def last(self, weights: jax.Array, client: Tree) -> Tree:
        return jax.value_and_grad(loss)(weights, client)

    def solve(self, sums: Sums) -> Tree:
        rate, scale = self.server["client"], np.exp(self.server["server"])
        weights: list[Any] = [np.zeros((self.size["features"], CLASSES), np.float32)]
        changes: list[Any] = []
        for _ in range(self.size["rounds"]):
            changes.append(sums("change", (rate, weights[-1])) / self.n)
            weights.append(np.float32(weights[-1] + scale * changes[-1]))
        value, slope = (total / self.n for total in sums("loss", weights[-1]))
        of_client = of_server = np.float64(0)
        for w, change in zip(weights[-2::-1], changes[::-1], strict=True):
            of_server += scale * np.sum(slope * change)
            given = (rate, w, np.float32(scale * slope / self.n))
            rate_slope, weight_slope = sums("backward", given)
            of_client, slope = of_client + rate_slope, slope + weight_slope
        return np.float32(value), {"client": of_client, "server": of_server}

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n})
        def final_loss(rates: Tree, clients: Tree) -> jax.Array:
            def round_(weights: jax.Array, _: None) -> tuple[jax.Array, None]:
                given = ops.broadcast((rates["client"], weights))
                changes = ops.map_fn(self.change, (given, clients))
                return weights + jnp.exp(rates["server"]) * ops.reduce_mean(changes), None

            start = jnp.zeros((self.size["features"], CLASSES), jnp.float32)
            weights, _ = jax.lax.scan(round_, start, length=self.size["rounds"])
            return ops.reduce_mean(ops.map_fn(loss, (ops.broadcast(weights), clients)))

        return jax.value_and_grad(final_loss)

    def source(self, bj: Any) -> Any:
        return bj.from_npy({name: self.folder / f"{name}.npy" for name in ("x", "y")})
