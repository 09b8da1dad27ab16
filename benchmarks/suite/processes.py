"""Process trees, read from /proc: who belongs to one, and what memory they take."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")


def tree(pid: int) -> list[int]:
    """The process and all that descend from it; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(PROC) if PROC.exists() else []:
        if name.isdigit():
            children.setdefault(_number(int(name), 4), []).append(int(name))
    found = [pid] if (PROC / str(pid)).exists() else []
    for member in found:
        found += children.get(member, [])
    return found


def known(pids: Iterable[int]) -> dict[int, int]:
    """Processes with the moments of their start, since the system gives numbers again."""
    return {pid: moment for pid in pids if (moment := _number(pid, 22)) >= 0}


def _number(pid: int, place: int) -> int:
    """A number of /proc/PID/stat, by its place in proc(5) after the name; -1 if it is gone."""
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[place - 3])
    except (OSError, ValueError, IndexError):
        return -1


def memory_mib(pids: Iterable[int]) -> float:
    """What processes have for themselves, and what they share in memory, once; not mapped files."""
    own, shared = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            lines = (PROC / str(pid) / "status").read_text().splitlines()
            kib = {name: int(text.split()[0]) for name, text in _rss(lines)}
            own += kib.get("RssAnon", 0)
            shared = max(shared, kib.get("RssShmem", 0))
    return (own + shared) / 1024


def _rss(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, text = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            yield name, text


class Peak:
    """Samples the memory of a process tree while it is asked to, and keeps the largest."""

    def __init__(self, pid: int, seconds: float = 0.1):
        self.pid, self.seconds, self.mib = pid, seconds, 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()

        def look() -> None:
            while True:
                self.mib = max(self.mib, memory_mib(tree(self.pid)))
                if done.wait(self.seconds):
                    return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.mib = max(self.mib, memory_mib(tree(self.pid)))
            done.set()
            thread.join()


def end(members: Mapping[int, int]) -> None:
    """Ends those of `known` processes that are still there: by asking, then by force."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + 3
        for pid in _left(members):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, kind)
        while _left(members) and time.monotonic() < until:
            time.sleep(0.05)


def _left(members: Mapping[int, int]) -> list[int]:
    same = [pid for pid, moment in members.items() if _number(pid, 22) == moment]
    return [pid for pid in same if not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
