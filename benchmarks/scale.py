"""Counts what a run on 1,000 workers sends: ranges, partials, merges, files and requests.

    python benchmarks/scale.py --shards 1000000 --workers 1000

Nothing here is timed. The first table follows from the plan of one pass with so many shards, and
from its pipeline. The second counts how often workers look for a task while they wait. The others
count the requests of rounds at an object store: workers are threads of this process, and the store
is in its memory, where each request takes 30 ms. Runs with different numbers of rounds and workers
show what a round takes, and which requests are for each worker; the last column is what that makes
for the given number of workers.
"""

from __future__ import annotations

import argparse
import collections
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

import beamjax as bj
from beamjax import execution
from beamjax.options import parse_options
from beamjax.pipelines.resident import mailbox
from beamjax.pipelines.resident import resident_job as resident
from beamjax.pipelines.resident.worker import ServeTasks
from beamjax.plan import merging
from beamjax.plan.steps import Map
from beamjax.storage import files, remote_files

SHARD = 1000
"""Members of a shard."""
SIZES = {"1 number": 1, "1 MB": 250_000, "100 MB": 25_000_000}
"""Float32s of a partial."""
REQUEST_SECONDS = 0.03


def one_pass(shards: int, workers: int) -> None:
    """Prints what a pass of one pipeline sends."""
    width = merging.range_width(shards, workers)
    ranges = -(-shards // width)
    print(f"One pass of {shards:,} shards on {workers:,} workers: {ranges:,} elements of up to "
          f"{width} shards.")  # fmt: skip
    row = "{:10} {:>7} {:>6} {:>13} {:>17} {:>20} {:>12}"
    print(row.format("reduced to", "pieces", "groups", "partial, B", "shuffled, B at most",
                     "merges of one worker", "pipeline, B"))  # fmt: skip
    for name, size in SIZES.items():
        fan = merging.fan_out(step_of(size, shards * SHARD), shards, workers, "exact")
        grouped = fan.groups if fan.groups > 1 else 0
        # Each worker merges some of the pieces, and before that some of their groups.
        merges = -(-fan.pieces // workers) * (grouped or ranges)
        if grouped:
            merges += -(-fan.pieces * grouped // workers) * -(-ranges // grouped)
        shuffled = fan.nbytes * (ranges + grouped)
        numbers = fan.pieces, fan.groups, fan.nbytes, shuffled, merges
        print(row.format(name, *map("{:,}".format, (*numbers, job_bytes(size, shards * SHARD)))))


def program(size: int) -> Callable[..., Any]:
    @bj.program(placements={"members": None})
    def total(i: Any) -> Any:
        return bj.reduce_sum(bj.map_fn(lambda i: jnp.full(size, i, jnp.float32), i))

    return total


def step_of(size: int, n: int) -> Map:
    """The pass of a program whose partials have `size` floats."""
    options = parse_options({"shard_size": SHARD})
    flat = execution.stage("run", program(size), (bj.from_range(n),))
    found = execution.plan(flat, "DirectRunner", options).plan
    return next(step for step in found.steps if isinstance(step, Map))


def job_bytes(size: int, n: int) -> int:
    """Bytes of the pipeline that a runner gets."""
    pipeline = beam.Pipeline()
    options = {"shard_size": SHARD}
    _ = pipeline | bj.transform(program(size), bj.from_range(n), options=options)
    return int(pipeline.to_runner_api().ByteSize())


def looks(folder: str, seconds: float) -> int:
    """How often a worker looks for a task that comes after so many seconds."""
    count, waited = 0, 0.0

    def now() -> float:
        return waited

    with mock.patch.object(mailbox.time, "monotonic", now):
        while waited < seconds:
            count += 1
            waited += mailbox._pause(folder, 0.0) + REQUEST_SECONDS * files.is_url(folder)
    return count


def waiting(workers: int) -> None:
    """Prints how often workers look for tasks, for rounds of some lengths."""
    print(f"Looks for a task per second by {workers:,} workers that wait most of a round:")
    print(f"{'a round':>9} {'in a folder':>13} {'at a URL':>10}")
    for seconds in (0.1, 1, 10, 100):
        rates = (workers * looks(where, seconds) / seconds for where in ("/folder", "gs://bucket"))
        print(f"{seconds:7} s {next(rates):13,.0f} {next(rates):10,.0f}")


# --- rounds


OPERATIONS = ("pipe_file", "pipe", "cat_file", "cat", "ls", "rm", "rm_file", "info", "exists")
Log = collections.Counter[tuple[str, str]]


class Counted:
    """The file system of an object store in memory, which counts requests by who makes them."""

    def __init__(self, system: Any, log: Log):
        self._system, self._log = system, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        if name not in OPERATIONS:
            return found

        def request(first: Any, *arguments: Any, **more: Any) -> Any:
            paths = [first] if isinstance(first, str) else list(first)
            by_worker = threading.current_thread().name.startswith(WORKER)
            is_beat = WORDS[name] == "write" and _kind(paths[0]) == "worker"
            role = "worker" if by_worker or is_beat else "launcher"
            # A request removes many files; all others are for one file each.
            for path in paths[:1] if name == "rm" else paths:
                self._log[role, f"{WORDS[name]} {_kind(path)}"] += 1
            if WORDS[name] == "write":
                contents = first.values() if isinstance(first, dict) else arguments[:1]
                self._log[role, f"write {_kind(paths[0])}, kB"] += sum(map(len, contents)) / 1e3
            time.sleep(REQUEST_SECONDS)
            return found(first, *arguments, **more)

        return request


def _kind(path: str) -> str:
    """The kind of a file of the store, as `mailbox` names them; others hold values."""
    kind = path.rstrip("/").rpartition("/")[2].partition("-")[0]
    known = ("worker", "program", "task", "reply", "launcher", "stop", "rounds")
    return kind if kind in known else "value"


WORKER = "scale worker"
WORDS = {"pipe_file": "write", "pipe": "write", "cat_file": "read", "cat": "read", "ls": "list",
         "rm": "remove", "rm_file": "remove", "info": "look at", "exists": "look at"}  # fmt: skip


def counted(workers: int, rounds: int, floats: int) -> Log:
    """The requests of a run of rounds on workers that are threads of this process."""
    log: Log = collections.Counter()
    system = Counted(MemoryFileSystem(), log)

    def serve(job: resident.ResidentJob, attempt: Any) -> None:
        fn = ServeTasks(job.folder, job._secret)
        threads = [
            threading.Thread(target=fn.process, args=(None,), name=f"{WORKER} {i}")
            for i in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @bj.program(placements={"members": 8 * 4 * workers})
    def mean(w: Any, i: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda i, w: w + i, (i, bj.broadcast(w))))

    def run(w: Any, i: Any) -> Any:
        return jax.lax.fori_loop(0, rounds, lambda _, w: mean(w, i), w)

    options = {"job_endpoint": "localhost:1", "environment_type": "EXTERNAL", "shard_size": 8,
               "parallelism": workers, "work_folder": "memory://store"}  # fmt: skip
    with (
        mock.patch.object(resident.ResidentJob, "_run", serve),
        mock.patch.object(remote_files, "_system", return_value=system),
        mock.patch.object(remote_files, "OBJECT_STORES", ("memory",)),
    ):
        members = bj.from_range(8 * 4 * workers)
        bj.run(run, np.zeros(floats, np.float32), members, runner="FlinkRunner", options=options)
    return log


def of_rounds(workers: int, floats: int) -> None:
    """Prints the requests of a round, as counted with few workers and calculated for many."""
    few, many, rounds = 4, 16, 8
    logs, seconds = {}, {}
    for count in (few, many):
        counted(count, 2, floats)  # compiles
        once = counted(count, rounds, floats)
        began = time.monotonic()
        again = counted(count, 2 * rounds, floats)
        logs[count] = {kind: (again[kind] - once[kind]) / rounds for kind in {*once, *again}}
        seconds[count] = (time.monotonic() - began) / (2 * rounds)
    print(f"A round with a state of {4 * floats:,} bytes, requests at an object store:")
    row = "{:9} {:16} {:>11} {:>11} {:>13}"
    print(row.format("", "", f"{few} workers", f"{many} workers", f"{workers:,} workers"))
    print(row.format("", "seconds", *(f"{seconds[count]:.2f}" for count in (few, many)), ""))
    # Threads share the values that one of them has read; each process would read them once.
    kinds = (kind for kind, count in logs[many].items() if count >= 0.3)
    for kind in sorted({*kinds} - {("worker", "read value")}):
        a, b = (logs[count].get(kind, 0.0) for count in (few, many))
        role, what = kind
        is_each = role == "worker" or what.startswith(("write task", "read reply"))
        whole = b / many * workers if is_each else b
        print(row.format(*kind, f"{a:.1f}", f"{b:.1f}", f"{whole:,.0f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=10**6)
    parser.add_argument("--workers", type=int, default=1000)
    flags = parser.parse_args()
    one_pass(flags.shards, flags.workers)
    waiting(flags.workers)
    for floats in (1_000, 250_000):
        of_rounds(flags.workers, floats)


if __name__ == "__main__":
    main()
