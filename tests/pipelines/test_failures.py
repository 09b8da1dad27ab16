"""Errors of workers as records, and as what a user catches, on every way to run workers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import faults
import numpy as np
import pytest

import beamjax as bj
from beamjax._beam_compat import WORKER_THREAD
from beamjax.errors import ArrayFormatError, Failure, JobCancelledError, SourceError, WorkerError
from beamjax.pipelines import launch as waiting
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.reporting import record_error
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.pipelines.worker.worker_errors import (
    PipelineError,
    RepeatedError,
    own_errors,
    recorded_error,
    transform_errors,
)
from beamjax.storage import files, records


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))


def raised(error, failure=None):
    try:
        if failure is not None:
            error.failure = failure
        raise error
    except Exception as caught:
        return caught


# --- records


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (WorkerError("step 'a': broken"), WorkerError, "step 'a': broken"),
        (SourceError("x.npy: gone"), SourceError, "x.npy: gone"),
        (KeyError("Failure"), WorkerError, "step 'a': KeyError: 'Failure'"),
    ],
)
def test_an_error_comes_back_from_its_record(store, error, kind, message):
    assert recorded_error(store) is None
    store.put([np.zeros(3)])
    assert recorded_error(store) is None
    record_error(store, raised(error, Failure("a", 3, (24, 31))))
    found = recorded_error(store)
    assert type(found) is kind
    assert str(found) == message
    where = found.failure
    assert (where.step, where.shard, where.members, where.others) == ("a", 3, (24, 31), 0)
    assert type(error).__name__ in where.traceback
    assert "process" in where.worker
    assert where.time > 1e9


def test_the_first_of_several_errors_by_time(store, monkeypatch):
    for moment in (7.0, 3.0, 5.0):
        monkeypatch.setattr(records.time, "time", lambda moment=moment: moment)
        record_error(store, raised(WorkerError(f"at {moment}")))
    found = recorded_error(store)
    assert str(found) == "at 3.0 (the first of 3 failures in this pipeline)"
    assert (found.failure.time, found.failure.others) == (3.0, 2)


def test_a_shard_that_fails_three_times_ends_the_pipeline(store):
    look = RepeatedError(store)
    assert look() is None
    for shard in (3, 4, 3, 5, None, 6):
        record_error(store, raised(WorkerError(f"shard {shard}"), Failure("a", shard)))
        assert look() is None
    record_error(store, raised(WorkerError("once more"), Failure("a", 3)))
    found = look()
    assert str(found).startswith("shard 3 (the first of 7 failures")
    assert found.failure.others == 6


def test_damaged_and_hostile_records(store, tmp_path):
    record_error(store, raised(WorkerError("x")))
    (name,) = files.names(store.root)
    path = files.join(store.root, name)
    data = bytes(files.read(path))
    for changed in (
        data[:-9],
        data.replace(b"WorkerError", b"WorkerErrot"),
        records.encode({"type": 3}),
    ):
        files.write(path, changed)
        assert recorded_error(store) is None
        with pytest.raises(ArrayFormatError, match=r"record: .*(found|mismatch).*expected"):
            records.error_of(records.decode(changed, path), path)
    found = {"message": "m", "step": "", "shard": None, "members": None}
    found |= {"worker": "", "traceback": "", "time": 0.0, "others": 0}
    for kind in ("Any", "dataclass", "Failure", "__name__", "annotations"):
        assert type(records.error_of(found | {"type": kind}, "p")) is WorkerError
    (tmp_path / "file").write_text("in the way")
    record_error(Store(str(tmp_path / "file")), WorkerError("x"))  # It hides no other error.


class Steps(StepFn):
    """Fails in one of its methods."""

    def __init__(self, store, fails):
        self.store, self.fails = store, fails

    def setup(self):
        assert self.fails != "setup"
        return "set up"

    def process(self, element):
        yield element
        assert self.fails != "process"

    def finish_bundle(self):
        assert self.fails != "finish_bundle"


@pytest.mark.parametrize("fails", ["setup", "process", "finish_bundle", None])
def test_a_dofn_records_its_errors(store, fails):
    def run():
        fn = Steps(store, fails)
        return [fn.setup(), *fn.process(3), fn.finish_bundle()]

    if fails is None:
        assert run() == ["set up", 3, None]
        assert recorded_error(store) is None
        return
    with pytest.raises(AssertionError):
        run()
    assert f"in {fails}" in recorded_error(store).failure.traceback


def test_a_dofn_of_a_cancelled_job_records_nothing(store):
    class Cancelled(Steps):
        def setup(self):
            raise JobCancelledError("now")

    with pytest.raises(JobCancelledError):
        Cancelled(store, None).setup()
    assert recorded_error(store) is None


def test_errors_of_transforms_of_the_user(store):
    """Those of beamjax's own steps, and of none, stay as they are."""
    trace = "Traceback: KeyError: 3"
    for error, kind, message in (
        (KeyError("a"), KeyError, "a"),
        (RuntimeError("no [while running 'Own/Step']"), RuntimeError, "^no .while"),
        (
            ValueError("no [while running 'Theirs']"),
            WorkerError,
            "^f: .*Theirs' failed: Val.*: no",
        ),
        (RuntimeError(f"{trace} [while running 'Theirs']"), WorkerError, f"failed: {trace}$"),
    ):
        with pytest.raises(kind, match=message), transform_errors("f", "Own/"):
            raise error


