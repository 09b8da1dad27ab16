"""Retries file operations that fail for a moment, as those on a shared folder do."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

MOMENTARY = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.ESTALE)
"""Errors that may be gone a moment later: a server that restarts, or a disk from which another
process removes files."""
SECONDS = 30.0
"""Seconds for which an operation is retried."""
_PAUSE_SECONDS = 0.25
_IMPATIENT_SECONDS = 60.0
"""Seconds after a failure in which no operation is retried, so that a run that fails ends soon."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_lock = threading.Lock()
_runs = 0
_failed = float("-inf")


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """A context in which the functions of `files` retry, in all threads of this process."""
    global _runs, _failed
    with _lock:
        _runs += 1
        _failed = float("-inf")
    try:
        yield
    finally:
        with _lock:
            _runs -= 1


def patiently(operation: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function retry in the context of `patient`."""

    @functools.wraps(operation)
    def tried(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return retried(operation, *args, **kwargs) if _runs else operation(*args, **kwargs)

    return tried


def retried(operation: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function, and again if it fails with one of `MOMENTARY`."""
    global _failed
    begun = time.monotonic()
    while True:
        try:
            return operation(*args, **kwargs)
        except OSError as error:
            now = time.monotonic()
            if error.errno not in MOMENTARY or now - _failed < _IMPATIENT_SECONDS:
                raise
            if now - begun > SECONDS:
                _failed = now
                text = f"{error.strerror}, also after {SECONDS:.0f} s of attempts"
                raise OSError(error.errno, text, error.filename) from error
        time.sleep(_PAUSE_SECONDS)
