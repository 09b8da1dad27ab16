"""The benchmark suite runs, at tiny sizes, and its ways agree; how fast they are is not tested."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
IN_PROCESS = [
    "jit", "loop", "local", "direct", "local-plain", "direct-plain", "element", "batch", "drjax",
]  # fmt: skip


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


def case_and_way():
    letters = "ABCDEFGH"
    return [(case, way) for case in letters for way in IN_PROCESS if way != "jit"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs of all workloads at tiny sizes, with data, and what jit answers."""
    from benchmarks.suite.cases import CASES
    from benchmarks.suite.sums import leaves
    from benchmarks.suite.ways import WAYS, Job

    found = {}
    for case in "ABCDEFGH":
        folder = tmp_path_factory.mktemp(case)
        CASES[case].type().write(folder, CASES[case].small)
        job = Job(case, CASES[case].small, str(folder), 8)
        found[case] = job, leaves(WAYS["jit"].call(job, None)())
    return found


@pytest.mark.filterwarnings("ignore")  # of drjax, and of Beam's hand-written pipelines
@pytest.mark.parametrize(("case", "way"), case_and_way())
def test_each_way_answers_what_jit_answers(jobs, case, way):
    from benchmarks.suite.sums import difference, leaves
    from benchmarks.suite.ways import WAYS

    job, expected = jobs[case]
    found = leaves(WAYS[way].call(job, None)())
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in expected]
    assert difference(found, expected) < 2e-5


