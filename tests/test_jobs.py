"""Jobs: their states, progress, results and errors, from this process and from others."""

import collections
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam

import beamjax as bj
from beamjax import job_results, process_ids, records
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
from beamjax.job_folder import JobFolder
from beamjax.jobs import JobState

N = 40
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
RUNNERS = ("local", "DirectRunner")
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


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
    """A program that computes member after member, and waits in one of them."""

    def __init__(self, member=9, error=None):
        self.reached, self.open = threading.Event(), threading.Event()
        self.seen = []

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
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.weak_type) == (right.dtype, right.weak_type)
        np.testing.assert_array_equal(left, right)


# --- one job from its start to its end


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_job_gives_what_run_gives(runner, empty_tmp):
    with bj.launch(total, X, runner=runner, options={"shard_size": 8}) as job:
        assert_same(job.result(), bj.run(total, X, runner=runner, options={"shard_size": 8}))
        assert job.state is JobState.DONE
        assert os.stat(job.folder).st_mode & 0o777 == 0o700
        assert str(empty_tmp) in job.folder
        assert repr(job).startswith("<Job total on ")
        progress = job.progress()
        assert (progress.done.members, progress.members) == (2 * N, 2 * N)
        assert (progress.done.shards, progress.shards, progress.done.retries) == (10, 10, 0)
        assert progress.done.bytes_read >= X.nbytes
    assert list(empty_tmp.iterdir()) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_states_while_it_runs(runner, gate):
    with bj.launch(gate.program, X, runner=runner, options={"shard_size": 8}) as job:
        assert gate.reached.wait(60)
        assert job.state is job.wait(0.05) is JobState.RUNNING
        assert bj.open_job(job.folder).wait(0.05) is JobState.RUNNING
        assert 0 <= job.progress().done.members <= 8
        gate.open.set()
        assert job.wait() is JobState.DONE
        np.testing.assert_array_equal(job.result(), X.sum(0))


def test_a_program_that_cannot_be_staged_is_no_job(empty_tmp):
    with pytest.raises(StagingError):
        bj.launch(total, jax.ShapeDtypeStruct((N, 3), "float32"))
    with pytest.raises(OptionsError, match="runner: found 'NoSuch'"):
        bj.launch(total, X, runner="NoSuch")
    assert list(empty_tmp.iterdir()) == []


def test_a_handle_that_goes_takes_its_folder_along(empty_tmp, gate):
    job = bj.launch(gate.program, X, runner="local")
    assert gate.reached.wait(60)
    del job
    gc.collect()
    assert list(empty_tmp.iterdir())
    gate.open.set()
    for _ in range(600):
        if not list(empty_tmp.iterdir()):
            break
        time.sleep(0.1)
    assert list(empty_tmp.iterdir()) == []


# --- cancelling


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("how", ["handle", "folder"])
def test_a_job_is_cancelled_between_two_shards(runner, how, gate, monkeypatch):
    monkeypatch.setattr("beamjax.meters.EVERY", 0.0)
    monkeypatch.setattr("beamjax.watching.LOOK", 0.02)
    with bj.launch(gate.program, X, runner=runner, options={"shard_size": 8}) as job:
        assert gate.reached.wait(60)
        (job if how == "handle" else bj.open_job(job.folder)).cancel()
        time.sleep(0.5)
        gate.open.set()
        assert job.wait(60) is JobState.CANCELLED
        for each in (job, bj.open_job(job.folder)):
            with pytest.raises(JobCancelledError, match="cancelled"):
                each.result()
        assert max(gate.seen) < X[24, 0]
        assert bj.open_job(job.folder).state is JobState.CANCELLED
        job.cancel()  # nothing is left to do
        assert job.state is JobState.CANCELLED


