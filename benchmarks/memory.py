"""Peak memory of each process as n grows: it should be flat, on all runners.

    python benchmarks/memory.py --members=10000 --steps=3

Runs each job over n, 10 n and 100 n members, each in a process of its own, and prints the peak of
the memory that is that process's own (anonymous: neither shared nor mapped from files) and of its
workers together with the ratio to the row before and what share it is of the estimate, which
`beamjax.explain` tells too. The members are of 4 KiB, so n = 25,000 and three steps are 10 GB at
the top; they are made on the spot, or lie in files that are written before.

- `draws`: members from `from_range`, one sum.
- `embed`: rows of Parquet, embedded to files (`keep="placed"`), nothing else.
- `pca`: rows of Parquet, two passes, for their mean and their covariance.
- `keyed`: rows of Parquet, summed by a column of 32 rows a key.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WIDTH = 1024
"""Floats of a member."""
RUNNERS: dict[str, dict[str, Any]] = {
    "local": {"runner": "local"},
    "DirectRunner": {},
    "processes": {"options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2}},
}
JOBS = ("draws", "embed", "pca", "keyed")


class Watch:
    """The peak of the anonymous memory of this process and of its children, in MiB."""

    def __init__(self) -> None:
        self.own = self.workers = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.own = max(self.own, anonymous(os.getpid()))
            self.workers = max([self.workers, *map(anonymous, descendants(os.getpid()))])

    def end(self) -> tuple[float, float]:
        """Of this process, and of the largest of the others."""
        self._stop.set()
        self._thread.join()
        return self.own, self.workers


def anonymous(pid: int) -> float:
    """MiB; 0 for a process that is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = list(map(int, path.read_text().split()))
        except OSError:
            continue
        found += children + [d for child in children for d in descendants(child)]
    return found


def write_rows(path: Path, n: int) -> None:
    """A table of n rows of 4 KiB, in row groups of 4 MiB."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    kind = pa.schema({"key": pa.int64(), "x": pa.list_(pa.float32(), WIDTH)})
    with pq.ParquetWriter(path, kind, compression="none", use_dictionary=False) as writer:
        for start in range(0, n, 1024):
            rows = min(1024, n - start)
            x = rng.standard_normal((rows, WIDTH), np.float32)
            keys = (start + np.arange(rows)) * 7919 % max(n // 32, 1)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
            writer.write_table(pa.table([pa.array(keys), lists], schema=kind))


def run(job: str, how: dict[str, Any], n: int, folder: Path) -> None:
    import jax
    import jax.numpy as jnp

    import beamjax as bj

    how = dict(how)
    how["options"] = {**how.get("options", {}), "work_folder": str(folder)}
    if job == "draws":

        @bj.program(i=None)
        def draws(key: Any, i: Any) -> Any:
            def body(k: Any) -> Any:
                return jax.random.normal(jax.random.fold_in(key, k), (WIDTH,)) ** 2

            return bj.reduce_mean(bj.map_fn(body, i))

        bj.run(draws, jax.random.key(0), bj.from_range(n), **how)
        return
    rows = bj.from_parquet(folder / f"{n}.parquet")
    weights = jax.random.normal(jax.random.key(0), (WIDTH, 64))
    if job == "embed":

        @bj.program(rows=None)
        def embed(w: Any, data: Any) -> Any:
            return bj.map_fn(lambda row: jnp.tanh(row["x"] @ w), data)

        how["options"]["results_folder"] = str(folder / f"embedded-{n}")
        bj.run(embed, weights, rows, keep="placed", **how)
    elif job == "pca":

        @bj.program(rows=None)
        def pca(w: Any, data: Any) -> Any:
            y = bj.map_fn(lambda row: row["x"] @ w, data)
            mean = bj.reduce_mean(y)
            return mean, bj.reduce_mean(bj.map_fn(lambda v, m: jnp.outer(v - m, v - m),
                                                  (y, bj.broadcast(mean))))  # fmt: skip

        bj.run(pca, weights, rows, **how)
    else:

        @bj.program(rows=None)
        def total(data: Any) -> Any:
            return bj.reduce_by_key(data["x"], data["key"])

        bj.run(total, rows, **how)


def noting_estimates() -> list[Any]:
    """A list to which the estimate of each run is added from now on."""
    from beamjax import execution
    from beamjax.diagnostics.memory import estimate
    from beamjax.diagnostics.topology import Workers

    found: list[Any] = []

    def note(plan: Any, sources: Any, options: Any, runner: str) -> None:
        found.append(estimate(plan, sources, options, Workers.of(runner, options)))

    execution.check_memory = note
    return found


def measured(job: str, name: str, n: int, folder: Path) -> dict[str, float]:
    """Runs one job in a process of its own."""
    command = [sys.executable, __file__, "--one", job, name, str(n), str(folder)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(found.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--jobs", nargs="*", default=JOBS, choices=JOBS)
    parser.add_argument("--runners", nargs="*", default=list(RUNNERS), choices=list(RUNNERS))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        job, name, number, folder = flags.one
        watch, began = Watch(), time.time()
        estimates = noting_estimates()
        run(job, RUNNERS[name], int(number), Path(folder))
        own, workers = watch.end()
        print(json.dumps({
            "own": own, "workers": workers, "seconds": time.time() - began,
            "own expected": max(e.launcher_bytes for e in estimates) / 2**20,
            "workers expected": max(e.worker_bytes for e in estimates) / 2**20,
        }))  # fmt: skip
        return
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'job':8} {'runner':13} {'members':>10} {'GB':>6} {'seconds':>8} {'launcher':>9} "
          f"{'a worker':>9}  MiB, to the row before, of the estimate")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="beamjax-memory-") as data:
        measure_all(flags, Path(data))


def measure_all(flags: argparse.Namespace, data: Path) -> None:
    for job in flags.jobs:
        for name in flags.runners:
            before: dict[str, float] = {}
            for step in range(flags.steps):
                n = flags.members * 10**step
                rows = data / f"{n}.parquet"
                if job != "draws" and not rows.exists():
                    write_rows(rows, n)
                with tempfile.TemporaryDirectory(prefix="run-", dir=data) as folder:
                    if rows.exists():
                        os.link(rows, Path(folder) / rows.name)
                    found = measured(job, name, n, Path(folder))
                kinds = ("own", "workers")
                ratio = [found[k] / before[k] if before.get(k) else 1.0 for k in kinds]
                share = [found[k] / found[f"{k} expected"] for k in kinds]
                size = n * WIDTH * 4 / 1e9
                print(f"{job:8} {name:13} {n:10} {size:6.2f} {found['seconds']:8.1f} "
                      f"{found['own']:9.0f} {found['workers']:9.0f}  {ratio[0]:.2f} {ratio[1]:.2f} "
                      f" {share[0]:.2f} {share[1]:.2f}", flush=True)  # fmt: skip
                before = found


if __name__ == "__main__":
    main()
