"""Pipelines whose launcher is killed are cancelled, and those of others are not."""

import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import cluster_runners
import jax
import numpy as np
import psutil
import pytest

import beamjax as bj
from beamjax.pipelines.clusters import guard, processes
from beamjax.pipelines.clusters.flink_rest import FlinkRest
from beamjax.telemetry import signs_of_life

LAUNCHER = """
import os, signal, sys
from beamjax.pipelines.clusters import guard
print(guard.watched(sys.argv[1], os.getpid()), flush=True)
input()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
with guard.needed():
    if sys.argv[2] == "interrupted":
        raise KeyboardInterrupt
"""


@pytest.fixture
def flink():
    """What a job manager answers, by path, and what it was asked to cancel."""
    jobs, cancelled = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"jobs": jobs})

        def do_PATCH(self):
            cancelled.append(self.path)
            self.answer({})

        def answer(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.jobs, server.cancelled = jobs, cancelled
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def launcher(flink, end):
    """A launcher that is under watch and ends soon; the name of its pipelines."""
    command = [sys.executable, "-c", LAUNCHER, f"http://127.0.0.1:{flink.server_port}", end]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    name = process.stdout.readline().strip()
    flink.jobs += [
        {"jid": "1", "name": name, "state": "RUNNING"},
        {"jid": "2", "name": name, "state": "FINISHED"},
        {"jid": "3", "name": "beamjax-of-another", "state": "RUNNING"},
    ]
    return process, name


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_only_the_pipelines_of_a_launcher_that_is_gone_are_cancelled(end, flink):
    process, name = launcher(flink, end)
    time.sleep(1.2)
    assert flink.cancelled == []
    process.communicate("\n")
    assert processes.wait_until(lambda: flink.cancelled, 20)
    assert set(flink.cancelled) == {"/jobs/1?mode=cancel"}
    # What comes later was on its way.
    flink.jobs[:] = [{"jid": "4", "name": name, "state": "RUNNING"}]
    assert processes.wait_until(lambda: "/jobs/4?mode=cancel" in flink.cancelled, 20)


@pytest.mark.parametrize("name", cluster_runners.params("flink"))
def test_what_reaches_a_cluster_after_its_launcher_was_interrupted(name, started):
    runner = started(name)
    address = f"http://127.0.0.1:{runner.supervisor.cluster.rest_port}"
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER, address, "interrupted"],
        input="\n", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    late = f"{ended.stdout.strip()}-late"

    def slow(v):
        time.sleep(0.25)
        return v

    body = lambda v: jax.pure_callback(slow, v, v, vmap_method="sequential")
    total = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    options = runner.flags(job_name=late, shard_size=8)
    with pytest.raises(bj.WorkerError):
        bj.run(total, np.ones(256, np.float32), runner=runner.name, options=options)
    jobs = [job for job in FlinkRest(address).named(None) if job["name"].startswith(late)]
    assert [job["state"] for job in jobs] == ["CANCELED"]


@pytest.mark.long
def test_a_launcher_that_ends_leaves_no_watch(flink):
    process, _ = launcher(flink, "of its own accord")
    process.communicate("\n")
    time.sleep(1.5)
    assert process.returncode == 0
    assert flink.cancelled == []


def test_what_is_forked_has_pipelines_of_its_own(monkeypatch):
    started = []
    monkeypatch.setattr(guard.subprocess, "Popen", lambda *a, **_: started.append(a[0]))
    monkeypatch.setattr(guard.atexit, "register", lambda *_: None)
    guard.watched.cache_clear()
    try:
        first, again = (guard.watched("http://x", 11) for _ in range(2))
        assert first == again != guard.watched("http://x", 12)
    finally:
        guard.watched.cache_clear()
    assert [command[4] for command in started] == ["11", "12"]


STARTING = """
import sys, time, numpy as np, jax, beamjax as bj
body = lambda v: jax.pure_callback(
    lambda v: time.sleep(600), jax.ShapeDtypeStruct((3,), "float32"), v, vmap_method="sequential")
program = bj.program(clients=8)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
options = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
bj.run(program, np.ones((8, 3), np.float32), options=options)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for children in /proc")
def test_workers_that_start_end_with_their_launcher():
    """Beam has them wait two minutes for its connections."""
    launcher = subprocess.Popen([sys.executable, "-c", STARTING], stderr=subprocess.DEVNULL)
    try:
        assert processes.wait_until(lambda: len(_below(launcher.pid)) >= 2, 60)
        workers = _below(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()
    assert processes.wait_until(lambda: not any(map(signs_of_life.started, workers)), 60)


def _below(launcher):
    """The processes that this one has started, and those that they have."""
    return sorted(child.pid for child in psutil.Process(launcher).children(recursive=True))
