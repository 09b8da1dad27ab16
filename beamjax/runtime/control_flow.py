"""Runs the loops and branches of a plan. Subclasses run the steps between them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from beamjax.numerics.provenance import Provenance
from beamjax.plan.liveness import Position, made, used, used_by_rounds
from beamjax.plan.steps import Block, Branch, Loop, Plan, Step, is_straight
from beamjax.telemetry.monitor import Monitor

V = TypeVar("V")


class Checkpointer(Protocol):
    """Saves the state of a run, and holds the state of an earlier run to continue from.

    Attributes:
      every: the number of rounds between two checkpoints.
      position: where to continue; empty to start at the beginning.
      finished: whether the earlier run has finished; then `values` are its outputs.
      values: the values at that position, in the form that the runner uses.
      stacks: the entries of the stacked results of unfinished loops.
      provenance: the kinds of machine that computed these values.
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
        """Saves a checkpoint with those of these values that later steps read."""

    def finish(self, values: Mapping[str, Any]) -> None:
        """Saves the outputs of a finished run."""


def starts_anew(checkpointer: Checkpointer | None) -> bool:
    """Whether a run starts at the beginning, not from a checkpoint."""
    return checkpointer is None or not (checkpointer.position or checkpointer.finished)


class ControlFlow(abc.ABC, Generic[V]):
    """Runs a plan. A subclass runs *segments*: consecutive steps without control flow.

    A value is dropped as soon as no later step needs it. A checkpoint is saved every
    `checkpointer.every` rounds, at the end of a round.

    Args:
      plan: the plan to run.
      values: its inputs, by name; `value` finds those that are missing.
      monitor: the monitor of the run.
      checkpointer: saves checkpoints of the run; None saves none.
    """

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, V],
        monitor: Monitor,
        checkpointer: Checkpointer | None = None,
    ):
        self.plan = plan
        self.values = dict(values)
        self.monitor = monitor
        # Entries of the stacked results of loops that have begun and not ended.
        self.stacks: dict[str, list[V]] = {}
        self._checkpointer = checkpointer
        # The rounds and branches that the current step is in, from the outermost.
        self._path: list[tuple[str, int]] = []
        # Depth of conditions of loops that are being computed; a condition may contain loops.
        self._conditions = 0
        self._until_checkpoint = checkpointer.every if checkpointer else sys.maxsize
        if checkpointer is not None:
            monitor.computed(checkpointer.provenance)
            self.values.update(checkpointer.values)
            self.stacks.update(checkpointer.stacks)

    # ---------------------------------------------------------------- what a subclass runs

    @abc.abstractmethod
    def segment(self, steps: Sequence[Step], prefix: str, needed: set[str]) -> None:
        """Runs steps without control flow, adds their results to `values`, and records them.

        Args:
          steps: the steps, in order.
          prefix: the rounds and branches that they are in, as `loop[3]/cond(1)/`.
          needed: the names of the values that later steps read.
        """

    @abc.abstractmethod
    def array(self, value: V) -> np.ndarray:
        """A server value in memory."""

    @abc.abstractmethod
    def entry(self, name: str, whole: V, index: int) -> V:
        """The value `name` of a round: one entry of the value `whole`, which `lax.scan` slices."""

    @abc.abstractmethod
    def stacked(self, name: str, entries: Sequence[V]) -> V:
        """Stacks the entries of all rounds as the value `name`."""

    def value(self, name: str) -> V:
        """The value with this name."""
        return self.values[name]

    # ---------------------------------------------------------------------- blocks of steps

    def run(self) -> dict[str, V]:
        """Runs all steps.

        Returns:
          Each output that is a value of the plan, by name.

        Raises:
          WorkerError: a body failed; the message names rounds, step and shard.
        """
        saved = self._checkpointer
        whole = Block(self.plan.steps, tuple(self.plan.returned()))
        if saved is not None and saved.finished:
            self.monitor.resumed(whole.steps)
            found = [self.value(name) for name in whole.outputs]
        else:
            found = self.block(whole, "", set(self.values), saved.position if saved else ())
        results = dict(zip(whole.outputs, found, strict=True))
        if saved is not None and not saved.finished:
            saved.provenance = self.monitor.provenance
            saved.finish(results)
        return results

    def block(
        self, block: Block, prefix: str, own: Iterable[str] = (), at: Position = ()
    ) -> list[V]:
        """Runs a block, and drops its values as soon as no later step needs them.

        Args:
          block: the block to run.
          prefix: the prefix of the names of its steps.
          own: names of the values that it may drop, besides those that it makes.
          at: the position in it to continue from; empty to start at its beginning.

        Returns:
          The outputs.
        """
        own = set(own)
        groups = _segments(block.steps)
        for number, steps in enumerate(groups):
            if at and steps[0].name != at[0][0]:
                # The earlier run has finished these steps; the checkpoint has their live results.
                self.monitor.resumed(steps)
                own.update(name for step in steps for name in made(step))
                continue
            later = set(block.outputs).union(
                *(used(step) for group in groups[number + 1 :] for step in group)
            )
            match steps:
                case [Loop() as loop]:
                    # An initial value can be dropped when the loop has copied it to its state,
                    # unless rounds or later steps read it too.
                    inits = {value.init for value in loop.carried} & own
                    self._loop(loop, prefix, inits - later - used_by_rounds(loop), at)
                case [Branch() as branch]:
                    self._branch(branch, prefix, at)
                case _:
                    self.segment(steps, prefix, later)
            at = ()
            own.update(name for step in steps for name in made(step))
            self.drop(own - later)
        outputs = [self.value(name) for name in block.outputs]
        self.drop(own)
        return outputs

    def drop(self, names: Iterable[str]) -> None:
        """Drops values."""
        for name in names:
            self.values.pop(name, None)

    # ----------------------------------------------------------------- branches and loops

    def _branch(self, branch: Branch, prefix: str, at: Position) -> None:
        """Runs the block of a branch that its index selects, or the rest of it from a position."""
        index = at[0][1] if at else int(self.array(self.value(branch.index)))
        index = min(max(index, 0), len(branch.blocks) - 1)
        with self._within(branch.name, index):
            where = f"{prefix}{branch.name}({index})/"
            outputs = self.block(branch.blocks[index], where, (), at[1:])
        self.values.update(zip(branch.results, outputs, strict=True))

    def _loop(self, loop: Loop, prefix: str, unneeded: Iterable[str], at: Position) -> None:
        """Runs all rounds of a loop.

        Args:
          loop: the loop to run.
          prefix: the prefix of the names of its steps.
          unneeded: initial values that no step needs once the loop has started.
          at: the position in it to continue from; empty to start with its first round.
        """
        first = at[0][1] if at else 0
        if at:
            self.monitor.resumed([dataclasses.replace(loop, rounds=first)])
        else:
            self._carry(loop, [self.value(value.init) for value in loop.carried])
            # Replaces the entries from the previous round of an enclosing loop.
            self.stacks |= {name: [] for name in loop.stacked}
        self.drop(unneeded)
        wholes = {value.param: self.value(value.operand) for value in loop.sliced}
        at = at[1:]
        for number in itertools.count(first) if loop.rounds is None else range(first, loop.rounds):
            # A run that continues inside of a round has already computed its condition.
            if not at and not self._continues(loop, f"{prefix}{loop.name}[{number}]/"):
                break
            self._round(loop, number, wholes, prefix, at)
            self._save_if_due((loop.name, number + 1))
            at = ()
        for value in loop.carried:
            self.values[value.result] = self.values.pop(value.param)
        for name in loop.stacked:
            entries = self.stacks.pop(name)
            self.values[name] = self.stacked(name, entries[::-1] if loop.reverse else entries)

    def _round(
        self, loop: Loop, number: int, wholes: Mapping[str, V], prefix: str, at: Position
    ) -> None:
        """Runs one round of a loop, or the rest of it."""
        index = loop.entry_index(number)
        self.values |= {name: self.entry(name, whole, index) for name, whole in wholes.items()}
        with self._within(loop.name, number):
            outputs = self.block(loop.block, f"{prefix}{loop.name}[{number}]/", wholes, at)
        self._carry(loop, outputs[: len(loop.carried)])
        for name, entry in zip(loop.stacked, outputs[len(loop.carried) :], strict=True):
            self.stacks[name].append(entry)
        self.monitor.round_ended()

    def _carry(self, loop: Loop, carried: Sequence[V]) -> None:
        params = (value.param for value in loop.carried)
        self.values.update(zip(params, carried, strict=True))

    def _continues(self, loop: Loop, prefix: str) -> bool:
        """Whether a loop runs another round: its condition is true, or it has none."""
        if loop.condition is None:
            return True
        self._conditions += 1
        try:
            (value,) = self.block(loop.condition, prefix)
        finally:
            self._conditions -= 1
        return bool(self.array(value))

    # --------------------------------------------------------------------------- checkpoints

    @contextlib.contextmanager
    def _within(self, name: str, number: int) -> Iterator[None]:
        """A context in which a round of a loop, or a block of a branch, runs."""
        self._path.append((name, number))
        try:
            yield
        finally:
            self._path.pop()

    def _save_if_due(self, at: tuple[str, int]) -> None:
        """Counts a round, and saves a checkpoint if it is due.

        Args:
          at: the name of the loop, and the number of its rounds that are done.
        """
        # A condition is computed again after a restart, so its own loops save nothing.
        if self._checkpointer is None or self._conditions:
            return
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._checkpointer.provenance = self.monitor.provenance
            self._checkpointer.save((*self._path, at), self.values, self.stacks)
            self._until_checkpoint = self._checkpointer.every
            self.monitor.saved()


def _segments(steps: Iterable[Step]) -> list[list[Step]]:
    """Groups consecutive steps without control flow; each loop and branch is a group of its own."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and is_straight([*groups[-1], step]):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups
