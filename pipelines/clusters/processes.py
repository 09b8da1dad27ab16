"""Starts, finds and stops servers that outlive the program. Each has a log and a pid file.

Each server leads a process group of its own. Its pid file also records its start time, so a later
process with the same pid is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from beamjax.errors import OptionsError
from beamjax.telemetry import process_ids

_LOG = logging.getLogger("beamjax")
LOOPBACK = "127.0.0.1"
_SECONDS_TO_STOP = 10.0


@dataclass(frozen=True)
class Process:
    """A server that this process or an earlier command started.

    Attributes:
      name: the stem of its files.
      folder: the folder of its files.
      pid: its process id, and that of its group.
      started: its start time, as the operating system reports it; "" if it ended at once.
      command: its command line.
    """

    name: str
    folder: Path
    pid: int
    started: str
    command: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        return bool(self.started) and process_ids.started(self.pid) == self.started

    def stop(self) -> None:
        """Stops the server and its process group, if it still runs, and removes its pid file."""
        if self.alive:
            _signal_group(self.pid, signal.SIGTERM)
            if not wait_until(lambda: not self.alive, _SECONDS_TO_STOP):
                _signal_group(self.pid, signal.SIGKILL)
                wait_until(lambda: not self.alive, _SECONDS_TO_STOP)
        _pid_file(self.folder, self.name).unlink(missing_ok=True)


def start(name: str, command: Sequence[str], folder: Path) -> Process:
    """Starts a server that outlives this process.

    Args:
      name: the stem of its files.
      command: its command line.
      folder: the folder for its log and its pid file.
    """
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    # Not `subprocess.Popen`: its objects warn when they are deleted while the process still runs.
    pid = os.posix_spawnp(
        command[0],
        list(command),
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.fspath(folder / f"{name}.log"), new, 0o666),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these; children inherit that
    )
    process = Process(name, folder, pid, process_ids.started(pid) or "", tuple(command))
    record = {"pid": process.pid, "started": process.started, "command": process.command}
    _pid_file(folder, name).write_text(json.dumps(record), encoding="utf-8")
    return process


def start_again(process: Process) -> Process:
    """Starts an ended server again with the same command; renames its old log to `*.log.old`."""
    _LOG.warning("beamjax: starting %s of %s again", process.name, process.folder)
    with contextlib.suppress(FileNotFoundError):
        os.replace(process.log, f"{process.log}.old")
    return start(process.name, process.command, process.folder)


def known(folder: Path) -> list[Process]:
    """The servers with pid files in a folder, sorted by name; they may have ended."""
    found = []
    for path in sorted(folder.glob("*.pid")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            pid, started, command = (record[key] for key in ("pid", "started", "command"))
            found.append(Process(path.stem, folder, int(pid), str(started), tuple(command)))
    return found


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, or a note that there are none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"  (no log: {error})"
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"  {line}" for line in last) or "  (the log is empty)"


def free_ports(count: int, hosts: Sequence[str] = (LOOPBACK,)) -> list[int]:
    """Distinct ports that are free at all of these addresses."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        # The sockets stay open until all ports are found, so the ports are distinct.
        while len(ports) < count:
            first = stack.enter_context(socket.socket())
            first.bind((hosts[0], 0))
            port = first.getsockname()[1]
            try:
                for host in hosts[1:]:
                    stack.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            ports.append(port)
        return ports


def can_listen(host: str, port: int = 0) -> bool:
    """Whether this process could listen at an address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections at an address."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until a condition holds; returns whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _pid_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.pid"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


_HELP = {
    "go": "Go 1.26 or later (https://go.dev/doc/install)",
    "java": "Java 11 or 17, a JDK (for example `apt-get install openjdk-17-jdk-headless`)",
    "javac": "Java 11 or 17, a JDK (for example `apt-get install openjdk-17-jdk-headless`)",
    "mvn": "Apache Maven (for example `apt-get install maven`)",
}
_LINES_OF_A_FAILURE = 20


def find(tool: str) -> str | None:
    """The path of a program on `PATH`, or in `$JAVA_HOME` if it is one of Java's."""
    home = os.environ.get("JAVA_HOME")
    if home and tool.startswith("java"):
        found = shutil.which(os.path.join(home, "bin", tool))
        if found:
            return found
    return shutil.which(tool)


def missing(*tools: str) -> list[str]:
    """What to install for those of these programs that are missing."""
    return list(dict.fromkeys(_HELP[tool] for tool in tools if find(tool) is None))


def require(tool: str, purpose: str) -> str:
    """The path of a program.

    Raises:
      OptionsError: it is not there; the message says what to install.
    """
    found = find(tool)
    if found is None:
        raise OptionsError(f"{purpose}: found no `{tool}` on PATH; install {_HELP[tool]}")
    return found


def run(
    command: Sequence[str],
    purpose: str,
    environment: Mapping[str, str] | None = None,
    advice: str = "",
    folder: Path | None = None,
) -> str:
    """Runs a program to its end.

    Args:
      command: the program and its arguments.
      purpose: what it is run for, for the message.
      environment: environment variables in addition to those of this process.
      advice: what may help if it fails, for the message.
      folder: its working directory; by default that of this process.

    Returns:
      Its stdout.

    Raises:
      OptionsError: it fails; the message has the last lines of its output.
    """
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, **(environment or {})},
        cwd=folder,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        shown = "\n".join(f"  {line}" for line in lines[-_LINES_OF_A_FAILURE:])
        raise OptionsError(
            f"{purpose}: `{' '.join(command)}` ended with status {done.returncode}{advice}:"
            f"\n{shown}"
        )
    return done.stdout


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that holds the lock of a folder, which excludes other processes."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
