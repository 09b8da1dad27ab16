"""Workloads with a GPU as the worker's device: `python -m benchmarks.suite.gpu`.

Runs A, B and F in jit of the whole, the shard loop, beamjax local and on DirectRunner (whose
workers are threads here). Each way of a workload has its own process, so that its peak of device
memory is its own, and each fills some seconds with calls. Reported are

    first call   seconds, with compilation
    seconds      of a later call, the median
    members/s    of that
    x jit        seconds over those of jit of the whole, whose data is on the device already
    x limit      seconds over the time that reading all members once a pass takes at the bandwidth
                 of the device's memory, which a copy measures first
    busy         share of the time in which the device had work, by nvidia-smi
    transfer     share of the workers' time spent on transfers, as beamjax counts it
    peak         MiB of device memory
    same bits    of two calls
    difference   from jit of the whole, relative to the largest number of a leaf

Without a GPU it refuses, unless `--small` only tries the script. All takes three minutes on an
NVIDIA H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.cases import CASES
from benchmarks.suite.server import plan, tally
from benchmarks.suite.sums import difference_from_first, leaves
from benchmarks.suite.ways import ALL, DIRECT, JIT, LOCAL, LOOP, Job

CASES_ON_GPU = ("A", "B", "F")
WAYS_ON_GPU = (JIT, LOOP, LOCAL, DIRECT)
COPY_BYTES = 1 << 30


class Busy:
    """Samples of the utilization of the device by nvidia-smi, if there is one."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    @property
    def share(self) -> float | None:
        return statistics.fmean(self.samples) / 100 if self.samples else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        if shutil.which("nvidia-smi") is None:
            yield
            return
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        process = subprocess.Popen([*command, "--loop-ms=100"], stdout=subprocess.PIPE, text=True)

        def read() -> None:
            for line in process.stdout or ():
                if line.strip().isdigit():
                    self.samples.append(float(line))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            thread.join()


def device(copied: int) -> dict[str, Any]:
    """The first device of JAX, and bytes a second by the best of ten copies in its memory."""
    copy = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(copy(jnp.zeros(copied // 4, jnp.float32)))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        best = min(best, time.perf_counter() - start)
    found = jax.devices()[0]
    return {
        "device": found.device_kind, "platform": found.platform, "jax": jax.__version__,
        "bandwidth": 2 * copied / best,
    }  # fmt: skip


def write(job: Job) -> dict[str, Any]:
    """Writes the data of a workload. Returns what beamjax plans for it."""
    CASES[job.case].type().write(Path(job.folder), job.size)
    return plan(job, {})


def row(job: Job, way: str, at_least: float) -> dict[str, Any]:
    """What one way of a workload took.

    Args:
      job: whose folder gets the answer of the first way, with which the others are compared.
      way: name.
      at_least: seconds that calls after the first fill; two calls are the fewest.
    """
    start = time.perf_counter()
    call = ALL[way].call(job, None)
    answer = leaves(call())
    first = time.perf_counter() - start
    times: list[float] = []
    same, busy = True, Busy()
    with busy.watched():
        while len(times) < 2 or sum(times) < at_least:
            start = time.perf_counter()
            found = call()
            times.append(time.perf_counter() - start)
            same &= all(map(_has_same_bits, answer, leaves(found)))
    seconds = statistics.median(times)
    # Counted before the job below, whose counts need a run of its own.
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    transfer = None
    if way == DIRECT:
        done = tally(job)
        parts = ("read", "transfer", "compute", "merge")
        transfer = done["transfer"] / max(sum(done[part] for part in parts), 1e-9)
    return {
        "case": job.case, "way": way, "title": ALL[way].title, "first": first,
        "seconds": seconds, "calls": len(times), "rate": job.size["n"] / seconds,
        "busy": busy.share, "transfer": transfer, "peak": peak, "same_bits": same,
        "difference": difference_from_first(Path(job.folder) / "answer.npz", answer),
    }  # fmt: skip


def _has_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def in_process(function: Any, *arguments: Any) -> Any:
    """Calls a function of this module in a process of its own, which then frees the device."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def rows(case: str, folder: str, small: bool, at_least: float, rate: float) -> Iterator[Any]:
    """A row for each way of a workload; `rate` is bytes a second of the device's memory."""
    job = Job(case, dict(CASES[case].small if small else CASES[case].full), folder)
    facts = in_process(write, job)
    job = Job(case, job.size, folder, facts["at_once"])
    limit = max(facts["nbytes"] * facts["passes"] / rate, 1e-12)
    of_jit = None
    for way in WAYS_ON_GPU:
        found = in_process(row, job, way, at_least)
        of_jit = of_jit or found["seconds"]
        found |= {"x_jit": found["seconds"] / of_jit, "x_limit": found["seconds"] / limit}
        shown = {name: value for name, value in found.items() if name not in ("case", "way")}
        print(case, *(f"{name} {_text(value)}" for name, value in shown.items()), sep=", ")
        yield found


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=CASES_ON_GPU)
    parser.add_argument("--seconds", type=float, default=5.0, help="of calls of each way")
    parser.add_argument("--small", action="store_true", help="sizes of a test, on any device")
    parser.add_argument("--json", type=Path, help="a file to write to")
    flags = parser.parse_args(argv)
    found = in_process(device, 1 << 20 if flags.small else COPY_BYTES)
    if (platform := found["platform"]) != "gpu" and not flags.small:
        raise SystemExit(f"found {platform} as JAX's device, expected gpu; --small tries it")
    print(found, flush=True)
    found |= {"date": datetime.date.today().isoformat(), "rows": []}
    for case in flags.cases:
        with tempfile.TemporaryDirectory(prefix="beamjax-gpu-") as folder:
            for each in rows(case, folder, flags.small, flags.seconds, found["bandwidth"]):
                found["rows"].append(each)
                if flags.json:
                    flags.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


if __name__ == "__main__":
    main()
