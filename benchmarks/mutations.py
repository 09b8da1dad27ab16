"""How many small faults in beamjax the tests find.

    python -m benchmarks.mutations record             # all tests once: which functions each calls
    python -m benchmarks.mutations run --mutants=100 --seed=0 --jobs=2
    python -m benchmarks.mutations show 17 --seed=0   # the change that mutant 17 makes
    python -m benchmarks.mutations record tests/sources             # of one package
    python -m benchmarks.mutations run --only 'beamjax/sources/**/*.py'

A mutant is beamjax with one operator, comparison, number, condition or loop changed, by the
operators of cosmic-ray. An equal number of them is drawn from the functions of the analysis, the
numerics, the shard runtime and the Beam workers. Each runs tests that call the changed function,
or a function of its file where none does, until one fails: first the fastest case of each test,
then the second one, and so on. A test that fails without the mutant too is left out. `run` prints
the mutants that survive, with the changed line, and the share of each group that was killed. The
same tree, seed and number give the same mutants.

Changes that no test should find are not drawn:

- in a `raise` statement, in `warnings.warn` and in calls of a logger, where it mostly changes a
  message
- in the `strict=` of a `zip`
- by one, of a multiple of 100, of a `timeout=` or of an argument of `sleep`, since such numbers
  mostly are tuning constants
- from `<` to `<=`, or the reverse, in a comparison that reads a clock

Needs Python 3.12 and `pip install -e '.[test,benchmarks]'`. Works on copies of the tree.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import pytest
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".mutations"
"""What `record` found, in one file for each worker of pytest-xdist."""

GROUPS = {
    "analysis": ["interpreters/**/*.py"],
    "numerics": [
        "beamjax/numerics/*.py",
        *(f"beamjax/ops/{name}.py" for name in ("combining", "keyed", "reductions")),
    ],
    "shard runtime": [
        f"beamjax/{package}/*.py" for package in ("bodies", "runtime", "sources", "sources/arrays")
    ],
    "Beam workers": ["pipelines/**/*.py"],
}

OPERATORS = [
    *("AddNot", "NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ZeroIterationForLoop", "ExceptionReplacer"),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in ("Add_Sub", "Sub_Add", "Mul_Add", "FloorDiv_Mul", "Div_Mul", "Mod_Mul")
    ),
    *(
        f"ReplaceComparisonOperator_{change}"
        for change in (
            *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "Lt_LtE", "Lt_GtE", "LtE_Lt"),
            *("LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
        )
    ),
]
"""Of cosmic-ray. Left out are those that mostly change annotations or messages."""

MESSAGES = {"warn", "warning", "info", "debug"}
CLOCKS = {"time", "monotonic", "perf_counter", "process_time"}
BOUNDARIES = {f"ReplaceComparisonOperator_{c}" for c in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")}

TEST_SECONDS = 120.0
"""Recorded seconds of tests that a mutant runs at most."""
START_SECONDS = 60.0
"""Seconds that starting pytest may take on a busy machine."""

# As tests/conftest.py says, which the preloaded JAX would read too late.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["jax", "apache_beam"])  # Most of the seconds of a start.


@dataclasses.dataclass(frozen=True, order=True)
class Mutant:
    """One change to a file: the `occurrence`-th place to which an operator applies."""

    file: str
    line: int
    operator: str
    occurrence: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator}"

    def source(self) -> str:
        changed = mutate_code(
            (ROOT / self.file).read_text(), _operator(self.operator), self.occurrence
        )
        assert changed is not None, self
        return changed

    def change(self) -> str:
        """The first line that differs, as it was and as it is."""
        before, after = (ROOT / self.file).read_text().splitlines(), self.source().splitlines()
        old, new = next((a, b) for a, b in zip(before, after, strict=False) if a != b)
        return f"    - {old.strip()}\n    + {new.strip()}"


def _operator(name: str) -> Any:
    return cosmic_ray.plugins.get_operator(f"core/{name}")()


def _functions(source: str) -> list[tuple[int, int, int]]:
    """First line of the body, last line, and line of the decorator or `def` of each function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.append((node.body[0].lineno, node.end_lineno or node.lineno, first))
    return sorted(found)


