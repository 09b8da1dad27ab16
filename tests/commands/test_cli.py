# ruff: noqa: F811
"""The command `beamjax`: command lines, functions by their names, answers and completion."""

import json
import math
import os
import subprocess
import sys
import warnings

import click
import jax
import numpy as np
import pytest
from command_lines import LOSS, folder, json_of  # noqa: F401 (a fixture)

from beamjax._text import listed
from beamjax.commands import answers, cli
from beamjax.commands.answers import Answer
from beamjax.commands.calls import find_target, functions_of, make_call, parsed
from beamjax.commands.functions import run
from beamjax.errors import Failure, JobCancelledError, OptionsError, WorkerError
from beamjax.options import OWN, beam_flags
from beamjax.pipelines.clusters import flink_cluster

HERE = "programs_here.py:"

# --- command lines

WRONG = [
    (["rnu"], 2, "No such command 'rnu'. Did you mean 'run'?"),
    (["flink"], 2, "Usage: beamjax flink"),
    (["run"], 2, "Missing argument 'TARGET'"),
    (["jobs", "list", "--jsn"], 2, "No such option '--jsn'. Did you mean '--json'?"),
    (["run", *LOSS, "--runner", "DirctRunner"], 2, "found 'DirctRunner', expected 'local'"),
    (["run", *LOSS, "--shard_sise=8"], 2, "did you mean 'shard_size'?"),
    (["run", *LOSS, "--otu=x.npz"], 2, "did you mean 'out'?"),
    (["run", *LOSS, "--qqqqq=8"], 2, "found 'qqqqq', expected an option of beamjax"),
    (["run", *LOSS, "--reduction=slow"], 2, "'slow' is not one of 'exact', 'fast'"),
    (["run", *LOSS, "--shard-size=7"], 2, "shard_size: found '7', expected a positive multiple"),
    (["run", *LOSS, "w.npz"], 2, "found 'w.npz', which belongs to no flag"),
    (["run", *LOSS, "--out=x.txt"], 2, "expected a name that ends in .npz, or in .npy"),
    (["run", *LOSS, "--out=there/x.npz"], 2, "there is no folder"),
    (["run", *LOSS, "--out=x.npz", "--keep=placed"], 2, "with --keep placed it is a folder"),
    (["run", *LOSS, "--out=x.npy", "--runner=local"], 2, "found 2 leaves, expected one"),
    (["run", *LOSS, "--results_folder=x"], 2, "add keep='placed'"),
    (["run", "--direct_num_workers", "2", *LOSS], 2, "as TARGET, which comes before the flags"),
    (["verify", *LOSS, "--out=x.npz"], 2, "found 'out', expected an option"),
    (["explain", *LOSS, "--html=there/x.html"], 2, "--html there/x.html: cannot write it"),
    (["jobs", "list", "none"], 2, "none: found no such folder"),
    (["jobs", "list", "gs://bucket/jobs"], 2, "folders at URLs can't be listed"),
    (["run", f"{HERE}broken", "--arg=x=1"], 1, "KeyError: 'nobody'"),
    (["run", f"{HERE}embed", "--arg=w=1", "--arg=x=w.npz"], 1, "beamjax: "),
    (["run", *LOSS[:-1], "y=three.npy"], 1, "beamjax: "),
    (["run", f"{HERE}prepared", "--row=3"], 2, "did you mean 'rows'?"),
    (["run", f"{HERE}prepared", "--rows=abc"], 2, "--rows: found 'abc', expected a number"),
    (["run", f"{HERE}prepared", "--reverse=3"], 2, "--reverse: found '3', expected true or false"),
    (["run", f"{HERE}typed", "--count=2.5"], 2, "--count: found '2.5', expected an integer"),
    (["run", f"{HERE}typed", "--count"], 2, "--count: found '', expected an integer"),
    (["run", *LOSS, "--report=x.pdf"], 2, "report: found 'x.pdf', expected the path or URL of a"),
    (["run", f"{HERE}nothing"], 2, "called as a job, and it returned 3"),
]


def test_wrong_command_lines(folder, capsys):
    faults = []
    for argv, status, message in WRONG:
        found = cli.main(argv)
        captured = capsys.readouterr()
        right = (found, message in captured.err, captured.out) == (status, True, "")
        if not right or "beamjax/commands" in captured.err:
            faults.append((argv, found, captured))
    assert faults == []


