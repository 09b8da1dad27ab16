"""The soak script knows a right run from a wrong one; the kills themselves need a cluster."""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "faults.py"


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    module = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["faults"]


def test_how_a_run_ended(faults, tmp_path):
    right = {"bits": "right"}
    for number, (output, ended, saved, outcome) in enumerate((
        (right, True, 7, "same bits"),
        ({"bits": "other"}, True, 7, "WRONG"),
        (right, True, 9, "ROUNDS RUN AGAIN"),
        ({"error": "WorkerError: it says why"}, True, 3, "named error"),
        ({"begins": True}, True, 3, "UNNAMED ERROR"),
        ({}, True, 3, "UNNAMED ERROR"),
        (right, False, 7, "HUNG"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"{saved:08}.checkpoint").touch()
        soak = faults.Soak(None, folder, 1, 1.0, bits="right", saved=7)
        run = types.SimpleNamespace(told=lambda output=output: output)
        assert soak.judge(run, ended, folder)[0] == outcome


def test_kinds_and_moments_come_from_the_seed(faults):
    flags = argparse.Namespace(kinds=["worker", "launcher"], kills_per_run=3)
    usual = {False: 10.0, True: 20.0}
    one, again = (faults.draws(random.Random(1), flags, usual) for _ in range(2))
    assert one == again != faults.draws(random.Random(2), flags, usual)
    assert {kill.kind for kill in one} <= set(flags.kinds)
    assert all(0 <= kill.moment <= 20 and kill.number in (0, 1) for kill in one)


def test_what_a_run_left_is_found_but_for_the_empty_folders_of_beam(faults, tmp_path):
    (tmp_path / "tmp").mkdir()
    assert faults.leftovers(tmp_path) == []
    (tmp_path / "tmp" / "x").touch()
    assert faults.leftovers(tmp_path) == ["tmp"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_a_process_that_was_left_is_found(faults, tmp_path):
    command = [sys.executable, "-c", "print(flush=True); input()"]
    assert not list(faults.strays(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": f"{tmp_path}/tmp"}, **pipes)
    try:
        process.stdout.readline()
        (found,) = faults.strays(tmp_path)
        assert f"process {process.pid}" in found
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_the_run_is_right_without_any_kill():
    command = [sys.executable, "-c", "import faults_job; faults_job.launch(2, 'local', {})"]
    path = {"PYTHONPATH": str(SCRIPT.parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["bits"]) == 64
    assert told["differs"] < 1e-5


def test_unknown_kinds_are_refused():
    command = [sys.executable, str(SCRIPT), "--kinds=worker,moon"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected some of ['worker', 'pool', 'taskmanager', 'launcher']" in done.stderr
