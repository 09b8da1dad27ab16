"""The command: `python -m benchmarks.suite`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import bar, model, page, scale
from benchmarks.suite.cases import CASES
from benchmarks.suite.machine import machine, memory_gib, versions_of
from benchmarks.suite.measure import Settings, measure
from benchmarks.suite.ways import ALL


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description="Workloads by beamjax and by its peers."
    )
    several: dict[str, Any] = {"nargs": "+", "default": []}
    parser.add_argument("--cases", **several, metavar="A", help=f"of {' '.join(CASES)}")
    parser.add_argument("--ways", **several, metavar="WAY", help=f"of {' '.join(ALL)}")
    parser.add_argument("--no-scale", action="store_true", help="only the workloads")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds, for a test")
    parser.add_argument(
        "--members", action="append", default=[], metavar="CASE=N",
        help="as many members, instead of the number in the table of workloads",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="after the first call (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="that the calls of a round fill (default: 0.5)"
    )
    parser.add_argument(
        "--budget", type=float, default=10.0,
        help="seconds of a way after which it has no more rounds (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after which nothing new is begun"
    )
    parser.add_argument("--shard-size", type=int, help="instead of the one that beamjax plans")
    parser.add_argument(
        "--python", action="append", default=[], metavar="WAY=PATH",
        help="the interpreter of a way, by its name or its package: dask=/path/bin/python",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="for the data: some 3 GB, removed at the end")
    parser.add_argument("--log", type=Path, help="a file for what the processes print")
    parser.add_argument("--json", type=Path, help="a file to write everything to")
    parser.add_argument("--page", type=Path, help="a page of Markdown to write, with plots")
    parser.add_argument("--targets", type=Path, help="a table of all targets to write")
    parser.add_argument(
        "--from", dest="read", type=Path, nargs="+", metavar="JSON",
        help="measures nothing: takes what was measured before; of several files, later ones first",
    )  # fmt: skip
    parser.add_argument("--gpu", type=Path, help="what benchmarks.suite.gpu wrote, for the page")
    flags = parser.parse_args(argv)
    for given, known in ((flags.cases, CASES), (flags.ways, ALL)):
        if not set(given) <= set(known):
            parser.error(f"found {given}, expected some of {list(known)}")
    if flags.rounds < 1:
        parser.error(f"--rounds: found {flags.rounds}, expected 1 or more")
    if any("=" not in text for text in flags.python):
        parser.error(f"--python: found {flags.python}, expected WAY=PATH")
    flags.python = dict(text.split("=", 1) for text in flags.python)
    flags.members = {case: int(n) for case, n in (text.split("=") for text in flags.members)}
    return flags


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures what is asked for."""
    began, cases = time.perf_counter(), flags.cases or list(CASES)
    found: dict[str, Any] = {"machine": machine() | {"GiB": round(memory_gib(), 1)}}
    found |= {"peers": versions_of(flags.python), "small": flags.small, "cases": {}, "scale": {}}
    settings = Settings(
        rounds=flags.rounds, seconds=flags.seconds, budget=flags.budget, small=flags.small,
        ways=flags.ways, pythons=flags.python, shard_size=flags.shard_size, log=flags.log,
        members=flags.members,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip

    def save() -> None:
        found["seconds"] = time.perf_counter() - began
        found["load average at the end"] = round(os.getloadavg()[0], 1)
        found["bar"], found["model"] = bar.lines(found["cases"]), model.on_paper(found["cases"])
        if flags.json:
            flags.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")

    def is_late(what: str) -> bool:
        late = time.perf_counter() - began > 60 * flags.minutes
        if late:
            settings.tell(f"{what}: not begun after {flags.minutes:g} minutes")
        return late

    for case in cases:
        if is_late(case):
            continue
        with tempfile.TemporaryDirectory(prefix="beamjax-suite-", dir=flags.folder) as folder:
            found["cases"][case] = measure(case, Path(folder), settings)
        print(page.as_text(case, found["cases"][case]), flush=True)
        save()
        settings.tell(f"{found['seconds']:.0f} s so far")
    if not flags.no_scale:
        for name, function in (("members", scale.by_members), ("workers", scale.by_workers)):
            if is_late(f"scale with {name}"):
                continue
            with tempfile.TemporaryDirectory(prefix="beamjax-suite-", dir=flags.folder) as folder:
                found["scale"][name] = function(Path(folder), settings)
    save()
    return found


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """What several runs measured; the machine is that of the first file."""
    found: dict[str, Any] = {}
    for path in paths:
        told = json.loads(path.read_text("utf-8"))
        if not found:
            found = told
            continue
        found["cases"] = found["cases"] | told["cases"]
        found["scale"] = found["scale"] | told["scale"]
        found["seconds"] += told["seconds"]
    found["cases"] = {case: found["cases"][case] for case in CASES if case in found["cases"]}
    found["bar"], found["model"] = bar.lines(found["cases"]), model.on_paper(found["cases"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse(argv)
    found = merged(flags.read) if flags.read else run(flags)
    if flags.read and flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    why = bar.reasons()
    for line in found["bar"]:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['key']:12} {line['found']}")
    for key in bar.untold(found["bar"], found["cases"], why):
        print(f"no reason in {bar.REASONS.name} yet: {key}", file=sys.stderr)
    if flags.page:
        gpu = json.loads(flags.gpu.read_text("utf-8")) if flags.gpu else None
        page.write(flags.page, found, why, gpu)
    if flags.targets:
        flags.targets.write_text("\n".join(page.targets(found)) + "\n", "utf-8")
    print(f"{found['seconds']:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
