"""A, B, C and F with a GPU as the worker's device: `python -m benchmarks.suite.gpu`.

In one process: jit of the whole, the shard loop, beamjax local and on DirectRunner (whose workers
are threads here), each for some seconds. Said are members a second; the share of the time in which
the device was busy, by nvidia-smi; the share that beamjax spent on transfers, by its own counts;
and seconds over those of jit of the whole, and over the time that reading all members once a pass
would take at the bandwidth of the device's memory, which a copy measures first. Without a GPU it
refuses, unless `--small` only tries the script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suite.cases import CASES
from benchmarks.suite.server import plan, tally
from benchmarks.suite.sums import difference, leaves
from benchmarks.suite.ways import ALL, DIRECT, JIT, LOCAL, LOOP, Job

CASES_ON_GPU = ("A", "B", "C", "F")
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


def bandwidth(nbytes: int = COPY_BYTES) -> float:
    """Bytes a second that the memory of the device reads and writes, by the best of ten copies."""
    copy = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(copy(jnp.zeros(nbytes // 4, jnp.float32)))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        best = min(best, time.perf_counter() - start)
    return 2 * nbytes / best


def rows(case: str, folder: Path, size: dict[str, int], at_least: float, rate: float) -> list[Any]:
    """A row for each way.

    Args:
      case: letter.
      folder: for the data.
      size: of the workload.
      at_least: seconds of calls of a way.
      rate: bytes a second of the memory.
    """
    job = Job(case, size, str(folder))
    CASES[case].type().write(folder, size)
    facts = plan(job, {})
    job = Job(case, size, str(folder), facts["at_once"])
    found: list[dict[str, Any]] = []
    reference: list[Any] = []
    for name in WAYS_ON_GPU:
        call = ALL[name].call(job, None)
        answer = leaves(call())
        reference = reference or answer
        times: list[float] = []
        busy = Busy()
        with busy.watched():
            while not times or sum(times) < at_least:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        transfer = None
        if name == DIRECT:
            told = tally(job)
            parts = ("read", "transfer", "compute", "merge")
            transfer = told["transfer"] / max(sum(told[part] for part in parts), 1e-9)
        found.append({
            "case": case, "way": name, "title": ALL[name].title, "seconds": seconds,
            "rate": size["n"] / seconds, "busy": busy.share, "transfer": transfer,
            "x_jit": seconds / (found[0]["seconds"] if found else seconds),
            "x_limit": seconds / max(facts["nbytes"] * facts["passes"] / rate, 1e-12),
            "difference": difference(answer, reference),
        })  # fmt: skip
        print(f"{case} {ALL[name].title}: {seconds:.3f} s, busy {busy.share}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES_ON_GPU, default=CASES_ON_GPU)
    parser.add_argument("--seconds", type=float, default=10.0, help="of calls of each way")
    parser.add_argument("--small", action="store_true", help="sizes of a test, on any device")
    parser.add_argument("--json", type=Path, help="a file to write to")
    flags = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu" and not flags.small:
        raise SystemExit(f"found {device.platform} as JAX's device, expected gpu; --small tries it")
    rate = bandwidth(1 << 20 if flags.small else COPY_BYTES)
    told: dict[str, Any] = {"device": device.device_kind, "bandwidth": rate, "rows": []}
    for case in flags.cases:
        size = dict(CASES[case].small if flags.small else CASES[case].full)
        with tempfile.TemporaryDirectory(prefix="beamjax-gpu-") as folder:
            told["rows"] += rows(case, Path(folder), size, flags.seconds, rate)
        if flags.json:
            flags.json.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return told


if __name__ == "__main__":
    main()
