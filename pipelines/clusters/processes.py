"""Servers and programs of others: started and stopped, with their ports and logs."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from beamjax.errors import OptionsError

LOOPBACK = "127.0.0.1"
_SECONDS_TO_STOP = 10.0


class ServerProcess:
    """A server that this process has started, and that must end when this process ends."""

    def __init__(self, command: Sequence[str], log: Path):
        self.command = list(command)
        self.log = log  # the file with its output
        self.owner = os.getpid()  # forked processes must not stop it
        self.process = self._started()

    @property
    def name(self) -> str:
        """The stem of its log."""
        return self.log.stem

    @property
    def alive(self) -> bool:
        """Whether the server still runs, as a child of this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def start_again(self) -> None:
        """Starts the server again after it ended; renames its old log to `*.log.old`."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.log, f"{self.log}.old")
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as output:
            # In a session of its own, Ctrl-C does not reach it: this process stops it in order.
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def stop(*servers: ServerProcess) -> None:
    """Asks servers to end, and waits; kills the process groups of those that take too long."""
    for server in servers:
        server.signal(signal.SIGTERM)
    for server in servers:
        try:
            server.process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            server.signal(signal.SIGKILL)
            server.process.wait()


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


def is_here(host: str) -> bool:
    """Whether a host is this machine; True for a name that is not known."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # What connects to it says so.
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections at an address."""
    with socket.socket() as probe:
        probe.settimeout(2)
        try:
            return probe.connect_ex((host, port)) == 0
        except OSError:  # the host is not known
            return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until a condition holds; returns whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


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
        program = shutil.which(os.path.join(home, "bin", tool))
        if program:
            return program
    return shutil.which(tool)


def missing(*tools: str) -> str:
    """What to install for those of these programs that are missing; "" if none is."""
    packages = dict.fromkeys(_HELP[tool] for tool in tools if find(tool) is None)
    return f"install {' and '.join(packages)}" if packages else ""


def require(tool: str, purpose: str) -> str:
    """The path of a program; OptionsError with what to install if it is not there."""
    program = find(tool)
    if program is None:
        raise OptionsError(f"{purpose}: found no `{tool}` on PATH; install {_HELP[tool]}")
    return program


def run(
    command: Sequence[str],
    purpose: str,
    environment: Mapping[str, str] | None = None,
    advice: str = "",
    folder: Path | None = None,
) -> str:
    """Runs a program to its end, and returns its stdout; OptionsError if it fails."""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        cwd=folder,
        text=True,
        errors="replace",
    ) as done:
        atexit.register(done.kill)  # for a thread that the end of the process does not wait for
        try:
            out, err = done.communicate()
        except BaseException:
            done.kill()
            raise
        finally:
            atexit.unregister(done.kill)
    if done.returncode:
        lines = [line for line in (out + err).splitlines() if line.strip()]
        shown = "\n".join(f"  {line}" for line in lines[-_LINES_OF_A_FAILURE:])
        raise OptionsError(
            f"{purpose}: `{' '.join(command)}` ended with status {done.returncode}{advice}:"
            f"\n{shown}"
        )
    return out
