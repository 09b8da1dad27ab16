"""Lanes cut to pieces: what an accumulator holds at once, and what a file holds of a partial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from beamjax.plan.steps import Lane, Map

PIECE_VALUES = 1 << 20
"""Values in a piece: an exact accumulator of as many float32 takes 16 MiB, and 64 MiB at worst."""

SECTION_BYTES = 32 << 20
"""Of the partials of a large lane in one file, in bytes."""


@dataclass(frozen=True)
class Piece:
    """Values [start, stop) of lane number `lane` of a step."""

    lane: int
    start: int
    stop: int

    @classmethod
    def from_key(cls, key: str) -> Piece:
        """Undoes `key_of`."""
        return cls(*map(int, key.split(":")))

    def cut(self, limit: int) -> Iterator[Piece]:
        """The same in pieces of at most `limit` values; an empty one stays as it is."""
        for start in range(self.start, max(self.stop, self.start + 1), limit):
            yield Piece(self.lane, start, min(start + limit, self.stop))


def key_of(piece: Piece) -> str:
    """The key of a piece."""
    return f"{piece.lane}:{piece.start}:{piece.stop}"


def lane_pieces(number: int, lane: Lane, limit: int | None = None) -> Iterator[Piece]:
    """Cuts a lane to pieces of at most `limit` values; an empty lane is one empty piece."""
    return Piece(number, 0, lane.size).cut(limit or PIECE_VALUES)


def step_pieces(step: Map) -> list[Piece]:
    """The pieces of all lanes of a step."""
    return [piece for i, lane in enumerate(step.lanes) for piece in lane_pieces(i, lane)]


def step_sections(step: Map) -> list[Piece]:
    """All lanes of a step, cut to what a file holds of a partial."""
    return [
        piece
        for i, lane in enumerate(step.lanes)
        for piece in lane_pieces(i, lane, max(SECTION_BYTES // np.dtype(lane.dtype).itemsize, 1))
    ]
