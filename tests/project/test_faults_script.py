"""The soak script knows a right run from a wrong one; the kills themselves need a cluster."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


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
