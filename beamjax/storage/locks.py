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
    """Locks a file, which is created if it does not exist."""
    end = time.monotonic() + seconds
    while (handle := _attempt(path)) is None:
        if time.monotonic() >= end:
            return None
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    return handle


def unlock(path: str | os.PathLike[str], handle: int) -> None:
    """Removes a file that this process has locked, and releases its lock."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(handle)


def _attempt(path: str | os.PathLike[str]) -> int | None:
    while True:
        handle = trust.open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file between the two calls.
            if _is_at(path, handle):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_at(path: str | os.PathLike[str], handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


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
