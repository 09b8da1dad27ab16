"""A reduction by any associative function whose result depends on the shard numbers alone.

Floating-point functions are rarely associative to the last bit, so the tree of calls is fixed by
the shard numbers: the value of the shards [i·2^l, (i+1)·2^l) is made from its two halves, and from
nothing else. A half waits until the other one is there. At the end, a half without another one
takes the place of the whole, so the remaining ranges are combined from right to left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from beamjax.errors import WorkerError

Value = TypeVar("Value")


class DyadicTree(Generic[Value]):
    """Values of shards, combined as soon as both halves of a dyadic range are there.

    Shards that come in order take the memory of log2(n) values; in random order, up to all of them.

    Attributes:
        combine: takes the values of a left and a right range to that of both; it must not change
            them, as trees share values.
    """

    def __init__(self, combine: Callable[[Value, Value], Value]) -> None:
        self.combine = combine
        self._nodes: dict[tuple[int, int], Value] = {}

    @property
    def nodes(self) -> Mapping[tuple[int, int], Value]:
        """(level, index) -> value of the shards [index·2^level, (index+1)·2^level)."""
        return self._nodes

    def add(self, value: Value, index: int, level: int = 0) -> None:
        """Adds the value of a range of shards.

        Args:
            value: it is kept.
            index: of the range; the shard number at level 0.
            level: log2 of the number of shards in the range.

        Raises:
            WorkerError: if the range was there already. Not every overlap is seen here, but each
                is seen by `fold` at the latest.
        """
        while True:
            if (level, index) in self._nodes:
                self._fail(level, index)
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
        """(level, index, value) of every range, by the first shard."""
        for level, index in sorted(self._nodes, key=lambda node: node[1] << node[0]):
            yield level, index, self._nodes[level, index]

    def fold(self) -> Value | None:
        """The value of all shards, None without any.

        Raises:
            WorkerError: if two ranges overlap: a shard was added twice.
        """
        end = 0
        values: list[Value] = []
        for level, index, value in self.in_order():
            if index << level < end:
                self._fail(level, index)
            end = (index + 1) << level
            values.append(value)
        if not values:
            return None
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
