"""Errors of workers as records, and as what a user catches, on every way to run workers."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import faults
import numpy as np
import pytest

import beamjax as bj
from beamjax import records
from beamjax.errors import ArrayFormatError, BeamjaxError, Failure, SourceError, WorkerError
from beamjax.pipelines import files, waiting
from beamjax.pipelines.failures import RepeatedError, own_errors, record_error, recorded_error
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import StepFn
from beamjax.shards import Shard, shard_errors

pytestmark = pytest.mark.long


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
        (OSError("disk"), WorkerError, "step 'a': OSError: disk"),
        (KeyError("Failure"), WorkerError, "step 'a': KeyError: 'Failure'"),
    ],
)
def test_an_error_comes_back_from_its_record(store, error, kind, message):
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


def test_no_record_no_error(store):
    assert recorded_error(store) is None
    store.put([np.zeros(3)])
    assert recorded_error(store) is None


def test_what_fails_again_and_again(store):
    look = RepeatedError(store)
    assert look() is None
    for shard in (3, 4, 3, 5, None, 6):
        record_error(store, raised(WorkerError(f"shard {shard}"), Failure("a", shard)))
        assert look() is None
    record_error(store, raised(WorkerError("once more"), Failure("a", 3)))
    found = look()
    assert str(found).startswith("shard 3 (the first of 7 failures")
    assert found.failure.others == 6


@pytest.mark.parametrize("damage", ["truncated", "flipped", "fields"])
def test_a_damaged_record_is_no_error_of_a_worker(store, damage):
    record_error(store, raised(WorkerError("x")))
    (name,) = files.names(store.root)
    path = files.join(store.root, name)
    data = bytes(files.read(path))
    changed = {
        "truncated": data[:-9],
        "flipped": data.replace(b"WorkerError", b"WorkerErrot"),
        "fields": records.encode({"type": 3}),
    }[damage]
    files.write(path, changed)
    assert recorded_error(store) is None
    with pytest.raises(ArrayFormatError, match=r"record: .*(found|mismatch).*expected"):
        records.error_of(records.decode(changed, path), path)


@pytest.mark.parametrize("name", ["Any", "dataclass", "Failure", "__name__", "annotations"])
def test_a_record_makes_errors_of_beamjax_only(name):
    found = {"type": name, "message": "m", "step": "", "shard": None, "members": None}
    found |= {"worker": "", "traceback": "", "time": 0.0, "others": 0}
    assert type(records.error_of(json.loads(json.dumps(found)), "p")) is WorkerError


def test_records_that_cannot_be_written_hide_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    record_error(Store(str(tmp_path / "file")), WorkerError("x"))


class Steps(StepFn):
    """Fails in whatever way it is told to."""

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
def test_a_dofn_leaves_a_record_of_its_errors_and_works_as_before(store, fails):
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


# --- runners that say nothing


def test_a_runner_that_fails_without_a_record(store):
    message = "^FlinkRunner failed in the pipeline of a, b, and no worker .*: job 7 failed$"
    with pytest.raises(WorkerError, match=message), own_errors(store, "FlinkRunner", ["a", "b"], 0):
        raise RuntimeError("job 7 failed")


def test_other_errors_of_a_runner_stay_as_they_are(store):
    with pytest.raises(ValueError, match=r"^no such flag\nR failed"), own_errors(store, "R", [], 0):
        raise ValueError("no such flag")


def test_the_record_counts_whatever_the_runner_says(store):
    record_error(store, raised(SourceError("s.npy: gone")))
    with (
        pytest.raises(SourceError, match=r"^s\.npy: gone$") as caught,
        own_errors(store, "R", [], 0),
    ):
        raise RuntimeError("CANCELLED: call already cancelled")
    assert "Traceback" in str(caught.value.__cause__)


def test_the_error_of_a_shard_knows_where_it_was():
    class Step:
        name, functions, placement = "map_0", (), "clients"

    with pytest.raises(BeamjaxError) as caught, shard_errors(Step, Shard(2, 16, 3)):
        raise ValueError("x")
    assert caught.value.failure == Failure("map_0", 2, (16, 18))


# --- every way to run workers, and every way to fail there


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A fault, and what a user gets for it.

    Attributes:
      fault: which, of `faults.fault`.
      place: a program with it.
      ways: to run workers for which this holds.
      told: in the message, after step, shard and members.
      options: of the run.
    """

    fault: str
    place: Callable[..., Any]
    ways: tuple[str, ...]
    told: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


