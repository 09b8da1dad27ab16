"""Runs each example on each runner, and writes down what it printed and how long it took.

    python benchmarks/examples.py                                    # about half an hour on 2 cores
    python benchmarks/examples.py --examples monte_carlo --runners local FlinkRunner
    python benchmarks/examples.py --json /tmp/examples.json --page docs/measured-examples.md
    python benchmarks/examples.py --examples cnn_clients --runners --workers     # about two minutes

With `--json`, runs that are there from before stay, unless they are asked for again. `--workers`
measures the rounds of cnn_clients.py by one worker and by two: threads of `local`, processes of
DirectRunner, with and without the option compile_cache, and task managers of a Flink cluster, each
with a process of its own.

Each is a process of its own, one after the other, so the seconds have the imports, staging and
compiling in them, and the start of Prism and Flink. What two runners print is the same if it is,
but for seconds and the names of runners.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
RUNNERS = ("local", "DirectRunner", "PrismRunner", "FlinkRunner")
# Where they take less than is usual, so that all of them end soon.
FLAGS = {"clustered_clients": ["--rounds=8"], "own_pipeline": ["--rounds=50"]}
NOT_ON = {("own_pipeline", "local"): "it is about pipelines"}
WORKERS_OF = {
    "local": "threads",
    "DirectRunner": "this process, or two that each round starts",
    "DirectRunner, compile_cache": "the same",
    "PrismRunner": "this process; bundles run one after the other",
    "FlinkRunner": "processes of a cluster, one for each task manager",
}
WORKERS = [(row, n) for row in WORKERS_OF for n in (1, 2) if (row, n) != ("PrismRunner", 2)]
ROUNDS = 6
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
      where: on which machine, and when.
    """

    seconds: float
    code: int | None
    printed: str
    errors: str
    where: str


