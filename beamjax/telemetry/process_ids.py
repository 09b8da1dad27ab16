"""Identifies processes, so that other processes can check whether they are alive."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """A record that identifies this process: where its pid means something, its pid and start."""
    # The name of the host is for messages only: several hosts may have the same.
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _place(), "pid": pid, "started": started(pid)}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process of a record is alive; None if its pid means nothing in this process."""
    if process.get("boot") != _place():  # another machine or container, or before a reboot
        return None
    pid = process.get("pid")
    if type(pid) is not int or pid < 1:
        return False
    start = started(pid)
    return start is not None and process.get("started") == start


def descends(pid: int) -> bool:
    """Whether a process descends from this one."""
    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def started(pid: int) -> str | None:
    """When a process started, as text to compare; None if there is no such process, or a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        if not psutil.LINUX:
            return str(process.create_time())
        # In ticks since the boot: psutil's time changes when the clock of the machine is set.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]  # the name in parentheses may contain any text
    except (psutil.Error, OSError):
        return None


@functools.cache
def _place() -> str:
    """The boot of this machine and the namespace of its pids; its name if there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
