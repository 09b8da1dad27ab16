"""G: many rounds of small work, where what a round costs by itself is all there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree, opened

RATE = np.float32(0.1)


class Rounds(Problem):
    """x (n, features); the weights are (features,)."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server = np.linspace(-1, 1, size["features"], dtype=np.float32)
        self.x = opened(folder, "x")
        self.functions = {"slope": self.slope}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        shape = (size["n"], size["features"])
        np.save(folder / "x.npy", np.random.default_rng(0).standard_normal(shape, np.float32))

    def read(self, start: int, stop: int) -> Tree:
        return self.x[start:stop]

    def slope(self, weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights) * x

    def solve(self, sums: Sums) -> Tree:
        weights = self.server
        for _ in range(self.size["rounds"]):
            weights = weights - RATE * np.float32(sums("slope", weights) / self.n)
        return weights

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n})
        def one_round(weights: jax.Array, x: jax.Array) -> jax.Array:
            slopes = ops.map_fn(self.slope, (ops.broadcast(weights), x))
            return weights - RATE * ops.reduce_mean(slopes)

        def rounds(weights: jax.Array, x: jax.Array) -> jax.Array:
            step = lambda w, _: (one_round(w, x), None)
            return jax.lax.scan(step, weights, length=self.size["rounds"])[0]

        return rounds

    def source(self, bj: Any) -> Any:
        return bj.from_npy(self.folder / "x.npy")
