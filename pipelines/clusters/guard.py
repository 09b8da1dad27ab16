"""Ends what a launcher has started in other processes if the launcher is killed.

A killed launcher can't clean up, so this file runs as a process beside it. It runs a job server and
stops it, or it cancels the pipelines on a Flink cluster, which would otherwise hold slots for
results that no process reads. It imports the standard library only, to start quickly.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from types import FrameType
from typing import Any

PREFIX = "beamjax-"
"""The beginning of the names of all pipelines that are cancelled."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_NOTICE = 0.05
"""Seconds until a guard notices a signal; the exit of each launcher with a job server waits."""
_SECONDS_TO_STOP = 5
_SECONDS_TO_ARRIVE = 30
"""Seconds after the end of a launcher in which its last pipeline may still reach the cluster."""
_ENDED = ("FINISHED", "FAILED", "CANCELED", "CANCELLING")


def guarded(command: list[str], folder: str = "") -> list[str]:
    """A command that runs another one, and stops it when the process that starts it ends."""
    # `folder` is removed when the command has been stopped. The launcher can't always do this: an
    # interrupt may end its exit handlers.
    return [sys.executable, "-I", "-S", __file__, "run", folder, *command]


def run(command: list[str], folder: str = "") -> int:
    """Runs a command until it ends, the parent ends, or a signal arrives; returns its status."""
    parent = os.getppid()
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(command)
    # A process whose parent ends gets another parent.
    while not stopping and os.getppid() == parent:
        try:
            # The folder stays: the launcher reads the log in it.
            return child.wait(_SECONDS_TO_NOTICE)
        except subprocess.TimeoutExpired:
            continue
    child.terminate()
    try:
        return child.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def watched(address: str, launcher: int) -> str:
    """Starts a process that cancels this process's pipelines if it is killed; their job name."""
    # `launcher` is the pid of this process. It is in the key of the cache, since a forked process
    # needs a guard of its own.
    name = f"{PREFIX}{launcher}-{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-I", "-S", __file__, "cancel", str(launcher), address, name]
    # In a session of its own, Ctrl-C does not reach it: the launcher cancels its pipelines itself.
    watch = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_stop, watch, launcher)
    return name


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Lets the process of `watched` outlive this one, unless the block ends without an error."""
    # A job server goes on to submit a pipeline after its launcher was interrupted. So there is no
    # `finally` here: after an error, the pipeline stays in the set.
    pipeline = object()
    _needed.add(pipeline)
    yield
    _needed.discard(pipeline)


_needed: set[object] = set()
"""The pipelines that may still reach a cluster."""


def _stop(watch: subprocess.Popen[bytes], launcher: int) -> None:
    # A forked process inherits the exit handler.
    if os.getpid() == launcher and not _needed:
        watch.terminate()
        watch.wait()


def cancel(launcher: int, address: str, name: str) -> None:
    """Waits until a launcher, the parent of this process, ends; then cancels its pipelines."""
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    end = time.monotonic() + _SECONDS_TO_ARRIVE
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for job in _ask(f"{address}/jobs/overview")["jobs"]:
                if job["name"].startswith(name) and job["state"] not in _ENDED:
                    _ask(f"{address}/jobs/{job['jid']}?mode=cancel", "PATCH")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _ask(address: str, method: str = "GET") -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(address, method=method), timeout=5) as answer:
        return json.load(answer)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[3:], sys.argv[2]))
    cancel(int(sys.argv[2]), *sys.argv[3:])