def _calls(node: ast.AST, names: set[str]) -> bool:
    """Whether a node is a call of a method, or of a function of a module, with one of the names."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", None) in names


def _has_no_effect(operator: str, node: ast.AST) -> bool:
    """Whether changes by an operator in a node are not drawn; see the top of this file."""
    if isinstance(node, ast.Raise) or _calls(node, MESSAGES):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if operator in BOUNDARIES and isinstance(node, ast.Compare):
        return any(_calls(part, CLOCKS) for part in ast.walk(node))
    if operator != "NumberReplacer":
        return False
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value >= 100 and node.value % 100 == 0
    return _calls(node, {"sleep"}) or (isinstance(node, ast.keyword) and node.arg == "timeout")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """The mutants of the bodies of a file's functions."""
    source = path.read_text()
    tree, functions = get_ast(source), _functions(source)
    python: list[Any] = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")]
    starts = [first for first, _, _ in functions]
    file = path.relative_to(ROOT).as_posix()

    def nodes(node: Any) -> Iterator[Any]:
        yield node
        for child in getattr(node, "children", ()):
            yield from nodes(child)

    everything = list(nodes(tree))  # In the order in which cosmic-ray counts.
    for name in OPERATORS:
        operator, occurrence = _operator(name), 0
        left_out = [
            ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            for node in python
            if _has_no_effect(name, node)
        ]
        for node in everything:
            for position, _ in operator.mutation_positions(node):
                line = position[0]
                inside = [f for f in functions[: bisect.bisect(starts, line)] if f[1] >= line]
                # The innermost function starts last.
                # cosmic-ray fails on a tuple of exceptions with one such as `pa.ArrowInvalid`.
                fails = name == "ExceptionReplacer" and "." in node.get_code()
                shown = not any(first <= position < end for first, end in left_out)
                if inside and shown and not fails:
                    yield Mutant(file, line, name, occurrence, f"{file}:{inside[-1][2]}")
                occurrence += 1


def draw(count: int, seed: int, only: Sequence[str] = ()) -> list[tuple[str, Mutant]]:
    """`count` mutants, each with its group; those of the files `only`, if it names some."""
    rng = random.Random(seed)
    groups = {"files": only} if only else GROUPS
    drawn = []
    for number, (group, patterns) in enumerate(groups.items()):
        paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
        pool = [mutant for path in paths for mutant in mutants_of(path)]
        share = count * (number + 1) // len(groups) - count * number // len(groups)
        drawn += [(group, mutant) for mutant in rng.sample(pool, share)]
    return drawn


def tests_by_function() -> dict[str, list[tuple[float, str]]]:
    """Of each function, and of each file, the tests that call it and their seconds."""
    tests: dict[str, dict[str, float]] = {}
    for record_file in sorted(RECORD.glob("*.jsonl")):
        for line in record_file.read_text().splitlines():
            record = json.loads(line)
            files = {function.rpartition(":")[0] for function in record["functions"]}
            for called in (*record["functions"], *files):
                tests.setdefault(called, {})[record["test"]] = record["seconds"]
    if not tests:
        raise SystemExit(f"{RECORD} has no record of tests; run `record` first")
    return {
        called: [(seconds, name) for name, seconds in found.items()]
        for called, found in tests.items()
    }


def chosen(tests: Sequence[tuple[float, str]]) -> tuple[float, list[str]]:
    """Seconds and names of cases of many tests, up to TEST_SECONDS."""
    cases: collections.Counter[str] = collections.Counter()
    order = []
    for seconds, name in sorted(tests):
        test = name.partition("[")[0]
        order.append((cases[test], seconds, name))
        cases[test] += 1
    total, names = 0.0, []
    for _, seconds, name in sorted(order):
        if names and total + seconds > TEST_SECONDS:
            break
        total += seconds
        names.append(name)
    return total, names


def copy_tree(folder: Path) -> None:
    """Copies the files that git has or would take."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)


class _FirstFailure:
    """A pytest plugin that writes the name of the first test, or file, that failed."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


def _pytest(tree: Path, names: Sequence[str], output: Path) -> None:
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)  # Of the workers that tests start.
    sys.path.insert(0, str(tree))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    (tree / "mutant-tests").write_text("\n".join(names))
    args = "-q -x -n0 --no-header -p no:cacheprovider --hypothesis-profile=ci @mutant-tests"
    code = pytest.main(args.split(), [_FirstFailure(tree / "mutant-failure")])
    sys.stdout.flush()
    os._exit(code)


