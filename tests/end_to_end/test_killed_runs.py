"""A process that is killed at any moment: the next one gives the bits that it would have given."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "killed_run.py"
SAVED = 4 + 3 + 1
"""Rounds of both loops, and the end."""


def start(folder, runner, out, *fault):
    command = [sys.executable, str(SCRIPT), str(folder), runner, str(out), *fault]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, killed=False):
    """The lines that a process has printed at its end."""
    out, err = process.communicate(timeout=500)
    assert process.returncode == (-signal.SIGKILL if killed else 0), err
    assert "damaged" not in err
    return out.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Without any checkpoints."""
    out = tmp_path_factory.mktemp("expected") / "out.json"
    finish(start("-", "local", out))
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("writer", "reader", "fault"),
    [
        ("local", "DirectRunner", "write:5"),  # files of values, some of them
        ("DirectRunner", "local", "link:4"),
        ("DirectRunner", "DirectRunner", "sync:3"),  # before all is on the disk
        ("local", "local", "remove_files:4"),  # between a new checkpoint and the removal of others
    ],
)
def test_killed_while_a_checkpoint_is_written(writer, reader, fault, tmp_path, expected):
    out = tmp_path / "out.json"
    before = finish(start(tmp_path / "c", writer, out, fault), killed=True)
    assert not out.exists()
    assert before
    after = finish(start(tmp_path / "c", reader, out))
    assert len(before) + len(after) in (SAVED - 1, SAVED)
    assert json.loads(out.read_text()) == expected
    names = os.listdir(tmp_path / "c")
    assert not [name for name in names if name.endswith(".tmp") or name == "work"]
