# ruff: noqa: F811
"""`beamjax run`, `verify` and `explain`, against the functions that they call."""

import json
import re
import subprocess
import sys

import html_checks
import jax
import numpy as np
import pytest
from command_lines import LOSS, N, folder, json_of  # noqa: F401 (a fixture)
from helpers import assert_same_bits

import beamjax
from beamjax import execution
from beamjax.commands import calls, cli


def call_of_loss():
    """The function of LOSS and its arguments."""
    import programs_here

    return programs_here.loss, np.ones(3, np.float32), np.load("x.npy"), np.load("y.npy")


def values(found):
    return [leaf["value"] for leaf in found["result"]]


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_the_same_bits_as_run(folder, runner, capsys):
    argv = ["run", *LOSS, "--runner", runner, "--shard_size=16", "--out", "out.npz"]
    assert cli.main([*argv, "--report=run.html"]) == 0
    text = capsys.readouterr().out
    assert "result['weights']  float32[3]  [1. 1. 1.]" in text
    assert f"loss on {runner}" in text
    expected = beamjax.run(*call_of_loss(), runner=runner, options={"shard_size": 16})
    with np.load("out.npz") as found:
        assert_same_bits(dict(found), expected)
    page = html_checks.parsed((folder / "run.html").read_text(encoding="utf-8"))
    assert page.data["run"]["program"] == "loss"
    assert page.data["run"]["progress"]["done"]["members"] == N


def test_what_programs_print_and_warn(folder, capsys, recwarn):
    argv = ["programs_here:told", "--arg", "x=three.npy", "--runner=local"]
    status, found, text = json_of(capsys, "run", *argv)
    assert (status, found["ok"], found["warnings"]) == (0, True, ["be told"])
    assert (found["program"], found["runner"]) == ("told", "local")
    assert found["progress"]["done"]["members"] == 3
    assert found["result"] == [{"name": "result", "dtype": "int32", "shape": [], "value": 3}]
    assert "printed" in text
    assert cli.main(["run", *argv]) == 0
    assert capsys.readouterr().out.startswith("printed\nresult  int32[]  3\n")


def test_arguments_and_jobs(folder, capsys):
    def result_of(*argv):
        status, found, _ = json_of(capsys, "run", *argv, "--runner=local")
        assert status == 0
        return found["result"]

    argv = ["programs_here.py:loss", "--arg", "weights=[1.0, 1.0, 1.0]", "--arg", "y=y.npy"]
    argv += ["--arg", "x=parts/*.npy", "--arg", "scale=2.5", "--arg", "power=1"]
    found = result_of(*argv)
    loss, *data = call_of_loss()
    expected = loss(*data, power=1, scale=2.5)["loss"]
    assert found[0]["value"] == pytest.approx(float(expected), rel=1e-6)
    assert result_of("programs_here:Model.mean", "--arg", "x=three.npy")[0]["value"] == 1
    found = result_of("programs_here:prepared")
    assert [leaf["name"] for leaf in found] == ["0", "1"]
    assert found[1]["value"] == 9
    found = result_of("programs_here:prepared", "--rows", "3", "--scale=5", "--reverse")
    assert found[0]["value"] == [0, -5, -10]
    found = result_of("programs_here:typed", "--count=3", "--name=2024", "--scale=2")
    assert [leaf["value"] for leaf in found] == [3, 4, 2]

    found = result_of("programs_here:prepared", "--keep=placed", "--out=kept")
    kept = beamjax.open_placed(found[0]["folder"])
    assert np.asarray(kept).tolist() == list(range(0, 20, 2))
    assert np.load("kept/1.npy") == 9
    # A result is an argument of the next run.
    found = result_of("programs_here:embed", "--arg", 'w={"scale": 3}', "--arg", "x=kept/0")
    assert found[1]["value"] == 18
    result_of("programs_here:Model.mean", "--arg", "x=three.npy", "--out=one.npy")
    assert np.load("one.npy") == 1


def test_workers_read_big_files_by_themselves(folder, capsys, monkeypatch):
    expected = json_of(capsys, "run", *LOSS, "--runner=local")[1]["result"]
    monkeypatch.setattr(calls, "MAP_BYTES", 1)
    sources = []
    from_npy = beamjax.from_npy
    monkeypatch.setattr(beamjax, "from_npy", lambda path: sources.append(path) or from_npy(path))
    assert json_of(capsys, "run", *LOSS, "--runner=local")[1]["result"] == expected
    # The weights are a server value: they stay an array.
    assert [str(path).rpartition("/")[2] for path in sources] == ["x.npy", "y.npy"]


def test_verify(folder, capsys, monkeypatch):
    status, found, _ = json_of(capsys, "verify", *LOSS)
    assert status == 0
    assert [leaf["path"] for leaf in found["leaves"]] == ["['loss']", "['weights']"]
    assert all(leaf["passed"] for leaf in found["leaves"])
    assert cli.main(["verify", *LOSS, "--runner=local"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("loss on local against jit: 2 leaves")
    rows = [line.split()[0] for line in text.splitlines()[2:]]
    assert rows == ["result['loss']", "result['weights']"]

    run = execution.run
    wrong = lambda fn, *args, **rest: jax.tree.map(lambda x: x + 1, run(fn, *args, **rest))
    monkeypatch.setattr(execution, "run", wrong)
    status, found, _ = json_of(capsys, "verify", *LOSS, "--runner=local")
    assert (status, found["ok"]) == (1, False)
    assert not any(leaf["passed"] for leaf in found["leaves"])
    assert cli.main(["verify", *LOSS, "--runner=local", "--atol=2"]) == 0
    assert cli.main(["verify", *LOSS, "--runner=local"]) == 1
    text = capsys.readouterr().out
    assert "2 past the tolerance" in text
    assert "found 2.0, expected 1.0" in text


def test_explain(folder, capsys):
    assert cli.main(["explain", *LOSS]) == 0
    expected = beamjax.explain(*call_of_loss())
    assert capsys.readouterr().out == f"{expected}\n"
    assert cli.main(["explain", *LOSS, "--html=plan.html"]) == 0
    # The bytes of exported bodies depend on the numbers of the lines that call the function.
    pages = (folder / "plan.html").read_text(), expected.to_html()
    assert re.sub(r"\d+", "0", pages[0]) == re.sub(r"\d+", "0", pages[1])
    capsys.readouterr()
    _, found, _ = json_of(capsys, "explain", *LOSS)
    plan = expected.to_json()
    names = ("program", "passes", "placements", "inputs", "edges", "outputs")
    assert {name: found["plan"][name] for name in names} == {name: plan[name] for name in names}
    assert cli.main(["explain", *LOSS, "--mermaid"]) == 0
    assert capsys.readouterr().out == f"{expected.to_mermaid()}\n"
    _, found, _ = json_of(capsys, "explain", *LOSS, "--runner=DataflowRunner")
    assert found["plan"]["memory"]["where"] == "DataflowRunner, processes of 12 threads"
    for stage in ("staged", "flat", "placed", "graph"):
        status, found, _ = json_of(capsys, "explain", *LOSS, "--stage", stage)
        assert (status, found["stage"]) == (0, stage)
        assert "reduce" in found["text"]


@pytest.mark.long
def test_as_a_process_of_its_own_with_workers(folder):
    """The function calls back to Python, so it travels to the processes of the workers by value."""
    np.save("x.npy", np.arange(30, dtype=np.int32))
    argv = ["run", "programs_here.py:told", "--arg", "x=x.npy", "--direct_num_workers", "2"]
    argv += ["--direct_running_mode", "multi_processing", "--shard_size", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "beamjax", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"][0]["value"] == 435
