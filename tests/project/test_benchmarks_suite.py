"""The benchmark suite runs, at tiny sizes, and its ways agree; how fast they are is not tested."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "ABCDEFGHM"
WAYS = ["loop", "local", "direct", "local-plain", "direct-plain", "element", "batch", "drjax"]
IN_THE_GATE = {("A", "loop"), ("A", "local"), ("A", "batch")}
EACH = [
    pytest.param(case, way, marks=[] if (case, way) in IN_THE_GATE else pytest.mark.long)
    for case in CASES
    for way in WAYS
]
EACH += [
    pytest.param(case, way, marks=pytest.mark.long)
    for case in "NOP"
    for way in ("loop", "local", "direct")
]
EACH.append(pytest.param("N", "duckdb", marks=pytest.mark.long))


@pytest.fixture(scope="module", autouse=True)
def suite():
    """The package is that of the repository, which is not installed."""
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def command(module, *flags):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def job_of(tmp_path_factory):
    """The job of a workload at a tiny size, with data, and what jit answers."""
    from benchmarks.suite.cases import CASES
    from benchmarks.suite.sums import leaves
    from benchmarks.suite.ways import WAYS, Job

    jobs = {}

    def get(case):
        if case not in jobs:
            folder = tmp_path_factory.mktemp(case)
            CASES[case].type().write(folder, CASES[case].small)
            job = Job(case, CASES[case].small, str(folder), 8)
            jobs[case] = job, leaves(WAYS["jit"].call(job, None)())
        return jobs[case]

    return get


@pytest.mark.filterwarnings("ignore")  # of drjax, and of Beam's hand-written pipelines
@pytest.mark.parametrize(("case", "way"), EACH)
def test_each_way_answers_what_jit_answers(job_of, case, way):
    from benchmarks.suite.sums import difference, leaves
    from benchmarks.suite.ways import WAYS

    job, expected = job_of(case)
    found = leaves(WAYS[way].call(job, None)())
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in expected]
    assert difference(found, expected) < 2e-5


@pytest.mark.long
def test_the_command_measures_and_writes_a_page(tmp_path):
    from benchmarks.suite.processes import tree

    ways = ["jit", "loop", "local", "direct", "session", "local-plain", "direct-plain", "batch"]
    done = command(
        "benchmarks.suite", "--cases", "A", "--ways", *ways, "dask-2", "--small", "--rounds=2",
        "--seconds=0", f"--json={tmp_path}/suite.json", f"--page={tmp_path}/page.md",
        f"--folder={tmp_path}", f"--log={tmp_path}/log",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "suite.json").read_text())
    page = (tmp_path / "page.md").read_text()
    rows = {row["way"]: row for row in written["cases"]["A"]["rows"]}
    for way in ways:
        row = rows[way]
        assert len(row["rounds"]) == 2
        assert 0 < min(row["rounds"]) <= row["seconds"] <= max(row["rounds"])
        assert row["difference"] < 1e-6
    if importlib.util.find_spec("dask") is None:
        assert rows["dask-2"]["missing"] == "dask is not installed"
    parts = ("## Targets", "## Cost of exact sums", "### A", "calculated", "load average")
    assert [part for part in parts if part not in page] == []
    assert {"A direct", "A exact"} <= {line["key"] for line in written["bar"]}
    running = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree(os.getpid())]
    assert not [line for line in running if b"benchmarks.suite.server" in line]