def test_errors_of_runners(store):
    message = "^FlinkRunner failed in the pipeline of a, b, and no worker .*: job 7 failed$"
    with pytest.raises(WorkerError, match=message), own_errors(store, "FlinkRunner", ["a", "b"], 0):
        raise PipelineError("job 7 failed")
    # Workers that are threads of this process can't die without it.
    message = "^FnApiRunner failed in the pipeline of a: no coder$"
    with pytest.raises(WorkerError, match=message), own_errors(store, "FnApiRunner", ["a"], True):
        raise PipelineError("no coder")
    for kind in (ValueError, RuntimeError):
        message = "^no such flag\nR raised this in the launching process, in the pipeline of a$"
        with pytest.raises(kind, match=message), own_errors(store, "R", ["a"], 0):
            raise kind("no such flag")
    # A record of a worker says more.
    record_error(store, raised(SourceError("s.npy: gone")))
    with (
        pytest.raises(SourceError, match=r"^s\.npy: gone$") as caught,
        own_errors(store, "R", [], 0),
    ):
        raise PipelineError("CANCELLED: call already cancelled")
    assert "Traceback" in str(caught.value.__cause__)


# --- every way to run workers, and every way to fail there

BODY, SOURCE = faults.in_body, faults.in_source
CRASH = "the worker .* crashed: .*Segmentation fault"
LATE = "took longer than 3 s"
# Other workers than the launching process only: it would end with them.
APART = [
    ("segfaults", BODY, f"while computing, {CRASH}"),
    ("killed", BODY, "while computing, the worker .* died without a trace"),
    ("killed once", BODY, "while computing, the worker .* died without a trace"),  # No retries.
    ("segfaults", SOURCE, f"while reading, {CRASH}"),
]
EVERYWHERE = [
    ("raises", BODY, ".*ValueError: member nine"),
    ("hangs", BODY, f"computing {LATE}"),
    ("raises", SOURCE, "ValueError: member nine"),
    ("hangs", SOURCE, f"reading {LATE}"),
]
CELLS = [(*case, way) for way in faults.WAYS for case in EVERYWHERE]
CELLS += [(*case, "processes") for case in APART]
QUICK = [("raises", "local"), ("raises", "threads"), ("hangs", "one"), ("killed", "processes")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "place", "message", "way"),
    [
        pytest.param(
            *cell, id=f"{cell[3]}-{cell[1].__name__}-{cell[0]}",
            marks=[] if cell[1] is BODY and (cell[0], cell[3]) in QUICK else pytest.mark.long,
        )
        for cell in CELLS
    ],
)  # fmt: skip
def test_a_failure_names_its_cause(fault, place, message, way, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), os.pathsep)
    runner, flags = faults.WAYS[way]
    program, x = place(fault, tmp_path)
    where = r"step 'map_clients_0' .*shard 1 of placement 'clients', members 8 to 15: "
    limit = {"shard_timeout": 3} if fault == "hangs" else {}
    try:
        options = {"shard_size": 8, "work_folder": str(tmp_path), **flags, **limit}
        with pytest.raises(WorkerError, match=f"(?s)^{where}{message}") as caught:
            bj.run(program, x, runner=runner, options=options)
    finally:
        (tmp_path / "over").touch()
    assert caught.type is WorkerError
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == faults.WHERE
    (pid,) = set((tmp_path / "been here").read_text().split())
    assert (pid == str(os.getpid())) == (way != "processes")
    assert not found.worker or pid in found.worker
    if fault == "hangs" or (fault == "raises" and way != "local"):
        assert "in go_wrong" in found.traceback
    assert {path.name for path in tmp_path.iterdir()} == {"been here", "over"}


@pytest.mark.long
@pytest.mark.parametrize("way", faults.WAYS)
def test_a_process_with_a_body_that_hangs_ends(way, tmp_path):
    limit = json.dumps({"shard_timeout": 3})
    command = [sys.executable, faults.__file__, "hangs", way, str(tmp_path), limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"computing {LATE}" in done.stderr


def test_a_worker_that_ends_has_seconds_to_say_why(monkeypatch):
    monkeypatch.setattr(waiting, "control_address", lambda thread: f"here:{id(thread)}")
    over = threading.Event()
    worker = threading.Thread(target=over.wait, name=WORKER_THREAD)
    with waiting._worker_threads() as ended:
        worker.start()
        assert ended() is None
        over.set()
        worker.join()
        assert ended() is None
        monkeypatch.setattr(waiting, "_SECONDS_TO_END", 0.0)
        assert "a worker process ended before the pipeline did" in str(ended())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_workers_that_cannot_start_are_an_error(tmp_path, monkeypatch):
    # The module that Python imports first in a worker ends it.
    monkeypatch.setattr(waiting, "_SECONDS_TO_END", 1.0)
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(0.3)\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runner, flags = faults.WAYS["processes"]
    program, x = faults.in_body("none", tmp_path)
    with pytest.raises(WorkerError, match="a worker process ended before the pipeline did"):
        bj.run(program, x, runner=runner, options=flags)
