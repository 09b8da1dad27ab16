"""The command `beamjax`."""

import json
import subprocess
import sys

import pytest

import beamjax
from beamjax import cli
from beamjax.pipelines import flink_cluster


def test_help_names_all_commands_and_imports_none(capsys):
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in cli.COMMANDS)
    code = "import sys; from beamjax import cli; cli.main(['--version']);"
    code += "print('apache_beam' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["beamjax", beamjax.__version__, "False"]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["flink"], ["flink", "up", "--slots=x"]])
def test_wrong_arguments(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "usage: beamjax" in capsys.readouterr().err


def test_a_reader_that_has_enough():
    code = "import sys; from beamjax import cli; sys.exit(cli.main(['jobs', 'list']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() == 1


def test_errors_are_one_line_without_a_traceback(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert cli.main(["prism", "install"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("beamjax: beamjax prism install: found no `go` on PATH; install Go")


def test_flink_where_nothing_runs(tmp_path, capsys):
    folder = str(tmp_path / "cluster")
    assert cli.main(["flink", "status", "--folder", folder]) == 1
    assert "not ready" in capsys.readouterr().out
    assert cli.main(["flink", "status", "--json", "--folder", folder]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"folder": folder, "healthy": False, "processes": {}}
    assert cli.main(["flink", "down", "--folder", folder]) == 0
    assert "nothing ran" in capsys.readouterr().out


def test_flink_up_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert cli.main(["flink", "up", "--folder", str(tmp_path / "cluster")]) == 1
    assert "found no `mvn` on PATH; install Apache Maven" in capsys.readouterr().err
    assert flink_cluster.read(tmp_path / "cluster") is None
