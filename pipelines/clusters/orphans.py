"""Cancels pipelines on a Flink cluster whose launcher was killed.

Flink continues a pipeline without its launcher: it holds slots and computes results that nothing
reads. This process runs beside the launcher, as `guard` does. It is started as a file and imports
only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from typing import Any

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ARRIVE = 30
"""Seconds after the end of a launcher in which its last submission may still reach Flink."""
_ENDED = ("FINISHED", "FAILED", "CANCELED", "CANCELLING")


@functools.cache
def watched(address: str, launcher: int) -> str:
    """Starts a process that cancels the pipelines of this one if it is killed.

    Args:
      address: of the job manager, as a URL.
      launcher: the id of this process; part of the key, since a fork has pipelines of its own.

    Returns:
      The name to give to these pipelines.
    """
    name = f"beamjax-{launcher}-{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-I", "-S", __file__, str(launcher), address, name]
    # A session of its own: Ctrl-C is for the launcher, which cancels its pipelines itself.
    watch = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_stop, watch, launcher)
    return name


def _stop(watch: subprocess.Popen[bytes], launcher: int) -> None:
    if os.getpid() == launcher:
        watch.terminate()
        watch.wait()


def main(launcher: int, address: str, name: str) -> None:
    """Waits until a launcher ends, then cancels its pipelines.

    Args:
      launcher: the id of its process, the parent of this one.
      address: the URL of the job manager.
      name: the name of the pipelines.
    """
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    end = time.monotonic() + _SECONDS_TO_ARRIVE
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for job in _ask(f"{address}/jobs/overview")["jobs"]:
                if job["name"] == name and job["state"] not in _ENDED:
                    _ask(f"{address}/jobs/{job['jid']}?mode=cancel", "PATCH")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _ask(address: str, method: str = "GET") -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(address, method=method), timeout=5) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
