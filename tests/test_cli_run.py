# ruff: noqa: F811
"""`beamjax run`, `verify`, `explain` and `bench`, against the functions that they call."""

import json
import subprocess
import sys

import html_checks
import jax
import numpy as np
import pytest
from command_lines import LOSS, N, folder, json_of  # noqa: F401 (a fixture)

import beamjax
from beamjax import cli, execution
from beamjax.commands import arguments as command_arguments
from beamjax.commands.bench import in_units


def programs(folder):
    import programs_here

    return programs_here


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_the_same_bits_as_run(folder, runner, capsys):
    argv = ["run", *LOSS, "--runner", runner, "--shard_size=16", "--out", "out.npz"]
    assert cli.main(argv) == 0
    told = capsys.readouterr().out
    assert "result['weights']  float32[3]  [1. 1. 1.]" in told
    assert f"loss on {runner}" in told
    fn = programs(folder).loss
    data = [np.ones(3, np.float32), np.load("x.npy"), np.load("y.npy")]
    expected = beamjax.run(fn, *data, runner=runner, options={"shard_size": 16})
    with np.load("out.npz") as found:
        assert set(found) == {"loss", "weights"}
        for name, leaf in expected.items():
            assert found[name].dtype == leaf.dtype
            assert found[name].tobytes() == np.asarray(leaf).tobytes()


def test_a_report_of_a_run(folder, capsys):
    assert cli.main(["run", *LOSS, "--runner=local", "--report=run.html"]) == 0
    page = html_checks.parsed((folder / "run.html").read_text(encoding="utf-8"))
    assert page.data["run"]["program"] == "loss"
    assert page.data["run"]["progress"]["done"]["members"] == N


def test_json_is_all_there_is_on_stdout(folder, capsys):
    argv = ["run", *LOSS, "--runner=local", "--shard-size=8"]
    status, found, _ = json_of(capsys, *argv)
    assert status == 0
    assert found["ok"]
    assert found["program"] == "loss"
    assert found["runner"] == "local"
    assert found["progress"]["done"]["members"] == N
    assert found["progress"]["done"]["shards"] == 5
    assert [leaf["name"] for leaf in found["result"]] == ["loss", "weights"]
    assert found["result"][1] == {
        "name": "weights", "dtype": "float32", "shape": [3], "value": [1, 1, 1],
    }  # fmt: skip


def test_what_programs_print_and_warn(folder, capsys, recwarn):
    argv = ["run", "programs_here:told", "--arg", "x=range:3", "--runner=local"]
    status, found, told = json_of(capsys, *argv)
    assert status == 0
    assert found["warnings"] == ["be told"]
    assert "printed" in told
    argv = ["run", "programs_here:chosen", "--factory", "--static=name=told", "--runner=local",
            "--arg=x=range:3"]  # fmt: skip
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("chosen told\nprinted\nresult  int32[]  3\n")


def test_arguments_by_position_and_by_name_alone(folder, capsys):
    argv = ["run", "programs_here.py:loss", "--arg", "0=[1.0, 1.0, 1.0]", "--arg", "2=npy:y.npy"]
    argv += ["--arg", "1=parts/*.npy", "--arg", "scale=2.5", "--static", "power=1"]
    status, found, _ = json_of(capsys, *argv, "--runner=local")
    assert status == 0
    expected = programs(folder).loss(
        np.ones(3, np.float32), np.load("x.npy"), np.load("y.npy"), power=1, scale=2.5
    )
    np.testing.assert_allclose(found["result"][0]["value"], expected["loss"], rtol=1e-6)
    argv = ["run", "programs_here.py:total", "--arg=1=range:4", "--arg=0=range:4", "--runner=local"]
    status, found, _ = json_of(capsys, *argv)
    assert [leaf["value"] for leaf in found["result"]] == [6, 6]


def test_methods_and_factories(folder, capsys):
    argv = ["run", "programs_here:Model.mean", "--arg", "x=range:5", "--runner=local"]
    assert json_of(capsys, *argv)[1]["result"][0]["value"] == 2
    argv = ["run", "programs_here:prepared", "--factory", "--runner=local"]
    found = json_of(capsys, *argv)[1]["result"]
    assert [leaf["name"] for leaf in found] == ["0", "1"]
    assert found[1]["value"] == 9


def test_placed_results_in_a_folder(folder, capsys):
    argv = ["run", "programs_here:prepared", "--factory", "--keep=placed", "--out=kept"]
    status, found, _ = json_of(capsys, *argv, "--runner=local")
    assert status == 0
    kept = beamjax.open_placed(found["result"][0]["folder"])
    assert np.asarray(kept).tolist() == list(range(0, 20, 2))
    assert np.load("kept/1.npy") == 9
    argv = ["run", "programs_here:embed", "--arg", 'w={"scale": 3}', "--arg", "x=kept/0"]
    status, found, _ = json_of(capsys, *argv, "--runner=local")
    assert found["result"][1]["value"] == 18


def test_a_result_is_an_argument_of_the_next_run(folder, capsys):
    assert cli.main(["run", *LOSS, "--runner=local", "--out=out.npz"]) == 0
    argv = ["run", "programs_here:total", "--arg", "0=out.npz#at=weights", "--runner=local"]
    capsys.readouterr()
    assert json_of(capsys, *argv)[1]["result"][0]["value"] == 3
    assert cli.main(["run", *argv[1:], "--out=one.npy"]) == 0
    assert np.load("one.npy") == np.float32(3)


