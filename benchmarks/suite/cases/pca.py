"""C: principal components of a table that is read from memory twice, and hardly computed with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.problem import Problem, Sums, Tree, opened, write_rows

AXES = 3


def components(mean: Tree, covariance: Tree) -> Tree:
    """The mean, the variances, and the projection on the first axes, which knows no signs."""
    variances, axes = jnp.linalg.eigh(covariance)
    first = axes[:, ::-1][:, :AXES]
    return {"mean": mean, "variances": variances[::-1], "projection": first @ first.T}


class Pca(Problem):
    """A table (n, features) whose columns differ in their scale."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server = ()
        self.table = opened(folder, "table")[: self.n]
        self.functions = {"total": self.total, "scatter": self.scatter}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        features = size["features"]
        scale = np.float32(3.0) / np.arange(1, features + 1, dtype=np.float32)
        block = rng.standard_normal((1 << 16, features), np.float32)

        def rows(start: int, stop: int) -> np.ndarray:  # drawing 2 GB would take a minute
            chosen = block[np.arange(start, stop) * 7919 % len(block)]
            return chosen * scale + np.float32(start % 97 * 0.01)

        write_rows(folder / "table.npy", (size["n"], features), rows)

    def read(self, start: int, stop: int) -> Tree:
        return self.table[start:stop]

    def total(self, _: Tree, row: jax.Array) -> jax.Array:
        return row

    def scatter(self, mean: jax.Array, row: jax.Array) -> jax.Array:
        return jnp.outer(row - mean, row - mean)

    def shard_sum(self, name: str) -> Callable[[Tree, Tree], Tree]:
        """A matrix product for the scatter, as anyone would write it."""
        if name == "total":
            return lambda _, rows: rows.sum(axis=0)
        return lambda mean, rows: (rows - mean[None]).T @ (rows - mean[None])

    def solve(self, sums: Sums) -> Tree:
        mean = np.float32(sums("total", ()) / self.n)
        return components(mean, np.float32(sums("scatter", mean) / self.n))

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"rows": self.n})
        def pca(_: Tree, table: jax.Array) -> Tree:
            mean = ops.reduce_mean(table)
            centred = table - mean[None]
            return components(mean, jnp.einsum("ni,nj->ij", centred, centred) / self.n)

        return pca

    def source(self, bj: Any) -> Any:
        return bj.from_npy(self.folder / "table.npy")

    def by_dask(self, chunk: int) -> Callable[[], Tree]:
        """As Dask's users write it: arrays of NumPy's in chunks; compute with a client open."""
        from dask import array
        from dask.delayed import delayed

        rows = delayed(rows_of_table)
        blocks = [
            array.from_delayed(
                rows(str(self.folder), start, stop), (stop - start, self.size["features"]), "f4"
            )
            for start, stop in self.shards(chunk)
        ]
        table = array.concatenate(blocks)

        def run() -> Tree:
            mean = table.mean(axis=0, dtype="f8").astype("f4").compute()
            centred = table - mean[None]
            return components(mean, (centred.T @ centred / np.float32(self.n)).compute())

        return run


def rows_of_table(folder: str, start: int, stop: int) -> np.ndarray:
    return opened(Path(folder), "table")[start:stop]
