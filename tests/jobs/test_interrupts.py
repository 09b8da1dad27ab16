"""Ctrl-C at the moments of a run, in processes of their own."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import cluster_runners
import interrupted_run
import numpy as np
import pytest

import beamjax as bj

SECONDS = 2.0 + 2.0
"""From the signal to KeyboardInterrupt; the second two are for a busy machine."""
OF_BEAM = "beam-requirements-cache"
"""An empty folder, one for all pipelines of a machine."""
APART = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
THREADS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROGRAM = """if True:
    import threading, jax, jax.numpy as jnp, beamjax as bj
    from beamjax.jobs.job import JobRun
    begin = JobRun._begin
    def saying(self):
        begin(self)
        threading.Timer(1.0, lambda: print("now", flush=True)).start()
    JobRun._begin = saying
    @bj.program(placements={"rows": None})
    def total(x):
        body = lambda v: jax.lax.fori_loop(0, 2_000_000, lambda _, a: jnp.tanh(a @ a), v).sum()
        return bj.reduce_sum(bj.map_fn(body, x))
"""


@contextlib.contextmanager
def process_of(command, tmp):
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(tmp)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupted(process, times=1):
    """Interrupts a process when it says "now"; returns its output and errors."""
    while (line := process.stdout.readline()) != "now\n":
        assert line, process.stderr.read()
    start = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, err = process.communicate(timeout=60)
    out += "" if "interrupted" in out else f"interrupted {time.monotonic()}"
    assert float(out.split()[-1]) - start < SECONDS, err
    for bad in ("WorkerError", "Fatal", "terminate called", "Exception ignored"):
        assert bad not in err
    return out, err


def processes_of(tmp):
    """The processes with this temporary folder, besides those that end."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            found += [pid] * (f"TMPDIR={tmp}".encode() in file.read())
    return found


def files_in(tmp):
    with contextlib.suppress(OSError):
        os.rmdir(tmp / OF_BEAM)
    return os.listdir(tmp)


def check(moment, call, runner, options, tmp_path):
    tmp, folder = tmp_path / "tmp", tmp_path / "job"
    tmp.mkdir()
    words = [moment, call, runner, json.dumps(options), str(folder)]
    with process_of([interrupted_run.__file__, *words], tmp) as process:
        _, err = interrupted(process)
        if options.get("direct_running_mode") == "multi_processing":
            # Beam's worker processes may print after it that their streams have ended.
            assert "KeyboardInterrupt" in err.splitlines()
        else:
            assert err.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT
    # On a cluster, a process waits for half a minute for a job that its server may still submit.
    end = time.monotonic() + (45 if "flink_cluster" in options else 10)
    while (left := [*files_in(tmp), *processes_of(tmp)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
    if moment == "tracing":
        assert not folder.exists()
    else:
        assert bj.open_job(folder).state is bj.JobState.CANCELLED


# What is traced, compiled and fetched in the launching process is so on either runner.
GATE = {("shard", "local"), ("compiling", "local")}
GATE |= {(moment, "DirectRunner") for moment in ("tracing", "shard", "rounds", "fetching")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in GATE else pytest.mark.long)
    for pair in itertools.product(interrupted_run.MOMENTS, ("local", "DirectRunner"))
]


@pytest.mark.parametrize(("moment", "runner"), PAIRS)
def test_a_run(moment, runner, tmp_path):
    check(moment, "run", runner, {}, tmp_path)


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("shard", "launch"),
        ("rounds", "session"),
        pytest.param("rounds", "launch", marks=pytest.mark.long),
        pytest.param("shard", "session", marks=pytest.mark.long),
    ],
)
def test_a_job_and_a_session(moment, call, tmp_path):
    check(moment, call, "DirectRunner", {}, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("moment", interrupted_run.MOMENTS)
@pytest.mark.parametrize("call", ["run", "launch", "session"])
@pytest.mark.parametrize("options", [THREADS, APART], ids=["threads", "processes"])
def test_workers_of_the_in_memory_runner(moment, call, options, tmp_path):
    check(moment, call, "DirectRunner", options, tmp_path)


@pytest.mark.parametrize("moment", interrupted_run.MOMENTS)
@pytest.mark.parametrize("call", ["run", "launch", "session"])
@pytest.mark.parametrize("name", cluster_runners.params("prism", "flink", "flink-embedded"))
def test_other_runners(name, call, moment, started, tmp_path):
    runner = started(name)
    check(moment, call, runner.name, runner.options, tmp_path)


# --- the command


@pytest.fixture
def command(tmp_path):
    (tmp_path / "p.py").write_text(PROGRAM)
    np.save(tmp_path / "x.npy", np.full((8, 16, 16), 0.1, np.float32))
    words = ["-m", "beamjax", "run", f"{tmp_path / 'p.py'}:total", "--arg", f"x={tmp_path}/x.npy"]
    return [*words, "--job_folder", str(tmp_path / "job"), "--shard_size=8"]


@pytest.mark.parametrize(("runner", "times"), [("local", 1), ("DirectRunner", 1), ("local", 2)])
def test_the_command(runner, times, command, tmp_path):
    (tmp_path / "tmp").mkdir()
    with process_of([*command, f"--runner={runner}"], tmp_path / "tmp") as process:
        _, err = interrupted(process, times)
        assert process.returncode == 130
        assert "beamjax: interrupted" in err
    assert os.listdir(tmp_path / "tmp") == []
    assert bj.open_job(tmp_path / "job").state is bj.JobState.CANCELLED


# --- signals that no wait sees

POLLS = """if True:
    import sys, time
    import beamjax as bj, numpy as np, jax
    def slow(v):
        time.sleep(0.2)
        return v
    body = lambda v: jax.pure_callback(slow, v, v, vmap_method="sequential")
    total = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    job = bj.launch(total, np.ones(800, "f"), runner="local",
                    options={"job_folder": sys.argv[1], "shard_size": 8})
    while not job.progress().done.shards:
        time.sleep(0.05)
    print("now", flush=True)
    time.sleep(60)
"""


def test_a_program_that_ctrl_c_ends_cancels_its_jobs(tmp_path):
    with process_of(["-c", POLLS, str(tmp_path / "job")], tmp_path) as process:
        interrupted(process)
        assert process.returncode == -signal.SIGINT
    assert bj.open_job(tmp_path / "job").state is bj.JobState.CANCELLED


COLLECTS = """if True:
    import gc, sys, time, signal
    import beamjax  # without JAX
    sent = []
    def callback(*_):
        if not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGINT)
            pass
    gc.callbacks.append(callback)
    print("now", flush=True)
    try:
        gc.collect()
        time.sleep(300)
    except KeyboardInterrupt:
        print("raised", len(sent))
"""


def test_an_interrupt_in_the_garbage_collector_is_raised_again():
    """Python ignores exceptions of these callbacks, of which JAX has one."""
    found = subprocess.run(
        [sys.executable, "-c", COLLECTS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.stdout, found.stderr) == ("now\nraised 1\n", "")


LEAVES = """if True:
    import atexit, signal, sys, time
    import beamjax as bj
    bj.run
    import beamjax.execution
    @atexit.register
    def remove():
        for _ in range(int(sys.argv[1])):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
        print("removed")
"""


@pytest.mark.parametrize(("times", "out", "status"), [(1, "removed\n", 0), (2, "", -signal.SIGINT)])
def test_exit_handlers_outlive_one_interrupt(times, out, status):
    found = subprocess.run(
        [sys.executable, "-c", LEAVES, str(times)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (found.stdout, found.stderr, found.returncode) == (out, "", status)
