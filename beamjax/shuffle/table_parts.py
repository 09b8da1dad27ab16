"""The parts that the rows of a table are dealt to: how rows get there, and how one is written."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from beamjax.errors import SourceError
from beamjax.shuffle.dealt_rows import Blocks
from beamjax.sources.leaf_checks import native_dtype
from beamjax.sources.source_base import LeafSpec, Source
from beamjax.sources.streams.spool import GrowingFile
from beamjax.storage.arrays import decode_arrays, encode_arrays

PART_BYTES = 1 << 25
"""Of the rows of a part, about: a worker sorts their keys in memory."""
BLOCK_BYTES = 1 << 24
"""Of the rows that are read and dealt at once."""
WRITE_BYTES = 1 << 24
"""Of the rows of a part that are written at once: a part may have more, if keys are uneven."""
MAX_PARTS = 4096
DEALT_ROW_BYTES, WRITTEN_ROW_BYTES = 40, 72
"""Of numbers that put rows in order, besides what is in them."""

Arrays = list[np.ndarray]


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

    def deal(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Reads rows, and gives those of each part: the number of each row, then all leaves."""
        arrays = source.read(start, stop)
        part = hashed(arrays[self.key]) % np.uint64(self.parts)
        order = np.argsort(part, kind="stable")
        cuts = np.searchsorted(part[order], np.arange(self.parts + 1, dtype=np.uint64))
        for number in np.unique(part).tolist():
            mine = order[cuts[number] : cuts[number + 1]]
            rows = [(start + mine).astype(np.int64), *(array[mine] for array in arrays)]
            yield number, encode_arrays(rows)

    def write(self, part: int, blocks: Blocks) -> None:
        """Puts the rows of a part in order and writes them: by length of the group, key, number.

        Only the keys and numbers of all rows are in memory, and `WRITE_BYTES` of the rest.

        Raises:
          SourceError: a file can't be written.
        """
        found = [self._numbers_and_keys(block) for block in blocks]
        ends = np.cumsum([0, *(len(keys) for _, keys in found)])
        rows, keys = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        del found
        order = np.lexsort((rows, keys))
        names, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
        members = np.lexsort((names, counts))
        order = order[_ranges(starts[members], counts[members])]
        self.save(part, "keys", names[members])
        del rows, keys
        self._write_leaves(part, blocks, order, ends)
        self.save(part, "counts", counts[members].astype(np.int64))

    def _numbers_and_keys(self, block: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Copies, so that the block can go."""
        numbers, *leaves = decode_arrays(block)[0]
        return np.array(numbers), np.array(scalars(leaves[self.key]))

    def _leaves(self, block: bytes) -> list[np.ndarray]:
        """Those of the members, without the keys."""
        leaves = decode_arrays(block)[0][1:]
        return [leaf for number, leaf in enumerate(leaves) if number != self.key]

    def _write_leaves(self, part: int, blocks: Blocks, order: np.ndarray, ends: np.ndarray) -> None:
        """Writes rows in this order; `ends` are where blocks end in what it is the order of."""
        leaves = [
            LeafSpec(x.shape[1:], native_dtype(x.dtype)) for x in self._leaves(blocks.read(0))
        ]
        size = max(WRITE_BYTES // max(sum(leaf.nbytes for leaf in leaves), 1), 1)
        paths = [self.path(part, f"leaf-{number:03d}") for number in range(len(leaves))]
        temporary = [f"{path}.{uuid.uuid4().hex}.tmp" for path in paths]
        try:
            with contextlib.ExitStack() as stack:
                files = [
                    stack.enter_context(GrowingFile(path, leaf))
                    for path, leaf in zip(temporary, leaves, strict=True)
                ]
                for start in range(0, len(order), size):
                    chunk = self._rows(blocks, order[start : start + size], ends, leaves)
                    for file, array in zip(files, chunk, strict=True):
                        file.append(array)
            for path, written in zip(paths, temporary, strict=True):
                os.replace(written, path)
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot write the grouped rows of a part ({error})."
            ) from error

    def _rows(
        self, blocks: Blocks, wanted: np.ndarray, ends: np.ndarray, leaves: Sequence[LeafSpec]
    ) -> Arrays:
        """Rows by their numbers in all blocks together; reads only blocks that have some."""
        found = [np.empty((len(wanted), *leaf.shape), leaf.dtype) for leaf in leaves]
        by_block = np.argsort(wanted, kind="stable")
        cuts = np.searchsorted(wanted[by_block], ends)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            here = by_block[cuts[number] : cuts[number + 1]]
            arrays = self._leaves(blocks.read(number))
            for whole, array in zip(found, arrays, strict=True):
                whole[here] = array[wanted[here] - ends[number]]
        return found

    def dealing_bytes(self, source: Source) -> int:
        """Of memory, to deal rows that are read at once: they, some of them twice, and numbers."""
        start, stop = next(self.blocks(source))
        part = -(-(stop - start) // self.parts) * 2
        each = sum(leaf.nbytes for leaf in source.leaves)
        return (stop - start + 2 * part) * each + (stop - start) * DEALT_ROW_BYTES

    def writing_bytes(self, source: Source) -> int:
        """Of memory, to write a part of twice the mean: rows, a block of them, keys and numbers."""
        each, key = sum(leaf.nbytes for leaf in source.leaves), source.leaves[self.key].nbytes
        rows = min(-(-self.rows // self.parts) * 2, self.rows)
        start, stop = next(self.blocks(source))
        block = min(-(-(stop - start) // self.parts) * 2, stop - start)
        batch = min(rows * each, max(WRITE_BYTES, each))
        return batch + 2 * block * each + rows * (WRITTEN_ROW_BYTES + 3 * key)

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


def scalars(keys: np.ndarray) -> np.ndarray:
    """Keys that NumPy sorts: texts as bytes of one width."""
    if keys.ndim == 1:
        return keys
    return np.ascontiguousarray(keys).view(f"S{keys.shape[1]}")[:, 0]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers of all ranges, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
