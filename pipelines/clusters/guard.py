"""Ends what a launcher has started in other processes if the launcher is killed.

A killed launcher can't clean up, so a process beside it does. This file, as a program, runs a job
server and stops it; it imports the standard library only, to start quickly. `flink_rest.py` cancels
pipelines on a Flink cluster, which would otherwise hold slots for results that no process reads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PREFIX = "beamjax-"
"""The beginning of the names of all pipelines that are cancelled."""
_SECONDS_TO_NOTICE = 0.05
"""Seconds until a guard notices a signal; the exit of each launcher with a job server waits."""
_SECONDS_TO_STOP = 5
_WATCH = str(Path(__file__).with_name("flink_rest.py"))
"""The program that cancels pipelines; not imported, as this file runs without beamjax."""


def guarded(command: list[str], folder: str = "") -> list[str]:
    """A command that runs another one, and stops it when the process that starts it ends."""
    # `folder` is removed when the command has been stopped. The launcher can't always do this: an
    # interrupt may end its exit handlers.
    return [sys.executable, "-I", "-S", __file__, folder, *command]


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
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(_SECONDS_TO_NOTICE)
            # The signal may have reached the command first, as they are in one process group.
            if not stopping:
                return status  # The folder stays: the launcher reads the log in it.
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
    command = [sys.executable, "-I", "-S", _WATCH, str(launcher), address, name]
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


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:], sys.argv[1]))
