"""The state of a Flink cluster, by its processes and ports; `test_clusters` has real ones."""

import contextlib
import dataclasses
import http.server
import json
import os
import signal
import socket
import sys
import threading

import pytest

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import flink_cluster, processes
from beamjax.pipelines.clusters.flink_cluster import Cluster, Settings

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]
NAMES = ["jobmanager", "jobserver", "workers-0"]


@contextlib.contextmanager
def job_manager(taskmanagers):
    """Answers with this many task managers; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            found = [{"id": f"manager-{number}"} for number in range(taskmanagers)]
            self.wfile.write(json.dumps({"taskmanagers": found}).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def started(tmp_path):
    """Processes that do nothing, in the folder of a cluster."""
    found = {name: processes.start(name, SLEEP, tmp_path) for name in NAMES}
    yield found
    for process in found.values():
        process.stop()


def recorded(folder, rest_port, job, pool, **settings):
    """The folder of a cluster whose job server and pool listen at these sockets."""
    ports = job.getsockname()[1], rest_port, pool.getsockname()[1]
    cluster = Cluster(Settings(**{"taskmanagers": 1, **settings}), *ports, ("127.0.0.1",))
    (folder / "cluster.json").write_text(json.dumps(dataclasses.asdict(cluster)))
    assert flink_cluster.read(folder) == cluster
    return cluster


def test_a_cluster_is_healthy_when_all_of_it_is_there(started, tmp_path):
    listen = lambda: socket.create_server(("127.0.0.1", 0))
    with listen() as job, listen() as pool, job_manager(1) as rest:
        cluster = recorded(tmp_path, rest, job, pool)
        found = flink_cluster.status(tmp_path)
        assert found["healthy"] is True
        assert found["taskmanagers"] == {"registered": 1, "expected": 1}
        assert found["pools"] == {"listening": 1, "expected": 1}
        assert {name: one["alive"] for name, one in found["processes"].items()} == dict.fromkeys(
            NAMES, True
        )
        assert found["flags"] == cluster.flags
        assert cluster.flags["parallelism"] == 1
        assert cluster.flags["environment_config"] == f"127.0.0.1:{cluster.pool_port}"
        two = dataclasses.replace(cluster, pools=("127.0.0.2", "127.0.0.3"))
        assert two.flags["environment_config"] == f"beamjax-workers:{cluster.pool_port}"
        # It is left as it is, unless another size is asked for.
        assert flink_cluster.up(tmp_path, cluster.settings) == cluster
        for other in ({"taskmanagers": 2}, {"slots": 2}):
            with pytest.raises(OptionsError, match="found a running cluster of 1 task managers"):
                flink_cluster.up(tmp_path, dataclasses.replace(cluster.settings, **other))
        recorded(tmp_path, rest, job, pool, taskmanagers=2, slots=3)
        assert flink_cluster.read(tmp_path).flags["parallelism"] == 6
        assert not flink_cluster.status(tmp_path)["healthy"]  # One task manager is missing.
        recorded(tmp_path, rest, job, pool)
        started["workers-0"].stop()
        processes.start("workers-0", [sys.executable, "-c", ""], tmp_path)
        assert processes.wait_until(lambda: not flink_cluster.status(tmp_path)["healthy"], 10)
    for missing in ("job", "pool"):
        with listen() as job, listen() as pool, job_manager(1) as rest:
            recorded(tmp_path, rest, job, pool)
            (job if missing == "job" else pool).close()
            found = flink_cluster.status(tmp_path)
            assert (found["healthy"], found["taskmanagers"]["registered"]) == (False, 1)
            assert found["pools"]["listening"] == (missing == "job")


def test_a_pipeline_is_in_trouble_without_job_manager_or_job_server(started, tmp_path):
    assert flink_cluster.trouble(tmp_path) is None
    started["workers-0"].stop()
    assert flink_cluster.trouble(tmp_path) is None
    started["jobserver"].log.write_text("its last words")
    os.kill(started["jobserver"].pid, signal.SIGKILL)
    assert processes.wait_until(lambda: flink_cluster.trouble(tmp_path) is not None, 10)
    assert "its jobserver has ended" in flink_cluster.trouble(tmp_path)
    assert "its last words" in flink_cluster.trouble(tmp_path)
    assert flink_cluster.down(tmp_path) == ["jobmanager"]
    assert processes.known(tmp_path) == []
    assert "its jobmanager has ended" in flink_cluster.trouble(tmp_path)
    assert flink_cluster.down(tmp_path) == flink_cluster.down(tmp_path / "none") == []


def test_a_cluster_whose_process_ends_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(flink_cluster, "_SECONDS_TO_START", 20.0)
    cluster = Cluster(Settings(taskmanagers=1), 1, 1, 1, ("127.0.0.1",))
    fails = processes.start("jobmanager", [sys.executable, "-c", "exit('no room')"], tmp_path)
    with pytest.raises(OptionsError, match=r"(?s)jobmanager does not start; .*no room"):
        flink_cluster._wait(tmp_path, cluster, [fails])
    monkeypatch.setattr(flink_cluster, "_SECONDS_TO_START", 0.1)
    waits = processes.start("workers-0", SLEEP, tmp_path)
    try:
        with pytest.raises(OptionsError, match=r"not ready after 0 s; .*\nworkers-0:"):
            flink_cluster._wait(tmp_path, cluster, [waits])
    finally:
        waits.stop()


def test_a_start_waits_for_all_of_a_cluster(started, tmp_path, monkeypatch):
    monkeypatch.setattr(flink_cluster, "_SECONDS_TO_START", 0.0)
    started["taskmanager-0"] = processes.start("taskmanager-0", SLEEP, tmp_path)
    some = [started["taskmanager-0"], started["workers-0"]]
    with socket.create_server(("127.0.0.1", 0)) as job, job_manager(1) as rest:
        cluster = recorded(tmp_path, rest, job, job)
        two = dataclasses.replace(cluster, settings=Settings(taskmanagers=2))
        none = dataclasses.replace(cluster, job_port=rest + 1)
        known = frozenset({"manager-0"})
        for log, *case in (
            ("", cluster, some),
            (flink_cluster.READY, two, some),
            (flink_cluster.READY, none, some),
            (flink_cluster.READY, cluster, some, known),
        ):
            started["workers-0"].log.write_text(log)
            with pytest.raises(OptionsError, match="the cluster is not ready after 0 s"):
                flink_cluster._wait(tmp_path, *case)
        flink_cluster._wait(tmp_path, cluster, some)
