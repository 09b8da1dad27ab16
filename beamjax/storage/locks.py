"""Locks between processes, as files: the system unlocks them when a process ends in any way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from beamjax.storage import trust

NAME = "lock"
"""The file in a folder whose lock is that of the folder."""
_SECONDS_BETWEEN_ATTEMPTS = 0.02


def try_lock(path: str | os.PathLike[str], seconds: float = 0.0) -> int | None:
    """Locks a file, which is created if it does not exist.

    Args:
      path: the file.
      seconds: how long to wait for its lock.

    Returns:
      A descriptor, which holds the lock until it is closed; None if another one holds it.

    Raises:
      OSError: the file can't be opened or locked, or is not a regular file.
    """
    end = time.monotonic() + seconds
    handle = trust.open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    os.close(handle)
                    return None
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            else:
                return handle
    except BaseException:
        os.close(handle)
        raise


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a process holds the lock of a file."""
    try:
        handle = trust.open_regular(path)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context that waits for the lock of a folder, and holds it."""
    handle = try_lock(os.path.join(folder, NAME), seconds=float("inf"))
    assert handle is not None
    try:
        yield
    finally:
        os.close(handle)
