"""Servers beside a program: known again by pid and start, stopped with all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import guard, job_servers, processes
from beamjax.telemetry import process_ids

SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def sleeping(tmp_path):
    process = processes.start("sleeper", SLEEP, tmp_path)
    yield process
    process.stop()


def test_a_process_is_known_again_until_it_is_stopped(sleeping, tmp_path):
    assert processes.known(tmp_path) == [sleeping]
    assert sleeping.alive
    assert processes.wait_until(lambda: "here" in processes.tail(sleeping.log), 20)
    mistaken = processes.Process("old", tmp_path, sleeping.pid, "12345")  # of the same pid
    assert not mistaken.alive
    mistaken.stop()
    assert sleeping.alive
    sleeping.stop()
    assert not sleeping.alive
    assert processes.known(tmp_path) == []
    sleeping.stop()


START = """
import pathlib, sys
from beamjax.pipelines.clusters import processes
print(processes.start("server", sys.argv[2:], pathlib.Path(sys.argv[1])).pid)
"""


def test_a_process_outlives_the_one_that_started_it_without_a_warning(tmp_path):
    strict = ["-X", "dev", "-W", "error::ResourceWarning", "-c", START, str(tmp_path), *SLEEP]
    done = subprocess.run([sys.executable, *strict], capture_output=True, text=True, check=True)
    (process,) = processes.known(tmp_path)
    try:
        assert done.stdout == f"{process.pid}\n"
        assert "ResourceWarning" not in done.stderr
        assert process.alive
        assert processes.wait_until(lambda: "here" in process.log.read_text(), 20)
        assert os.getsid(process.pid) == process.pid
    finally:
        process.stop()
    assert not process.alive


def test_what_a_process_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("BEAMJAX_TOLD", "this")
    told = "import os, signal, sys; print(sys.stdin.read() == '', os.environ['BEAMJAX_TOLD'], "
    told += "signal.getsignal(signal.SIGPIPE), file=sys.stderr)"
    command = [sys.executable, "-c", told]
    process = processes.start("told", command, tmp_path)
    assert processes.wait_until(lambda: not process.alive, 20)
    plain = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert process.log.read_text() == plain.stderr
    with pytest.raises(FileNotFoundError):
        processes.start("none", ["/no/such/command"], tmp_path)


def test_a_process_that_ended_is_started_again_by_its_command(sleeping, tmp_path, caplog):
    assert processes.wait_until(lambda: "here" in processes.tail(sleeping.log), 20)
    sleeping.log.write_text("its last words")
    os.kill(sleeping.pid, signal.SIGKILL)
    assert processes.wait_until(lambda: not sleeping.alive, 10)
    (old,) = processes.known(tmp_path)
    new = processes.start_again(old)
    try:
        assert new.alive
        assert new.pid != old.pid
        assert processes.known(tmp_path) == [new]
        assert processes.wait_until(lambda: "here" in processes.tail(new.log), 20)
        assert (tmp_path / "sleeper.log.old").read_text() == "its last words"
        assert f"starting sleeper of {tmp_path} again" in caplog.text
    finally:
        new.stop()


def test_pid_files_that_are_broken_are_passed_over(tmp_path):
    for number, text in enumerate(["", "{", "[]", '{"pid": "x", "started": ""}', '{"pid": 1}']):
        (tmp_path / f"{number}.pid").write_text(text)
    assert processes.known(tmp_path) == []


def test_what_a_process_starts_ends_with_it(tmp_path):
    process = processes.start("parent", [sys.executable, "-c", PARENT, *SLEEP[1:]], tmp_path)
    assert processes.wait_until(lambda: "here" in process.log.read_text(), 20)
    child = int(process.log.read_text().split()[0])
    process.stop()
    assert processes.wait_until(lambda: not process_ids.started(child), 10)


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


def guarded(tmp_path):
    """A process whose child is a guard of a sleeping process; and the pid of that."""
    command = [sys.executable, "-c", PARENT, *guard.guarded(SLEEP)[1:]]
    launcher = processes.start("launcher", command, tmp_path)
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
    launcher, of_guard, server = guarded(tmp_path)
    try:
        assert process_ids.started(server)
        if who == "launcher":
            os.kill(launcher.pid, signal.SIGKILL)
        else:
            os.kill(of_guard, signal.SIGTERM)
        assert processes.wait_until(lambda: not process_ids.started(server), 10)
    finally:
        launcher.stop()


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
