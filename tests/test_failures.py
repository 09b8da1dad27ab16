"""Errors of workers as records, and as what a user catches, on every way to run workers."""

import json
import os

import jax
import numpy as np
import pytest

import beamjax as bj
from beamjax import records
from beamjax.errors import ArrayFormatError, BeamjaxError, Failure, SourceError, WorkerError
from beamjax.pipelines import files
from beamjax.pipelines.failures import own_errors, record_error, recorded_error
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import StepFn
from beamjax.shards import Shard, shard_errors

N = 20
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


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


# --- every way to run workers


def failing():
    """Local functions travel to other processes by value."""

    def refuse(v):
        if v[0] == 9:
            raise ValueError("member nine")
        return v

    out = jax.ShapeDtypeStruct((3,), "float32")
    body = lambda v: jax.pure_callback(refuse, out, v, vmap_method="sequential")
    return bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))


@pytest.mark.parametrize("flags", [[], THREADS, PROCESSES], ids=["one", "threads", "processes"])
def test_an_error_of_a_body_on_every_way_to_run_workers(flags):
    x = np.repeat(np.arange(N, dtype=np.float32)[:, None], 3, axis=1)
    with pytest.raises(WorkerError, match="member nine") as caught:
        bj.run(failing(), x, options=["--shard_size=8", *flags])
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == ("map_clients_0", 1, (8, 15))
    assert "member nine" in found.traceback
    assert str(os.getpid()) in found.worker or flags is PROCESSES
    assert caught.value.__cause__ is not None
