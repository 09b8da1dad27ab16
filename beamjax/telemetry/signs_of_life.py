"""Whether other processes are alive: by their pids, or on other hosts by their heartbeats.

Heartbeats are a file that a process rewrites. Readers compare the content with what they saw
before. They use no clock of another host, and no pid: hosts may have the same name, and containers
of one host have pids of their own.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamjax.storage import files
from beamjax.storage.schema import parse_json


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
    import psutil

    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def started(pid: int) -> str | None:
    """When a process started, as text to compare; None if there is no such process, or a zombie."""
    import psutil  # Most runs ask for no process.

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


# --- heartbeats

BEAT_SECONDS, REMOTE_BEAT_SECONDS = 2.0, 4.0
"""Seconds between two heartbeats in a local folder, and at a URL, where each costs a request."""

MAX_GAP_SECONDS = 5.0
"""Largest part of the time between two looks that counts as silence. A process that did not look,
because it was stopped or busy, does not know whether there were heartbeats."""

_log = logging.getLogger("beamjax")


def seconds_at(path: str) -> float:
    """Seconds between two heartbeats at a path or URL."""
    return REMOTE_BEAT_SECONDS if files.is_url(path) else BEAT_SECONDS


class Heart:
    """Writes heartbeats of this process to a file until it is stopped; nothing else writes it."""

    def __init__(self, path: str):
        self.path = path
        self._beats = 0
        self._stopped = threading.Event()
        # Here, and not in the thread: a folder that can't be written is an error of the caller.
        self._beat()
        threading.Thread(target=self._keep_beating, name="beamjax heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Ends the heartbeats. The file stays."""
        self._stopped.set()

    def _keep_beating(self) -> None:
        while not self._stopped.wait(seconds_at(self.path)):
            try:
                self._beat()
            except Exception as error:  # whatever a file system raises
                # Readers miss a heartbeat, but not the next ones.
                _log.warning("can't write the heartbeat %s: %s", self.path, error)

    def _beat(self) -> None:
        self._beats += 1
        record = {"beats": self._beats, "process": this_process()}
        files.write(self.path, json.dumps(record).encode(), make=False)


class Pulse:
    """Whether another process lives, from the heartbeats in its file."""

    def __init__(self, data: bytes):
        record = parse_json(data, "a heartbeat")
        if not isinstance(record, dict) or not isinstance(record.get("process"), dict):
            raise ValueError(f"found {data!r:.80}, expected a heartbeat")
        self.process: dict[str, Any] = record["process"]
        self._seen: object = data
        self._looked = time.monotonic()
        self._silence = 0.0

    @property
    def needs_looks(self) -> bool:
        """Whether only heartbeats tell, as this process does not see the pids of the other one."""
        return is_alive(self.process) is None

    def look(self, seen: object) -> None:
        """Records what the file is now: its content, or whatever changes with it."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._silence = seen, 0.0
        else:
            self._silence += min(now - self._looked, MAX_GAP_SECONDS)
        self._looked = now

    def is_dead(self, seconds: float) -> bool:
        """Whether the process has ended, or was silent for so long while this one looked."""
        alive = is_alive(self.process)
        return self._silence > seconds if alive is None else not alive
