"""Chooses ranges of members that no border of shards cuts, for equations with a table of them.

Each shard sends a row for each range, so there must be few, and the members of a range must fit
into a shard.
"""

from __future__ import annotations

MAX_ROWS = 1024
"""Largest number of rows that each shard sends, where the user does not give the shard size."""
MAX_TABLE_BYTES = 4 << 20
"""Largest size of all rows that a shard sends, in bytes."""
MAX_BLOCK_BYTES = 16 << 20
"""Largest size of the members of a range, in bytes."""


def block_of(
    n: int, row: int, member: int, shard_size: int | None, *, fewest: int = 1
) -> int | None:
    """The number of members per range: a power of two, as shard sizes are, or that of a shard.

    Args:
      n: the number of members.
      row: bytes of a row.
      member: bytes of a member.
      shard_size: members per shard, if the user gives it.
      fewest: the fewest members per range; 16 times as many where the user gives none.

    Returns:
      The number, or None if there is none with which the rows and the shards are small enough.
    """
    rows = max(1, min(MAX_ROWS, MAX_TABLE_BYTES // max(row, 1)))
    least = max(-(-n // rows), 16 * fewest)
    block = shard_size or 1 << (least - 1).bit_length()
    small = block * member <= MAX_BLOCK_BYTES and -(-n // block) * row <= MAX_TABLE_BYTES
    return block if block >= fewest and small else None
