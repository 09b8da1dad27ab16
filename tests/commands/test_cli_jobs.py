# ruff: noqa: F811
"""`beamjax jobs`: jobs by their folders, of this and of other processes."""

import json
import os
import signal
import subprocess
import sys
import time

import html_checks
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import LOSS, folder, json_of  # noqa: F401 (a fixture)

import beamjax
from beamjax.commands import cli
from beamjax.commands.calls import Command
from beamjax.commands.jobs import read_command
from beamjax.telemetry.job_folder import JobFolder

RUN = ["run", *LOSS, "--runner=local"]


def show(capsys, job):
    """What `jobs show` gives as JSON, and as text."""
    status, found, _ = json_of(capsys, "jobs", "show", job)
    assert status == 0
    assert cli.main(["jobs", "show", job]) == 0
    return found["job"], capsys.readouterr().out


def refused(capsys, *argv):
    """What a command that is refused says."""
    assert cli.main(list(argv)) == 2
    return capsys.readouterr().err


def test_a_job_that_is_done(folder, capsys):
    argv = [*RUN, "--job_folder=jobs/7"]
    assert cli.main(argv) == 0
    result = capsys.readouterr().out.splitlines()[:2]
    job, text = show(capsys, "jobs/7")
    assert (job["state"], job["program"], job["runner"]) == ("done", "loss", "local")
    assert job["command"] == ["beamjax", *argv]
    assert read_command(JobFolder("jobs/7")) == Command(tuple(argv), str(folder))
    assert job["progress"]["done"]["members"] == 40
    assert [leaf["name"] for leaf in job["result"]] == ["loss", "weights"]
    assert "state     done" in text
    assert text.splitlines()[-2:] == result
    assert cli.main(["jobs", "show", "jobs/7", "--html=job.html"]) == 0
    assert "page      job.html" in capsys.readouterr().out
    page = html_checks.parsed((folder / "job.html").read_text(encoding="utf-8"))
    assert page.data["run"]["state"] == "done"
    wrong = refused(capsys, "jobs", "show", "jobs/7", "--html=none/job.html")
    assert "--html none/job.html: cannot write it" in wrong
    assert "the job is done" in refused(capsys, "jobs", "resume", "jobs/7")
    assert cli.main(["jobs", "cancel", "jobs/7"]) == 0
    assert capsys.readouterr().out == f"{folder}/jobs/7: done\n"
    assert "job_folder: found a job that is done" in refused(capsys, *argv)
    assert cli.main([*argv, "--overwrite=true"]) == 0
    again = Command((*argv, "--overwrite=true"), str(folder))
    assert read_command(JobFolder("jobs/7")) == again
    total = beamjax.program(rows=3)(beamjax.reduce_sum)
    options = {"job_folder": "jobs/7", "overwrite": True}
    beamjax.run(total, jnp.arange(3.0), runner="local", options=options)
    assert read_command(JobFolder("jobs/7")) is None


def test_a_job_that_failed(folder, capsys, monkeypatch):
    argv = ["run", "programs_here.py:Model.mean", "--arg=x=y.npy", "--job_folder=j"]
    with monkeypatch.context() as patch:
        patch.setattr("beamjax.jobs.results.write_result", lambda *_: 1 / 0)
        assert cli.main([*argv, "--runner=local"]) == 1
    capsys.readouterr()
    job, text = show(capsys, "j")
    assert (job["state"], job["error"]["type"]) == ("failed", "ZeroDivisionError")
    assert "error     ZeroDivisionError: division by zero" in text
    status, found, text = json_of(capsys, "jobs", "resume", "j")
    assert (status, found["ok"], found["program"]) == (0, True, "mean")
    assert f"beamjax: in {folder}: beamjax run programs_here.py:Model.mean" in text
    assert show(capsys, "j")[0]["state"] == "done"


