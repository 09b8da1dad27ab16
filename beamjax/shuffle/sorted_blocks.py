"""The shuffle: any number of workers sort rows by key, on disk.

Workers write their rows in blocks, each of which is sorted by key. When all blocks are listed, the
range of keys is divided into parts. For each part, a worker reads the rows in its range from all
blocks. So the files depend only on the rows, not on bundles, retries or the number of workers. Beam
shuffles only the names of blocks, because several runners hold shuffled data in memory.

A worker has one block in memory, or the keys of one part and `BLOCK_BYTES` of its rows.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.npy_source import part_path, restored, storable
from beamjax.sources.source_base import LeafSpec
from beamjax.sources.streams.spool import GrowingFile
from beamjax.storage import files

BLOCK_BYTES = 1 << 24
"""Bytes of the rows of a block, which a worker sorts in memory."""
PART_BYTES = 1 << 25
"""Approximate bytes of the rows of a part. A worker has at most one leaf of them in memory."""
MAX_PARTS = 4096
"""Largest number of parts. Each part searches the keys of all blocks, so more parts would cost more
than they save."""
LIST = "blocks.json"

Block = tuple[np.ndarray, list[np.ndarray]]
"""The keys, uint64[rows, 2], ascending, and the leaves of the rows."""


@dataclass(frozen=True)
class Shuffle(abc.ABC):
    """Describes the rows of a shuffle and its folders. A subclass defines how a part is written.

    Attributes:
      folder: the folder of the files of the parts, which all workers see.
      scratch: a folder for the blocks, see `scratch_in`.
      leaves: one row of each leaf.
      block_bytes: approximate bytes of the rows of a block.
      part_bytes: approximate bytes of the rows of a part.
    """

    folder: str
    scratch: str
    leaves: tuple[LeafSpec, ...]
    block_bytes: int
    part_bytes: int

    @abc.abstractmethod
    def write(self, part: int) -> None:
        """Writes the files of a part, if it has rows.

        Raises:
          SourceError: a file can't be read or written.
        """

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its key."""
        return sum(leaf.nbytes for leaf in self.leaves) + 16

    def save(self, block: Block) -> tuple[str, int]:
        """Writes a block, and returns its name and the number of its rows.

        Raises:
          SourceError: a file can't be written.
        """
        name = uuid.uuid4().hex
        keys, leaves = block
        for what, array in [("keys", keys), *((f"{i:03d}", leaf) for i, leaf in enumerate(leaves))]:
            path = self._block_path(name, what)
            try:
                np.save(path, storable(array), allow_pickle=False)
            except OSError as error:
                raise SourceError(
                    f"{path}: cannot write {array.nbytes} bytes of members ({error}); expected a "
                    "folder that the launcher and all workers can write and read."
                ) from error
        return name, len(keys)

    def list_blocks(self, blocks: Sequence[tuple[str, int]], dropped: Sequence[str] = ()) -> int:
        """Writes the list of all blocks, and returns the number of parts to make of them.

        Args:
          blocks: the name and the number of rows of each block.
          dropped: messages of the rows that were left out.

        Raises:
          SourceError: the list can't be written.
        """
        count = sum(rows for _, rows in blocks)
        parts = min(-(-count * self.row_bytes // self.part_bytes), MAX_PARTS)
        record = {"blocks": blocks, "parts": parts, "count": count, "dropped": dropped}
        path = os.path.join(self.scratch, LIST)
        try:
            files.write(path, json.dumps(record).encode(), make=False)
        except OSError as error:
            raise SourceError(f"{path}: cannot write the list of blocks ({error}).") from error
        return parts

    def listed(self) -> dict[str, Any]:
        """What `list_blocks` wrote.

        Raises:
          SourceError: it can't be read.
        """
        path = os.path.join(self.scratch, LIST)
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: cannot read ({error}); do the launcher and the workers see the same "
                "files under this path?"
            ) from error
        return found

    def rows_between(self, low: int, high: int, listed: dict[str, Any]) -> SortedRows:
        """The rows of which the first word of the key is in [low, high); `low < high`."""
        names = [name for name, _ in listed["blocks"]]
        keys, blocks, rows = [np.empty((0, 2), np.uint64)], [], []
        for number, name in enumerate(names):
            found = self._load(name, "keys")
            start = int(np.searchsorted(found[:, 0], np.uint64(low)))
            # `high` may be 2**64, which is no uint64.
            stop = int(np.searchsorted(found[:, 0], np.uint64(high - 1), side="right"))
            keys.append(np.array(found[start:stop]))
            blocks.append(np.full(stop - start, number, np.int32))
            rows.append(np.arange(start, stop, dtype=np.int64))
        together = np.concatenate(keys)
        order = _order(together)
        places = np.concatenate(blocks)[order], np.concatenate(rows)[order]
        return SortedRows(self, names, together[order], *places)

    def write_leaf(
        self, part: int, number: int, leaf: LeafSpec, arrays: Iterable[np.ndarray]
    ) -> None:
        """Writes the file of a leaf of a part: the concatenation of arrays.

        Raises:
          SourceError: it can't be written.
        """
        path = part_path(self.folder, part, number)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with GrowingFile(temporary, leaf) as file:
                for array in arrays:
                    file.append(array)
            os.replace(temporary, path)
        except OSError as error:
            raise SourceError(f"{path}: cannot write members ({error}).") from error

    def _load(self, name: str, what: str) -> np.ndarray:
        path = self._block_path(name, what)
        try:
            # Not `map_file`: its cache would hold the files open after they are removed.
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: cannot read a block of members ({error}); do all workers see the same "
                "files under this path?"
            ) from error
        return found

    def _block_path(self, name: str, what: str) -> str:
        return os.path.join(self.scratch, f"{name}-{what}.npy")


