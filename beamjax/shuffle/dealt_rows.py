"""Rows of tables on their way to the parts that they are dealt to: in files, whose names alone go
through a shuffle.

A file has those rows of all parts that some worker has read at once, each part together, and before
them where each part begins. So what is shuffled grows with the files alone, not with the parts too.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beamjax.errors import SourceError

NAMES = "files.json"


@dataclass(frozen=True)
class DealtRows:
    """A folder of files with rows. A file of a worker that failed is in nobody's list.

    Attributes:
      folder: of the files.
      parts: how many there are.
    """

    folder: str
    parts: int

    @classmethod
    def inside(cls, folder: str, parts: int) -> DealtRows:
        """A new folder in another one."""
        return cls(tempfile.mkdtemp(prefix="dealt-", dir=folder), parts)

    def write(self, blocks: Iterable[tuple[int, bytes]]) -> str:
        """Writes a file of blocks of rows, of parts in ascending order; gives its name.

        Raises:
          SourceError: the file can't be written.
        """
        begins = np.zeros(self.parts + 1, np.int64)
        try:
            handle, path = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                file.write(begins.tobytes())
                for part, block in blocks:
                    file.write(block)
                    begins[part + 1] = len(block)
                file.seek(0)
                file.write((begins.nbytes + np.cumsum(begins)).tobytes())
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot write rows of the table ({error})."
            ) from error
        return os.path.basename(path)

    def list(self, names: Iterable[str]) -> None:
        """Says which files there are.

        Raises:
          SourceError: the list can't be written.
        """
        path = os.path.join(self.folder, NAMES)
        try:
            Path(f"{path}.tmp").write_text(json.dumps(sorted(names)), encoding="utf-8")
            os.replace(f"{path}.tmp", path)
        except OSError as error:
            raise SourceError(f"{path}: cannot write the list of files ({error}).") from error

    def blocks(self, part: int) -> Blocks:
        """The blocks of a part, of all files that are listed.

        Raises:
          SourceError: a file can't be read.
        """
        path = os.path.join(self.folder, NAMES)
        found = []
        try:
            for name in json.loads(Path(path).read_text(encoding="utf-8")):
                path = os.path.join(self.folder, name)
                with open(path, "rb") as file:
                    file.seek(8 * part)
                    begin, end = np.frombuffer(file.read(16), np.int64).tolist()
                if begin < end:
                    found.append((path, begin, end - begin))
        except (OSError, ValueError) as error:
            raise _unread(path, error) from error
        return Blocks(found)

    def remove(self) -> None:
        """Removes all files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Blocks:
    """Blocks of rows, read from their files one at a time.

    Args:
      places: of each, its file, where it begins in that, and its bytes.
    """

    def __init__(self, places: Sequence[tuple[str, int, int]]):
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.read, range(len(self)))

    def read(self, index: int) -> bytes:
        """A block.

        Raises:
          SourceError: its file can't be read.
        """
        path, begin, size = self.places[index]
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                return file.read(size)
        except OSError as error:
            raise _unread(path, error) from error


def _unread(path: str, error: Exception) -> SourceError:
    return SourceError(
        f"{path}: cannot read rows of the table ({error}); do all workers see the same files there?"
    )
