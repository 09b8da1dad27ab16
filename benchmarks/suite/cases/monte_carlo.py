"""D: the price of an Asian option, from members that are nothing but a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree

RATE, STRIKE, YEARS = 0.03, 100.0, 1.0
SPOT, VOLATILITY = 100.0, 0.2


class MonteCarlo(Problem):
    """Paths 0 to n - 1; the server has the market and the data of a key."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        market = np.array([SPOT, VOLATILITY], np.float32)
        self.server = {"market": market, "key": np.array([0, 7], np.uint32)}
        self.functions = {"payoff": self.moments}

    @property
    def nbytes(self) -> int:
        return 0

    def read(self, start: int, stop: int) -> Tree:
        return np.arange(start, stop, dtype=np.int32)

    def payoff(self, server: Tree, path: jax.Array) -> jax.Array:
        days, (spot, volatility) = self.size["days"], server["market"]
        key = jax.random.wrap_key_data(server["key"], impl="threefry2x32")
        noise = jax.random.normal(jax.random.fold_in(key, path), (days,), jnp.float32)
        day = YEARS / days
        steps = (RATE - volatility**2 / 2) * day + volatility * math.sqrt(day) * noise
        mean = jnp.mean(spot * jnp.exp(jnp.cumsum(steps)))
        return math.exp(-RATE * YEARS) * jnp.maximum(mean - STRIKE, 0)

    def moments(self, server: Tree, path: jax.Array) -> Tree:
        value = self.payoff(server, path)
        return value, value**2

    def solve(self, sums: Sums) -> Tree:
        mean, square = sums("payoff", self.server)
        return np.float32(mean / self.n), np.float32(square / self.n)

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"paths": self.n})
        def price(server: Tree, paths: jax.Array) -> Tree:
            return ops.reduce_mean(ops.map_fn(self.moments, (ops.broadcast(server), paths)))

        return price

    def source(self, bj: Any) -> Any:
        return bj.from_range(self.n)
