"""Splits fused reduction buffers into ranges whose accumulators fit in an element."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from beamjax.plan.steps import Map

RANGE_VALUES = 1 << 20
"""Largest number of values in a range. An exact accumulator of so many float32 values takes 16 MiB,
and at worst 64 MiB, the limit for Beam elements."""


class ValueRange(NamedTuple):
    """The values [start, stop) of buffer number `buffer` of a step."""

    buffer: int
    start: int
    stop: int

    def cut(self, limit: int) -> Iterator[ValueRange]:
        """Splits this range into ranges of at most `limit` values; an empty one stays one range."""
        for start in range(self.start, max(self.stop, self.start + 1), limit):
            yield ValueRange(self.buffer, start, min(start + limit, self.stop))


def accumulator_ranges(step: Map) -> tuple[ValueRange, ...]:
    """The ranges of all buffers of a step, each small enough for an accumulator."""
    return _ranges(tuple([buffer.size for buffer in step.buffers]), RANGE_VALUES)


@functools.lru_cache(maxsize=256)
def _ranges(sizes: tuple[int, ...], limit: int) -> tuple[ValueRange, ...]:
    # An empty buffer is one empty range.
    wholes = [ValueRange(number, 0, size) for number, size in enumerate(sizes)]
    return tuple(piece for whole in wholes for piece in whole.cut(limit))
