"""The shards that processes computed, each with its time, for a trace of a run."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from beamjax.errors import ArrayFormatError

MOST_EVENTS = 1000
"""Largest number of events of a process and of a run, about 80 kB of JSON."""

NOT_CHECKED = -1
"""The checksum of a shard of which none was taken."""


@dataclass(frozen=True)
class ShardEvent:
    """One shard that a process computed.

    Attributes:
      worker: the name of the process.
      step: the name of the step in the plan, with the round, as `loop_0[3]/map_rows_0`.
      start: the first member of the shard.
      count: the number of its members.
      time: seconds since the epoch at which the shard was done, by the clock of the worker.
      seconds: the measured time of the shard, from reading to merging.
      checksum: the CRC-32C of what came out of the shard; `NOT_CHECKED` if that is large.
    """

    worker: str
    step: str
    start: int
    count: int
    time: float
    seconds: float
    checksum: int = NOT_CHECKED

    def to_json(self) -> list[Any]:
        """The fields, in order."""
        return list(astuple(self))


def events_from_json(record: Any, path: str) -> tuple[ShardEvent, ...]:
    """The events in a record, which are lists of the fields of `ShardEvent`.

    Raises:
      ArrayFormatError: the record at `path` has something else.
    """
    for row in record if isinstance(record, list | tuple) else [record]:
        # Records of earlier versions have no checksums.
        plain = isinstance(row, list | tuple) and len(_KINDS) - len(row) in (0, 1)
        if not plain or not all(map(_is_one, row, _KINDS)):
            raise ArrayFormatError(f"{path}: found the event {row!r:.200}, expected a shard's")
    return tuple(ShardEvent(*row) for row in record)


_NUMBER = int, float
_KINDS: tuple[tuple[type, ...], ...] = (
    (str,), (str,), (int,), (int,), _NUMBER, _NUMBER, (int,)
)  # fmt: skip


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and (isinstance(value, str) or math.isfinite(value))
