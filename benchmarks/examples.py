"""Runs each example on each runner, and writes down what it printed and how long it took.

    python benchmarks/examples.py                                    # about half an hour on 2 cores
    python benchmarks/examples.py --examples monte_carlo --runners local FlinkRunner
    python benchmarks/examples.py --json /tmp/examples.json --page docs/measured-examples.md

With `--json`, runs that are there from before stay, unless they are asked for again.

Each is a process of its own, one after the other, so the seconds have the imports, staging and
compiling in them, and the start of Prism and Flink. What two runners print is the same if it is,
but for seconds and the names of runners.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
RUNNERS = ("local", "DirectRunner", "PrismRunner", "FlinkRunner")
# Where they take less than is usual, so that all of them end soon.
FLAGS = {"clustered_clients": ["--rounds=8"], "own_pipeline": ["--rounds=50"]}
NOT_ON = {("own_pipeline", "local"): "it is about pipelines"}
LIMIT = 900
BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"


@dataclass
class Run:
    """What one example printed on one runner.

    Attributes:
      seconds: of the process, from its start to its end.
      code: its exit status; None if it was stopped after `LIMIT` seconds.
      printed: on stdout, without bars of progress.
      errors: the end of what it wrote on stderr.
    """

    seconds: float
    code: int | None
    printed: str
    errors: str


def run(name: str, runner: str) -> Run:
    """Runs an example in a process of its own."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), f"--runner={runner}"]
    start = time.perf_counter()
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    try:
        done = subprocess.run(
            [*command, *FLAGS.get(name, [])],
            capture_output=True, text=True, timeout=LIMIT, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Run(time.perf_counter() - start, None, "", f"stopped after {LIMIT} s")
    printed = "".join(line for line in done.stdout.splitlines(True) if BAR not in line)
    return Run(time.perf_counter() - start, done.returncode, printed, done.stderr[-2000:])


def essence(printed: str) -> str:
    """What was printed, without seconds, names of runners and the blanks that align columns."""
    text = re.sub(r"\b\d+(\.\d+)? m?s\b", "_ s", printed)
    text = re.sub("|".join(RUNNERS), "RUNNER", text)
    return re.sub(r"[ \t]+", " ", text)


def machine() -> str:
    """Of which machine and versions the figures are."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "apache-beam"))
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the start, Python {platform.python_version()}, {versions}"
    )


def page(where: str, found: dict[str, dict[str, Run]]) -> str:
    """A page of the documentation: a table of seconds, then what each example printed."""
    runners = [on for on in RUNNERS if any(on in runs for runs in found.values())]
    lines = [
        "# What the examples printed",
        "",
        "Made by `python benchmarks/examples.py --page docs/measured-examples.md`; not edited. A "
        "run is a process of its own: its seconds hold imports, compiling and the runner's start.",
        "",
        f"Measured {where}.",
        "",
        f"| Example | {' | '.join(runners)} | printed the same |",
        f"| --- |{' --- |' * len(runners)} --- |",
    ]
    for name, runs in found.items():
        cells = [_cell(name, runner, runs.get(runner)) for runner in runners]
        lines.append(f"| [{name}.py](#{name}py) | {' | '.join(cells)} | {_agreement(runs)} |")
    for name, runs in found.items():
        lines += ["", f"## {name}.py", ""]
        flags = " ".join(FLAGS.get(name, []))
        for runner in _distinct(runs):
            lines += [f"`python examples/{name}.py --runner={runner} {flags}".rstrip() + "`", ""]
            lines += ["```text", runs[runner].printed.rstrip(), "```", ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def _cell(name: str, runner: str, found: Run | None) -> str:
    if found is None:
        return NOT_ON.get((name, runner), "not run")
    return f"{found.seconds:.1f} s" if found.code == 0 else f"FAILED ({found.code})"


def _agreement(runs: dict[str, Run]) -> str:
    kinds = {essence(found.printed) for found in runs.values() if found.code == 0}
    return "yes" if len(kinds) == 1 and len(runs) > 1 else f"{len(kinds)} kinds"


def _distinct(runs: dict[str, Run]) -> list[str]:
    """The runners that printed something that none before them did; Beam's first."""
    order = sorted(runs, key=lambda runner: runner != "DirectRunner")
    seen: dict[str, str] = {}
    for runner in order:
        seen.setdefault(essence(runs[runner].printed), runner)
    return list(seen.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    parser.add_argument("--runners", nargs="+", default=list(RUNNERS))
    parser.add_argument("--json", type=Path, help="where all runs are kept")
    parser.add_argument("--page", type=Path, help="a page of Markdown to write")
    args = parser.parse_args()
    where, found, failed = machine(), {}, 0
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text(encoding="utf-8"))
        found = {name: {on: Run(**one) for on, one in runs.items()} for name, runs in known.items()}
    for name in args.examples:
        found.setdefault(name, {})
        for runner in args.runners:
            if (name, runner) in NOT_ON:
                continue
            one = found[name][runner] = run(name, runner)
            failed += one.code != 0
            print(f"{name:22} {runner:14} {one.seconds:7.1f} s  exit {one.code}", flush=True)
            if one.code != 0:
                print(one.errors)
        print(f"{name:22} printed the same: {_agreement(found[name])}", flush=True)
    found = dict(sorted(found.items()))
    if args.json:
        plain = {
            name: {on: asdict(one) for on, one in runs.items()} for name, runs in found.items()
        }
        args.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    if args.page:
        args.page.write_text(page(where, found), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
