"""N: the median of the rows of each key in Parquet files, which no sum over rows gives.

So each tool computes it in its own way: beamjax by passes that count digits, DuckDB and Dask by a
group-by, Ray Data by groups that it sorts, and NumPy in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.suite.problem import Problem, Sums, Tree

FILES = 40


class Medians(Problem):
    """Rows with a key from 0 to `keys` - 1 and a number x."""

    def __init__(self, folder: Path, size: Any):
        super().__init__(folder, size)
        self.server, self.functions = (), {}
        files, rows = sorted(self.folder.glob("rows-*.parquet")), 0
        self.files: list[str] = []  # those of the first n rows
        while rows < self.n:
            self.files.append(str(files[len(self.files)]))
            rows += parquet.read_metadata(self.files[-1]).num_rows

    @classmethod
    def write(cls, folder: Path, size: Any) -> None:
        rng = np.random.default_rng(0)
        for number, part in enumerate(np.array_split(np.arange(size["n"]), FILES)):
            key = rng.integers(0, size["keys"], len(part)).astype(np.int32)
            x = rng.standard_normal(len(part), np.float32)
            table = pa.table({"key": key, "x": x})
            parquet.write_table(table, folder / f"rows-{number:02}.parquet")

    @property
    def nbytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self.files)

    def read(self, start: int, stop: int) -> Tree:
        table = parquet.read_table(self.files).slice(start, stop - start)
        return {name: table[name].to_numpy() for name in ("key", "x")}

    def solve(self, sums: Sums) -> Tree:
        """By hand: all rows in memory, sorted by key."""
        rows = self.whole()
        order = np.argsort(rows["key"].astype(np.int16), kind="stable")  # a radix sort
        ends = np.cumsum(np.bincount(rows["key"], minlength=self.size["keys"]))
        parts = np.split(rows["x"][order], ends[:-1])
        return np.array([np.median(part) for part in parts], np.float32)

    def program(self, ops: Any) -> Callable[..., Tree]:
        @ops.program(placements={"rows": self.n})
        def medians(_: Tree, rows: Tree) -> Tree:
            return ops.quantile(rows["x"], 0.5, keys=rows["key"], num_keys=self.size["keys"])

        return medians

    def source(self, bj: Any) -> Any:
        return bj.from_parquet(self.files)

    def by_duckdb(self, duckdb: Any) -> Callable[[], Tree]:
        rows = f"read_parquet({self.files})"
        sql = f"SELECT quantile_cont(x, 0.5) m FROM {rows} GROUP BY key ORDER BY key"

        def run() -> Tree:
            return np.asarray(duckdb.sql(sql).fetchnumpy()["m"], np.float32)

        return run

    def by_dask(self, chunk: int) -> Callable[[], Tree]:
        from dask import dataframe

        def run() -> Tree:
            rows = dataframe.read_parquet(self.files)
            return rows.groupby("key").x.median().compute().sort_index().to_numpy(np.float32)

        return run

    def by_ray(self, ray: Any) -> Callable[[], Tree]:
        # The default, a shuffle by hashes, waits forever for more than two processors.
        strategy = ray.data.context.ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
        ray.data.DataContext.get_current().shuffle_strategy = strategy

        def run() -> Tree:
            groups = ray.data.read_parquet(self.files).groupby("key")
            parts = groups.map_groups(median_of_group, batch_format="numpy")
            rows = sorted((row["key"], row["x"]) for row in parts.take_all())
            return np.array([x for _, x in rows], np.float32)

        return run


def median_of_group(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"key": rows["key"][:1], "x": np.median(rows["x"])[None].astype(np.float32)}
