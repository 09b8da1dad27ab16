"""Time and memory against the number of shards: both should be linear, and memory flat.

    python benchmarks/growth.py --jobs shards --counts 1000 10000 100000 1000000
    python benchmarks/growth.py --jobs files --runner DirectRunner --counts 1000 10000

Runs each job with each count, each in a process of its own, and prints seconds, the milliseconds
that each further one takes compared with the row before, and peaks of anonymous memory, in MiB: of
this process, of its worker processes, and of servers (Prism, Java).

- `shards`: so many shards of 1,000 members from `from_range`, one sum. The ideal is a loop over a
  jitted function that adds up with NumPy.
- `files`: so many files of Parquet with 100 rows each; making the source is timed as well.
- `partials`: so many shards, each of which is reduced to 10 MB.
- `placed`: so many shards of 100,000 members, whose results stay in files (`keep="placed"`).
- `keys`: so many keys that are not known in advance, with four members each.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from large_values import RUNNERS, Watch, measured, started
from memory import anonymous

SHARD, ROWS, WIDE, PLACED, EACH = 1000, 100, 2_500_000, 100_000, 4
"""Members of a shard; rows of a file; floats of a partial; members of a shard of a placed result;
members of a key."""
COUNTS = {
    "shards": (1_000, 10_000, 100_000),
    "files": (1_000, 10_000, 100_000),
    "partials": (10, 100, 1_000),
    "placed": (10, 100, 1_000),
    "keys": (10_000, 100_000, 1_000_000),
}
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


def ideal(count: int) -> float:
    """Seconds of a loop over a jitted function, without beamjax."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    body = jax.jit(lambda i: jnp.float32(i % 7).sum())
    sums = np.zeros(1)
    body(np.arange(SHARD, dtype=np.int32)).block_until_ready()
    began = time.perf_counter()
    for start in range(0, SHARD * count, SHARD):
        sums += np.asarray(body(np.arange(start, start + SHARD, dtype=np.int32)))
    return time.perf_counter() - began


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
        before = anonymous(os.getpid())
        watch, began = Watch(others), time.perf_counter()
        more = JOBS[job](count, Path(name), how)
        found = {"seconds": time.perf_counter() - began, "before": before, **watch.end(), **more}
    if job == "shards" and runner == "local":
        found["ideal"] = ideal(min(count, 10_000)) * count / min(count, 10_000)
    assert bj
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--runner", nargs="*", default=["local", "DirectRunner"], choices=RUNNERS)
    parser.add_argument("--counts", nargs="*", type=int)
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
                found = measured(__file__, "--one", job, runner, str(count))
                if not found:
                    print(f"{job:9} {runner:14} {count:9} failed", flush=True)
                    continue
                seconds = found["seconds"]
                each = 1e3 * (seconds - before[1]) / (count - before[0])
                more = [f"{name} {found[name]:.2f}" for name in ("ideal", "opening", "files")
                        if name in found]  # fmt: skip
                print(f"{job:9} {runner:14} {count:9} {seconds:8.2f} {each:9.4f} "
                      f"{found['launcher']:9.0f} {found['workers']:8.0f} {found['servers']:8.0f}  "
                      f"{', '.join(more)}", flush=True)  # fmt: skip
                before = count, seconds


if __name__ == "__main__":
    main()
