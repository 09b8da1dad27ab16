"""Identifies processes by records that other processes can check."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """A record that identifies this process: its host, the boot of the host, its pid and start."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "started": started(pid)}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether the process of a record is alive; None if it runs on another machine."""
    if process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if process.get("boot") != _boot() or type(pid) is not int or pid < 1:
        return False
    found = started(pid)
    return found is not None and process.get("started") == found


def descends(pid: int) -> bool:
    """Whether a process descends from this one, by at most `_GENERATIONS`; False if unknown."""
    for _ in range(_GENERATIONS):
        words = _stat(pid)
        if not words:
            return False
        pid = int(words[1])
        if pid == os.getpid():
            return True
    return False


_GENERATIONS = 4


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started(pid: int) -> str | None:
    """The start time of a process, in any unit; None if there is none or it is a zombie."""
    words = _stat(pid)
    if words:
        return None if words[0] in "ZX" else words[19]
    if Path("/proc/self/stat").exists():
        return None
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return None if not found or found[0].startswith("Z") else " ".join(found[1:])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty on systems other than Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # After the name in parentheses, which may hold anything.
    return stat.rpartition(")")[2].split()