@pytest.mark.parametrize("command", ["run", "verify", "explain"])
def test_errors_as_json_and_help(folder, command, capsys):
    status, found, _ = json_of(capsys, command, f"{HERE}broken", "--arg=x=1")
    assert (status, found["ok"], found["error"]["type"]) == (1, False, "KeyError")
    status, found, _ = json_of(capsys, command, f"{HERE}loss")
    assert (status, found["error"]["type"]) == (2, "OptionsError")
    assert "add --arg weights=... --arg x=... --arg y=..." in found["error"]["message"]
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in OWN if f"--{name} " not in text] == []
    for choices in ("reduction [exact|fast]", "on_error [raise|drop]", "progress [true|false]"):
        assert f"--{choices}" in text
    assert "exit codes: 0 success; 1 the run failed" in text
    assert ".parquet" in text


def test_options_with_underscores_or_dashes_and_those_of_beam(folder):
    def options_of(*argv):
        return make_call(parsed(run, ["run", *LOSS, *argv])).options

    found = options_of("--shard-size", "64", "--overwrite=true", "--direct_num_workers", "2")
    assert (found.shard_size, found.overwrite) == (64, True)
    assert found.beam == ("--direct_num_workers", "2")
    found = options_of("--shard-size", "64", "--direct_num_workers", "2", "--", "--beam_only=1")
    assert found.shard_size == 64
    assert beam_flags(found.beam) == {"direct_num_workers": 2, "beam_only": "1"}
    # What comes after two dashes is not looked at.
    assert cli.main(["run", *LOSS, "--runner=local", "--", "--shard_sise=9"]) == 0


def test_a_reader_that_has_enough():
    code = "import sys; from beamjax.commands import cli; sys.exit(cli.main(['jobs', 'list']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no such device")
