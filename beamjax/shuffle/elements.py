"""Gives the elements of a PCollection, which has no order, an order as members."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.shuffle.sorted_blocks import Block, Shuffle, hash_range, sorted_block
from beamjax.sources.source_base import MAX_VALUES
from beamjax.sources.streams.one_member import MemberType, shown

INLINE_BYTES = 1 << 18
"""Largest block, in bytes, that is an element of Beam until it is merged with others."""


@dataclass(frozen=True)
class ElementShuffle(Shuffle):
    """Elements, sorted by number or by a hash of their bytes.

    Attributes:
      member: the expected type of each element.
      indexed: whether the keys are the numbers of the members.
      drop: whether elements that are no members are left out.
      inline_bytes: the largest block, in bytes, that is not written to a file at first.
    """

    member: MemberType
    indexed: bool
    drop: bool
    inline_bytes: int

    def key(self, data: Sequence[bytes], index: Any = None) -> bytes:
        """The key of a member: 16 bytes.

        Args:
          data: the bytes of each leaf of the member.
          index: the number of the member, if members are indexed.

        Raises:
          StructureError: `index` is no number of a member.
        """
        if self.indexed:
            known = isinstance(index, int | np.integer) and not isinstance(index, bool)
            if not known or not 0 <= index < MAX_VALUES:
                raise StructureError(
                    f"from_beam: index returns {shown(index)}, expected the number of the member, "
                    "an int from 0"
                )
            return int(index).to_bytes(8, "big") + bytes(8)
        return hashlib.blake2b(b"".join(data), digest_size=16).digest()

    def block(self, keys: Sequence[bytes], members: Sequence[Sequence[bytes]]) -> Block:
        """A block of one or more members, given by their keys and the bytes of their leaves."""
        found = np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2).astype(np.uint64)
        columns = [
            np.ndarray((len(keys), *leaf.shape), leaf.dtype, b"".join(data))
            for leaf, data in zip(self.leaves, zip(*members, strict=True), strict=True)
        ]
        return sorted_block(found, columns)

    def list_blocks(self, blocks: Sequence[tuple[str, int]], dropped: Sequence[str] = ()) -> int:
        """As `Shuffle.list_blocks`; SourceError if there is no member."""
        if not blocks:
            found = "no element"
            if dropped:
                found = f"{len(dropped)} elements, none of which is a member ({dropped[0]})"
            raise SourceError(f"from_beam: found {found}, expected at least one member.")
        return super().list_blocks(blocks, dropped)

    def write(self, part: int) -> None:
        """Writes the members of a part.

        Raises:
          SourceError: a number occurs twice or is missing, or a file can't be read or written.
        """
        listed = self.listed()
        low, high = self._range(part, listed)
        if low == high:
            return
        rows = self.rows_between(low, high, listed)
        if self.indexed:
            self._check_numbers(rows.keys[:, 0], low, high, listed)
        if len(rows):
            for number, leaf in enumerate(self.leaves):
                self.write_leaf(part, number, leaf, rows.chunks(number))

    def _range(self, part: int, listed: dict[str, Any]) -> tuple[int, int]:
        """The range of the first words of the keys of a part."""
        parts = listed["parts"]
        if not self.indexed:
            return hash_range(part, parts)
        size = listed["count"] + len(listed["dropped"])
        # The last part also gets numbers that are too large, which `_check_numbers` refuses.
        last = MAX_VALUES if part == parts - 1 else size * (part + 1) // parts
        return size * part // parts, last

    def _check_numbers(
        self, found: np.ndarray, low: int, high: int, listed: dict[str, Any]
    ) -> None:
        """Checks that each number of a part occurs once; elements that were dropped leave gaps."""
        size = listed["count"] + len(listed["dropped"])
        expected = f"from_beam, index: {listed['count']} members are numbered 0 to {size - 1}"
        twice = found[1:][found[1:] == found[:-1]]
        if len(twice):
            count = int((found == twice[0]).sum())
            raise SourceError(f"{expected}, each once; found {count} elements with {twice[0]}.")
        missing = np.setdiff1d(np.arange(low, min(high, size), dtype=np.uint64), found)
        if len(missing) and not listed["dropped"]:
            more = f" (and {len(missing) - 1} more of its part)" if len(missing) > 1 else ""
            raise SourceError(f"{expected}, each once; found no element with {missing[0]}{more}.")
        if len(found) and found[-1] >= size:
            raise SourceError(f"{expected}, each once; found an element with {found[-1]}.")
