"""The processes of the ways, as the suite sees them: started together, asked in turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import processes
from benchmarks.suite.ways import ALL

ROOT = Path(__file__).resolve().parents[2]
CODE = "from benchmarks.suite.server import main; main()"

SILENT_SECONDS = 240
"""After which a way has failed."""


class WayFailed(Exception):
    """A way can't be measured.

    Attributes:
      missing: the package that is not installed, if that is why.
    """

    def __init__(self, text: str, missing: str | None = None):
        super().__init__(text)
        self.missing = missing


class Process:
    """The process of one way.

    Attributes:
      peak: of its memory and that of its children.
    """

    def __init__(self, way: str, python: str, log: Path | None, cache: Path | None):
        self.way = way
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": path}
        env |= {"PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if cache is not None and ALL[way].start is not None:
            # Any of its workers may get any shard, and would compile for it long after the first.
            env |= {"JAX_COMPILATION_CACHE_DIR": str(cache)}
            env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # Not run as a script: Beam and Dask would take its functions for those of `__main__`.
        command, pipe = [python, "-c", CODE], subprocess.PIPE
        with open(log or os.devnull, "a") as errors:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env
            )
        self.peak = processes.Peak(self.process.pid)
        self.tell({"way": way})

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says why it has ended
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], SILENT_SECONDS)
        if not ready:
            raise WayFailed(f"no answer in {SILENT_SECONDS} s")
        line = self.process.stdout.readline()  # an answer is a line, and nothing else is said
        if not line:
            code = self.process.wait()
            raise WayFailed(f"its process ended with code {code}")
        found: dict[str, Any] = json.loads(line)
        if "missing" in found:
            raise WayFailed(f"{found['missing']} is not installed", found["missing"])
        if "error" in found:
            raise WayFailed(found["error"])
        return found

    def ask(self, **message: Any) -> dict[str, Any]:
        """Says something and waits for the answer, with an eye on the memory."""
        self.tell(message)
        with self.peak.watched():
            return self.hear()

    def memory_mib(self) -> float:
        return processes.memory_mib(processes.tree(self.process.pid))

    def _children(self) -> dict[int, int]:
        return processes.known(processes.tree(self.process.pid)[1:])

    def leave(self) -> None:
        """Asks it to end, with what it started."""
        self.members = self._children()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self, seconds: float = 20) -> None:
        """Sees to it that it ends, after `leave`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        processes.end(self.members | self._children())
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def started(
    ways: Sequence[str],
    pythons: Mapping[str, str],
    log: Path | None = None,
    cache: Path | None = None,
) -> Iterator[dict[str, Process]]:
    """Processes of ways; all of them end in the end.

    Args:
      ways: by name.
      pythons: interpreters of some.
      log: a file for what they print.
      cache: a folder for what JAX compiles in the workers of clusters.
    """
    found: dict[str, Process] = {}
    try:
        for way in ways:
            found[way] = Process(way, python_of(way, pythons), log, cache)
        yield found
    finally:
        for process in found.values():
            process.leave()
        for process in found.values():
            process.close()


def python_of(way: str, pythons: Mapping[str, str]) -> str:
    """The interpreter of a way, by its name or by that of its package."""
    names = (way, way.partition("-")[0], *ALL[way].packages)
    return next((pythons[name] for name in names if name in pythons), sys.executable)
