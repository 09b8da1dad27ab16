"""Servers beside a program: started, and stopped with all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import guard, job_servers, processes
from beamjax.telemetry import signs_of_life

SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(child.pid, flush=True)
child.wait()
"""


def test_a_server_is_started_again_with_the_same_command(tmp_path):
    server = processes.ServerProcess(SLEEP, tmp_path / "sleeper.log")
    try:
        assert server.alive
        assert os.getsid(server.process.pid) == server.process.pid
        assert processes.wait_until(lambda: "here" in processes.tail(server.log), 20)
        server.log.write_text("its last words")
        before = server.process
        before.kill()
        assert processes.wait_until(lambda: not server.alive, 10)
        server.start_again()
        assert server.process.args == before.args
        assert processes.wait_until(lambda: "here" in processes.tail(server.log), 20)
        assert (tmp_path / "sleeper.log.old").read_text() == "its last words"
    finally:
        processes.stop(server)
    assert not server.alive
    processes.stop(server)


def test_a_server_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_SECONDS_TO_STOP", 0.2)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    server = processes.ServerProcess([*SLEEP[:2], deaf + SLEEP[2]], tmp_path / "deaf.log")
    assert processes.wait_until(lambda: "here" in processes.tail(server.log), 20)
    processes.stop(server)
    assert server.process.returncode == -signal.SIGKILL


def test_what_a_server_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("BEAMJAX_TOLD", "this")
    told = "import os, signal, sys; print(sys.stdin.read() == '', os.environ['BEAMJAX_TOLD'], "
    told += "signal.getsignal(signal.SIGPIPE), file=sys.stderr)"
    command = [sys.executable, "-c", told]
    server = processes.ServerProcess(command, tmp_path / "told.log")
    assert processes.wait_until(lambda: not server.alive, 20)
    plain = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert server.log.read_text() == plain.stderr
    with pytest.raises(FileNotFoundError):
        processes.ServerProcess(["/no/such/command"], tmp_path / "none.log")


def test_what_a_process_starts_ends_with_it(tmp_path):
    server = processes.ServerProcess(
        [sys.executable, "-c", PARENT, *SLEEP[1:]], tmp_path / "parent.log"
    )
    assert processes.wait_until(lambda: "here" in server.log.read_text(), 20)
    child = int(server.log.read_text().split()[0])
    processes.stop(server)
    assert processes.wait_until(lambda: not signs_of_life.started(child), 10)


def test_logs_and_ports(tmp_path):
    (tmp_path / "empty").touch()
    assert "empty" in processes.tail(tmp_path / "empty")
    assert "no log" in processes.tail(tmp_path / "none")
    hosts = ["127.0.0.1", "127.0.0.2"]
    ports = processes.free_ports(4, hosts)
    assert len(set(ports)) == 4
    assert all(processes.can_listen(host, port) for host in hosts for port in ports)
    assert not any(processes.listens(host, port) for host in hosts for port in ports)


# --- the guard


def guarded(tmp_path, folder=""):
    """A process whose child is a guard of a sleeping process; and the pid of that."""
    command = [sys.executable, "-c", PARENT, *guard.guarded(SLEEP, folder)[1:]]
    launcher = processes.ServerProcess(command, tmp_path / "launcher.log")
    assert processes.wait_until(lambda: "here" in launcher.log.read_text(), 20)
    of_guard = int(launcher.log.read_text().split()[0])
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(of_guard)], capture_output=True, text=True
    )
    return launcher, of_guard, int(found.stdout)


def test_a_guard_gives_the_status_of_its_command():
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(guard.guarded(command)).returncode == 7


@pytest.mark.parametrize("who", ["launcher", "guard"])
def test_a_guarded_server_ends_with_its_launcher(tmp_path, who):
    folder = tmp_path / "of the server"
    folder.mkdir()
    (folder / "log").touch()
    launcher, of_guard, server = guarded(tmp_path, str(folder))
    try:
        assert signs_of_life.started(server)
        if who == "launcher":
            launcher.process.kill()
            launcher.process.wait()
        else:
            os.kill(of_guard, signal.SIGTERM)
        assert processes.wait_until(lambda: not signs_of_life.started(server), 10)
        assert processes.wait_until(lambda: not folder.exists(), 10)
    finally:
        processes.stop(launcher)


# --- job servers

LISTEN = """
import concurrent.futures, sys, time
import grpc
server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
server.add_insecure_port(f"localhost:{sys.argv[1]}")
server.start()
time.sleep(60)
"""


def command(ports, _):
    return [sys.executable, "-c", LISTEN, str(ports[0])]


def test_a_job_server_is_started_once_and_again_if_it_ended():
    first = job_servers.serve("Test", "key", command)
    try:
        assert job_servers.serve("Test", "key", command) is first
        first.process.kill()
        first.process.wait()
        second = job_servers.serve("Test", "key", command)
        assert second is not first
        # This one dies while its guard sleeps, and is not given to anybody either.
        of_guard = second.process.pid
        told = subprocess.run(["pgrep", "-P", str(of_guard)], capture_output=True, text=True).stdout
        os.kill(of_guard, signal.SIGSTOP)
        awake = threading.Timer(1, os.kill, (of_guard, signal.SIGCONT))
        try:
            os.kill(int(told), signal.SIGKILL)
            assert processes.wait_until(lambda: not second.listens, 10)
            assert second.alive
            awake.start()
            third = job_servers.serve("Test", "key", command)
            assert third is not second
            assert third.alive
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(of_guard, signal.SIGCONT)
    finally:
        job_servers.stop_all()
    assert not third.alive
    assert not third.folder.exists()


def test_a_job_server_that_does_not_start_is_an_error_with_its_log():
    fails = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(OptionsError, match=r"(?s)job server of Test does not start.*no such thing"):
        job_servers.serve("Test", "bad", lambda *_: fails)


def test_defaults_do_not_replace_what_is_given():
    from apache_beam.options.pipeline_options import PipelineOptions

    given = PipelineOptions(["--environment_type=PROCESS", "--unknown=3"])
    found = job_servers.with_defaults(given, environment_type="LOOPBACK", parallelism=2)
    told = found.get_all_options(drop_default=True, retain_unknown_options=True)
    assert told == {"environment_type": "PROCESS", "unknown": "3", "parallelism": 2}
