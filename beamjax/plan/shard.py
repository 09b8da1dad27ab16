"""Shards: consecutive members of a placement, the unit of work of a worker."""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from beamjax._text import described
from beamjax.errors import BeamjaxError, Failure, WorkerError
from beamjax.storage import schema

if TYPE_CHECKING:
    from beamjax.plan.steps import Map


class SizeReason(enum.StrEnum):
    """A rule that decided how many members a shard has."""

    PAYING = enum.auto()  # as few as pay for a call and for merging
    FEWEST_SHARDS = enum.auto()
    TWO_SHARDS = enum.auto()  # since merging costs more than calls
    FEW_CALLS = enum.auto()  # with the fewest shards, they would not be worth a call
    UNKNOWN_SIZE = enum.auto()  # of the placement
    FILES = enum.auto()  # a part of a group of files
    BYTES = enum.auto()  # as many as a shard may move
    MULTIPLE = enum.auto()  # the smallest size
    EQUAL = enum.auto()  # a few shards of equal sizes
    ALL = enum.auto()  # no more than there are
    WHOLE_RANGES = enum.auto()  # of members in order
    OPTION = enum.auto()
    GIVEN = enum.auto()  # as in another plan


schema.add_codec(SizeReason, str, SizeReason)


@dataclass(frozen=True)
class Shard:
    """Members [start, start + count) of a placement: shard number `index`."""

    index: int
    start: int
    count: int


@dataclass(frozen=True)
class Shards:
    """All shards of a placement."""

    # Each has `size` members, except for the last one and those before a cut, which may be short.
    n: int | None  # the number of members; if it is None, shards can't be counted or listed
    size: int
    cuts: tuple[int, ...] = ()  # indices of members at which a shard begins in any case: ascending

    @property
    def count(self) -> int | None:
        """The number of shards; None if it is unknown."""
        return None if self.n is None else len(self)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __iter__(self) -> Iterator[Shard]:
        return self.between(0, self._firsts[-1])

    def between(self, first: int, last: int) -> Iterator[Shard]:
        """Shards [first, last)."""
        part = bisect.bisect_right(self._firsts, first) - 1
        for index in range(first, last):
            if index == self._firsts[part + 1]:
                part += 1
            start = self._starts[part] + (index - self._firsts[part]) * self.size
            yield Shard(index, start, min(self.size, self._starts[part + 1] - start))

    def index_at(self, start: int) -> int:
        """The number of the shard that has the member with index `start`."""
        if not self.cuts:
            return start // self.size
        part = bisect.bisect_right(self._starts, start) - 1
        return self._firsts[part] + (start - self._starts[part]) // self.size

    @functools.cached_property
    def _starts(self) -> list[int]:
        """First member of each part between two cuts, then n."""
        assert self.n is not None
        return [0, *self.cuts, self.n]

    @functools.cached_property
    def _firsts(self) -> list[int]:
        """First shard of each part between two cuts, then the number of shards."""
        counts = (
            -(-(stop - start) // self.size) for start, stop in itertools.pairwise(self._starts)
        )
        return list(itertools.accumulate(counts, initial=0))


def shard_error(step: Map, shard: Shard, error: Exception) -> BeamjaxError:
    """The error with the step and the shard in its message, and with its `failure`."""
    functions = f" ({', '.join(step.functions)})" if step.functions else ""
    members = shard.start, shard.start + shard.count - 1
    where = (
        f"step {step.name!r}{functions}, shard {shard.index} of placement "
        f"{step.placement!r}, members {members[0]} to {members[1]}"
    )
    located: BeamjaxError = WorkerError(f"{where}: {described(error)}")
    if isinstance(error, BeamjaxError):
        located = type(error)(f"{where}: {error}")
    located.failure = Failure(step.name, shard.index, members)
    return located
