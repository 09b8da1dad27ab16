"""Runs many random programs: `python -m tests.generate --count 5000 --seed 1 --jobs 2`.

Programs are drawn in chunks. The seed and a program's number say which program it is, and
`--only NUMBER` runs it again. What differs is made small and written to a folder, as a file that
runs by itself. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import logging
import multiprocessing
import os
import pathlib
import re
import time
import warnings
from collections.abc import Iterator

CHUNK = 50
SHRINKING_SECONDS = 90


@dataclasses.dataclass
class Report:
    """What became of the programs of a chunk.

    Attributes:
      failures: for each kind of failure the number of a program, its source and the message; the
        smallest program that was found.
    """

    programs: int = 0
    rejected: int = 0
    used: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    misfits: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    rejections: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: dict[str, tuple[int, str, str]] = dataclasses.field(default_factory=dict)
    failed: int = 0

    def add(self, other: Report) -> None:
        self.programs += other.programs
        self.rejected += other.rejected
        self.failed += other.failed
        for mine, theirs in (
            (self.used, other.used),
            (self.misfits, other.misfits),
            (self.rejections, other.rejections),
        ):
            mine.update(theirs)
        for kind, failure in other.failures.items():
            if kind not in self.failures or len(failure[1]) < len(self.failures[kind][1]):
                self.failures[kind] = failure


class Chunk:
    """The programs `CHUNK * index` and following of a seed."""

    def __init__(self, args: argparse.Namespace, index: int, size: int):
        self.args, self.index, self.size = args, index, size
        self.report = Report()
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.known: set[str] = set()
        self.target = ""
        self.deadline = 0.0
        self.number = 0

    def run(self) -> Report:
        """Draws and checks all programs, and again after each new kind of failure is made small."""
        from . import checks

        while True:
            self.target, self.number = "", 0
            try:
                self._draw()
            except checks.DifferenceError:
                self.known.add(self.target)
            else:
                return self.report

    def _draw(self) -> None:
        import hypothesis

        from .programs import programs

        phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
        settings = hypothesis.settings(
            max_examples=self.size,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=False,
        )
        strategy = programs(frozenset(self.args.features))
        test = hypothesis.given(strategy)(lambda program: self._check(program))
        hypothesis.seed(self.args.seed * 1_000_003 + self.index)(settings(test))()

    def _check(self, program) -> None:
        from . import checks

        shrinking = bool(self.target)
        number = self.index * CHUNK + self.number
        self.number += not shrinking
        if program.body not in self.outcomes:
            if shrinking and time.monotonic() > self.deadline:
                return
            if self.args.only not in (None, number) and not shrinking:
                return
            self.outcomes[program.body] = outcome = self._outcome(program)
            if not shrinking:
                self._count(program, *outcome)
        kind, message = self.outcomes[program.body]
        if kind in ("passed", "rejected"):
            return
        self._keep(kind, number, program, message)
        if kind in self.known or (shrinking and kind != self.target):
            return
        if not shrinking:
            print(f"program {number} failed: {message[:300]}", flush=True)
            self.target, self.deadline = kind, time.monotonic() + SHRINKING_SECONDS
        raise checks.DifferenceError(message)

    def _outcome(self, program) -> tuple[str, str]:
        from . import checks

        try:
            checks.check(program, self.args.runners)
        except checks.RejectedError as error:
            return "rejected", str(error)
        except checks.DifferenceError as error:
            text = str(error)
            return re.sub(r"[\d.]+(e[+-]?\d+)?|\[.*|found.*", "", text)[:70], text
        return "passed", ""

    def _count(self, program, kind: str, message: str) -> None:
        self.report.programs += 1
        self.report.rejected += kind == "rejected"
        if kind == "rejected":
            self.report.rejections[message[:100]] += 1
        self.report.failed += kind not in ("passed", "rejected")
        self.report.used.update({key: 1 for key, value in program.used.items() if value})
        self.report.misfits.update(program.misfits)

    def _keep(self, kind: str, number: int, program, message: str) -> None:
        best = self.report.failures.get(kind)
        if best is None or len(program.script()) < len(best[1]):
            first = best[0] if best else number
            self.report.failures[kind] = (first, program.script(), message)


def run_chunk(chunk: tuple[argparse.Namespace, int, int]) -> Report:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import jax

    report = Chunk(*chunk).run()
    jax.clear_caches()
    return report


def write_failures(folder: str, seed: int, report: Report) -> list[str]:
    """Writes each failing program to a file; the name says its seed and number."""
    os.makedirs(folder, exist_ok=True)
    paths = []
    for number, source, message in report.failures.values():
        path = pathlib.Path(folder, f"seed{seed}_program{number}.py")
        comment = "\n".join(f"# {line}" for line in message.splitlines())
        path.write_text(f"{comment}\n\n{source}")
        paths.append(str(path))
    return paths


def coverage(report: Report, features: frozenset[str]) -> str:
    """How many programs used each operation, feature and kind of block; the rarest come first."""
    from .operations import OPERATIONS

    names = {op.name for op in OPERATIONS.values() if op.feature in features}
    counts = {name: report.used.get(name, 0) for name in names | set(report.used)}
    lines = [
        f"  {count:7}  {name}"
        + (f"  ({refused} refused)" if (refused := report.misfits.get(name)) else "")
        for name, count in sorted(counts.items(), key=lambda item: (item[1], item[0]))
    ]
    return "\n".join(["programs that use each operation:", *lines])


def parse(argv: list[str]) -> argparse.Namespace:
    from .programs import FEATURES

    parser = argparse.ArgumentParser(prog="python -m tests.generate", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runner", choices=["local", "DirectRunner", "both"], default="both")
    parser.add_argument("--features", nargs="+", default=sorted(FEATURES), choices=sorted(FEATURES))
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(FEATURES))
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--folder", default="failing_programs")
    args = parser.parse_args(argv)
    args.features = sorted(set(args.features) - set(args.without))
    args.runners = ("local", "DirectRunner") if args.runner == "both" else (args.runner,)
    return args


def reports(args: argparse.Namespace) -> Iterator[Report]:
    """What became of chunk after chunk; programs that were drawn before in theirs are left out."""
    size = CHUNK if args.only is not None else min(CHUNK, args.count)
    indices = itertools.count() if args.only is None else iter([args.only // CHUNK])
    chunks = ((args, index, size) for index in indices)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, maxtasksperchild=5) as pool:
        start = lambda chunk: pool.apply_async(run_chunk, (chunk,))
        running = collections.deque(map(start, itertools.islice(chunks, 2 * args.jobs)))
        while running:
            yield running.popleft().get()
            running.extend(map(start, itertools.islice(chunks, 1)))


def main(argv: list[str]) -> int:
    from .programs import FEATURES

    args = parse(argv)
    started, total = time.monotonic(), Report()
    for report in reports(args):
        total.add(report)
        rate = total.programs / (time.monotonic() - started)
        print(
            f"{total.programs} programs, {rate:.2f}/s, {total.failed} failed, "
            f"{total.rejected} rejected",
            flush=True,
        )
        write_failures(args.folder, args.seed, total) if total.failures else None
        if args.only is not None or total.programs >= args.count:
            break
    print(coverage(total, FEATURES & frozenset(args.features)))
    for message, count in total.rejections.most_common(10):
        print(f"rejected {count} times: {message}")
    for number, source, message in total.failures.values():
        print(f"\nFAILED, program {number} of seed {args.seed}:\n{message[:2000]}\n\n{source}")
    return bool(total.failures)