def run_tests(tree: Path, names: Sequence[str], seconds: float) -> str:
    """Runs tests in a copy of the tree until one fails; returns what ended them, or "survived"."""
    failure = tree / "mutant-failure"
    failure.unlink(missing_ok=True)
    process = _FORKS.Process(target=_pytest, args=(tree, names, tree / "mutant-output"))
    process.start()
    assert process.pid is not None
    process.join(START_SECONDS + 4 * seconds)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # And the workers that tests started.
    process.join()
    if code is None:
        return "time"
    if code == 0:
        return "survived"
    return failure.read_text() if failure.exists() else f"exit code {code} of pytest"


class Unmutated:
    """Which tests pass without a mutant, run in the same way; each is run once, when it fails."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def passes(self, tree: Path, names: Sequence[str], result: str, seconds: float) -> bool:
        """Whether a failure of tests is due to a mutant; `tree` holds none now."""
        suspects = [result] if result in names else names
        if self.passed.issuperset(suspects):
            return True
        found = run_tests(tree, suspects, seconds)
        if found == "survived":
            self.passed.update(suspects)
        elif found in names or found == "time":
            print(f"fails without a mutant, left out: {found}", flush=True)
            self.failed.update(suspects if found == "time" else [found])
        else:
            raise RuntimeError(f"without a mutant: {found} of {suspects[0]}…; run `record` again")
        return found == "survived"


def test_mutants(mutants: Sequence[tuple[str, Mutant]], jobs: int) -> list[str]:
    """Runs the tests of each mutant, `jobs` at once; gives how each ended."""
    tests, unmutated = tests_by_function(), Unmutated()
    with tempfile.TemporaryDirectory(prefix="beamjax-mutants-") as temporary:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            (Path(temporary) / str(job)).mkdir()
            copy_tree(Path(temporary) / str(job))
            trees.put(Path(temporary) / str(job))

        def test(mutant: Mutant) -> str:
            found = tests.get(mutant.function) or tests.get(mutant.file)
            if found is None:
                return "survived"
            tree = trees.get()
            file = tree / mutant.file
            original = file.read_text()
            try:
                while True:
                    seconds, names = chosen([t for t in found if t[1] not in unmutated.failed])
                    file.write_text(mutant.source())
                    result = run_tests(tree, names, seconds) if names else "survived"
                    file.write_text(original)
                    if result == "survived" or unmutated.passes(tree, names, result, seconds):
                        return result
            finally:
                file.write_text(original)
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            ended = pool.map(test, [mutant for _, mutant in mutants])
            results = []
            for number, ((group, mutant), result) in enumerate(zip(mutants, ended, strict=True)):
                print(f"{number:3} {group}: {mutant}: {result[:160]}", flush=True)
                if result == "survived":
                    print(mutant.change(), flush=True)
                results.append(result)
    return results


def summary(mutants: Sequence[tuple[str, Mutant]], results: Sequence[str]) -> str:
    lines = []
    for group in [*dict.fromkeys(group for group, _ in mutants), "all"]:
        of_group = [r for (g, _), r in zip(mutants, results, strict=True) if group in (g, "all")]
        killed = sum(result != "survived" for result in of_group)
        lines.append(f"{group:14} {killed:3} of {len(of_group):3} killed")
    return "\n".join(lines)


def record(tests: Sequence[str]) -> int:
    """Runs the tests, or some of them, once and records which functions each calls."""
    shutil.rmtree(RECORD, ignore_errors=True)
    RECORD.mkdir()
    args = "-m pytest -q -p benchmarks.reached --hypothesis-profile=ci"
    env = os.environ | {"REACHED": str(RECORD), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *args.split(), *tests], cwd=ROOT, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("tests", nargs="*", help="all of the gate if none")
    run, show = commands.add_parser("run"), commands.add_parser("show")
    show.add_argument("numbers", type=int, nargs="*")
    for command in (run, show):
        command.add_argument("--mutants", type=int, default=100)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="files")
    run.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    args = parser.parse_args()
    if args.command == "record":
        return record(args.tests)
    mutants = draw(args.mutants, args.seed, args.only)
    if args.command == "show":
        for number in args.numbers or range(len(mutants)):
            group, mutant = mutants[number]
            print(f"{number:3} {group}: {mutant}\n{mutant.change()}")
        return 0
    print(summary(mutants, test_mutants(mutants, args.jobs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
