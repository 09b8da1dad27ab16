"""Jobs: their states, progress, results and errors, from this process and from others."""

import collections
import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known
from helpers import assert_same_bits, assert_same_types

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    JobCancelledError,
    JobError,
    OptionsError,
    SourceError,
    StagingError,
    StructureError,
    WorkerError,
)
from beamjax.jobs.job import JobState
from beamjax.pipelines.clusters.processes import wait_until
from beamjax.storage import files, records
from beamjax.storage.schema import to_plain
from beamjax.telemetry import signs_of_life
from beamjax.telemetry.job_folder import JobFolder

N = 40
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
RUNNERS = ("local", "DirectRunner")


@bj.program(clients=N)
def total(x):
    mean = bj.reduce_mean(x)
    return {"sum": bj.reduce_sum(bj.map_fn(lambda v: v * mean, x)), "rest": [(mean, None), x[0]]}


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


class Gate:
    """A program that computes one member after the other, and waits at one of them."""

    def __init__(self, member=9, error=None, is_open=False):
        self.reached, self.open = threading.Event(), threading.Event()
        self.seen = []
        if is_open:
            self.open.set()

        def at(v):
            self.seen.append(int(v[0]))
            if v[0] == X[member, 0]:
                self.reached.set()
                assert self.open.wait(60)
                if error is not None:
                    raise error
            return v

        out = jax.ShapeDtypeStruct((3,), "float32")
        body = lambda v: jax.pure_callback(at, out, v, vmap_method="sequential")
        self.program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def assert_same(found, expected):
    assert_same_types(found, expected)
    assert_same_bits(found, expected)


def own_files(folder):
    return [path for path in folder.iterdir() if path.name.startswith("beamjax-")]


# --- one job from its start to its end


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_job_gives_what_run_gives(runner, empty_tmp):
    with bj.launch(total, X, runner=runner, options={"shard_size": 8}) as job:
        assert_same(job.result(), bj.run(total, X, runner=runner, options={"shard_size": 8}))
        assert job.state is JobState.DONE
        assert os.stat(job.folder).st_mode & 0o777 == 0o700
        assert str(empty_tmp) in job.folder
        assert '"program":"total"' in job._repr_html_()
        assert repr(job).startswith("<Job total on ")
        progress = job.progress()
        assert (progress.done.members, progress.members) == (2 * N, N)
        assert (progress.done.shards, progress.shards, progress.done.retries) == (10, 10, 0)
        assert progress.done.bytes_read >= X.nbytes
    assert list(empty_tmp.iterdir()) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_states_while_it_runs(runner, gate, tmp_path):
    options = {"shard_size": 8, "job_folder": tmp_path / "job"}
    with bj.launch(gate.program, X, runner=runner, options=options) as job:
        assert gate.reached.wait(60)
        assert job.state is job.wait(0.05) is JobState.RUNNING
        assert bj.open_job(job.folder).wait(0.05) is JobState.RUNNING
        for each in (job, bj.open_job(job.folder)):
            with pytest.raises(TimeoutError, match=r"has not ended after 0\.05 s; it goes on"):
                each.result(timeout=0.05)
        assert 0 <= job.progress().done.members <= 8
        with pytest.raises(OptionsError, match="job_folder: found another run that uses"):
            bj.run(total, X, runner="local", options={**options, "overwrite": True})
        gate.open.set()
        assert job.wait() is JobState.DONE
        np.testing.assert_array_equal(job.result(), X.sum(0))


def test_a_program_that_cannot_be_staged_is_no_job(empty_tmp):
    with pytest.raises(StagingError):
        bj.launch(total, jax.ShapeDtypeStruct((N, 3), "float32"))
    with pytest.raises(OptionsError, match="runner: found 'NoSuch'"):
        bj.launch(total, X, runner="NoSuch")
    assert list(empty_tmp.iterdir()) == []