def run(name: str, runner: str, flags: list[str], where: str) -> Run:
    """Runs an example in a process of its own."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), f"--runner={runner}"]
    start = time.perf_counter()
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    try:
        done = subprocess.run(
            [*command, *flags],
            capture_output=True, text=True, timeout=LIMIT, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Run(time.perf_counter() - start, None, "", f"stopped after {LIMIT} s", where)
    printed = "".join(line for line in done.stdout.splitlines(True) if BAR not in line)
    seconds = time.perf_counter() - start
    return Run(seconds, done.returncode, printed, done.stderr[-2000:], where)


@contextlib.contextmanager
def flink_cluster(taskmanagers: int) -> Iterator[str]:
    """The folder of a cluster with so many task managers, each with a pool of one process."""
    flink = [sys.executable, "-m", "beamjax", "flink"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*flink, "up", f"--taskmanagers={taskmanagers}", "--slots=1"]
        subprocess.run([*command, f"--folder={folder}"], check=True, stdout=subprocess.DEVNULL)
        try:
            yield folder
        finally:
            down = [*flink, "down", f"--folder={folder}"]
            subprocess.run(down, check=True, stdout=subprocess.DEVNULL)


def run_rounds(row: str, workers: int, where: str) -> Run:
    """Runs the rounds of cnn_clients.py with so many workers."""
    runner, _, cached = row.partition(", ")
    flags = [f"--rounds={ROUNDS}"]
    with contextlib.ExitStack() as stack:
        if cached:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            flags.append(f"--compile_cache={folder}")
        if runner == "local":
            flags.append(f"--local_threads={workers}")
        elif runner == "FlinkRunner":
            flags.append(f"--flink_cluster={stack.enter_context(flink_cluster(workers))}")
        else:
            flags.append(f"--workers={workers}")
        return run("cnn_clients", runner, flags, where)


def seconds_of_rounds(printed: str) -> list[float]:
    """What each round took."""
    return [float(found) for found in re.findall(r"^round .* ([\d.]+) s$", printed, re.M)]


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


def page(found: dict[str, dict[str, Run]], rounds: dict[str, Run]) -> str:
    """A page of the documentation: a table of seconds, then what each example printed.

    Args:
      found: runs by example and runner.
      rounds: runs of `run_rounds`, by row and number of workers with a blank between them.
    """
    runners = [on for on in RUNNERS if any(on in runs for runs in found.values())]
    lines = [
        "# What the examples printed",
        "",
        "Made by `python benchmarks/examples.py --page docs/measured-examples.md`; not edited. A "
        "run is a process of its own: its seconds hold imports, compiling and the runner's start.",
        "",
        *_measured({(name, on): one for name, runs in found.items() for on, one in runs.items()}),
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
        if name == "cnn_clients" and rounds:
            lines += ["", *_table_of_rounds(rounds)]
    return "\n".join(lines) + "\n"


def _measured(runs: dict[tuple[str, str], Run]) -> list[str]:
    """Where most runs were measured, then where the others were."""
    where: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (name, runner), one in runs.items():
        where[one.where][name].append(runner)
    most, *others = sorted(where, key=lambda text: -sum(map(len, where[text].values())))
    lines = [f"Measured {most}."]
    for other in others:
        names = (f"{name}.py ({', '.join(on)})" for name, on in where[other].items())
        lines += ["", f"Measured {other}: {', '.join(names)}."]
    return lines


def _table_of_rounds(rounds: dict[str, Run]) -> list[str]:
    """A line for each runner."""

    def cell(row: str, workers: int) -> str:
        one = rounds.get(f"{row} {workers}")
        if one is None:
            return "not run" if (row, workers) in WORKERS else "one only"
        if one.code != 0:
            return f"FAILED ({one.code})"
        first, *others = seconds_of_rounds(one.printed)
        return f"{statistics.median(others):.2f} s (first {first:.2f} s)"

    losses = {tuple(re.findall(r"loss \S+ accuracy \S+", one.printed)) for one in rounds.values()}
    same = "were the same" if len(losses) == 1 else f"were of {len(losses)} kinds"
    return [
        f"Seconds of a round: the median of rounds 2 to {ROUNDS}, and the first, which compiles. "
        f"Losses and accuracies {same} everywhere.",
        "",
        *_measured({("cnn_clients", on): one for on, one in rounds.items()})[:1],
        "",
        "| Runner | Workers | 1 worker | 2 workers |",
        "| --- | --- | --- | --- |",
        *(f"| {row} | {on} | {cell(row, 1)} | {cell(row, 2)} |" for row, on in WORKERS_OF.items()),
    ]


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


def tell(name: str, runner: str, one: Run) -> bool:
    """Prints how a run went, and whether it failed."""
    print(f"{name:22} {runner:14} {one.seconds:7.1f} s  exit {one.code}", flush=True)
    if one.code != 0:
        print(one.errors)
    return one.code != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    parser.add_argument("--runners", nargs="*", default=list(RUNNERS))
    parser.add_argument("--workers", action="store_true", help="measure rounds by 1 and 2 workers")
    parser.add_argument("--json", type=Path, help="where all runs are kept")
    parser.add_argument("--page", type=Path, help="a page of Markdown to write")
    args = parser.parse_args()
    where, found, rounds, failed = machine(), {}, {}, 0
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text(encoding="utf-8"))
        rounds = {on: Run(**one) for on, one in known.pop("rounds", {}).items()}
        found = {name: {on: Run(**one) for on, one in runs.items()} for name, runs in known.items()}
    for name in args.examples:
        found.setdefault(name, {})
        for runner in args.runners:
            if (name, runner) in NOT_ON:
                continue
            one = found[name][runner] = run(name, runner, FLAGS.get(name, []), where)
            failed += tell(name, runner, one)
        print(f"{name:22} printed the same: {_agreement(found[name])}", flush=True)
    for row, workers in WORKERS if args.workers else []:
        key = f"{row} {workers}"
        one = rounds[key] = run_rounds(row, workers, where)
        failed += tell("cnn_clients", key, one)
    load = f"at the start and {os.getloadavg()[0]:.1f} at the end"
    for one in (*rounds.values(), *(one for runs in found.values() for one in runs.values())):
        if one.where == where:
            one.where = where.replace("at the start", load)
    found = dict(sorted(found.items()))
    if args.json:
        plain = {
            name: {on: asdict(one) for on, one in runs.items()}
            for name, runs in (found | {"rounds": rounds}).items()
        }
        args.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    if args.page:
        args.page.write_text(page(found, rounds), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