EVERY = tuple(faults.WAYS)
APART = ("processes",)  # where the launching process lives on if a worker does not
BODY, SOURCE = faults.in_body, faults.in_source
SOON = {"shard_timeout": 3}

ATTEMPTS = {
    "a body raises": Attempt("raises", BODY, EVERY, ".*ValueError: member nine"),
    "a body hangs": Attempt("hangs", BODY, EVERY, "computing took longer than 3 s", SOON),
    "a body segfaults": Attempt(
        "segfaults", BODY, APART, r"while computing, the worker .* crashed: .*Segmentation fault"
    ),
    "a body is killed": Attempt(
        "killed", BODY, APART, r"while computing, the worker .* died without a trace"
    ),
    # Beam's in-memory runner does not try again.
    "a body is killed once": Attempt(
        "killed once", BODY, APART, r"while computing, the worker .* died without a trace"
    ),
    "a source raises": Attempt("raises", SOURCE, EVERY, "ValueError: member nine"),
    "a source hangs": Attempt("hangs", SOURCE, EVERY, "reading took longer than 3 s", SOON),
    "a source segfaults": Attempt(
        "segfaults", SOURCE, APART, r"while reading, the worker .* crashed: .*Segmentation fault"
    ),
}
CELLS = [(name, way) for name, attempt in ATTEMPTS.items() for way in attempt.ways]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("name", "way"), CELLS)
def test_a_failure_names_its_cause_on_every_way_to_run_workers(name, way, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), os.pathsep)
    attempt = ATTEMPTS[name]
    runner, flags = faults.WAYS[way]
    program, x = attempt.place(attempt.fault, tmp_path)
    where = r"step 'map_clients_0' .*shard 1 of placement 'clients', members 8 to 15: "
    try:
        options = {"shard_size": 8, "work_folder": str(tmp_path), **flags, **attempt.options}
        with pytest.raises(WorkerError, match=f"(?s)^{where}{attempt.told}") as caught:
            bj.run(program, x, runner=runner, options=options)
    finally:
        (tmp_path / "over").touch()
    assert caught.type is WorkerError
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == faults.WHERE
    pids = (tmp_path / "been here").read_text().split()
    assert len(set(pids)) == 1
    assert (pids[0] == str(os.getpid())) == (way != "processes")
    assert not found.worker or pids[0] in found.worker
    if attempt.fault in ("raises", "hangs") and (way, attempt.fault) != ("local", "raises"):
        assert "in go_wrong" in found.traceback
    assert {path.name for path in tmp_path.iterdir()} == {"been here", "over"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", EVERY)
def test_a_limit_that_nothing_exceeds_changes_nothing(way, tmp_path):
    runner, flags = faults.WAYS[way]
    program, x = faults.in_body("none", tmp_path)
    options = {"shard_size": 8, **flags, **SOON}
    np.testing.assert_array_equal(bj.run(program, x, runner=runner, options=options), faults.TOTAL)


@pytest.mark.parametrize("way", EVERY)
def test_a_program_with_a_body_that_hangs_comes_to_its_end(way, tmp_path):
    command = [sys.executable, faults.__file__, "hangs", way, str(tmp_path), json.dumps(SOON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "computing took longer than 3 s" in done.stderr


@pytest.mark.parametrize("way", ["local", "one", "threads"])
def test_a_crash_in_the_launching_process_ends_it(way, tmp_path):
    command = [sys.executable, faults.__file__, "segfaults", way, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert not (tmp_path / "out.npy").exists()


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
