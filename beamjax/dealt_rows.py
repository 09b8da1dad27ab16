"""Rows of tables on their way to the parts that they are dealt to: in files, as only what says
where they are goes through a shuffle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from beamjax.errors import SourceError

Piece: TypeAlias = tuple[str, int, int]
"""Rows of one part: the name of a file, where they begin in it, and how many bytes they are."""


@dataclass(frozen=True)
class DealtRows:
    """A folder of files with rows, each with those of all parts that some worker has read at once.

    A file of a worker that failed is in nobody's list.
    """

    folder: str

    @classmethod
    def inside(cls, folder: str) -> DealtRows:
        """A new folder in another one."""
        return cls(tempfile.mkdtemp(prefix="dealt-", dir=folder))

    def write(self, blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Piece]]:
        """Writes blocks of rows to a file; gives the piece of each, with its part.

        Raises:
          SourceError: the file can't be written.
        """
        pieces = []
        try:
            handle, path = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                for part, block in blocks:
                    pieces.append((part, (os.path.basename(path), file.tell(), len(block))))
                    file.write(block)
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot write rows of the table ({error})."
            ) from error
        yield from pieces

    def read(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """The blocks that were written.

        Raises:
          SourceError: a file can't be read.
        """
        for name, start, size in sorted(pieces):
            path = os.path.join(self.folder, name)
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    block = file.read(size)
            except OSError as error:
                raise SourceError(
                    f"{path}: cannot read rows of the table ({error}); do all workers see the same "
                    "files there?"
                ) from error
            yield block

    def remove(self) -> None:
        """Removes all files."""
        shutil.rmtree(self.folder, ignore_errors=True)
