"""P: logistic regression by Newton's method, on a table of Parquet files larger than the memory.

Each step is a pass over all rows: it sums the gradient and the Hessian of the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.suite.problem import Problem, Sums, Tree

STEPS = 5
GROUP = 1 << 20  # rows of a row group
GROUPS = 8  # row groups of a file
MEMORY = "2GiB"


def slopes(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient and the Hessian of the loss of one row."""
    chance = jax.nn.sigmoid(x @ w)
    return (chance - y) * x, chance * (1 - chance) * jnp.outer(x, x)


class Logistic(Problem):
    """Columns x0, x1, ... and label of the rows; the model is (features,)."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.options = {"memory": MEMORY}
        self.server = np.zeros(size["features"], np.float32)
        self.columns = [f"x{i}" for i in range(size["features"])]
        self.files = [str(path) for path in sorted(self.folder.glob("rows-*.parquet"))]
        self.functions = {"slopes": lambda w, rows: slopes(w, rows["x"], rows["label"])}

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        """Drawing all rows would take minutes: each row group has one of eight sets of rows."""
        rng = np.random.default_rng(0)
        n, features = size["n"], size["features"]
        truth = rng.standard_normal(features, np.float32)
        tables = []
        for _ in range(min(8, -(-n // GROUP))):
            x = rng.standard_normal((min(n, GROUP), features), np.float32)
            label = (x @ truth + rng.logistic(size=len(x)) > 0).astype(np.float32)
            columns = {f"x{i}": x[:, i] for i in range(features)}
            tables.append(pa.table({**columns, "label": label}))
        for number, start in enumerate(range(0, n, GROUP * GROUPS)):
            path = folder / f"rows-{number:04}.parquet"
            with parquet.ParquetWriter(path, tables[0].schema, compression="none") as writer:
                for at in range(start, min(start + GROUP * GROUPS, n), GROUP):
                    table = tables[at // GROUP * 5 % len(tables)]
                    writer.write_table(table.slice(0, min(GROUP, n - at)), row_group_size=GROUP)

    @property
    def nbytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self.files)

    def shards(self, size: int) -> list[tuple[int, int]]:
        """Row groups, which pyarrow decodes as a whole."""
        return super().shards(GROUP)

    def read(self, start: int, stop: int) -> Tree:
        """Rows of one row group."""
        file, group = divmod(start // GROUP, GROUPS)
        columns = opened_file(self.files[file]).read_row_group(group)
        x = np.stack([columns[name].to_numpy() for name in self.columns], axis=1)
        rows = {"x": x, "label": columns["label"].to_numpy()}
        first = start % GROUP
        return jax.tree.map(lambda leaf: leaf[first : first + stop - start], rows)

    def whole(self) -> Tree:
        parts = [self.read(*shard) for shard in self.shards(0)]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def shard_sum(self, name: str) -> Callable[[Tree, Tree], Tree]:
        """Matrix products, as anyone would write them."""

        def total(w: jax.Array, rows: Tree) -> Tree:
            x, chance = rows["x"], jax.nn.sigmoid(rows["x"] @ w)
            return x.T @ (chance - rows["label"]), (x * (chance * (1 - chance))[:, None]).T @ x

        return total

    def solve(self, sums: Sums) -> Tree:
        w = self.server
        for _ in range(STEPS):
            gradient, hessian = sums("slopes", w)
            w = np.float32(w - np.linalg.solve(hessian, gradient))
        return w

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"rows": self.n})
        def fit(w: jax.Array, rows: Tree) -> jax.Array:
            def of_row(w: jax.Array, row: Tree) -> Tree:  # of a table, or of `read`
                x = row["x"] if "x" in row else jnp.stack([row[name] for name in self.columns])
                return slopes(w, x, row["label"])

            def step(_: int, w: jax.Array) -> jax.Array:
                parts = ops.map_fn(functools.partial(of_row, w), rows)
                gradient, hessian = ops.reduce_mean(parts)
                return w - jnp.linalg.solve(hessian, gradient)

            return jax.lax.fori_loop(0, STEPS, step, w)

        return fit

    def source(self, bj: Any) -> Any:
        return bj.from_parquet(self.files)

    def by_dask_ml(self) -> Callable[[], Tree]:
        """As Dask-ML's users write it: arrays of a data frame that stays in its files."""
        from dask import dataframe
        from dask_ml.linear_model import LogisticRegression

        def run() -> Tree:
            table = dataframe.read_parquet(self.files, split_row_groups=1)
            lengths = [stop - start for start, stop in self.shards(0)]
            x = table[self.columns].to_dask_array(lengths=lengths)
            model = LogisticRegression(
                solver="newton", max_iter=STEPS, tol=0.0, fit_intercept=False
            )
            model.fit(x, table["label"].to_dask_array(lengths=lengths))
            return np.float32(model.coef_).reshape(-1)

        return run


@functools.lru_cache(maxsize=64)
def opened_file(path: str) -> Any:
    return parquet.ParquetFile(path, memory_map=True)
