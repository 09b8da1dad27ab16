"""Where a run is, told to whoever keeps checkpoints of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from beamjax.numerics.provenance import Provenance
from beamjax.plan.liveness import Position
from beamjax.telemetry.monitor import Monitor


class Checkpointer(Protocol):
    """Keeps the state of a run, and has that of an earlier one.

    Attributes:
      every: rounds between two checkpoints.
      position: where to go on; empty to start at the beginning.
      finished: whether the earlier run came to its end; then `values` are its outputs.
      values: at that position, as the runner has them.
      stacks: entries of the stacked results of loops under way there.
      provenance: of all of these.
    """

    provenance: Provenance

    @property
    def every(self) -> int: ...
    @property
    def position(self) -> Position: ...
    @property
    def finished(self) -> bool: ...
    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def stacks(self) -> Mapping[str, list[Any]]: ...

    def save(
        self, position: Position, values: Mapping[str, Any], stacks: Mapping[str, Sequence[Any]]
    ) -> None:
        """Saves a checkpoint: what is live of these values."""

    def finish(self, values: Mapping[str, Any]) -> None:
        """Saves the outputs of a run that is at its end."""


def starts_anew(checkpointer: Checkpointer | None) -> bool:
    """Whether a run starts at the beginning."""
    return checkpointer is None or not (checkpointer.position or checkpointer.finished)


class Tracker:
    """Follows a run into its loops and branches, and has it saved when that is due.

    Args:
      checkpointer: saves the run as it goes on; None saves nothing.
      monitor: of the run, which learns of checkpoints, and knows the provenance of the values.

    Raises:
      WorkerError: the run is strict, and the earlier one had other machines or versions.
    """

    def __init__(self, checkpointer: Checkpointer | None, monitor: Monitor):
        self._checkpointer = checkpointer
        self._monitor = monitor
        if checkpointer is not None:
            monitor.computed(checkpointer.provenance)
        self._path: list[tuple[str, int]] = []
        self._deciding = 0
        self._left = checkpointer.every if checkpointer else sys.maxsize

    @property
    def left(self) -> int:
        """Rounds until a checkpoint is due."""
        return self._left

    @contextlib.contextmanager
    def within(self, name: str, number: int) -> Iterator[None]:
        """While a round of a loop is under way, or a block of a branch."""
        self._path.append((name, number))
        try:
            yield
        finally:
            self._path.pop()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """While the condition of a loop is computed: nothing is saved within."""
        self._deciding += 1
        try:
            yield
        finally:
            self._deciding -= 1

    def passed(
        self,
        rounds: int,
        at: tuple[str, int],
        values: Mapping[str, Any],
        stacks: Mapping[str, Sequence[Any]],
    ) -> None:
        """Counts rounds that were run.

        Args:
          rounds: how many.
          at: name of their loop, and how many of its rounds are done.
          values: all that are known, by name.
          stacks: entries of the stacked results of loops under way.
        """
        if self._checkpointer is None or self._deciding:
            return
        self._left -= rounds
        if self._left <= 0:
            self._checkpointer.provenance = self._monitor.provenance
            self._checkpointer.save((*self._path, at), values, stacks)
            self._left = self._checkpointer.every
            self._monitor.saved()

    def finish(self, values: Mapping[str, Any]) -> None:
        """The run is at its end, with these outputs."""
        if self._checkpointer is not None:
            self._checkpointer.provenance = self._monitor.provenance
            self._checkpointer.finish(values)