@pytest.mark.parametrize("argv", [["jobs", "list"], ["jobs", "list", "--json"], ["doctor"]])
def test_stdout_that_cannot_be_written(argv):
    code = (
        "import sys; from beamjax.commands import cli, doctor; "
        f"doctor.examine = lambda *_: [doctor.check_python()]; sys.exit(cli.main({argv}))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    wrong = "Error: cannot write to stdout (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, wrong)


def test_clusters_where_nothing_runs_or_is_installed(monkeypatch, tmp_path, capsys):
    place = str(tmp_path / "cluster")
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert cli.main(["flink", "up", "--folder", place]) == 1
    assert "found no `mvn` on PATH; install Apache Maven" in capsys.readouterr().err
    assert flink_cluster.read(place) is None
    assert cli.main(["prism", "where"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(str(tmp_path / "cache/prism-"))
    assert err == "beamjax: not built yet; `beamjax prism install` builds it\n"
    assert list((tmp_path / "cache").glob("prism-*/*")) == []
    assert cli.main(["prism", "install"]) == 1
    assert capsys.readouterr().err.startswith("beamjax: beamjax prism install: found no `go` on")


# --- functions by their names


def test_functions_by_their_names(folder):
    for text in ("programs_here:{}", f"{HERE}{{}}", f"./{HERE}{{}}", f"{folder}/{HERE}{{}}"):
        assert find_target(text.format("loss")).__name__ == "loss"
        assert find_target(text.format("Model.mean")).__name__ == "mean"
    assert find_target("json.decoder:JSONDecoder.decode").__name__ == "decode"
    (folder / "json.py").write_text("def fn():\n    return 1\n")  # The name of another module.
    assert find_target("json.py:fn")() == 1
    assert sys.modules["json"] is json
    assert hasattr(json, "dumps")
    for number in (1, 20):  # A file is read again.
        (folder / "json.py").write_text(f"def fn():\n    return {number}\n")
        assert find_target("json.py:fn")() == number
    assert "dumps" in functions_of(json)
    # Its own come before those that it imports, such as `Answer`.
    assert functions_of(sys.modules[__name__])[0] == "completed"


ABSENT = [
    ("programs_here:los", "did you mean 'loss'?"),
    ("programs_here:Model.mea", "functions there: mean; did you mean 'mean'?"),
    ("programs_here:NUMBER", "found int after the colon"),
    ("programs_her:loss", "programs_her: found no such module"),
    ("programs_her:loss", "did you mean 'programs_here'?"),
    ("nobody_knows:loss", "found no such module, expected module:function or file.py:function"),
    ("programs_her.py:loss", "found no such file; did you mean 'programs_here.py'?"),
    ("programs_here", "expected module:function or file.py:function; functions there: Model"),
    ("programs_here.py:", "functions there: Model, broken"),
    ("x.npy:f", "x.npy: found no such module"),
    ("./x.npy:f", "./x.npy: found no Python file"),
    ("2", "2: found no such module, expected module:function or file.py:function"),
    ("a b:loss", "a b: found no such module"),
    ("..:loss", "..: found no such module"),
]


def test_functions_that_are_not_there(folder, capsys):
    for text, message in ABSENT:
        with pytest.raises(OptionsError) as raised:
            find_target(text)
        assert message in str(raised.value)
    assert listed(map(str, range(14))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"
    (folder / "bad_here.py").write_text("import json\nimport nobody_knows_this\n")
    with pytest.raises(ModuleNotFoundError, match="nobody_knows_this"):
        find_target("bad_here:fn")
    assert cli.main(["run", "bad_here.py:fn"]) == 1
    text = capsys.readouterr().err
    assert 'bad_here.py", line 2, in <module>' in text
    assert "ModuleNotFoundError: No module named 'nobody_knows_this'" in text
    assert "importlib" not in text


# --- answers


def ended(work, *flags):
    """The exit status of a command that does this work."""
    return click.Command("work", callback=answers.answers(work), params=PARAMS).main(
        flags, standalone_mode=False
    )


PARAMS = answers.answers(lambda: Answer({})).__click_params__


def failing(error):
    def work():
        raise error

    return work


def test_an_answer_as_text_or_json(capsys):
    def work():
        print("by the program")
        warnings.showwarning(UserWarning("careful"), UserWarning, "file", 1)
        return Answer({"numbers": (1, math.nan, [math.inf])}, "the answer", 1)

    with pytest.warns(UserWarning, match="careful"):
        assert ended(work) == 1
    assert capsys.readouterr().out == "by the program\nthe answer\n"
    with pytest.warns(UserWarning, match="careful"):
        assert ended(work, "--json") == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out, parse_constant=pytest.fail)
    assert found == {"ok": False, "numbers": [1, "nan", ["inf"]], "warnings": ["careful"]}
    assert "by the program" in captured.err


def test_errors(capsys):
    wrong = WorkerError("it broke")
    wrong.failure = Failure("map_0", 3, (24, 31), "here")
    wrong.add_note("The folder is kept")
    for error, status, message in (
        (OptionsError("no such option"), 2, "beamjax: no such option\n"),
        (wrong, 1, "beamjax: it broke\nThe folder is kept\n"),
        (JobCancelledError("cancelled"), 1, "beamjax: cancelled\n"),
        (KeyboardInterrupt(), 130, "beamjax: interrupted\n"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ):
        assert ended(failing(error)) == status
        captured = capsys.readouterr()
        assert (message in captured.err, captured.out) == (True, "")
        assert ended(failing(error), "--json") == status
        found = json.loads(capsys.readouterr().out)["error"]
        assert (found["type"], found["message"]) == (type(error).__name__, str(error))
        if error is wrong:
            assert (found["failure"]["step"], found["failure"]["members"]) == ("map_0", [24, 31])
            assert found["notes"] == ["The folder is kept"]
    assert ended(failing(OptionsError("no")), "--traceback") == 2
    text = capsys.readouterr().err
    assert "answers.py" in text
    assert "beamjax.errors.OptionsError: no" in text


def users(x):
    return np.linalg.inv(x) + jax.numpy.ones(3) @ jax.numpy.ones(4)


def test_tracebacks_have_frames_of_the_user_alone():
    def error_of(fn):
        try:
            fn()
        except Exception as error:
            return "".join(answers.user_frames(error))

    def caused():
        try:
            jax.numpy.ones(3) @ jax.numpy.ones(4)
        except TypeError as error:
            raise ValueError("mine") from error

    for text, *parts in (
        (error_of(lambda: jax.jit(users)(np.eye(3, dtype="float32"))), "return np.linalg.inv(x)"),
        (error_of(caused), "ValueError: mine", "direct cause"),
    ):
        assert [part for part in parts if part not in text] == []
        assert "/jax/" not in text
        assert "removed its internal frames" not in text


# --- completion


def completed(*words):
    """What a shell offers for the last of the words of a command line."""
    env = os.environ | {
        "_BEAMJAX_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["beamjax", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "from beamjax.commands import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


def test_completion():
    assert completed("") >= {"run", "verify", "explain", "jobs", "doctor", "flink"}
    assert completed("run", "--shard") >= {"--shard_size", "--shard_timeout"}
    assert completed("run", "--runner", "Pri") == {"PrismRunner"}
    assert completed("run", "--on_error", "") == {"raise", "drop"}
    assert completed("jobs", "") >= {"list", "show", "cancel", "resume"}
