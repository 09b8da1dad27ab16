"""Time and memory against the number of shards: both should be linear, and memory flat.

    python benchmarks/growth.py --jobs shards keys
    python benchmarks/growth.py --jobs files --runner DirectRunner --counts 1000 10000 --record

Runs each job with each count, each in a process of its own, and prints seconds, the milliseconds
that each further one takes compared with the row before, and peaks of anonymous memory, in MiB: of
this process, of its worker processes, and of servers (Prism, Java). `--record` puts the rows into
`growth.json`, in place of those of the same jobs, runners and counts; `python -m benchmarks.curves`
then draws the curves and writes the tables of `docs/scaling.md`.

- `shards`: so many shards of 1,000 members from `from_range`, one sum. Also a loop over a jitted
  function that adds up with NumPy.
- `files`: so many files of Parquet with 100 rows each; making the source is timed as well.
- `partials`: so many shards, each of which is reduced to 10 MB.
- `placed`: so many shards of 100,000 members, whose results stay in files (`keep="placed"`).
- `keys`: so many keys that are not known in advance, with four members each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from figures import GROWTH
from large_values import RUNNERS, Watch, measured, started

SHARD, ROWS, WIDE, PLACED, EACH = 1000, 100, 2_500_000, 100_000, 4
"""Members of a shard; rows of a file; floats of a partial; members of a shard of a placed result;
members of a key."""
COUNTS = {
    "shards": (1_000, 10_000, 100_000, 1_000_000),
    "files": (1_000, 10_000, 100_000),
    "partials": (10, 100, 1_000),
    "placed": (10, 100, 1_000),
    "keys": (10_000, 100_000, 1_000_000),
}
Row = dict[str, Any]
"""What was measured of a job, a runner and a count."""
Case = Callable[[int, Path, dict[str, Any]], dict[str, float]]
"""Runs a job with a count, in a folder, with these arguments of `run`; returns more to print."""


def shards(count: int, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": None})
    def total(i: Any) -> Any:
        return bj.reduce_sum(bj.map_fn(lambda i: jnp.float32(i % 7), i))

    n = SHARD * count
    found = bj.run(total, bj.from_range(n), **with_options(how, shard_size=SHARD))
    whole, rest = divmod(n, 7)
    assert found == np.float32(whole * 21 + sum(range(rest))), found
    return {}


def loop(count: int) -> float:
    """The least seconds of three loops over a jitted function, without beamjax."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    body = jax.jit(lambda i: jnp.float32(i % 7).sum())
    sums, least = np.zeros(1), float("inf")
    body(np.arange(SHARD, dtype=np.int32)).block_until_ready()
    for _ in range(3):
        began = time.perf_counter()
        for start in range(0, SHARD * count, SHARD):
            sums += np.asarray(body(np.arange(start, start + SHARD, dtype=np.int32)))
        least = min(least, time.perf_counter() - began)
    return least


