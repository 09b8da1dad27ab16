"""A folder of arrays under content addresses, which runs of many processes share."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays

LIMIT_BYTES = 10 * 2**30
"""Approximate limit of the bytes of all files in a folder."""
SUFFIX = ".partials"
_UNFINISHED_SECONDS = 3600.0
"""Seconds after which a temporary file is considered abandoned by its writer."""
_PAUSE = 20.0
"""Seconds for which a cache is not used after a second that was lost with a failure."""
_log = logging.getLogger(__name__)


class PartialCache:
    """Finds and stores arrays by address; thread-safe."""

    # A file is named after its address and is written atomically, so two processes may write one
    # address at the same time. The least recently used files are removed first; those of local
    # folders count as used when they are read, those at URLs when they are written.

    def __init__(self, folder: str, limit: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit = limit
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._paused_until = 0.0
        # As many bytes as trigger the check of the folder before the first write.
        self._written = limit

    def find(self, address: str) -> tuple[list[np.ndarray], dict[str, Any]] | None:
        """The arrays of an address and the `meta` stored with them; None if they can't be read."""
        path, start = self._path(address), time.monotonic()
        if start < self._paused_until:
            return None
        try:
            if files.is_url(path) and not files.exists(path):
                return None
            decoded = decode_arrays(files.read(path))
        except FileNotFoundError:
            return None
        except ArrayFormatError as error:
            _log.warning("cache: found a damaged file %s, computing it again: %s", path, error)
            return None
        except Exception as error:  # whatever a file system raises
            self._warn("cache: can't read %s, computing it again: %s", path, error, start)
            return None
        if not files.is_url(path):
            # The time of change is the time of the last use. Ignored: another process has removed
            # the file, or this one may not write it.
            with contextlib.suppress(OSError):
                os.utime(path)
        return decoded

    def store(self, address: str, arrays: Sequence[np.ndarray], meta: dict[str, Any]) -> None:
        """Stores arrays; only logs a warning if the folder can't be written."""
        path, start = self._path(address), time.monotonic()
        if start < self._paused_until:
            return
        data = encode_arrays(arrays, meta)
        try:
            # A process checks the limit before its first write, and each time that it has written a
            # sixteenth of it; in between, the files may exceed it.
            with self._lock:
                self._written += len(data)
                full = self._written * 16 > self.limit
                if full:
                    self._written = 0
            if full:
                self.trim()
            files.write(path, data)
        except Exception as error:  # whatever a file system raises
            self._warn("cache: can't write %s, going on without it: %s", path, error, start)

    def _warn(self, message: str, path: str, error: Exception, start: float) -> None:
        """Logs only the first failure of each kind: with a full disk, every shard fails."""
        # A file system of URLs may retry for many seconds. Not every shard should wait for that.
        now = time.monotonic()
        self._paused_until = now + _PAUSE * (now - start)
        level = logging.DEBUG if message in self._failed else logging.WARNING
        self._failed.add(message)
        _log.log(level, message, path, error)

    def trim(self) -> None:
        """Removes the least recently used files until the others are within the limit."""
        by_age = sorted(files.listed(self.folder), key=lambda file: file.time)
        old = time.time() - _UNFINISHED_SECONDS
        gone = [f.name for f in by_age if f.name.endswith(files.TEMPORARY) and f.time < old]
        stored = [file for file in by_age if file.name.endswith(SUFFIX)]
        total = sum(file.nbytes for file in stored)
        for file in stored:
            if total <= self.limit:
                break
            gone.append(file.name)
            total -= file.nbytes
        files.remove_files(self.folder, gone)

    def _path(self, address: str) -> str:
        return files.join(self.folder, address + SUFFIX)
