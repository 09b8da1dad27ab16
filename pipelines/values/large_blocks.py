"""Blocks that are too large for an element: with fewer members, or with their values in the store.

The next pass needs all members of a shard in one element; a step that writes or gathers them does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from beamjax.pipelines.values.elements import MemberBlock
from beamjax.pipelines.values.store import Store

LIMIT_BYTES = (64 << 20) - (64 << 10)
"""Largest size of the values in a block: an element has 64 MiB with its header."""


def whole(block: MemberBlock, store: Store) -> MemberBlock:
    """A block as one element: the values of a large one go to the store.

    Raises:
      SourceError: the store can't be written.
    """
    if block.nbytes <= LIMIT_BYTES:
        return block
    refs = {name: store.put([array], "block") for name, array in block.values.items()}
    return replace(block, values={}, refs=refs)


def cut(block: MemberBlock, store: Store) -> Iterator[MemberBlock]:
    """A block as elements with as many members as fit; a member that is large alone, as `whole`."""
    most = max(LIMIT_BYTES * block.count // max(block.nbytes, 1), 1)
    for first in range(0, block.count, most):
        values = {name: array[first : first + most] for name, array in block.values.items()}
        count = min(most, block.count - first)
        part = replace(block, start=block.start + first, count=count, values=values)
        yield whole(part, store)
