"""Seconds from the start of Python to a first result, and the modules that a worker imports.

    python benchmarks/startup.py --rounds=7
    python benchmarks/startup.py --cpu          # on a machine that others use: processor time

Each way has a process of its own, whose end is not part of the time. The processes of a round run
in turn, so a busy machine slows all of them down; times are the least of all rounds. `Beam` imports
Beam and runs a pipeline of a Create and a Map. The last line counts the modules of beamjax in a
worker process of DirectRunner, when it reads its first shard.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.sources.source_base import LeafSpec, Source

X = "x = np.arange(64, dtype=np.float32)"
PROGRAM = f"""
import numpy as np
import beamjax as bj
{X}
@bj.program(placements={{"members": 64}})
def f(x):
    return bj.reduce_mean(bj.map_fn(lambda v: v * v, x))
result = bj.run(f, x, runner=%r)
assert float(result) == 1333.5
"""
WAYS = {
    "python": "pass",
    "import beamjax": "import beamjax",
    "import jax": "import jax",
    "jit": f"import numpy as np; import jax; {X}; jax.jit(lambda x: (x * x).mean())(x).item()",
    "local": PROGRAM % "local",
    "Beam": """
import apache_beam as beam
with beam.Pipeline() as pipeline:
    pipeline | beam.Create([1]) | beam.Map(abs)
""",
    "DirectRunner": PROGRAM % "DirectRunner",
}


class Noted(Source):
    """Members that are their own numbers; reading them lists the modules of the process."""

    leaves = (LeafSpec((), np.dtype("float32")),)

    def __init__(self, n: int, folder: str) -> None:
        self.n, self.folder = n, folder

    def __len__(self) -> int:
        return self.n

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        names = [name for name in sys.modules if name.partition(".")[0] == "beamjax"]
        Path(self.folder, f"{os.getpid()}-{start}").write_text("\n".join(sorted(names)))
        return [np.arange(start, stop, dtype=np.float32)]


def in_a_worker() -> list[str]:
    """The modules of beamjax that a worker imports before it reads its first shard."""
    import startup  # Workers find the class in the module of this name.

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)

    import beamjax as bj

    @bj.program(placements={"members": 64})
    def f(x: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda v: v * v, x))

    options = {"direct_running_mode": "multi_processing", "direct_num_workers": 2, "shard_size": 8}
    with tempfile.TemporaryDirectory() as folder:
        bj.run(f, startup.Noted(64, folder), runner="DirectRunner", options=options)
        first = min(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert int(first.name.partition("-")[0]) != os.getpid()
        return first.read_text().split()


def seconds_to(code: str, clock: str) -> float:
    """Seconds from the start of a process to the end of its code, by a clock of `time`."""
    began = time.time() if clock == "time" else 0.0  # processor time begins at 0
    code = f"{code}\nimport time; print(time.{clock}())"
    # Beam prints warnings.
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--modules", action="store_true", help="name the modules of a worker")
    flags = parser.parse_args()
    clock = "process_time" if flags.cpu else "time"
    seconds = dict.fromkeys(WAYS, float("inf"))
    for _ in range(flags.rounds):
        for way, code in WAYS.items():
            seconds[way] = min(seconds[way], seconds_to(code, clock))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for way, found in seconds.items():
        print(f"{way:16} {found:7.3f} s   {found - seconds['python']:7.3f} s without Python")
    rest = seconds["DirectRunner"] - seconds["local"] - seconds["Beam"] + seconds["python"]
    print(f"local / jit {seconds['local'] / seconds['jit']:.2f}; "
          f"DirectRunner - local - Beam {rest:.3f} s")  # fmt: skip
    names = in_a_worker()
    print(f"modules of beamjax in a worker: {len(names)}")
    if flags.modules:
        print("\n".join(names))


if __name__ == "__main__":
    main()
