"""The supervisor of a Flink cluster, with servers that only listen; see also `test_clusters`."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import flink_cluster, flink_supervisor, guard, processes
from beamjax.pipelines.clusters.flink_cluster import Settings

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        found = [{"id": f"manager-{number}"} for number in range(int(sys.argv[3]))]
        self.wfile.write(json.dumps({"taskmanagers": found}).encode())
server = http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler)
print("workers at", sys.argv[1], flush=True)
server.serve_forever()
"""
"""Listens at an address and tells of task managers."""


def serving(host, port, taskmanagers=0):
    return guard.guarded(
        [sys.executable, "-I", "-S", "-c", SERVER, host, str(port), str(taskmanagers)]
    )


def commands(folder, cluster):
    """Those of a cluster whose task managers are told of by its job manager."""
    number = cluster.settings.taskmanagers
    return {
        "workers-0": serving(cluster.pools[0], cluster.pool_port),
        "jobmanager": serving("127.0.0.1", cluster.rest_port, number),
        "jobserver": serving("127.0.0.1", cluster.job_port),
    }


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(flink_cluster, "commands", commands)
    monkeypatch.setattr(flink_supervisor, "RESTART_SECONDS", 0.05)


def start_and_stop(folder):
    with flink_supervisor.running(folder, Settings(taskmanagers=1)):
        pass


def kill(server):
    before = server.process
    os.killpg(before.pid, signal.SIGKILL)
    before.wait()


def test_a_cluster_is_found_while_it_runs(tmp_path):
    folder = tmp_path / "new"
    assert flink_cluster.read(folder) is None
    with flink_supervisor.running(folder, Settings(taskmanagers=1, slots=3)) as supervisor:
        cluster = supervisor.cluster
        assert folder.stat().st_mode & 0o777 == 0o700
        assert flink_cluster.read(folder) == cluster
        assert flink_cluster.incomplete(cluster) is None
        assert cluster.flags["parallelism"] == 3
        assert cluster.flags["environment_config"] == f"127.0.0.1:{cluster.pool_port}"
        with pytest.raises(OptionsError, match="found a running cluster; end it with Ctrl-C"):
            start_and_stop(folder)
        assert flink_cluster.read(folder) == cluster
        servers = [psutil.Process(one.process.pid) for one in supervisor.servers.values()]
        servers += [child for server in servers for child in server.children()]
        assert len(servers) == 6
    assert not any(server.is_running() for server in servers)
    assert flink_cluster.read(folder) is None


def test_a_server_that_ends_is_replaced_without_a_change_of_ports(tmp_path, caplog):
    with flink_supervisor.running(tmp_path, Settings(taskmanagers=1)) as supervisor:
        pool = supervisor.servers["workers-0"]
        pool.log.write_text("its last words")
        before = pool.process
        kill(pool)
        lacks = lambda: flink_cluster.incomplete(supervisor.cluster)
        assert processes.wait_until(lambda: pool.process is not before, 10)
        assert processes.wait_until(lambda: lacks() is None, 10)
        assert flink_cluster.read(tmp_path) == supervisor.cluster
        assert (tmp_path / "workers-0.log.old").read_text() == "its last words"
        assert "workers-0 ended; starting another one" in caplog.text


@pytest.mark.parametrize("name", ["jobmanager", "jobserver"])
def test_a_cluster_ends_with_its_job_manager_and_its_job_server(name, tmp_path):
    with flink_supervisor.running(tmp_path, Settings(taskmanagers=1)) as supervisor:
        supervisor.servers[name].log.write_text("its last words")
        kill(supervisor.servers[name])
        with pytest.raises(OptionsError, match=rf"(?s){name} ended with status -9, .*last words"):
            supervisor.wait()
    assert not any(server.alive for server in supervisor.servers.values())
    assert flink_cluster.read(tmp_path) is None


def without(name, command=None):
    def changed(folder, cluster):
        found = commands(folder, cluster)
        return found | {name: command or [sys.executable, "-c", "import time; time.sleep(60)"]}

    return changed


FAILS = [sys.executable, "-c", "exit('no room')"]
INCOMPLETE = [
    (without("jobmanager", FAILS), r"jobmanager ended with status 1, .*no room"),
    (without("jobserver"), r"not ready after 2 s, the job server does not listen; .*jobserver:"),
    (without("jobmanager"), "not ready after 2 s, 0 of 1 task managers are registered"),
    (without("workers-0"), "not ready after 2 s, workers-0 has not loaded its modules"),
]


@pytest.mark.parametrize(("changed", "expected"), INCOMPLETE)
def test_a_cluster_that_does_not_start(changed, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(flink_cluster, "commands", changed)
    monkeypatch.setattr(flink_supervisor, "_SECONDS_TO_START", 1.5)
    with pytest.raises(OptionsError, match=f"(?s){expected}"):
        start_and_stop(tmp_path)
    assert flink_cluster.read(tmp_path) is None
    assert not any(str(tmp_path) in " ".join(one.cmdline()) for one in psutil.Process().children())


def test_each_task_manager_connects_to_its_own_pool():
    cluster = flink_cluster.Cluster(Settings(2), 1, 2, 3, ("127.0.0.2", "127.0.0.3"))
    assert cluster.flags["environment_config"] == "beamjax-workers:3"


def test_no_file_of_a_folder_names_what_is_run(tmp_path):
    """A cluster is what this process starts; what others left in a folder is not read."""
    marker = tmp_path / "marker"
    record = f'{{"pid": 1, "started": "1", "command": ["touch", "{marker}"]}}'
    (tmp_path / "workers-0.pid").write_text(record)
    (tmp_path / "cluster.json").write_text("[]")
    start_and_stop(tmp_path)
    assert not marker.exists()


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(OptionsError, match=r"others can write to .* \(mode 0777\)"):
        start_and_stop(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionsError, match="others can write"):
        flink_cluster.read(tmp_path)


def test_servers_end_with_a_supervisor_that_is_killed(tmp_path):
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import test_flink_cluster as here\n"
        "here.flink_cluster.commands = here.commands\n"
        "with here.flink_supervisor.running(sys.argv[2], here.Settings(taskmanagers=1)) as s:\n"
        "    print(*[server.process.pid for server in s.servers.values()], flush=True)\n"
        "    s.wait()\n"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        servers = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        servers += [child for server in servers for child in server.children()]
        launcher.kill()
    assert len(servers) == 6
    assert not psutil.wait_procs(servers, timeout=15)[1]
    assert flink_cluster.read(tmp_path) is None


def test_a_stop_ends_the_wait_of_another_thread(tmp_path):
    with flink_supervisor.running(tmp_path, Settings(taskmanagers=1)) as supervisor:
        waiting = threading.Thread(target=supervisor.wait)
        waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
