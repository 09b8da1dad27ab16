"""The history of a run in a bounded number of samples, which are thinned as their number grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from beamjax.telemetry.progress import SECONDS, Progress

MOST = 400
"""Largest number of samples of a run."""
COLUMNS = (
    "seconds", "members", "shards", "retries", "bytes_read", "rounds", "dropped", "workers",
    *SECONDS,
)  # fmt: skip
"""The numbers of a sample: seconds since the job began, and fields of `Progress` and `Tally`."""

Samples = Mapping[str, tuple[float, ...]]
"""A column of numbers for each of `COLUMNS`, all of one length."""


T = TypeVar("T")


class Moments(Generic[T]):
    """A bounded list of events of a run, evenly thinned when it is full.

    Args:
      most: the largest number of entries; a full list drops every second one.
    """

    def __init__(self, most: int = MOST):
        self._most = most
        self._kept: list[T] = []
        self._every = 1
        self._count = 0

    def add(self, moment: T) -> None:
        """Adds an entry."""
        if self._count % self._every == 0:
            self._kept.append(moment)
            if len(self._kept) >= self._most:
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1

    @property
    def times(self) -> tuple[T, ...]:
        """The entries of the list, in order."""
        return tuple(self._kept)


class Timeline:
    """Samples of the progress of a run, at even distances, and the newest one.

    Args:
      most: the largest number of samples, see `Moments`.
    """

    def __init__(self, most: int = MOST):
        self._sampled: Moments[tuple[float, ...]] = Moments(most)
        self._last: tuple[float, ...] | None = None

    def add(self, progress: Progress) -> None:
        """Adds a sample; the caller does so at even intervals of time."""
        self._last = _sample(progress)
        self._sampled.add(self._last)

    @property
    def samples(self) -> dict[str, tuple[float, ...]]:
        """All samples."""
        rows = list(self._sampled.times)
        if self._last is not None and rows[-1] is not self._last:
            rows.append(self._last)
        return {name: tuple(row[i] for row in rows) for i, name in enumerate(COLUMNS)}


def _sample(progress: Progress) -> tuple[float, ...]:
    done = progress.done
    found = [getattr(done if hasattr(done, name) else progress, name) for name in COLUMNS]
    return tuple(round(value, 4) for value in found)
