"""Shards: consecutive members of a placement, which one worker computes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from beamjax.errors import BeamjaxError, Failure, WorkerError
from beamjax.plan.steps import Map


@dataclass(frozen=True)
class Shard:
    """Members [start, start + count) of a placement: shard number `index`."""

    index: int
    start: int
    count: int


def shards(n: int, size: int, first: int = 0, last: int | None = None) -> Iterator[Shard]:
    """Shards number [first, last) of n members in shards of `size`; the last one may be short."""
    for index in range(first, -(-n // size) if last is None else last):
        start = index * size
        yield Shard(index, start, min(size, n - start))


class shard_errors:
    """Says of every error in a `with` block which step and shard it belongs to.

    Raises:
      BeamjaxError: of the same type if it is one of ours, otherwise a `WorkerError`.
    """

    # No generator: it is entered for each shard, and twice.
    __slots__ = ("shard", "step")

    def __init__(self, step: Map, shard: Shard):
        self.step = step
        self.shard = shard

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception):
            return
        step, shard = self.step, self.shard
        functions = f" ({', '.join(step.functions)})" if step.functions else ""
        where = (
            f"step {step.name!r}{functions}, shard {shard.index} of placement "
            f"{step.placement!r}, members {shard.start} to {shard.start + shard.count - 1}"
        )
        told: BeamjaxError = WorkerError(f"{where}: {type(error).__name__}: {error}")
        if isinstance(error, BeamjaxError):
            told = type(error)(f"{where}: {error}")
        members = shard.start, shard.start + shard.count - 1
        told.failure = Failure(step.name, shard.index, members)
        raise told from error
