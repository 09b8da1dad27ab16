"""Reduces by any associative function, in an order that depends on the shard numbers alone.

Floating-point functions are rarely associative to the last bit, so the shard numbers fix the tree
of calls: the value of the shards [i·2^l, (i+1)·2^l) is always combined from its two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from beamjax.errors import WorkerError

Value = TypeVar("Value")


class DyadicTree(Generic[Value]):
    """Values of shards, combined as soon as both halves of a dyadic range have arrived."""

    # It holds at most about log2(n) values if n shards arrive in order, and up to n/2 otherwise.

    def __init__(self, combine: Callable[[Value, Value], Value]) -> None:
        # From the values of a left and a right range to that of both. It must not change them,
        # since trees share values.
        self.combine = combine
        self._nodes: dict[tuple[int, int], Value] = {}

    @property
    def nodes(self) -> Mapping[tuple[int, int], Value]:
        """(level, index) -> value of the shards [index·2^level, (index+1)·2^level)."""
        return self._nodes

    def add(self, value: Value, index: int, level: int = 0) -> None:
        """Adds the value of a range of shards."""
        while True:
            if (level, index) in self._nodes:
                self._fail(level, index)
            # The other half of the range of the next level has the index with the last bit flipped.
            sibling = self._nodes.pop((level, index ^ 1), None)
            if sibling is None:
                self._nodes[level, index] = value
                return
            value = self.combine(value, sibling) if index % 2 == 0 else self.combine(sibling, value)
            level, index = level + 1, index >> 1

    def merge(self, other: DyadicTree[Value]) -> None:
        """Adds the values of `other`, and leaves `other` as it is; raises as `add`."""
        for (level, index), value in list(other._nodes.items()):
            self.add(value, index, level)

    def in_order(self) -> Iterator[tuple[int, int, Value]]:
        """(level, index, value) of every range, in the order of their first shards."""
        for level, index in sorted(self._nodes, key=lambda node: node[1] << node[0]):
            yield level, index, self._nodes[level, index]

    def fold(self) -> Value | None:
        """The value of all shards; None if there are none."""
        end = 0
        values: list[Value] = []
        for level, index, value in self.in_order():
            if index << level < end:
                self._fail(level, index)
            end = (index + 1) << level
            values.append(value)
        if not values:
            return None
        # Without 2^l shards, ranges of several levels remain. The small ones are last, so from
        # right to left each is combined with about as many shards.
        result = values.pop()
        while values:
            result = self.combine(values.pop(), result)
        return result

    def _fail(self, level: int, index: int) -> None:
        first, last = index << level, ((index + 1) << level) - 1
        raise WorkerError(
            f"ordered reduction: found the shards {first} to {last} twice, or some of them, "
            "expected every shard once. Check that the source gives each element exactly once."
        )
