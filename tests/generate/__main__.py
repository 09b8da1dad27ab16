"""Runs many random programs: `python -m tests.generate --count 5000 --seed 1`.

Hypothesis makes each program that differs small; it is written to a folder, as a file that runs
by itself. The exit code is 1 if any program differs. Other seeds draw other programs, so several
processes can run side by side.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys

import hypothesis
import jax

from . import checks
from .operations import OPERATIONS
from .programs import FEATURES, programs

CHUNK = 50


def run_chunk(seed: int, count: int, args: argparse.Namespace, used: collections.Counter) -> str:
    """Checks programs, and counts what they use; returns the smallest one that differs, or ""."""
    failing = [""]

    def check(program):
        used.update({name: 1 for name, times in program.used.items() if times})
        try:
            checks.check(program, args.runners)
        except checks.RejectedError:
            used["(rejected)"] += 1
        except checks.DifferenceError as error:
            comment = "".join(f"# {line}\n" for line in str(error).splitlines())
            failing[0] = f"{comment}\n{program.script()}"  # The last one is the smallest.
            raise

    settings = hypothesis.settings(
        max_examples=count, database=None, deadline=None, report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink], print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    strategy = programs(FEATURES - set(args.without))
    try:
        hypothesis.seed(seed)(settings(hypothesis.given(strategy)(check)))()
    except checks.DifferenceError as error:
        print(f"seed {seed} differs: {str(error)[:300]}", flush=True)
    jax.clear_caches()
    return failing[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generate", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runners", nargs="+", default=checks.RUNNERS, choices=checks.RUNNERS)
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(FEATURES))
    parser.add_argument("--folder", default="failing_programs", type=pathlib.Path)
    args = parser.parse_args(argv)
    used = collections.Counter(dict.fromkeys(OPERATIONS, 0))
    failed = 0
    for begin in range(0, args.count, CHUNK):
        seed = args.seed * 1_000_003 + begin // CHUNK
        failing = run_chunk(seed, min(CHUNK, args.count - begin), args, used)
        print(f"{min(begin + CHUNK, args.count)} programs", flush=True)
        if failing:
            failed += 1
            args.folder.mkdir(parents=True, exist_ok=True)
            (args.folder / f"seed{seed}.py").write_text(failing)
    print("programs that use each operation, the rarest first:")
    print("\n".join(f"  {count:7}  {name}" for name, count in reversed(used.most_common())))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
