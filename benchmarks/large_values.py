"""Values past 2 GiB: `python benchmarks/large_values.py --gib=3 --runner=DirectRunner`.

One value of so many GiB is broadcast to some members, or comes back as the result. Prints seconds,
and the peak of memory: of this process, of its worker processes, of servers (Prism, Java), and of
all of them together. Anonymous memory counts, which nothing can take back; pages of files do not,
which the system can.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memory import anonymous, descendants

RUNNERS: dict[str, dict[str, Any]] = {
    "local": {"runner": "local"},
    "DirectRunner": {"runner": "DirectRunner"},
    "processes": {
        "runner": "DirectRunner",
        "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
    },
    "Prism": {"runner": "PrismRunner"},
    "Flink": {"runner": "FlinkRunner", "options": {"flink_master": "[local]", "parallelism": 1}},
    "Flink cluster": {"runner": "FlinkRunner"},
}
JOBS = ("broadcast", "result")


class Watch:
    """The peaks of anonymous memory, in MiB: of this process, of others, and of all at a time."""

    def __init__(self, others: Callable[[], list[int]]) -> None:
        self.others = others
        self.peaks = {"launcher": 0.0, "workers": 0.0, "servers": 0.0, "together": 0.0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            found = {"launcher": anonymous(os.getpid()), "workers": 0.0, "servers": 0.0}
            for pid in {*descendants(os.getpid()), *self.others()}:
                kind = "workers" if _is_python(pid) else "servers"
                found[kind] += anonymous(pid)
            found["together"] = sum(found.values())
            self.peaks = {kind: max(peak, found[kind]) for kind, peak in self.peaks.items()}

    def end(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        return self.peaks


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def run(job: str, n: int, size: int, how: dict[str, Any]) -> None:
    """One job, whose result is compared with what it must be."""
    import jax
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"i": n})
    def broadcast(w: Any, i: Any) -> Any:
        return bj.reduce_sum(bj.map_fn(lambda k, w: w[k] + w[-1], (i, bj.broadcast(w))))

    @bj.program(placements={"i": n})
    def result(w: Any, i: Any) -> Any:
        return w + bj.reduce_sum(i)

    w = np.zeros(size, np.float32)
    w[::4096] = np.arange(len(w[::4096]), dtype=np.float32) % 1000
    w[-1] = 7
    fn = {"broadcast": broadcast, "result": result}[job]
    w = jax.device_put(w)
    found = np.asarray(bj.run(fn, w, bj.from_range(n), **how))
    w = np.asarray(w)
    total = n * (n + 1) // 2
    for start in range(0, size, 1 << 24):
        part = w[start : start + (1 << 24)]
        if job == "broadcast":
            assert found == sum(float(w[k]) + 7 for k in range(n)), found
            break
        np.testing.assert_array_equal(found[start : start + (1 << 24)], part + (total - n))


@contextlib.contextmanager
def started(runner: str, folder: Path) -> Iterator[tuple[dict[str, Any], Callable[[], list[int]]]]:
    """How to run on a runner, and the processes of a cluster of Flink that is started for it."""
    how = dict(RUNNERS[runner])
    how["options"] = {**how.get("options", {}), "work_folder": str(folder)}
    if runner != "Flink cluster":
        yield how, list
        return
    from beamjax.pipelines.clusters import flink_cluster, flink_supervisor

    where = folder / "flink"
    settings = flink_cluster.Settings(taskmanagers=1, slots=1)
    with flink_supervisor.running(where, settings) as supervisor:
        how["options"]["flink_cluster"] = str(where)
        roots = [server.process.pid for server in supervisor.servers.values()]
        yield how, lambda: [pid for root in roots for pid in (root, *descendants(root))]


def measured(script: str, *arguments: str) -> dict[str, float]:
    """What a script prints last, as JSON, in a process of its own; nothing if it fails."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--runner", nargs="*", default=["local", "DirectRunner"], choices=RUNNERS)
    parser.add_argument("--jobs", nargs="*", default=JOBS, choices=JOBS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    size = int(flags.gib * 2**30) // 4
    if flags.one:
        job, runner = flags.one
        with (
            tempfile.TemporaryDirectory(prefix="beamjax-large-") as folder,
            started(runner, Path(folder)) as (how, others),
        ):
            watch, began = Watch(others), time.time()
            run(job, flags.members, size, how)
            print(json.dumps({"seconds": time.time() - began, **watch.end()}))
        return
    load = os.getloadavg()[0]
    what = f"a value of {flags.gib} GiB, {flags.members} members"
    print(f"{what}; {os.cpu_count()} cores, load {load:.1f}")
    print(f"{'job':10} {'runner':14} {'seconds':>8} {'launcher':>9} {'workers':>8} {'servers':>8} "
          f"{'together':>9}  MiB, and its ratio to the value")  # fmt: skip
    for runner in flags.runner:
        for job in flags.jobs:
            found = measured(
                __file__, "--one", job, runner, f"--gib={flags.gib}", f"--members={flags.members}"
            )
            if not found:
                print(f"{job:10} {runner:14} failed", flush=True)
                continue
            print(f"{job:10} {runner:14} {found['seconds']:8.1f} {found['launcher']:9.0f} "
                  f"{found['workers']:8.0f} {found['servers']:8.0f} {found['together']:9.0f}  "
                  f"{found['together'] / flags.gib / 1024:.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
