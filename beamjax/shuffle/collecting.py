"""Elements without an order as members with one: sorted by a key of each, on disk.

Workers write the elements that they get in blocks, each in the order of the keys, and then merge
what all blocks have of one range of keys. What comes out depends on the elements alone: neither on
who had which, nor on how often. No more than a block is in memory, but for the keys of a range.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.npy_source import restored, storable
from beamjax.sources.source_base import MAX_VALUES, LeafSpec
from beamjax.sources.streams.one_member import MemberType, shown
from beamjax.sources.streams.spool import GrowingFile
from beamjax.storage.arrays import encode_arrays

BLOCK_BYTES = 1 << 24
"""Of the members of a block: a worker sorts them in memory."""
INLINE_BYTES = 1 << 18
"""Of the members of a small block, which travels as an element and not as a file."""
PART_BYTES = 1 << 26
"""Of the members of a part, about."""
MAX_PARTS = 4096
BLOCKS = "blocks.json"

Block = tuple[np.ndarray, list[np.ndarray]]
"""uint64[rows, 2], the keys, ascending; and the leaves."""


@dataclass(frozen=True)
class Collecting:
    """What is collected, and where it goes.

    Attributes:
      folder: of the files, which all workers see.
      scratch: a folder in it, for blocks.
      member: what each element must be.
      indexed: whether the keys are the numbers of the members, and not hashes of their bytes.
      drop: whether elements that are no members are left out.
      block_bytes: of the members of a block.
      inline_bytes: of those of a block that is no file.
      part_bytes: of those of a part, about.
    """

    folder: str
    scratch: str
    member: MemberType
    indexed: bool
    drop: bool
    block_bytes: int
    inline_bytes: int
    part_bytes: int

    @property
    def member_bytes(self) -> int:
        """Of a member and its key."""
        return sum(leaf.nbytes for leaf in self.member.leaves) + 16

    def key(self, data: Sequence[bytes], index: Any = None) -> bytes:
        """What a member, the bytes of each leaf, is sorted by: 16 bytes.

        Raises:
          StructureError: the number of an indexed member is none.
        """
        if self.indexed:
            known = isinstance(index, int | np.integer) and not isinstance(index, bool)
            if not known or not 0 <= index < MAX_VALUES:
                raise StructureError(
                    f"from_beam: index gives {shown(index)}, expected the number of the member, "
                    "an int from 0"
                )
            return int(index).to_bytes(8, "big") + bytes(8)
        return hashlib.blake2b(b"".join(data), digest_size=16).digest()

    def block(self, keys: Sequence[bytes], members: Sequence[Sequence[bytes]]) -> Block:
        """Members, one or more, each the bytes of its leaves, as a block."""
        found = np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2).astype(np.uint64)
        columns = [
            np.ndarray((len(keys), *leaf.shape), leaf.dtype, b"".join(data))
            for leaf, data in zip(self.member.leaves, zip(*members, strict=True), strict=True)
        ]
        return in_order(found, columns)

    def save_block(self, block: Block) -> tuple[str, int]:
        """Writes a block to files; gives its name and its rows.

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

    def list_blocks(self, blocks: Sequence[tuple[str, int]], dropped: Sequence[str]) -> int:
        """Says which blocks there are; gives the number of parts that are to be made of them.

        Raises:
          SourceError: there is no member, or the list can't be written.
        """
        count = sum(rows for _, rows in blocks)
        if count == 0:
            found = "no element"
            if dropped:
                found = f"{len(dropped)} elements, none of which is a member ({dropped[0]})"
            raise SourceError(f"from_beam: found {found}, expected at least one member.")
        parts = min(-(-count * self.member_bytes // self.part_bytes), MAX_PARTS)
        record = {"blocks": blocks, "parts": parts, "count": count, "dropped": dropped}
        path = os.path.join(self.scratch, BLOCKS)
        try:
            Path(f"{path}.tmp").write_text(json.dumps(record), encoding="utf-8")
            os.replace(f"{path}.tmp", path)
        except OSError as error:
            raise SourceError(f"{path}: cannot write the list of blocks ({error}).") from error
        return parts

    def listed(self) -> dict[str, Any]:
        """What `list_blocks` wrote.

        Raises:
          SourceError: it can't be read.
        """
        path = os.path.join(self.scratch, BLOCKS)
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: cannot read ({error}); do the launcher and the workers see the same "
                "files under this path?"
            ) from error
        return found

    def write(self, part: int) -> None:
        """Merges the members of a part from all blocks, and writes them, if there are any.

        Raises:
          SourceError: a number is there twice, or missing; or a file can't be read or written.
        """
        listed = self.listed()
        names = [name for name, _ in listed["blocks"]]
        low, high = self._range(part, listed)
        if low == high:
            return
        keys, blocks, rows = [], [], []
        for number, name in enumerate(names):
            found = self._load(name, "keys")
            start = int(np.searchsorted(found[:, 0], np.uint64(low)))
            stop = int(np.searchsorted(found[:, 0], np.uint64(high - 1), side="right"))
            if stop > start:
                keys.append(np.array(found[start:stop]))
                blocks.append(np.full(stop - start, number, np.int32))
                rows.append(np.arange(start, stop, dtype=np.int64))
        found = np.concatenate(keys) if keys else np.empty((0, 2), np.uint64)
        order = np.lexsort((found[:, 1], found[:, 0]))
        if self.indexed:
            self._check_numbers(found[order, 0], low, high, listed)
        if not keys:
            return
        where = np.concatenate(blocks)[order], np.concatenate(rows)[order]
        for i, leaf in enumerate(self.member.leaves):
            self._write_leaf(part_path(self.folder, part, i), i, leaf, names, *where)

    def _range(self, part: int, listed: dict[str, Any]) -> tuple[int, int]:
        """Of the first words of the keys of a part."""
        parts = listed["parts"]
        if not self.indexed:
            return (part << 64) // parts, ((part + 1) << 64) // parts
        size = listed["count"] + len(listed["dropped"])
        last = MAX_VALUES if part == parts - 1 else size * (part + 1) // parts
        return size * part // parts, last

    def _check_numbers(
        self, found: np.ndarray, low: int, high: int, listed: dict[str, Any]
    ) -> None:
        """That the numbers of a part are each there once; elements that were dropped leave gaps."""
        size = listed["count"] + len(listed["dropped"])
        told = f"from_beam, index: {listed['count']} members are numbered 0 to {size - 1}"
        twice = found[1:][found[1:] == found[:-1]]
        if len(twice):
            count = int((found == twice[0]).sum())
            raise SourceError(f"{told}, each once; found {count} elements with {twice[0]}.")
        missing = np.setdiff1d(np.arange(low, min(high, size), dtype=np.uint64), found)
        if len(missing) and not listed["dropped"]:
            more = f" (and {len(missing) - 1} more of its part)" if len(missing) > 1 else ""
            raise SourceError(f"{told}, each once; found no element with {missing[0]}{more}.")
        if len(found) and found[-1] >= size:
            raise SourceError(f"{told}, each once; found an element with {found[-1]}.")

    def _write_leaf(
        self,
        path: str,
        number: int,
        leaf: LeafSpec,
        names: Sequence[str],
        blocks: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Writes the rows of blocks to a file, a block's bytes at a time."""
        size = max(self.block_bytes // max(leaf.nbytes, 1), 1)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with GrowingFile(temporary, leaf) as file:
                for start in range(0, len(rows), size):
                    block, row = blocks[start : start + size], rows[start : start + size]
                    chunk = np.empty((len(row), *leaf.shape), leaf.dtype)
                    for each in np.unique(block).tolist():
                        mine = block == each
                        stored = self._load(names[each], f"{number:03d}")
                        chunk[mine] = restored(stored[row[mine]], leaf.dtype)
                    file.append(chunk)
            os.replace(temporary, path)
        except OSError as error:
            raise SourceError(f"{path}: cannot write members ({error}).") from error

    def _load(self, name: str, what: str) -> np.ndarray:
        path = self._block_path(name, what)
        try:
            # Not by `map_file`, which would keep them when they are removed.
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: cannot read a block of members ({error}); do all workers see the same "
                "files under this path?"
            ) from error
        return found

    def _block_path(self, name: str, what: str) -> str:
        return os.path.join(self.scratch, f"{name}-{what}.npy")


def part_path(folder: str, part: int, leaf: int) -> str:
    """The file of a leaf of a part."""
    return os.path.join(folder, f"part-{part:05d}-leaf-{leaf:03d}.npy")


def in_order(keys: np.ndarray, leaves: Sequence[np.ndarray]) -> Block:
    """Rows sorted by their keys."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    return keys[order], [leaf[order] for leaf in leaves]


def joined(blocks: Sequence[Block]) -> Block:
    """The rows of several blocks as one."""
    keys, leaves = zip(*blocks, strict=True)
    return in_order(np.concatenate(keys), [np.concatenate(c) for c in zip(*leaves, strict=True)])


def encoded(block: Block) -> bytes:
    """A block as an element; `decode_arrays` gives keys and leaves."""
    return encode_arrays([block[0], *block[1]], {"rows": len(block[0])})


def gathered(blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    """Small blocks as bigger ones, of about so many bytes."""
    found: list[Block] = []
    size = 0
    for block in blocks:
        found.append(block)
        size += sum(array.nbytes for array in (block[0], *block[1]))
        if size >= limit:
            yield joined(found)
            found, size = [], 0
    if found:
        yield joined(found)