class SortedRows:
    """Rows of all blocks, in the order of their keys.

    Attributes:
      keys: uint64[rows, 2].
    """

    def __init__(
        self,
        shuffle: Shuffle,
        names: Sequence[str],
        keys: np.ndarray,
        blocks: np.ndarray,
        rows: np.ndarray,
    ):
        """Use `Shuffle.rows_between`.

        Args:
          shuffle: the shuffle, which reads the blocks.
          names: the names of the blocks.
          keys: the keys of the rows.
          blocks: the number of the block of each row.
          rows: the number of each row in its block.
        """
        self.keys = keys
        self._shuffle = shuffle
        self._names = names
        self._blocks = blocks
        self._rows = rows

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, number: int) -> np.ndarray:
        """A leaf of all rows."""
        return self._read(number, 0, len(self))

    def chunks(self, number: int) -> Iterator[np.ndarray]:
        """A leaf of all rows, in chunks of about `block_bytes`."""
        leaf = self._shuffle.leaves[number]
        size = max(self._shuffle.block_bytes // max(leaf.nbytes, 1), 1)
        for start in range(0, len(self), size):
            yield self._read(number, start, start + size)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        leaf = self._shuffle.leaves[number]
        blocks, rows = self._blocks[start:stop], self._rows[start:stop]
        found = np.empty((len(rows), *leaf.shape), leaf.dtype)
        for block in np.unique(blocks).tolist():
            is_in_block = blocks == block
            stored = self._shuffle._load(self._names[block], f"{number:03d}")
            found[is_in_block] = restored(stored[rows[is_in_block]], leaf.dtype)
        return found


def hash_range(part: int, parts: int) -> tuple[int, int]:
    """The range [low, high) of the first words of the keys of a part, if keys are hashes."""
    return (part << 64) // parts, ((part + 1) << 64) // parts


def sorted_block(keys: np.ndarray, leaves: Sequence[np.ndarray]) -> Block:
    """Sorts rows by key."""
    order = _order(keys)
    return keys[order], [leaf[order] for leaf in leaves]


def merged(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    """Merges small blocks to larger ones of at least `limit` bytes; the last one may be smaller."""
    found: list[Block] = []
    size = 0
    for block in blocks:
        found.append(block)
        size += sum(array.nbytes for array in (block[0], *block[1]))
        if size >= limit:
            yield _one(found)
            found, size = [], 0
    if found:
        yield _one(found)


@contextlib.contextmanager
def scratch_in(folder: str) -> Iterator[str]:
    """Makes a folder for blocks inside of the folder of the parts; removes parts of earlier calls.

    Raises:
      SourceError: the folder can't be written.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for path in Path(folder).glob("part-*.npy"):
            path.unlink()
        scratch = tempfile.mkdtemp(prefix="blocks-", dir=folder)
    except OSError as error:
        raise SourceError(f"{folder}: cannot write members here ({error}).") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _order(keys: np.ndarray) -> np.ndarray:
    return np.lexsort((keys[:, 1], keys[:, 0]))


def _one(blocks: Sequence[Block]) -> Block:
    keys, leaves = zip(*blocks, strict=True)
    arrays = [np.concatenate(column) for column in zip(*leaves, strict=True)]
    return sorted_block(np.concatenate(keys), arrays)