def test_a_run_is_cancelled_through_its_folder(tmp_path, gate, monkeypatch):
    monkeypatch.setattr("beamjax.meters.EVERY", 0.0)

    def cancel():
        assert gate.reached.wait(60)
        bj.open_job(tmp_path / "job").cancel()
        time.sleep(1.2)
        gate.open.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(JobCancelledError):
        bj.run(gate.program, X, options={"shard_size": 8, "job_folder": tmp_path / "job"})
    thread.join()
    assert bj.open_job(tmp_path / "job").state is JobState.CANCELLED


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_interrupted_run_is_cancelled(runner, tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("beamjax.monitor.Monitor.tick", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bj.run(total, X, runner=runner, options={"job_folder": tmp_path / "job"})
    assert bj.open_job(tmp_path / "job").state is JobState.CANCELLED


# --- errors


@pytest.mark.parametrize("flags", [[], THREADS], ids=["one", "threads"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_in_a_job(runner, flags):
    gate = Gate(error=ValueError("member nine"))
    gate.open.set()
    with bj.launch(gate.program, X, runner=runner, options=["--shard_size=8", *flags]) as job:
        assert job.wait() is JobState.FAILED
        opened = bj.open_job(job.folder)
        assert opened.state is JobState.FAILED
        for each in (job, opened):
            with pytest.raises(WorkerError, match=r"(?s)members 8 to 15.*member nine") as caught:
                each.result()
            where = caught.value.failure
            assert (where.step, where.shard, where.members) == ("map_clients_0", 1, (8, 15))
        assert "Traceback" in str(caught.value.__cause__)


@pytest.mark.parametrize("keep", [None, "failed", "always"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept(keep, fails, empty_tmp):
    gate = Gate(error=ValueError("x") if fails else None)
    gate.open.set()
    catch = pytest.raises(WorkerError) if fails else contextlib.nullcontext()
    with catch as caught:
        bj.run(gate.program, X, options={"keep_folder": keep})
    kept = keep == "always" or (keep == "failed" and fails)
    folders = list(empty_tmp.iterdir())
    assert len(folders) == kept
    if kept:
        assert bj.open_job(folders[0]).state.value == ("failed" if fails else "done")
        assert [path for path in folders[0].iterdir() if path.name.startswith("beamjax-")]
    if kept and fails:
        assert str(folders[0]) in caught.value.__notes__[-1]


# --- folders


def test_a_folder_that_was_given_is_kept(tmp_path, empty_tmp):
    folder = tmp_path / "a" / "job"
    folder.mkdir(parents=True)
    mine = [folder / "notes.txt", folder / "x.arrays", folder / "my.record"]
    for path in mine:
        path.write_text("mine")
    expected = bj.run(total, X, runner="local")
    for _ in range(2):  # what an earlier job left is replaced
        options = {"job_folder": folder, "overwrite": True}
        assert_same(bj.run(total, X, options=options), expected)
        job = bj.open_job(str(folder))
        assert (job.state, job.name, job.runner) == (JobState.DONE, "total", "DirectRunner")
        assert_same(job.result(), expected)
        assert job.progress().done.members == 2 * N
    job.close()
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert not [path for path in folder.iterdir() if path.name.startswith("beamjax-")]
    assert list((folder / "records").iterdir()) == []
    assert list(empty_tmp.iterdir()) == []


def test_a_relative_folder_is_known_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with bj.launch(total, X, runner="local", options={"job_folder": "job"}) as job:
        job.wait()
        monkeypatch.chdir("/")
        assert job.folder == str(tmp_path / "job")
        assert bj.open_job(job.folder).state is JobState.DONE


def test_a_job_that_is_done_is_not_replaced_unless_asked(tmp_path):
    for number, options in enumerate([{}, {"keep": "placed"}]):
        options |= {"job_folder": tmp_path / str(number)}
        expected = bj.run(total, X, runner="local", options=options)
        for call in (bj.run, bj.launch):
            with pytest.raises(OptionsError, match="found a job that is done"):
                call(total, 2 * X, runner="local", options=options)
        assert_same(bj.open_job(options["job_folder"]).result(), expected)
        again = bj.run(total, 2 * X, runner="local", options=options | {"overwrite": True})
        assert_same(bj.open_job(options["job_folder"]).result(), again)
    folder = tmp_path / "failed"
    options = {"job_folder": folder, "on_nonfinite": "raise"}
    with pytest.raises(WorkerError):
        bj.run(total, X * np.nan, runner="local", options=options)
    assert bj.open_job(folder).state is JobState.FAILED
    bj.run(total, X, runner="local", options={"job_folder": folder})


def test_two_jobs_do_not_share_a_folder(tmp_path, gate):
    options = {"job_folder": tmp_path / "job"}
    with bj.launch(gate.program, X, runner="local", options=options) as job:
        assert gate.reached.wait(60)
        with pytest.raises(OptionsError, match="job_folder: found a job that still runs"):
            bj.run(total, X, runner="local", options=options)
        gate.open.set()
        np.testing.assert_array_equal(job.result(), X.sum(0))


def test_a_folder_without_a_job(tmp_path):
    for path in (tmp_path, tmp_path / "no such"):
        with pytest.raises(JobError, match="found no job; expected a folder"):
            bj.open_job(path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"file.*cannot be the folder of a job"):
        bj.run(total, X, runner="local", options={"job_folder": tmp_path / "file"})


def test_the_folder_of_a_job_at_a_url(tmp_path):
    """Another file system of Beam, see `test_store`."""
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


def test_results_read_by_another_handle_are_the_same(tmp_path):
    expected = bj.run(anything, X, options={"job_folder": tmp_path})
    found = bj.open_job(tmp_path).result()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert getattr(left, "weak_type", None) == getattr(right, "weak_type", None)
        if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_64_bits_are_read_where_they_are_off(tmp_path):
    with jax.enable_x64(True):
        wide = X.astype(np.float64)
        expected = bj.run(total, wide, runner="local", options={"job_folder": tmp_path})
    assert_same(bj.open_job(tmp_path).result(), expected)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_other_nodes_need_an_example(tmp_path):
    program = bj.program(clients=N)(lambda x: Node(bj.reduce_sum(x)))
    bj.run(program, X, runner="local", options={"job_folder": tmp_path})
    job = bj.open_job(tmp_path)
    with pytest.raises(StructureError, match=r"node of test_jobs\.Node.*result\(like=\.\.\.\)"):
        job.result()
    with pytest.raises(StructureError, match="like: found a tree with 2 leaves, expected 1"):
        job.result(like=[0, 0])
    found = job.result(like=Node(0))
    assert type(found) is Node
    np.testing.assert_array_equal(found.value, X.sum(0))


# --- files that were changed


def damaged(path, how):
    data = path.read_bytes()
    if how == "truncated":
        return data[:-7]
    if how == "flipped":
        return data[:-1] + bytes([data[-1] ^ 1])
    if how == "empty":
        return b""
    return {"hostile": b'{"state": "done"}', "fields": records.encode({"a": [1]})}[how]


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "hostile", "fields"])
@pytest.mark.parametrize(
    "name", ["job.record", "state.record", "progress.record", "result.record", "result-0.arrays"]
)
def test_changed_files_are_clear_errors(name, how, tmp_path):
    bj.run(total, X, runner="local", options={"job_folder": tmp_path})
    (tmp_path / name).write_bytes(damaged(tmp_path / name, how))

    def read():
        job = bj.open_job(tmp_path)
        job.progress()
        job.result()

    with pytest.raises(
        ArrayFormatError, match=rf"{name}: .*(found|bad|truncated|mismatch|expected)"
    ):
        read()


def test_removed_files_are_clear_errors(tmp_path):
    bj.run(total, X, runner="local", options={"job_folder": tmp_path})
    job = bj.open_job(tmp_path)
    (tmp_path / "result-1.arrays").unlink()
    with pytest.raises(SourceError, match=r"result-1\.arrays: cannot read a leaf"):
        job.result()
    (tmp_path / "result.record").unlink()
    with pytest.raises(JobError, match="its result was removed"):
        job.result()
    (tmp_path / "state.record").unlink()
    with pytest.raises(JobError, match="found no state"):
        _ = job.state


@pytest.mark.parametrize(
    "tree",
    [{"named": ["os", "system", ["x"]], "of": ["*"]}, {"dict": [[["a"], "*"]]}, {"list": 3}, "?", 5,
     {"named": ["no.such", "P", ["x"]], "of": ["*"]}],
    ids=str,
)  # fmt: skip
def test_hostile_trees(tree, tmp_path):
    bj.run(
        bj.program(clients=N)(bj.reduce_sum), X, runner="local", options={"job_folder": tmp_path}
    )
    record = records.decode((tmp_path / "result.record").read_bytes(), "")
    (tmp_path / "result.record").write_bytes(records.encode(record | {"tree": tree}))
    with pytest.raises(
        (ArrayFormatError, StructureError), match=r"found|not there in this process"
    ):
        bj.open_job(tmp_path).result()


# --- other processes

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
    try:
        end = time.monotonic() + 120
        while not JobFolder(str(folder)).progress().done.members:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_job_of_another_process_is_cancelled(runner, tmp_path):
    with launcher(tmp_path, runner) as process:
        job = bj.open_job(tmp_path)
        assert job.state is JobState.RUNNING
        assert 0 < job.progress().done.members < job.progress().members == 400
        job.cancel()
        assert job.wait(60) is JobState.CANCELLED
        assert process.wait(60) != 0
        assert "JobCancelledError" in process.stderr.read()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("beamjax-")]


@pytest.mark.parametrize(
    ("call", "runner", "flags"),
    [
        ("run", "local", {}),
        ("run", "DirectRunner", {}),
        ("run", "DirectRunner", dict(flag[2:].split("=") for flag in PROCESSES)),
        ("launch", "local", {}),
        ("launch", "DirectRunner", {}),
    ],
    ids=["local", "one", "processes", "launch-local", "launch"],
)
def test_a_terminated_process_cancels_its_job(call, runner, flags, tmp_path):
    """As Ctrl-C does; the process then dies by the signal, as without beamjax."""
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    with launcher(tmp_path / "job", runner, call, flags, **env) as process:
        process.terminate()
        process.wait(60)
        assert process.returncode == -signal.SIGTERM
    assert bj.open_job(tmp_path / "job").state is JobState.CANCELLED
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "job").iterdir() if path.is_dir()) == [
        "records"
    ]


def test_sigterm_is_the_users(tmp_path):
    """Beamjax handles it only where nobody else does, and only while a job runs."""
    code = f"""
import signal, threading, time, numpy as np, beamjax as bj
total = bj.program(clients=4)(lambda x: bj.reduce_sum(x))
def run(call=bj.run):
    options = {{"report": {str(tmp_path / "r")!r}}}
    job = call(total, np.ones(4, np.float32), runner="local", options=options)
    return job.result() if call is bj.launch else job
for call in (bj.run, bj.launch):
    run(call)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
thread = threading.Thread(target=run)
thread.start()
thread.join()
seen = []
mine = lambda *_: seen.append(1)
signal.signal(signal.SIGTERM, mine)
for call in (bj.run, bj.launch):
    run(call)
    assert signal.getsignal(signal.SIGTERM) is mine
signal.raise_signal(signal.SIGTERM)
assert seen == [1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_job_whose_process_was_killed_is_lost(tmp_path):
    with launcher(tmp_path, "local") as process:
        job = bj.open_job(tmp_path)
        process.send_signal(signal.SIGKILL)
        assert job.wait(60) is JobState.LOST
        with pytest.raises(JobError, match=rf"launching process {process.pid} on .* is gone"):
            job.result()
    assert bj.open_job(tmp_path).state is JobState.LOST
    bj.run(total, X, runner="local", options={"job_folder": tmp_path})  # the folder is free
    assert bj.open_job(tmp_path).state is JobState.DONE


def test_a_result_read_by_another_process(tmp_path):
    bj.run(total, X, options={"job_folder": tmp_path})
    code = textwrap.dedent(f"""
        import sys, beamjax as bj
        job = bj.open_job({str(tmp_path)!r})
        print(job.state.name, job.result()["sum"].tolist(), job.progress().done.members)
        print("apache_beam" in sys.modules)
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == [
        f"DONE {(X.mean(0) * X).sum(0).tolist()} {2 * N}",
        "False",
    ]


@pytest.mark.parametrize(("age", "state"), [(1.0, "RUNNING"), (1e4, "LOST")])
def test_a_process_on_another_machine_is_lost_when_it_is_silent(age, state, tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin({"name": "f", "runner": "local"})
    process = process_ids.this_process() | {"host": "elsewhere"}
    described = folder.describe() | {"process": process, "time": time.time() - age}
    folder.write("job", described)
    assert bj.open_job(tmp_path).state is JobState[state]


def test_processes_are_told_apart():
    here = process_ids.this_process()
    assert process_ids.is_alive(here) is True
    assert process_ids.is_alive(here | {"started": "1"}) is False
    assert process_ids.is_alive(here | {"boot": "another"}) is False
    assert process_ids.is_alive(here | {"host": "another"}) is None
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    for _ in range(600):
        if process_ids.started(child.pid) is None:  # it is dead, though nobody has asked
            break
        time.sleep(0.1)
    assert process_ids.is_alive(here | {"pid": child.pid}) is False
    child.wait()


@pytest.mark.parametrize("impl", ["threefry2x32", "no such", "x" * 300])
def test_a_result_of_keys_that_there_are_not(impl):
    for data, weak in ((np.zeros(2, np.uint32), True), (np.zeros((), np.uint32), False)):
        with pytest.raises(ArrayFormatError, match=r"^p: found .*keys of"):
            job_results._leaf(
                data, {"impl": impl, "weak": weak, "placed": None, "keyed": False}, False, "p"
            )
