"""The parts that the rows of a table are dealt to: how rows get there, and how one is written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.source_base import Source

PART_BYTES = 1 << 25
"""Of the rows of a part, about: a worker sorts their keys in memory."""
BLOCK_BYTES = 1 << 24
"""Of the rows that are read and dealt at once."""
MAX_PARTS = 4096


@dataclass(frozen=True)
class Grouping:
    """What is grouped, and where the groups go.

    Attributes:
      folder: of the files, which all workers see.
      key: the number of the leaf with the keys.
      parts: how many.
      rows: of the table.
    """

    folder: str
    key: int
    parts: int
    rows: int

    def blocks(self, source: Source) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are read at once."""
        size = max(BLOCK_BYTES // max(sum(leaf.nbytes for leaf in source.leaves), 1), 1)
        for start in range(0, self.rows, size):
            yield start, min(start + size, self.rows)

    def path(self, part: int, what: str) -> str:
        """Of a file of a part."""
        return os.path.join(self.folder, f"part-{part:05d}-{what}.npy")

    def written(self) -> list[int]:
        """The parts that have rows."""
        return [part for part in range(self.parts) if os.path.exists(self.path(part, "counts"))]

    def save(self, part: int, what: str, array: np.ndarray) -> None:
        """Writes a file of a part.

        Raises:
          SourceError: it can't be written.
        """
        path = self.path(part, what)
        try:
            handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(temporary, path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot write {array.nbytes} bytes of grouped rows ({error})."
            ) from error


def parts_for(rows: Source) -> int:
    """Into how many parts rows are dealt."""
    return min(max(-(-rows.nbytes // PART_BYTES), 1), MAX_PARTS)


def hashed(keys: np.ndarray) -> np.ndarray:
    """uint64[n] that are as good as random, of integers or texts: the finalizer of SplitMix64.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
    """
    if keys.ndim == 2:  # texts
        width = -(-keys.shape[1] // 8) * 8
        words = np.zeros((len(keys), width), np.uint8)
        words[:, : keys.shape[1]] = keys
        x = np.zeros(len(keys), np.uint64)
        for word in words.view("<u8").T:
            x = hashed(x ^ word.astype(np.uint64))
        return x
    x = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64).view(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
