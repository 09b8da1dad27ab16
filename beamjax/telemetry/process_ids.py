"""Processes of this and other machines: whether one that is known by its record still lives."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What tells this process from all others: host, boot of the host, pid and start."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "started": started(pid)}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether a process lives that `this_process` told of; None if it is on another machine."""
    if process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if process.get("boot") != _boot() or type(pid) is not int or pid < 1:
        return False
    found = started(pid)
    return found is not None and process.get("started") == found


def descends(pid: int) -> bool:
    """Whether this process has started another one, or its parent; False if that can't be seen."""
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
    """When a process started, in any unit; None if there is none, or it is dead but not gone."""
    words = _stat(pid)
    if words:
        return None if words[0] in "ZX" else words[19]
    if Path("/proc/self/stat").exists():
        return None
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return None if not found or found[0].startswith("Z") else " ".join(found[1:])


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state and parent on; empty elsewhere."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # After the name in parentheses, which may hold anything.
    return stat.rpartition(")")[2].split()
