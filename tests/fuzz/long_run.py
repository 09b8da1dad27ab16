"""Gives readers hostile bytes for a long time: `python -m tests.fuzz --seconds 60 --reader spec`.

With atheris installed (`pip install atheris`) its coverage of beamjax guides the bytes; without it
they are mutations of right ones. What a reader does wrong is told once for each place in the code,
and the bytes are written to a folder. The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

SLOW_SECONDS = 5.0
MORE_BYTES = 2 * 2**30
"""Of address space that a reader may take."""


class Harness:
    """One reader, and what it did wrong so far.

    Args:
      name: of the reader.
      folder: for the bytes that it reads wrongly.
    """

    def __init__(self, name: str, folder: pathlib.Path):
        from .readers import READERS

        self.name, self.folder = name, folder
        self.reader = READERS[name]
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="beamjax-fuzz-"))
        self.seeds = self.reader.seeds(self.work)
        self.executions = self.taken = 0
        self.findings: dict[str, str] = {}

    def __call__(self, data: bytes) -> None:
        """Reads bytes once."""
        from .readers import accepts

        self.executions += 1
        begin = time.monotonic()
        try:
            self.taken += accepts(self.reader, data, self.work)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            ours = [
                f for f in traceback.extract_tb(error.__traceback__) if "fuzz" not in f.filename
            ]
            frame = next((f for f in reversed(ours) if "/site-packages/" not in f.filename), frame)
            where = f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
            self.found(f"{type(error).__name__} at {where}", str(error), data)
        if time.monotonic() - begin > SLOW_SECONDS:
            self.found("slow", f"{time.monotonic() - begin:.0f} s", data)

    def found(self, kind: str, message: str, data: bytes) -> None:
        """Keeps a finding, and its bytes, unless there is one of its kind."""
        if kind not in self.findings:
            path = self.folder / f"{self.name.replace(' ', '-')}-{len(self.findings)}"
            path.write_bytes(data)
            self.findings[kind] = f"{message[:200]} ({path})"

    def report(self, how: str) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "how": how,
            "executions": self.executions,
            "taken": self.taken,
            "findings": self.findings,
        }


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Makes it a MemoryError to take much memory."""
    used = int(re.findall(r"VmSize:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + MORE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutations(harness: Harness, seconds: float, seed: int) -> dict[str, Any]:
    """Mutates right bytes for some time."""
    from .mutations import mutate
    from .readers import no_pickle

    rng = random.Random(f"{seed} {harness.name}")
    end = time.monotonic() + seconds
    with no_pickle(), _bounded():
        while time.monotonic() < end:
            harness(mutate(rng.choice(harness.seeds), rng))
    return harness.report("mutations")


def guided(name: str, folder: pathlib.Path, seconds: float, seed: int) -> None:
    """Has atheris choose the bytes; ends the process, and so tells of it as it goes."""
    import atheris

    with atheris.instrument_imports(include=["beamjax"]):
        harness = Harness(name, folder)
    from .mutations import mutate
    from .readers import no_pickle

    end = time.monotonic() + seconds
    corpus = harness.work / "corpus"
    corpus.mkdir()
    for number, data in enumerate(harness.seeds):
        (corpus / str(number)).write_bytes(data)

    def once(data: bytes) -> None:
        harness(data)
        if time.monotonic() > end:
            _tell(harness.report("atheris"), folder)
            shutil.rmtree(harness.work, ignore_errors=True)
            os._exit(0)  # libFuzzer takes SystemExit for a crash

    def other(data: bytes, limit: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            return atheris.Mutate(data, limit)
        return mutate(data, rng)[:limit]

    flags = [
        f"-seed={seed + 1}",
        "-rss_limit_mb=0",
        "-max_len=20000",
        "-verbosity=0",
        "-timeout=60",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], once, custom_mutator=other)
    with no_pickle(), _bounded():
        atheris.Fuzz()


def _tell(report: dict[str, Any], folder: pathlib.Path) -> None:
    (folder / "report.json").write_text(json.dumps(report))


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one reader in a process of its own, which may be killed by what it reads."""
    folder = pathlib.Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").unlink(missing_ok=True)
    given = ["--worker", name, "--seconds", str(args.seconds), "--seed", str(args.seed)]
    package = __package__ or "fuzz"
    root = pathlib.Path(__file__).parents[package.count(".") + 1]
    command = [sys.executable, "-m", package, *given, "--folder", str(folder), "--how", args.how]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    try:
        return json.loads((folder / "report.json").read_text())
    except FileNotFoundError:
        told = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        kind = f"the process ended with {done.returncode}"
        return {"how": args.how, "executions": 0, "taken": 0, "findings": {kind: told}}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", nargs="*", help="names; all of them by default")
    parser.add_argument("--folder", default="fuzz-findings", help="for bytes that are read wrongly")
    have = "atheris" if find_spec("atheris") else "mutations"
    parser.add_argument("--how", choices=["atheris", "mutations"], default=have)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs readers one after the other."""
    args = parse(argv)
    folder = pathlib.Path(args.folder).absolute()
    args.folder = str(folder)
    if args.worker:
        if args.how == "atheris":
            guided(args.worker, folder, args.seconds, args.seed)
        harness = Harness(args.worker, folder)
        _tell(mutations(harness, args.seconds, args.seed), folder)
        shutil.rmtree(harness.work, ignore_errors=True)
        return 0
    wrong = 0
    from .readers import READERS

    for name in args.reader or READERS:
        report = run(name, args)
        print(f"{name}: {report['executions']} executions by {report['how']},", end=" ")
        print(f"{report['taken']} taken, {len(report['findings'])} findings", flush=True)
        for kind, message in report["findings"].items():
            print(f"  {kind}: {message}", flush=True)
        wrong += len(report["findings"])
    return int(wrong > 0)
