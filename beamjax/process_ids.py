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
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "started": _started(pid)}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether a process lives that `this_process` told of; None if it is on another machine."""
    if process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if process.get("boot") != _boot() or type(pid) is not int or pid < 1:
        return False
    return _started(pid) not in (None, "") and process.get("started") == _started(pid)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started, in any unit; None if there is none, or it is dead but not gone."""
    try:
        # After the name in parentheses, which may hold anything: state, then 18 more, then start.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] in "ZX" else words[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    found = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None