def files(count: int, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    import beamjax as bj

    data = folder / "rows"
    write_files(data, count)
    began = time.perf_counter()
    rows = bj.from_parquet(data)
    opening = time.perf_counter() - began

    @bj.program(placements={"rows": None})
    def total(rows: Any) -> Any:
        return bj.reduce_sum(rows["x"])

    began = time.perf_counter()
    found = bj.run(total, rows, **how)
    assert found == count * sum(range(ROWS)), found
    return {"seconds": time.perf_counter() - began, "opening": opening}


def write_files(folder: Path, count: int) -> None:
    """Equal files of Parquet; most are copies, which is faster than to write them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    first = folder / "00000000.parquet"
    pq.write_table(pa.table({"x": pa.array(range(ROWS), pa.float32())}), first, compression="none")
    data = first.read_bytes()
    for number in range(1, count):
        (folder / f"{number:08}.parquet").write_bytes(data)


def partials(count: int, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": None})
    def total(i: Any) -> Any:
        return bj.reduce_sum(bj.map_fn(lambda i: jnp.full(WIDE, i, jnp.float32), i))

    how = with_options(how, shard_size=8, member_loop="loop")
    found = np.asarray(bj.run(total, bj.from_range(8 * count), **how))
    assert (found == np.float32(sum(range(8 * count)))).all(), found
    return {}


def placed(count: int, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    import jax.numpy as jnp

    import beamjax as bj

    @bj.program(placements={"members": None})
    def halves(i: Any) -> Any:
        return bj.map_fn(lambda i: jnp.float32(i) / 2, i)

    n = PLACED * count
    how = with_options(how, shard_size=PLACED, results_folder=str(folder / "results"))
    found = bj.run(halves, bj.from_range(n), keep="placed", **how)
    assert found[n - 1] == (n - 1) / 2, found[n - 1]
    return {"files": len(found.files)}


def keys(count: int, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": None})
    def total(i: Any) -> Any:
        ones, keys = bj.map_fn(lambda i: (1.0 + 0 * i, i % count), i)
        return bj.reduce_by_key(ones, keys)

    table = bj.run(total, bj.from_range(EACH * count), **how)
    assert len(table) == count, len(table)
    assert (np.asarray(table.read(0, 10)[1]) == EACH).all()
    return {}


JOBS: dict[str, Case] = {
    "shards": shards, "files": files, "partials": partials, "placed": placed, "keys": keys
}  # fmt: skip


def with_options(how: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**how, "options": {**how["options"], **options}}


def one(job: str, runner: str, count: int) -> dict[str, float]:
    """Runs a job in this process."""
    import jax  # noqa: F401  (not counted)

    import beamjax as bj
    from beamjax.execution import run  # noqa: F401

    with (
        tempfile.TemporaryDirectory(prefix="beamjax-growth-") as name,
        started(runner, Path(name)) as (how, others),
    ):
        watch, began = Watch(others), time.perf_counter()
        more = JOBS[job](count, Path(name), how)
        found = {"seconds": time.perf_counter() - began, **watch.end(), **more}
    if job == "shards" and runner == "local":
        found["loop"] = loop(min(count, 10_000)) * count / min(count, 10_000)
    assert bj
    return found


def row_of(job: str, runner: str, count: int) -> Row | None:
    """Runs a job in a process of its own; None if it fails."""
    date, load = datetime.date.today().isoformat(), f"{os.getloadavg()[0]:.1f}"
    found = measured(__file__, "--one", job, runner, str(count))
    if not found:
        return None
    digits = {"seconds": 2, "loop": 2, "opening": 2}
    numbers = ("seconds", "launcher", "workers", "servers", "loop", "opening", "files")
    return {"job": job, "runner": runner, "count": count, "date": date, "load": load} | {
        name: round(found[name], digits.get(name)) for name in numbers if name in found
    }


def merged(before: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """The rows measured before, some of them replaced, in the order of jobs, runners and counts."""
    by_key = {(row["job"], row["runner"], row["count"]): row for row in (*before, *rows)}
    jobs, runners = list(JOBS), list(RUNNERS)
    keys = sorted(by_key, key=lambda key: (jobs.index(key[0]), runners.index(key[1]), key[2]))
    return [by_key[key] for key in keys]


def record(rows: Iterable[Row], path: Path = GROWTH) -> None:
    lines = map(json.dumps, merged(json.loads(path.read_text("utf-8")), rows))
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--runner", nargs="*", default=["local", "DirectRunner"], choices=RUNNERS)
    parser.add_argument("--counts", nargs="*", type=int)
    parser.add_argument("--record", action="store_true", help=f"puts the rows into {GROWTH.name}")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        job, runner, count = flags.one
        print(json.dumps(one(job, runner, int(count))))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'job':9} {'runner':14} {'count':>9} {'seconds':>8} {'ms each':>9} {'launcher':>9} "
          f"{'workers':>8} {'servers':>8}")  # fmt: skip
    for job in flags.jobs:
        for runner in flags.runner:
            before = 0, 0.0
            for count in flags.counts or COUNTS[job]:
                row = row_of(job, runner, count)
                if row is None:
                    print(f"{job:9} {runner:14} {count:9} failed", flush=True)
                    continue
                if flags.record:
                    record([row])
                each = 1e3 * (row["seconds"] - before[1]) / (count - before[0])
                more = [f"{name} {row[name]}" for name in ("loop", "opening", "files")
                        if name in row]  # fmt: skip
                print(f"{job:9} {runner:14} {count:9} {row['seconds']:8.2f} {each:9.4f} "
                      f"{row['launcher']:9} {row['workers']:8} {row['servers']:8}  "
                      f"{', '.join(more)}", flush=True)  # fmt: skip
                before = count, row["seconds"]


if __name__ == "__main__":
    main()
