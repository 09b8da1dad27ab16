"""The benchmark runs, on a few clients, and its ways agree; how fast they are is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "overhead.py"


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the script prints, and what it writes, for 30 clients of case A."""
    path = tmp_path_factory.mktemp("overhead") / "out.json"
    flags = ["--cases=A", "--rounds=2", "--seconds=0", "--scale=0.003", f"--json={path}"]
    done = run_script(*flags)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_all_ways_compute_the_same_mean_model(measured):
    _, written = measured
    rows = written["cases"]["A"]["rows"]
    assert len(rows) == 6
    assert {row["way"]: row["difference"] < 1e-6 for row in rows} == {r["way"]: True for r in rows}


def test_every_round_is_timed_and_memory_grows_from_what_the_data_takes(measured):
    _, written = measured
    for row in written["cases"]["A"]["rows"]:
        assert len(row["rounds"]) == 2
        assert 0 < min(row["rounds"]) <= row["seconds"] <= max(row["rounds"])
        assert 0 < row["start_mib"] <= row["peak_mib"]


def test_output_tells_machine_versions_shards_and_aims(measured):
    text, written = measured
    case = written["cases"]["A"]
    assert case["case"]["clients"] == 30
    assert f"{case['shard_size']} clients in a shard" in text
    for word in ("cores", "load average", "jax", "apache-beam", "x loop", "peak", "aim 1.25"):
        assert word in text


def test_unknown_case_is_refused():
    done = run_script("--cases=A,C")
    assert done.returncode == 2
    assert "found ['A', 'C'], expected some of ['A', 'B']" in done.stderr