def test_workers_read_big_files_by_themselves(folder, capsys, monkeypatch):
    monkeypatch.setattr(command_arguments, "MAP_BYTES", 1)
    expected = json_of(capsys, "run", *LOSS, "--runner=local")[1]["result"]
    sources = []
    from_npy = beamjax.from_npy
    monkeypatch.setattr(beamjax, "from_npy", lambda path: sources.append(path) or from_npy(path))
    found = json_of(capsys, "run", *LOSS, "--runner=local")[1]["result"]
    assert [str(path).rpartition("/")[2] for path in sources] == ["x.npy", "y.npy"]
    assert found == expected
    # As a server value it stays an array.
    sources.clear()
    np.save("weights.npy", np.ones(3, np.float32))
    argv = [word.replace("w.npz#at=model/weights", "weights.npy") for word in LOSS]
    assert json_of(capsys, "run", *argv, "--runner=local")[1]["result"] == expected
    assert [str(path).rpartition("/")[2] for path in sources] == ["x.npy", "y.npy"]


def test_verify(folder, capsys):
    status, found, _ = json_of(capsys, "verify", *LOSS)
    assert status == 0
    assert [leaf["path"] for leaf in found["leaves"]] == ["['loss']", "['weights']"]
    assert all(leaf["passed"] for leaf in found["leaves"])
    assert cli.main(["verify", *LOSS, "--runner=local"]) == 0
    assert "loss on local against jit: 2 leaves" in capsys.readouterr().out


def test_a_table_in_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["verify", *LOSS, "--runner=local"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("loss on local against jit: 2 leaves")
    assert [line.split()[0] for line in told.splitlines()[2:]] == [
        "result['loss']",
        "result['weights']",
    ]


def test_verify_past_the_tolerance(folder, capsys, monkeypatch):
    run = execution.run
    wrong = lambda fn, *args, **rest: jax.tree.map(lambda x: x + 1, run(fn, *args, **rest))
    monkeypatch.setattr(execution, "run", wrong)
    status, found, _ = json_of(capsys, "verify", *LOSS, "--runner=local")
    assert (status, found["ok"]) == (1, False)
    assert not any(leaf["passed"] for leaf in found["leaves"])
    assert cli.main(["verify", *LOSS, "--runner=local", "--atol=2"]) == 0
    assert cli.main(["verify", *LOSS, "--runner=local"]) == 1
    told = capsys.readouterr().out
    assert "2 past the tolerance" in told
    assert "found 2.0, expected 1.0" in told


def test_explain(folder, capsys):
    data = [np.ones(3, np.float32), np.load("x.npy"), np.load("y.npy")]
    assert cli.main(["explain", *LOSS]) == 0
    expected = beamjax.explain(programs(folder).loss, *data)
    assert capsys.readouterr().out == f"{expected}\n"
    _, found, _ = json_of(capsys, "explain", *LOSS)
    plan = expected.to_json()
    told = ("program", "passes", "placements", "inputs", "edges", "outputs")
    assert {name: found["plan"][name] for name in told} == {name: plan[name] for name in told}
    assert cli.main(["explain", *LOSS, "--mermaid"]) == 0
    assert capsys.readouterr().out == f"{expected.to_mermaid()}\n"
    _, found, _ = json_of(capsys, "explain", *LOSS, "--runner=Dataflow")
    assert found["plan"]["memory"]["where"] == "Dataflow, processes of 12 threads"
    for stage in ("staged", "flat", "placed", "graph"):
        status, found, _ = json_of(capsys, "explain", *LOSS, "--stage", stage)
        assert (status, found["stage"]) == (0, stage)
        assert "reduce" in found["text"]
    assert cli.main(["explain", *LOSS, "--html=plan.html"]) == 0
    assert (folder / "plan.html").read_text() == expected.to_html()


def test_bench(folder, capsys):
    status, found, _ = json_of(capsys, "bench", *LOSS, "--runner=local", "--repeat=2")
    assert status == 0
    assert [row["runner"] for row in found["runs"]] == ["jit", "local"]
    for row in found["runs"]:
        assert len(row["seconds"]) == 2
        assert row["best"] == min(row["seconds"])
        assert row["once"] == pytest.approx(max(0, row["first"] - row["median"]))
    assert found["runs"][0]["times_jit"] == 1
    argv = ["bench", *LOSS, "--runner=local", "--runner=DirectRunner", "--repeat=1", "--no-jit"]
    assert cli.main(argv) == 0
    told = capsys.readouterr().out
    assert "without jit: --no-jit" in told
    assert all(f"\n  {name}" in told for name in ("local", "DirectRunner"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (1, "1.00 s"), (0.04567, "45.7 ms"), (12e-6, "12.0 us"), (123, "123 s")],
)
def test_units(seconds, text):
    assert in_units(seconds) == text


def test_as_a_process_of_its_own_with_workers(folder):
    """The function calls back to Python, so it travels to the processes of the workers by value."""
    argv = ["run", "programs_here.py:told", "--arg", "x=range:30", "--direct_num_workers", "2"]
    argv += ["--direct_running_mode", "multi_processing", "--shard_size", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "beamjax", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"][0]["value"] == 435
