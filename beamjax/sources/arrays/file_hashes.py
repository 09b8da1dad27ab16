"""Hashes of the contents of files, which are computed once for as long as a file is unchanged."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from beamjax.sources.arrays.data_files import SETTLED, is_url, readable

_THREADS = 4
"""Files that are hashed side by side: hashlib and reads release the GIL."""


class FileHashes:
    """Hashes by path, each with the size and the times of the file that it was computed from.

    Args:
      known: what `to_json` gave before; entries of any other form are ignored.
    """

    def __init__(self, known: Mapping[str, Any] | None = None):
        self._known = dict(known or {})
        self._unsettled: set[str] = set()

    def of(self, paths: Iterable[str]) -> list[str]:
        """The hash of each file, or at a URL what its file system says of the content.

        Object stores have checksums. Other file systems give the size and the time of change.

        Raises:
          SourceError: a file can't be read.
        """
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._hash, paths))

    def to_json(self) -> dict[str, Any]:
        """The hashes as plain JSON values, but for those of files that changed just before.

        These may change again without another size or time.
        """
        return {path: found for path, found in self._known.items() if path not in self._unsettled}

    def _hash(self, path: str) -> str:
        with readable(path):
            if is_url(path):
                from beamjax.storage import remote_files

                return remote_files.content_mark(path)
            found = os.stat(path)
            seen = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
            match self._known.get(path):
                case [*before, str(digest)] if before == seen:
                    return digest
            now = time.time_ns()
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, _new_hash).hexdigest()
            self._known[path] = [*seen, digest]
            if now - max(found.st_mtime_ns, found.st_ctime_ns) < SETTLED:
                self._unsettled.add(path)
            return digest


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)
