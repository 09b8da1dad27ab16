"""The soak script knows a right run from a wrong one; the kills themselves need a cluster."""

import importlib.util
import json
import os
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


@pytest.mark.long
def test_the_run_is_right_without_any_kill():
    command = [sys.executable, "-c", "import faults_job; faults_job.launch(2, 'local', {})"]
    path = {"PYTHONPATH": str(SCRIPT.parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["bits"]) == 64
    assert found["differs"] < 1e-5