def test_derivatives_by_hand_are_those_of_the_program_in_float64(jobs):
    """The hypergradient against differences of the loss itself."""
    import jax

    from benchmarks.suite.sums import opened

    job, expected = jobs["H"]
    problem = opened(job)
    members, step = problem.whole(), 1e-2

    def loss(rates):
        weights = np.zeros((job.size["features"], 10), np.float32)
        each = jax.vmap(problem.change, (None, 0))
        for _ in range(job.size["rounds"]):
            change = each((rates["client"], weights), members).mean(axis=0)
            weights = weights + np.exp(rates["server"]) * change
        values, _ = jax.vmap(problem.last, (None, 0))(weights, members)
        return float(values.mean())

    for leaf, name in zip(expected[1:], ("client", "server"), strict=True):
        up, down = (
            loss(problem.server | {name: np.float32(problem.server[name] + s)})
            for s in (step, -step)
        )
        assert leaf == pytest.approx((up - down) / (2 * step), rel=1e-2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the command prints, writes to JSON and to a page, for A."""
    folder = tmp_path_factory.mktemp("suite")
    done = command(
        "benchmarks.suite", "--cases", "A", "--ways", "jit", "loop", "local", "direct",
        "local-plain", "direct-plain", "batch", "dask-2", "--small", "--rounds=2", "--seconds=0",
        f"--json={folder}/suite.json", f"--page={folder}/page.md", f"--folder={folder}",
        f"--log={folder}/log",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((folder / "suite.json").read_text())
    return done, written, (folder / "page.md").read_text()


def test_every_round_is_timed_and_memory_is_seen(measured):
    _, written, _ = measured
    rows = {row["way"]: row for row in written["cases"]["A"]["rows"]}
    for way in ("jit", "loop", "local", "direct", "local-plain", "direct-plain", "batch"):
        row = rows[way]
        assert len(row["rounds"]) == 2
        assert 0 < min(row["rounds"]) <= row["seconds"] <= max(row["rounds"])
        assert row["difference"] < 1e-6
        if sys.platform == "linux":
            assert 0 < row["start_mib"] <= row["peak_mib"]


def test_what_is_not_installed_is_said_to_be_and_has_no_number(measured):
    _, written, page = measured
    if importlib.util.find_spec("dask") is not None:
        pytest.skip("Dask is installed")
    (row,) = (row for row in written["cases"]["A"]["rows"] if row["way"] == "dask-2")
    assert row["missing"] == "dask is not installed"
    assert "seconds" not in row
    line = next(line for line in page.splitlines() if line.startswith("| Dask, 2 workers"))
    assert [cell.strip() for cell in line.split("|") if cell.strip()] == [
        "Dask, 2 workers", "dask is not installed",
    ]  # fmt: skip


def test_the_page_has_the_machine_the_bar_and_all_tables(measured):
    _, written, page = measured
    parts = "## The bar", "## What exact sums cost", "### A", "on paper"
    for text in ("cores", "load average", "jax", *parts):
        assert text in page
    assert {line["key"] for line in written["bar"]} == {
        "A direct", "A local", "A jit", "A jit-direct", "A exact", "A exact-direct",
    }  # fmt: skip
    assert "These are the sizes of a test" in page
    assert set(written["scale"]["members"]["seconds"]["loop"]) == {"100", "1000"}
    assert written["model"]["cases"]["A"]["costs"]["shards"] >= 1


def test_measurements_of_several_runs_make_one_page(measured, tmp_path):
    _, written, _ = measured
    other = dict(written, cases={"C": written["cases"]["A"]}, scale={})
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, told in zip(paths, (written, other), strict=True):
        path.write_text(json.dumps(told))
    page = tmp_path / "page.md"
    done = command("benchmarks.suite", "--from", *map(str, paths), f"--page={page}")
    assert done.returncode == 0, done.stderr
    assert page.read_text().index("### A") < page.read_text().index("### C")


def test_no_process_is_left(measured):
    from benchmarks.suite.processes import tree

    assert not [pid for pid in tree(os.getpid()) if _runs_the_suite(pid)]


def _runs_the_suite(pid):
    try:
        return b"benchmarks.suite.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_unknown_names_are_refused():
    for flag, known in (("--cases", "'A', 'B'"), ("--ways", "'jit', 'loop'")):
        done = command("benchmarks.suite", flag, "A", "Z")
        assert done.returncode == 2
        assert f"expected some of [{known}" in done.stderr


# --- the bar


def rows_of(**seconds):
    rows = [{"way": way.replace("_", "-"), "seconds": value} for way, value in seconds.items()]
    return {"rows": rows}


def test_the_bar_on_numbers_that_are_known():
    from benchmarks.suite import bar

    cases = {
        "A": rows_of(jit=0.2, loop=0.1, local=0.11, direct=1.2),
        "B": rows_of(jit=1.0, loop=0.5, local=0.5, direct=0.6, batch=1.3),
        "G": rows_of(
            loop=0.1, local=9.0, direct=9.0, dask_2=1.0, local_plain=7.0, direct_plain=6.0
        ),
        "L": rows_of(loop=11.0, local=11.0, direct=12.0, dask_2=11.5, ray_2=13.0),
    }
    met = {line["key"]: line["met"] for line in bar.lines(cases)}
    assert met == {
        "A direct": False, "A local": False, "A jit": True, "A jit-direct": False,
        "B direct": True, "B local": True, "B jit": True, "B jit-direct": True, "B batch": True,
        "G exact": True, "G exact-direct": False, "L dask-2": False, "L ray-2": True,
    }  # fmt: skip
    standings = {(case, way): ratio for case, way, ratio in bar.standings(cases)}
    assert standings["G", "dask-2"] == pytest.approx(1 / 9)
    assert bar.exact_over_plain(cases) == {"G": {"local": (9.0, 7.0), "direct": (9.0, 6.0)}}


def test_reasons_are_read_by_key_and_what_has_none_is_told(tmp_path):
    from benchmarks.suite import bar

    path = tmp_path / "reasons.txt"
    path.write_text("# a remark\n\nA local: threads: two of them\n")
    assert bar.reasons(path) == {"A local": "threads: two of them"}
    lines = bar.lines({"A": rows_of(loop=0.1, local=0.2, direct=9.0)})
    assert bar.untold(lines, bar.reasons(path)) == ["A direct"]
    path.write_text("no colon\n")
    with pytest.raises(ValueError, match="line 1: found 'no colon', expected 'A direct: reason'"):
        bar.reasons(path)


def test_reasons_in_the_repository_can_be_read():
    from benchmarks.suite import bar

    assert all(bar.reasons().values())


# --- the model on paper


def costs(**changed):
    from benchmarks.suite.model import Costs

    usual = {"shards": 64, "passes": 1, "shard": 0.5, "merge": 0.0, "round": 0.0}
    return Costs(**usual | {"broadcast": 0.0, "partial": 0.0} | changed)


def test_without_merges_and_rounds_workers_divide_the_time():
    from benchmarks.suite import model

    for workers in (1, 2, 64):
        assert sum(model.seconds(costs(), workers).values()) == pytest.approx(32 / workers)
    assert sum(model.seconds(costs(), 1000).values()) == 0.5
    assert sum(model.seconds(costs(passes=3), 1, times_larger=10).values()) == 960.0


def test_merges_and_broadcasts_as_the_formulas_say():
    from benchmarks.suite import model

    parts = model.seconds(costs(merge=0.01, partial=2.5e9, broadcast=1.25e9, round=3.0), 32)
    levels = math.ceil(math.log(32, 16))
    assert levels == 2
    assert parts["merges"] == pytest.approx(2 * 0.01 + levels * 16 * (0.01 + 2.0))
    assert parts["broadcast"] == pytest.approx(math.ceil(math.log2(33)))
    assert parts["round"] == 3.0
    assert model.seconds(costs(broadcast=1.25e9), 1)["broadcast"] == 0.0
    assert model.seconds(costs(merge=1.0, shards=0), 16)["merges"] == 16.0


# --- processes


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_memory_of_a_process_and_its_children_is_seen():
    from benchmarks.suite.processes import Peak, end, known, memory_mib, tree

    code = "import subprocess, sys; x = b'1' * (64 << 20)\n"
    inner = "x = b'1' * (32 << 20); print(1, flush=True); input()"
    code += f"subprocess.run([sys.executable, '-c', {inner!r}])"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
    try:
        process.stdout.readline()
        members, peak = tree(process.pid), Peak(process.pid, 0.01)
        with peak.watched():
            pass
        assert len(members) == 2
        assert 96 < memory_mib(members) < 200
        assert peak.mib > 96
    finally:
        end({process.pid: 0})  # another process of that number
        assert process.poll() is None
        end(known(tree(process.pid)))
        process.communicate()
    assert memory_mib(members) == 0.0


def test_the_script_for_a_gpu_runs_on_what_there_is(tmp_path):
    path = tmp_path / "gpu.json"
    done = command(
        "benchmarks.suite.gpu", "--small", "--cases", "A", "--seconds=0.01", f"--json={path}"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(path.read_text())
    assert [row["way"] for row in told["rows"]] == ["jit", "loop", "local", "direct"]
    assert told["bandwidth"] > 0
    assert all(row["difference"] < 1e-6 and row["rate"] > 0 for row in told["rows"])


def test_without_a_gpu_the_script_for_one_refuses():
    done = command("benchmarks.suite.gpu")
    assert done.returncode != 0
    assert "found cpu as JAX's device, expected gpu" in done.stderr
