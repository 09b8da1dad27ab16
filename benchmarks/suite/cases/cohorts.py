"""O: rounds of federated averaging, each with a cohort of the clients that the round draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.cases.regression import Regression
from benchmarks.suite.problem import Sums, Tree


class Cohorts(Regression):
    """The clients of `Regression`; the model of a round is the mean of those of its cohort."""

    def draw(self, key: jax.Array) -> jax.Array:
        """The numbers of the clients of a round; the same client may be drawn twice."""
        return jax.random.randint(key, (self.size["cohort"],), 0, self.n)

    def keys(self) -> jax.Array:
        return jax.random.split(jax.random.key(0), self.size["rounds"])

    def solve(self, sums: Sums) -> Tree:
        """By hand: a jitted mean over the rows of each cohort."""
        each = jax.vmap(self.train, (None, 0))
        mean = jax.jit(lambda w, cohort: jnp.mean(each(w, cohort), axis=0))
        weights = self.server
        for index in self.cohorts():
            weights = mean(weights, {"x": self.x[index], "y": self.y[index]})
        return np.asarray(weights)

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"clients": self.n, "cohort": self.size["cohort"]})
        def rounds(weights: jax.Array, clients: Tree) -> jax.Array:
            def one_round(w: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
                index = self.draw(key)
                cohort = jax.tree.map(lambda leaf: leaf[index], clients)
                trained = ops.map_fn(lambda c: self.train(w, c), cohort, placement="cohort")
                return ops.reduce_mean(trained, placement="cohort"), None

            return jax.lax.scan(one_round, weights, self.keys())[0]

        return rounds

    def cohorts(self) -> Iterator[Sequence[int]]:
        yield from np.asarray(jax.jit(jax.vmap(self.draw))(self.keys()))
