"""Worker processes that die: the launcher notices, and says at which shard they were."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from beamjax.errors import WorkerError
from beamjax.pipelines.clusters.processes import wait_until
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import lost_workers
from beamjax.pipelines.worker.lost_workers import (
    Look,
    begin_pipeline,
    end_pipeline,
    end_workers,
    lost_worker,
)
from beamjax.pipelines.worker.reporting import watchdog_of
from beamjax.plan.steps import Map

STEP = Map("map_0", "clients", "key", (), (), (), (), functions=("f",))

WORKER = """
import ctypes, os, signal, sys, threading, time
from beamjax.pipelines.worker.reporting import watchdog_of
from beamjax.spans import Spans, timed
from beamjax.pipelines.values.store import Store
from beamjax.plan.steps import Map
from beamjax.plan.shard import Shard

step = Map("map_0", "clients", "key", (), (), (), (), functions=("f",))
limit = float(sys.argv[3]) if len(sys.argv) > 3 else None
watchdog = watchdog_of(Store(sys.argv[1]), here=False, limit=limit)
watchdog.steps["map_0"] = step
spans = Spans(watch=watchdog)

def other():
    with timed(spans, "map_0", "read", Shard(0, 0, 8)):
        time.sleep(100)

def deep():
    print("ready", flush=True)
    match sys.argv[2]:
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "segfaults": ctypes.string_at(0)
        case "aborts": os.abort()
        case "hangs": time.sleep(100)

if sys.argv[2] == "between":
    with timed(spans, "map_0", "compute", Shard(1, 8, 8)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=other, daemon=True).start()
time.sleep(0.2)
with timed(spans, "map_0", "compute", Shard(1, 8, 8)):
    deep()
"""


@pytest.fixture
def store(tmp_path):
    found = Store(str(tmp_path / "store"), persistent=False)
    os.mkdir(found.root)
    begin_pipeline(found, here=False)
    return found


def start(store, how, *more):
    command = [sys.executable, "-c", WORKER, store.root, how, *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def finish(store, how, *more):
    worker = start(store, how, *more)
    worker.communicate(timeout=60)
    return worker


WHERE = r"^step 'map_0' \(f\), shard 1 of placement 'clients', members 8 to 15: while computing, "


def test_a_killed_worker(store):
    worker = finish(store, "killed")
    # Nothing says which thread it was, so the first one is taken.
    error = lost_worker(store, [STEP])
    assert type(error) is WorkerError
    assert re.match(r"step 'map_0' \(f\), shard 0 .*, members 0 to 7: while reading", str(error))
    assert f"the worker process {worker.pid} on" in str(error)
    assert "The usual reason is lack of memory" in str(error)
    assert "its other threads were at 'map_0' shard 1" in str(error)
    assert str(worker.pid) in error.failure.worker
    assert (error.failure.shard, error.failure.members) == (0, (0, 7))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("segfaults", "Segmentation fault"),
        pytest.param("aborts", "Aborted", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_crashes_tells_which_thread_it_was(store, how, reason):
    look, patient = Look(store, [STEP], keeps=True), Look(store, [STEP], keeps=False)
    assert look() is None
    worker = finish(store, how)
    error = lost_worker(store, [STEP])
    assert re.match(
        rf"(?s){WHERE}the worker process {worker.pid} on \S+ crashed \(its other threads were at "
        rf"'map_0' shard 0\): Fatal Python error: {reason}\n.* in deep\n.* in <module>$",
        str(error),
    )
    assert "in deep" in error.failure.traceback
    assert "in other" in error.failure.traceback
    error = lost_worker(store, [replace(STEP, name="map_1")])  # A step that the plan lacks.
    assert str(error).startswith("step 'map_0', shard 1, members 8 to 15: while computing, ")
    assert error.failure.shard == 1
    # A look says it the second time; where runners try again, only once that is in vain.
    assert look() is None
    assert re.match(WHERE, str(look()))
    assert patient() is patient() is None


def test_a_worker_that_dies_again_and_again(store):
    patient = Look(store, [STEP], keeps=False)
    for worker in [start(store, "segfaults") for _ in range(2)]:
        worker.communicate(timeout=60)
    assert patient() is None
    began = time.time()
    last = finish(store, "segfaults")
    error = patient()
    assert re.match(WHERE, str(error))
    # The last one that died, and how many did before.
    assert f"the worker process {last.pid} on" in str(error)
    assert error.failure.others == 2
    assert began < error.failure.time < time.time()


@pytest.mark.long
def test_a_worker_that_dies_between_two_shards(store):
    worker = finish(store, "between")
    error = lost_worker(store, [STEP])
    assert str(error).startswith(f"the worker process {worker.pid}")
    assert "at no shard" in str(error)
    assert error.failure.step == ""


def test_only_workers_of_this_pipeline_are_lost_or_ended(store):
    worker = start(store, "hangs")
    assert worker.stdout.readline() == b"ready\n"
    assert lost_worker(store, [STEP]) is None
    end_workers(store)
    worker.communicate(timeout=20)
    assert worker.returncode == -signal.SIGKILL
    assert lost_worker(store, [STEP]) is not None
    begin_pipeline(store, here=False)  # Of the next one it is no worker.
    assert lost_worker(store, [STEP]) is None


@pytest.mark.long
def test_a_worker_that_ends_well_is_not_lost(store):
    assert finish(store, "ends").returncode == 0
    assert lost_worker(store, [STEP]) is None


@pytest.mark.long
def test_processes_that_are_not_ours_are_left_alone(store):
    # Started by a process that has ended, so that it is not below this one.
    command = [sys.executable, "-c", WORKER, store.root, "hangs"]
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, check=True)
    pid = int(done.stdout)
    try:
        assert wait_until(lambda: lost_workers._processes(store), 30)
        assert len(lost_workers._processes(store)) == 1
        end_workers(store)
        time.sleep(0.2)
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_this_process_leaves_no_file_and_stops_at_the_end(store):
    watchdog = watchdog_of(store, here=True, limit=None)
    assert watchdog is watchdog_of(store, here=True, limit=None)
    assert not watchdog.has_file
    assert os.listdir(store.root) == ["workers-wanted"]
    end_pipeline(store)
    with pytest.raises(Exception, match="the run has ended before"):
        watchdog.check()
    os.unlink(f"{store.root}/workers-wanted")
    begin_pipeline(store, here=True)
    watchdog_of(store, here=True, limit=None).check()
    assert os.listdir(store.root) == []


@pytest.mark.parametrize("root", ["gs://bucket/folder", "/no/such/folder"])
def test_stores_that_cannot_hold_the_files(root):
    store = Store(root)
    begin_pipeline(store, here=False)
    assert lost_worker(store, []) is None
    end_workers(store)
    end_pipeline(store)


def test_files_that_are_no_files_of_workers(store):
    for name, data in {"working-1": b"x", "working-2": b"\0" * 33_792}.items():
        with open(f"{store.root}/{name}", "wb") as file:
            file.write(data)
    os.mkdir(f"{store.root}/working-3")
    assert lost_worker(store, [STEP]) is None
