"""Folders and files in which another user may have written: refused, and nothing of them is run."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.commands import cli
from beamjax.errors import (
    ArrayFormatError,
    BeamjaxError,
    CheckpointError,
    OptionsError,
    SourceError,
)
from beamjax.storage import records

X = np.ones((64, 2), np.float32)


@bj.program(placements={"rows": None})
def double(x):
    return bj.map_fn(lambda v: v * 2, x)


@bj.program(placements={"rows": None})
def total(x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, x))


@bj.program(placements={"rows": None})
def fit(w, x):
    return jax.lax.scan(lambda w, n: (w + bj.reduce_mean(x), None), w, jnp.arange(3))[0]


@pytest.fixture
def wide(tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def run(program, *args, **options):
    return bj.run(program, *args, runner="local", options=options)


NAMES = ["job_folder", "cache", "checkpoint", "results_folder", "work_folder"]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_options_name_folders_of_this_user_alone(name, inside, wide):
    folder = wide / "inside" if inside else wide
    with pytest.raises(OptionsError, match=rf"^{name}: found .*others can write to {wide} "):
        run(total, X, keep="placed", **{name: str(folder)})
    assert not list(wide.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_the_temporary_folder_may_be_shared_if_it_is_sticky(name, wide):
    wide.chmod(0o1777)
    own = wide / "own"
    more = {"keep": "placed"} if name == "results_folder" else {}
    assert run(double if more else total, X, **{name: str(own)}, **more) is not None
    if name != "work_folder":
        with pytest.raises(OptionsError, match=f"^{name}: .*others can write to {wide} "):
            run(total, X, **{name: str(wide)}, **more)


def test_jobs_and_results_in_folders_of_others_are_not_opened(tmp_path, capsys):
    placed = run(double, X, keep="placed", job_folder=str(tmp_path / "wide" / "job"))
    (tmp_path / "wide").chmod(0o777)
    job = str(tmp_path / "wide" / "job")
    with pytest.raises(OptionsError, match=r"^open_job: .*others can write to .*wide \(mode 0777"):
        bj.open_job(job)
    with pytest.raises(OptionsError, match=r"^open_placed: .*others can write to .*wide "):
        bj.open_placed(placed.folder)
    for command in ("show", "cancel", "resume", "replay"):
        assert cli.main(["jobs", command, job]) == 2
        assert "others can write to" in capsys.readouterr().err
    assert cli.main(["jobs", "list", str(tmp_path / "wide")]) == 0
    assert "not trusted" in capsys.readouterr().out


@pytest.mark.parametrize("stem", ["../../victim", "/victim", "", "a/b", 7])
def test_results_name_files_of_their_folder(stem, tmp_path):
    placed = run(double, X, keep="placed", results_folder=str(tmp_path / "results"))
    victim = tmp_path / "victim-0-64.npy"
    np.save(victim, X * 7)
    manifest = os.path.join(placed.folder, "placed.json")
    with open(manifest) as file:
        record = json.load(file) | {"stem": stem}
    with open(manifest, "w") as file:
        json.dump(record, file)
    with pytest.raises(BeamjaxError):
        bj.open_placed(placed.folder)
    assert victim.exists()


def test_a_list_of_files_that_is_deep_or_long_is_damaged(tmp_path):
    for text in (b"[" * 100_000, b'{"a":' * 500 + b"0" + b"}" * 500, b" " * (2**24 + 1)):
        (tmp_path / "placed.json").write_bytes(text)
        with pytest.raises(ArrayFormatError, match=r"placed\.json: found .*JSON"):
            bj.open_placed(tmp_path)


def test_a_lock_that_is_a_link_truncates_nothing(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "lock").symlink_to(precious)
    with pytest.raises(CheckpointError, match=r"checkpoint: cannot be written .*lock"):
        run(fit, np.zeros(2, np.float32), X, checkpoint=str(tmp_path / "checkpoint"))
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("kind", ["fifo", "zero", "loop"])
def test_an_entry_of_the_cache_that_is_no_file_is_passed_over(kind, tmp_path):
    options = {"cache": str(tmp_path / "cache"), "shard_size": 16}
    expected = run(total, X, **options)
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert entries
    for entry in entries:
        entry.unlink()
        if kind == "fifo":
            os.mkfifo(entry)
        else:
            entry.symlink_to("/dev/zero" if kind == "zero" else entry)
    start = time.monotonic()
    np.testing.assert_array_equal(run(total, X, **options), expected)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_a_record_that_is_no_file_is_an_error(kind, tmp_path):
    run(total, X, job_folder=str(tmp_path / "job"))
    for name in ("state", "result"):
        path = tmp_path / "job" / f"{name}.record"
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(BeamjaxError):
            bj.open_job(tmp_path / "job").result(timeout=5)


ESCAPES = "\x1b]0;title\x07\x1b[31mred\nstate    done"


def test_text_of_a_record_does_not_control_the_terminal(tmp_path, capsys):
    folder = tmp_path / "job"
    total = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(x))
    total.__name__ = total.__qualname__ = ESCAPES
    run(total, X, job_folder=str(folder))
    job = bj.open_job(folder)
    assert "\x1b" not in repr(job)
    for words in (["list", str(tmp_path)], ["show", str(folder)]):
        assert cli.main(["jobs", *words]) == 0
        out = capsys.readouterr().out
        assert r"\x1b[31mred" in out
        assert "\x1b" not in out
        assert "\nstate    done" not in out.replace("\nstate     done", "")


def test_errors_of_a_record_do_not_control_the_terminal(tmp_path, capsys):
    folder = tmp_path / "job"
    run(total, X, job_folder=str(folder))
    try:
        raise SourceError(f"{ESCAPES}\u202e")
    except SourceError as error:
        found = records.error_record(error)
    state = {"state": "failed", "error": found | {"traceback": ESCAPES}}
    (folder / "state.record").write_bytes(records.encode(state))
    with pytest.raises(SourceError, match=r"\\x1b\[31mred\nstate") as caught:
        bj.open_job(folder).result()
    assert "\x1b" not in f"{caught.value.failure.traceback}{caught.value}{caught.value.__cause__}"
    assert cli.main(["jobs", "show", str(folder)]) == 0
    assert not set("\x1b\x07\u202e") & set(capsys.readouterr().out)


def test_replay_shows_the_command_before_it_runs(tmp_path, monkeypatch):
    code = "import beamjax as bj\n@bj.program(placements={'rows': None})\ndef f(x):\n"
    code += "    return bj.reduce_sum(bj.map_fn(lambda v: v / v, x))\nprint('loaded', flush=True)\n"
    (tmp_path / "program.py").write_text(code)
    np.save(tmp_path / "x.npy", X)
    beamjax = [sys.executable, "-m", "beamjax"]
    shared = {"cwd": tmp_path, "stderr": subprocess.STDOUT, "stdout": subprocess.PIPE, "text": True}
    words = ["run", "program.py:f", "--arg=x=x.npy", "--runner=local", "--job_folder=job"]
    done = subprocess.run([*beamjax, *words], **shared)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([*beamjax, "jobs", "replay", "job", "--member=0"], **shared)
    assert done.stdout.startswith(f"beamjax: in {tmp_path}: beamjax run program.py:f"), done.stdout
    assert "loaded" in done.stdout
