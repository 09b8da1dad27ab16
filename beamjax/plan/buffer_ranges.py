"""Splits fused reduction buffers into ranges whose accumulators fit in an element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from beamjax.plan.steps import FusedBuffer, Map

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


def buffer_ranges(number: int, buffer: FusedBuffer) -> Iterator[ValueRange]:
    """Splits a buffer into ranges; an empty buffer is one empty range."""
    return ValueRange(number, 0, buffer.size).cut(RANGE_VALUES)


def accumulator_ranges(step: Map) -> list[ValueRange]:
    """The ranges of all buffers of a step, each small enough for an accumulator."""
    return [piece for i, buffer in enumerate(step.buffers) for piece in buffer_ranges(i, buffer)]
