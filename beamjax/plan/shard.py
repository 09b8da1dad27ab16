"""Shards: consecutive members of a placement, the unit of work of a worker."""

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
    """Shards [first, last) of n members in shards of `size`; the last one of all may be short.

    Bodies with a table of shards (`interpreters.rules.by_shard`) need each to begin at a multiple
    of `size`.
    """
    for index in range(first, -(-n // size) if last is None else last):
        start = index * size
        yield Shard(index, start, min(size, n - start))


class shard_errors:
    """Adds the step and the shard to the message of every error in a `with` block.

    Raises:
      BeamjaxError: of the same type if the error is a BeamjaxError, otherwise a `WorkerError`.
    """

    # A class and not a generator, as it is entered twice for each shard and must be fast.
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
        raised: BeamjaxError = WorkerError(f"{where}: {type(error).__name__}: {error}")
        if isinstance(error, BeamjaxError):
            raised = type(error)(f"{where}: {error}")
        members = shard.start, shard.start + shard.count - 1
        raised.failure = Failure(step.name, shard.index, members)
        raise raised from error