def test_a_job_without_a_handle_removes_its_folder_at_its_end(empty_tmp, gate):
    job = bj.launch(gate.program, X, runner="local")
    assert gate.reached.wait(60)
    del job
    gc.collect()
    assert list(empty_tmp.iterdir())
    gate.open.set()
    assert wait_until(lambda: not list(empty_tmp.iterdir()), 60)


# --- cancelling, and errors


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("how", ["handle", "folder"])
def test_a_job_is_cancelled_between_two_shards(runner, how, gate, monkeypatch):
    by_workers = (runner, how) == ("DirectRunner", "folder")  # They see the folder first.
    for module in ("telemetry.worker_records", "pipelines.worker.reporting"):
        monkeypatch.setattr(f"beamjax.{module}.EVERY_SECONDS", 0.0)
    monkeypatch.setattr("beamjax.jobs.recording.LOOK_SECONDS", 60.0 if by_workers else 0.02)
    with bj.launch(gate.program, X, runner=runner, options={"shard_size": 8}) as job:
        assert gate.reached.wait(60)
        (job if how == "handle" else bj.open_job(job.folder)).cancel()
        if not by_workers:
            assert wait_until(lambda: job._monitor.spans.cancelled, 60)
        gate.open.set()
        assert job.wait(60) is JobState.CANCELLED
        for each in (job, bj.open_job(job.folder)):
            with pytest.raises(JobCancelledError, match="cancelled"):
                each.result()
        assert max(gate.seen) < X[24, 0]
        assert bj.open_job(job.folder).state is JobState.CANCELLED
        job.cancel()  # It is over, and stays as it is.
        assert job.state is JobState.CANCELLED


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_interrupted_run_is_cancelled(runner, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("beamjax.telemetry.monitor.Monitor.computed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bj.run(total, X, runner=runner, options={"job_folder": tmp_path / "job"})
    assert bj.open_job(tmp_path / "job").state is JobState.CANCELLED


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_in_a_job(runner):
    gate = Gate(error=ValueError("member nine"), is_open=True)
    with bj.launch(gate.program, X, runner=runner, options={"shard_size": 8}) as job:
        assert job.wait() is JobState.FAILED
        opened = bj.open_job(job.folder)
        assert opened.state is JobState.FAILED
        for each in (job, opened):
            with pytest.raises(WorkerError, match=r"(?s)members 8 to 15.*member nine") as caught:
                each.result()
            where = caught.value.failure
            assert (where.step, where.shard, where.members) == ("map_clients_0", 1, (8, 15))
        assert "Traceback" in str(caught.value.__cause__)


# --- folders


@pytest.mark.parametrize("fails", [False, True])
def test_a_temporary_folder_is_removed(fails, empty_tmp):
    gate = Gate(error=ValueError("x") if fails else None, is_open=True)
    with pytest.raises(WorkerError) if fails else contextlib.nullcontext():
        bj.run(gate.program, X, options={"progress": True})
    assert list(empty_tmp.iterdir()) == []


def test_the_folder_of_a_job_that_fails_stays(tmp_path):
    gate = Gate(error=ValueError("x"), is_open=True)
    with pytest.raises(WorkerError) as caught:
        bj.run(gate.program, X, options={"job_folder": tmp_path / "job"})
    assert str(tmp_path / "job") in caught.value.__notes__[-1]
    assert bj.open_job(tmp_path / "job").state is JobState.FAILED


def test_a_given_folder_keeps_the_files_of_others(tmp_path, empty_tmp, monkeypatch):
    folder = tmp_path / "a" / "job"
    folder.mkdir(parents=True)
    mine = [folder / "notes.txt", folder / "x.arrays", folder / "my.record"]
    for path in mine:
        path.write_text("mine")
    expected = bj.run(total, X, runner="local")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        options = {"job_folder": "a/job", "overwrite": True}
        assert_same(bj.run(total, X, options=options), expected)
        job = bj.open_job(str(folder))
        assert (job.state, job.name, job.runner) == (JobState.DONE, "total", "DirectRunner")
        assert job.folder == str(folder)
        assert_same(job.result(), expected)
        assert job.progress().done.members == 2 * N
    job.close()
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert own_files(folder) == list((folder / "records").iterdir()) == []
    assert list(empty_tmp.iterdir()) == []


def test_only_overwrite_replaces_a_job_that_is_done(tmp_path):
    for number, options in enumerate([{}, {"keep": "placed"}]):
        options |= {"job_folder": tmp_path / str(number)}
        expected = bj.run(total, X, runner="local", options=options)
        for call in (bj.run, bj.launch):
            with pytest.raises(OptionsError, match="found a job that is done"):
                call(total, 2 * X, runner="local", options=options)
        assert_same_bits(bj.open_job(options["job_folder"]).result(), expected)
        again = bj.run(total, 2 * X, runner="local", options=options | {"overwrite": True})
        assert_same_bits(bj.open_job(options["job_folder"]).result(), again)
    folder = tmp_path / "failed"
    options = {"job_folder": folder, "on_nonfinite": "raise"}
    with pytest.raises(WorkerError):
        bj.run(total, X * np.nan, runner="local", options=options)
    assert bj.open_job(folder).state is JobState.FAILED
    bj.run(total, X, runner="local", options={"job_folder": folder})


def test_a_folder_without_a_job(tmp_path):
    for path in (tmp_path, tmp_path / "no such"):
        with pytest.raises(JobError, match="found no job; expected a folder"):
            bj.open_job(path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"job_folder: cannot write to .*file"):
        bj.run(total, X, runner="local", options={"job_folder": tmp_path / "file"})


def test_the_folder_of_a_job_at_a_url(tmp_path):
    (tmp_path / "job" / "records").mkdir(parents=True)
    options = {"job_folder": f"bjtest:/{tmp_path}/job"}
    expected = bj.run(total, X, runner="local")
    assert_same(bj.run(total, X, options=options), expected)
    job = bj.open_job(options["job_folder"])
    assert job.state is JobState.DONE
    assert_same(job.result(), expected)


# --- results


Point = collections.namedtuple("Point", "x y")


@bj.program(clients=N)
def anything(x):
    keys = bj.map_fn(lambda v: jax.random.key(v[0].astype("int32")), x)
    weak = bj.reduce_sum(x)[0] * 0 + 1
    ordered = collections.OrderedDict(b=weak, a=x[:0])
    return {
        "point": Point(keys, [None, ()]),
        "ordered": ordered,
        "seven": (x.astype("bfloat16"), 3.0, X),
    }


def test_another_handle_reads_the_same_result(tmp_path):
    expected = bj.run(anything, X, options={"job_folder": tmp_path / "any"})
    found = bj.open_job(tmp_path / "any").result()
    assert_same_bits(found, expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(left, "weak_type", None) == getattr(right, "weak_type", None)
    with jax.enable_x64(True):
        wide = X.astype(np.float64)
        expected = bj.run(total, wide, runner="local", options={"job_folder": tmp_path / "wide"})
    assert_same(bj.open_job(tmp_path / "wide").result(), expected)


def test_other_nodes_need_an_example(tmp_path):
    program = bj.program(clients=N)(lambda x: collections.defaultdict(int, a=bj.reduce_sum(x)))
    bj.run(program, X, runner="local", options={"job_folder": tmp_path})
    job = bj.open_job(tmp_path)
    with pytest.raises(StructureError, match=r"node of \S*defaultdict.*result\(like=\.\.\.\)"):
        job.result()
    with pytest.raises(StructureError, match="like: found a tree with 2 leaves, expected 1"):
        job.result(like=[0, 0])
    found = job.result(like=collections.defaultdict(int, a=0))
    assert type(found) is collections.defaultdict
    np.testing.assert_array_equal(found["a"], X.sum(0))


# --- files that were changed


def test_changed_and_removed_files_are_clear_errors(tmp_path):
    bj.run(anything, X, runner="local", options={"job_folder": tmp_path})

    def refusal():
        try:
            job = bj.open_job(tmp_path)
            job.progress()
            job.result()
        except (ArrayFormatError, StructureError) as error:
            return str(error)
        return "none"

    faults = []
    names = [f"{name}.record" for name in ("job", "state", "progress", "result")]
    for name in [*names, "result-0.arrays"]:
        path = tmp_path / name
        whole = path.read_bytes()
        wrong = [whole[:-7], whole[:-1] + bytes([whole[-1] ^ 1]), b"", b'{"state": "done"}']
        others = [records.encode({"a": [1]})] * (name != "progress.record")
        for data in [*wrong, *others]:
            path.write_bytes(data)
            if f"{name}: " not in refusal():
                faults.append((name, data, refusal()))
        path.write_bytes(whole)
    path = tmp_path / "result.record"
    whole = path.read_bytes()
    record = records.decode(whole, "")
    trees = ["?", {"named": ["os", "system", ["x"]], "of": ["*"]}]
    changes = [{"tree": tree} for tree in trees]
    for number, impl in itertools.product(range(len(record["types"])), ("no such", "x" * 300)):
        leaves = list(record["types"])
        leaves[number] = leaves[number] | {"impl": impl}
        changes.append({"types": leaves})
    for change in changes:
        path.write_bytes(records.encode(record | change))
        if "found" not in refusal() and "not there in this process" not in refusal():
            faults.append((change, refusal()))
    path.write_bytes(whole)
    assert refusal() == "none"
    assert faults == []
    job = bj.open_job(tmp_path)
    for name, error, message in (
        ("result-1.arrays", SourceError, r"result-1\.arrays: cannot read a leaf"),
        ("result.record", JobError, "found no result of the job"),
        ("state.record", JobError, "found no state"),
    ):
        (tmp_path / name).unlink()
        with pytest.raises(error, match=message):
            job.result()
    assert ": unknown, in " in repr(job)


@pytest.mark.parametrize("call", [bj.run, bj.launch])
def test_a_result_that_cannot_be_stored_is_returned(call, tmp_path, monkeypatch, caplog):
    write = files.write

    def full(path, data, **how):
        if "result-" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, **how)

    monkeypatch.setattr(files, "write", full)
    found = call(total, X, runner="local", options={"job_folder": tmp_path / "job"})
    found = found.result() if call is bj.launch else found
    assert_same(found, jax.jit(total)(X))
    assert "the result is returned but not stored: " in caplog.text
    assert "No space left" in caplog.text
    assert bj.open_job(tmp_path / "job").state is JobState.DONE
    with pytest.raises(JobError, match="found no result of the job"):
        bj.open_job(tmp_path / "job").result()


# --- other processes


def test_warnings_are_printed_where_no_logging_is_configured(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    mean = bj.program(placements={"rows": None})(lambda x: bj.reduce_mean(x))
    options = {"on_nonfinite": "drop", "drop_limit": 1.0}
    bj.launch(mean, np.float32([1, np.nan]), runner="local", options=options).result()
    assert capsys.readouterr().err.count("1 member was dropped") == 1


LATE = """if True:
    import time
    import beamjax as bj, jax, numpy as np
    def fails(x):
        time.sleep(2)
        raise ValueError("too late")
    fn = lambda x: jax.pure_callback(fails, jax.ShapeDtypeStruct((), "float32"), x)
    bj.launch(fn, np.float32(1), runner="local")
"""


def test_a_job_that_fails_after_the_main_program_logs_its_error():
    found = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert "job <lambda> failed after the main program had ended" in found.stderr


LAUNCHER = """
import json, sys, time, numpy as np, jax, beamjax as bj
folder, runner, call, flags = sys.argv[1:]
def slow(v):
    time.sleep(0.05)
    return v
out = jax.ShapeDtypeStruct((3,), "float32")
body = lambda v: jax.pure_callback(slow, out, v, vmap_method="sequential")
program = bj.program(clients=400)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
options = {"job_folder": folder, "shard_size": 8} | json.loads(flags)
job = getattr(bj, call)(program, np.ones((400, 3), np.float32), runner=runner, options=options)
if call == "launch":
    job.result()
"""


@contextlib.contextmanager
def launcher(folder, runner, call="run", flags=None, **env):
    words = [str(folder), runner, call, json.dumps(flags or {})]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *words],
        stderr=subprocess.PIPE, text=True, env=os.environ | env,
    )  # fmt: skip
    members = lambda: JobFolder(str(folder)).progress().done.members
    try:
        assert wait_until(lambda: members() or process.poll() is not None, 120)
        assert process.poll() is None, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("call", "runner", "flags"),
    [
        ("launch", "DirectRunner", {}),
        pytest.param(
            "run", "DirectRunner",
            {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_sigterm_cancels_the_job_and_ends_the_process(call, runner, flags, tmp_path):
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    with launcher(tmp_path / "job", runner, call, flags, **env) as process:
        process.terminate()
        process.wait(60)
        assert process.returncode == -signal.SIGTERM
    assert bj.open_job(tmp_path / "job").state is JobState.CANCELLED
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in (tmp_path / "job").iterdir() if path.is_dir()] == ["records"]


def handle_sigterm(folder):
    """Runs jobs in the main thread and in another one, with and without a handler of the user."""

    def run(call=bj.run):
        options = {"report": f"{folder}/report.html"}
        job = call(total, X, runner="local", options=options)
        return job.result() if call is bj.launch else job

    handlers = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    mine = lambda *_: None
    for handler in (signal.SIG_DFL, mine):
        signal.signal(signal.SIGTERM, handler)
        for call in (bj.run, bj.launch):
            run(call)
            handlers.append(signal.getsignal(signal.SIGTERM) is handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return handlers


def test_the_handler_of_sigterm_is_given_back(other_process, tmp_path):
    assert other_process(handle_sigterm, tmp_path) == [True] * 4


def test_processes_are_told_apart(tmp_path):
    here = signs_of_life.this_process()
    for change, alive in (
        ({}, True),
        ({"started": "1"}, False),
        ({"boot": "another"}, None),
        ({"pid": 0}, False),
        ({"pid": "1"}, False),
        ({"host": "another"}, True),  # Hosts may have the same name, and change it.
        ({"boot": here["boot"].split()[0] + " pid:[1]"}, None),  # A container on this machine.
    ):
        assert signs_of_life.is_alive(here | change) is alive, change
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert wait_until(lambda: signs_of_life.started(child.pid) is None, 60)  # It is a zombie.
    dead = here | {"pid": child.pid}
    assert signs_of_life.is_alive(dead) is False
    folder = JobFolder(str(tmp_path))
    folder.begin("f", "local")
    folder.write("job", to_plain(dataclasses.replace(folder.describe(), process=dead)))
    job = bj.open_job(tmp_path)
    assert job.wait(60) is JobState.LOST
    with pytest.raises(JobError, match=rf"launching process {child.pid} on .* is gone"):
        job.result()
    child.wait()
    assert job.state is JobState.LOST
    bj.run(total, X, runner="local", options={"job_folder": tmp_path})  # The folder is free.
    assert bj.open_job(tmp_path).state is JobState.DONE
    # A process on another machine counts as lost once it is silent for a minute.
    folder = JobFolder(str(tmp_path / "elsewhere"))
    folder.begin("f", "local")
    for age, state in ((55, JobState.RUNNING), (65, JobState.LOST)):
        process = here | {"boot": "another"}
        record = dataclasses.replace(folder.describe(), process=process, time=time.time() - age)
        folder.write("job", to_plain(record))
        assert bj.open_job(tmp_path / "elsewhere").state is state