def test_lists(folder, capsys, monkeypatch):
    assert cli.main(["jobs", "list"]) == 0
    assert capsys.readouterr().out == "no jobs in .\n"
    for number in (1, 2):
        assert cli.main([*RUN, f"--job_folder=all/{number}"]) == 0
    (folder / "all" / "other").mkdir()
    (folder / "all" / "damaged").mkdir()
    (folder / "all" / "damaged" / "job.record").write_bytes(b"nothing")
    capsys.readouterr()
    status, found, _ = json_of(capsys, "jobs", "list", "all")
    assert status == 0
    states = {os.path.basename(job["folder"]): job["state"] for job in found["jobs"]}
    assert states == {"1": "done", "2": "done", "damaged": "damaged"}
    monkeypatch.setenv("BEAMJAX_JOBS", "all")
    assert cli.main(["jobs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["JOB", "STATE", "PROGRAM", "RUNNER", "STARTED", "PROGRESS"]
    assert len(lines) == 4
    assert cli.main(["jobs", "list", "all/1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("1    done   loss")
    assert show(capsys, "2")[0]["folder"] == f"{folder}/all/2"
    assert "jobs nearby: all/1, all/2, all/damaged" in refused(capsys, "jobs", "show", "3")


FAILING = """
import jax
import beamjax as bj


def positive(v):
    if v < 0:
        raise ValueError(f"found {v}")
    return v


@bj.program(rows=None)
def total(x):
    check = lambda v: jax.pure_callback(positive, v, v, vmap_method="sequential")
    return bj.reduce_sum(bj.map_fn(check, x))
"""


def test_replay(folder, capsys, monkeypatch):
    (folder / "failing.py").write_text(FAILING, encoding="utf-8")
    x = np.arange(9, dtype=np.float32)
    x[5] = -1
    np.save("x.npy", x)
    argv = ["run", "failing.py:total", "--arg=x=x.npy", "--runner=local", "--job_folder=a b"]
    assert cli.main(argv) == 1
    assert "beamjax jobs replay 'a b' --pdb" in capsys.readouterr().err
    status, found, _ = json_of(capsys, "jobs", "replay", "a b", "--member=4")
    assert (status, found["result"][0]["value"]) == (0, 4)
    stopped = []
    monkeypatch.setattr("pdb.post_mortem", stopped.append)
    assert cli.main(["jobs", "replay", "a b", "--pdb"]) == 1
    assert "ValueError: found -1.0" in capsys.readouterr().err
    names = []
    while (trace := stopped.pop() if stopped else None) is not None:
        names.append(trace.tb_frame.f_code.co_name)
        stopped += [trace.tb_next] if trace.tb_next else []
    assert "positive" in names
    assert "one from 0 to 8" in refused(capsys, "jobs", "replay", "a b", "--member=9")


def test_jobs_that_cannot_be_resumed(folder, capsys):
    total = beamjax.program(rows=3)(beamjax.reduce_sum)
    beamjax.run(total, jnp.arange(3.0), runner="local", options={"job_folder": "j"})
    assert read_command(JobFolder("j")) is None
    job, _ = show(capsys, "j")
    assert (job["command"], job["result"][0]["value"]) == (None, 3)
    JobFolder("j").write_state("failed", ValueError("x"))
    wrong = refused(capsys, "jobs", "resume", "j")
    assert "the job was not started by `beamjax run`" in wrong
    JobFolder("j").write("command", {"argv": RUN, "cwd": "/nowhere/at/all"})
    wrong = refused(capsys, "jobs", "resume", "j")
    assert "/nowhere/at/all: the folder in which the job was started is gone" in wrong


# --- other processes

SLOW = """
import os
import time

import jax
import jax.numpy as jnp

import beamjax as bj


def wait(x):
    time.sleep(float(os.environ.get("ROUND_SECONDS", 0.2)))
    return x


@bj.program(placements={"rows": 4})
def rounds(x):
    def one(total, _):
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "float32"), total)
        return held / 2 + bj.reduce_sum(bj.map_fn(lambda v: v + total, x)), total

    return jax.lax.scan(one, jnp.float32(0), None, length=20)


@bj.program(placements={"rows": None})
def one_pass(x):
    shape = jax.ShapeDtypeStruct((), "float32")
    slow = lambda v: jax.pure_callback(wait, shape, v, vmap_method="sequential")
    return bj.reduce_sum(bj.map_fn(slow, x))
"""


def start(folder, *argv, function="rounds", x="[1.0, 2.0, 3.0, 4.0]", runner="local"):
    (folder / "slow_here.py").write_text(SLOW)
    command = [sys.executable, "-m", "beamjax", "run", f"slow_here.py:{function}",
               "--arg", f"x={x}", f"--runner={runner}", *argv]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture
def interruptible():
    """Processes take interrupts, also where tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def until(condition, process):
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
def test_resume_after_a_kill(folder, capsys):
    process = start(folder, "--job_folder=j", "--checkpoint=c")
    try:
        until(lambda: list(folder.glob("c/*.checkpoint")), process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert json_of(capsys, "jobs", "show", "j")[1]["job"]["state"] == "lost"
    # A program of this process would save what it computes here; it reads what is saved there.
    argv = [sys.executable, "-m", "beamjax", "jobs", "resume", "j", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "beamjax run slow_here.py:rounds" in done.stderr
    assert found["progress"]["members"] == 4
    assert found["progress"]["done"]["members"] < 20 * 4  # in the rounds after the checkpoint
    assert (found["progress"]["rounds"], found["progress"]["rounds_total"]) == (20, 20)
    process = start(folder, "--out=whole.npz")
    assert process.wait() == 0, process.communicate()[1]
    process.communicate()
    with np.load("whole.npz") as whole:
        assert found["result"][0]["value"] == whole["0"]
    assert json_of(capsys, "jobs", "show", "j")[1]["job"]["state"] == "done"


@pytest.mark.long
def test_cancel_and_interrupt(folder, capsys, interruptible, monkeypatch):
    process = start(folder, "--job_folder=j")
    try:
        until(lambda: (folder / "j" / "progress.record").exists(), process)
        assert cli.main(["jobs", "resume", "j"]) == 2
        assert "`beamjax jobs cancel` ends it" in capsys.readouterr().err
        assert json_of(capsys, "jobs", "cancel", "j")[:2] == (
            0, {"ok": True, "folder": f"{folder}/j", "state": "cancelled", "warnings": []},
        )  # fmt: skip
        _, told = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "cancelled" in told
        process = start(folder, "--job_folder=k", "--json")
        until(lambda: (folder / "k" / "progress.record").exists(), process)
        process.send_signal(signal.SIGINT)
        found, told = process.communicate(timeout=120)
        assert process.returncode == 130
        assert json.loads(found)["error"]["type"] == "KeyboardInterrupt"
        assert json.loads(found)["state"] == "cancelled"
        assert json_of(capsys, "jobs", "show", "k")[1]["job"]["state"] == "cancelled"
        monkeypatch.setenv("ROUND_SECONDS", "100")  # a second interrupt does not wait for them
        process = start(folder, "--job_folder=m", "--json")
        until(lambda: (folder / "m" / "progress.record").exists(), process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        found, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (130, "beamjax: interrupted\n")
        assert json.loads(found)["state"] == "cancelled"
        assert json.loads(found)["job_folder"] == "m"
        assert json_of(capsys, "jobs", "show", "m")[1]["job"]["state"] == "cancelled"
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_an_interrupt_that_reaches_workers(folder, interruptible):
    """Ctrl-C in a terminal reaches all processes. Only the launcher heeds it, and ends the rest."""
    np.save("slow.npy", np.ones(400, np.float32))
    argv = ["--job_folder=j", "--shard_size=8", "--direct_running_mode=multi_processing"]
    argv += ["--direct_num_workers=2"]
    process = start(folder, *argv, function="one_pass", x="slow.npy", runner="DirectRunner")
    try:
        until(lambda: any(folder.glob("j/records/*")), process)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=120)[1]
        assert process.returncode == 130
        assert "Traceback" not in told
        assert "Fatal" not in told
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
