"""Programs of others that a runner needs, and the folder in which beamjax keeps what they make."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from beamjax.errors import OptionsError

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
    """What to install to have these programs, those that are not there."""
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
      purpose: for the message, what it is run for.
      environment: what to add to the environment of this process.
      advice: for the message, what may help.
      folder: to run it in; by default that of this process.

    Returns:
      What it wrote to stdout.

    Raises:
      OptionsError: it fails; the message has the last lines that it wrote.
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
    """Keeps other processes out of a folder that take this lock too."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
