"""Two threads and short shards: what keeps the threads from computing all the time.

    python benchmarks/contention.py

The first table runs a pass whose shards take so many milliseconds, in two threads of this process
(`runner="local"`) and on DirectRunner. *busy* is the share of the time of two threads in which they
compute. *ideal* is the time of two threads that do nothing but call the jitted body, as a share of
the time of the run. *besides* is the CPU time of a shard besides its body, all of which may hold
the GIL, and *GIL* its share of the time of the run. The ways are timed in turn, the shortest run of
each counts.

The second table has the locks of beamjax that such a pass takes on `local`, by the line that makes
them: for each shard, how often, how often a thread had to wait, and the microseconds for which it
waited and held the lock. Counting takes time itself, so these are upper bounds.

The third table has the time of reading shards and of moving them to the device, from several
sources, in copies: one copy is the time in which NumPy copies the same bytes.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

MILLISECONDS = (0.3, 1.0, 3.0, 10.0)
THREADS, REPEATS = 2, 2
MEMBERS, WIDTH = 8, 1024
"""Members of a shard, and floats of a member."""
RUN_SECONDS = 10.0
"""Time of the bodies of a run in one thread."""
COPIED_SHARD_BYTES, COPIED_SHARDS = 2**20, 256


class Timed(NamedTuple):
    seconds: float
    cpu: float
    result: Any


def timed(function: Callable[[], Any]) -> Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu, result)


# --- threads


class Pass:
    """A pass whose shards take so many milliseconds each, with its jitted body."""

    def __init__(self, milliseconds: float):
        import jax
        import numpy as np

        shard = np.random.default_rng(0).normal(size=(MEMBERS, WIDTH)).astype(np.float32)
        self.steps = 64
        for _ in range(3):  # the time of a step depends a little on their number
            self.body = jax.jit(lambda x: jax.vmap(self.member)(x).sum(0))
            self.body(shard).block_until_ready()
            calls = (timed(lambda: self.body(shard).block_until_ready()) for _ in range(20))
            seconds = min(call.seconds for call in calls)
            self.steps = max(1, round(self.steps * 1e-3 * milliseconds / seconds))
        self.body = jax.jit(lambda x: jax.vmap(self.member)(x).sum(0))
        self.shards = int(1e3 * RUN_SECONDS / milliseconds)
        self.rows = np.tile(shard, (self.shards, 1))

    def member(self, row: Any) -> Any:
        import jax
        import jax.numpy as jnp

        return jax.lax.fori_loop(0, self.steps, lambda _, v: jnp.sin(v) + 0.1, row)

    def run(self, runner: str) -> dict[str, float]:
        return run(self.member, self.rows, runner)

    def ideal(self) -> None:
        """Calls the jitted body for each shard, in threads that do nothing else."""
        import numpy as np

        def calls(first: int) -> None:
            for start in range(first * MEMBERS, len(self.rows), THREADS * MEMBERS):
                np.asarray(self.body(self.rows[start : start + MEMBERS]))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(calls, range(THREADS)))


def run(member: Callable[[Any], Any], rows: Any, runner: str) -> dict[str, float]:
    """Sums a function of members; returns the seconds of each kind of work."""
    import beamjax as bj
    from beamjax.jobs import job

    monitors: list[Any] = []

    class Kept(job.Monitor):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any):
            super().__init__(*args)
            monitors.append(self)

    @bj.program(placements={"members": None})
    def total(x: Any) -> Any:
        return bj.reduce_sum(bj.map_fn(member, x))

    options = {"shard_size": MEMBERS, "member_loop": "vmap", "local_threads": THREADS}
    with mock.patch.object(job, "Monitor", Kept), tempfile.TemporaryDirectory() as folder:
        if runner != "local":  # workers report to the folder
            options["job_folder"] = f"{folder}/job"
        bj.run(total, rows, runner=runner, options=options)
    sums: dict[str, float] = collections.Counter()
    for amounts in monitors[-1].spans.work().sums.values():
        sums.update(amounts)
    return sums


def print_busy() -> None:
    print(f"{'a shard, ms':>11}  {'runner':14} {'seconds':>8} {'busy':>6} {'ideal':>6} "
          f"{'besides, us':>12} {'GIL':>6}")  # fmt: skip
    for milliseconds in MILLISECONDS:
        case = Pass(milliseconds)
        for runner in ("local", "DirectRunner"):
            case.run(runner)
            case.ideal()
            turns = [(timed(case.ideal), timed(lambda: case.run(runner))) for _ in range(REPEATS)]  # noqa: B023
            ideals, runs = zip(*turns, strict=True)
            ideal, best = min(ideals), min(runs, key=lambda each: each.seconds)
            besides = max(0.0, best.cpu - ideal.cpu)
            print(f"{milliseconds:11}  {runner:14} {best.seconds:8.2f} "
                  f"{best.result['compute'] / best.seconds / THREADS:6.0%} "
                  f"{ideal.seconds / best.seconds:6.0%} {1e6 * besides / case.shards:12.0f} "
                  f"{besides / best.seconds:6.0%}", flush=True)  # fmt: skip


# --- locks


class Counts:
    """What was counted of the locks that one line makes."""

    def __init__(self) -> None:
        self.taken = self.waited = self.waiting = self.holding = 0.0


class CountedLock:
    """A lock that counts how often and how long it is waited for and held."""

    def __init__(self, counts: Counts):
        self._lock = _plain_lock()
        self._counts = counts
        self._since = 0.0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        began = time.perf_counter()
        waits = not self._lock.acquire(False)
        if waits and not (blocking and self._lock.acquire(True, timeout)):
            return False
        # Locks of one line that are held at the same time may lose a count.
        self._since = time.perf_counter()
        self._counts.taken += 1
        self._counts.waited += waits
        self._counts.waiting += waits * (self._since - began)
        return True

    def release(self) -> None:
        self._counts.holding += time.perf_counter() - self._since
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


_plain_lock = threading.Lock
_by_line: dict[str, Counts] = collections.defaultdict(Counts)


def counted_lock() -> Any:
    """Replaces `threading.Lock`: counts the locks that beamjax makes, and no others."""
    caller = sys._getframe(1)
    folder, _, name = caller.f_code.co_filename.rpartition("/beamjax/")
    if not folder or "site-packages" in folder:
        return _plain_lock()
    return CountedLock(_by_line[f"{name}:{caller.f_lineno}"])


def print_locks(milliseconds: float) -> None:
    """Prints the second table. Nothing of beamjax is imported before."""
    with mock.patch.object(threading, "Lock", counted_lock):
        case = Pass(milliseconds)
        case.run("local")
        for counts in _by_line.values():
            counts.__init__()  # type: ignore[misc]
        case.run("local")
    print(f"\n{'locks made at':44} {'taken':>7} {'waited':>7} {'waiting, us':>12} {'held, us':>9}")
    for line, counts in sorted(_by_line.items(), key=lambda item: -item[1].taken):
        taken, waited, waiting, held = (value / case.shards for value in vars(counts).values())
        if taken >= 0.01:
            print(f"{line:44} {taken:7.2f} {waited:7.3f} {1e6 * waiting:12.2f} {1e6 * held:9.2f}")


# --- copies


def sources(folder: Path, rows: Any) -> Iterator[tuple[str, Any]]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import beamjax as bj

    yield "array", rows
    shifted = np.empty(rows.nbytes + 4, np.uint8)[4:].view(rows.dtype).reshape(rows.shape)
    shifted[:] = rows
    yield "array that is not aligned", shifted
    np.save(folder / "rows.npy", rows)
    yield ".npy file", bj.from_npy(folder / "rows.npy")
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    settings = {"row_group_size": len(rows) // 16, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": column}), folder / "rows.parquet", **settings)
    yield "Parquet, not compressed", bj.from_parquet(folder / "rows.parquet", columns="x")


def print_copies(folder: Path) -> None:
    import numpy as np

    shape = MEMBERS * COPIED_SHARDS, COPIED_SHARD_BYTES // MEMBERS // 4
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    room = np.empty_like(rows)
    first = lambda row: row[:8]
    print(f"\n{'source, shards of 1 MiB':28} {'read':>6} {'moved':>6}  in copies")
    for name, source in sources(folder, rows):
        run(first, source, "local")
        ratios = []
        for _ in range(REPEATS):
            copy = timed(lambda: np.copyto(room, rows)).seconds
            sums = run(first, source, "local")
            ratios.append((sums["read"] / copy, sums["transfer"] / copy))
        read, moved = np.min(ratios, 0)
        print(f"{name:28} {read:6.2f} {moved:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locks", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.locks is not None:
        print_locks(flags.locks)
        return
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print_busy()
    subprocess.run([sys.executable, __file__, "--locks", "1"], check=True)
    with tempfile.TemporaryDirectory(prefix="beamjax-contention-") as folder:
        print_copies(Path(folder))


if __name__ == "__main__":
    main()
