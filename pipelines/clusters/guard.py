"""Runs a command for as long as the process lives that asked for it.

A server that a launcher starts outlives it where the launcher is killed and runs no more Python.
This stands between the two. It is run as a file and imports the standard library alone, so that it
costs a small interpreter and no time.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_STOP = 5


def main(command: list[str]) -> int:
    """Runs a command until it ends, the parent of this process does, or this one is stopped.

    Args:
      command: what to run, with its arguments.

    Returns:
      The exit status of the command.
    """
    parent = os.getppid()
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(command)
    while not stopping and os.getppid() == parent:
        try:
            return child.wait(_SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            continue
    child.terminate()
    try:
        return child.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
