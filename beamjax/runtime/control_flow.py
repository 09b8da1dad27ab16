"""Control flow: the loops and branches of a plan, over whatever runs the steps between them."""

from __future__ import annotations

import abc
import contextlib
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from beamjax.numerics.provenance import Provenance
from beamjax.plan.liveness import Position, made, used, used_by_rounds
from beamjax.plan.steps import Block, Branch, Loop, Plan, Step, is_straight
from beamjax.telemetry.monitor import Monitor

V = TypeVar("V")
MAX_RECORDED = 1 << 20
"""Largest bytes of a value whose checksum is recorded, so that checksums do not slow rounds
down."""


class Checkpointer(Protocol):
    """Saves the state of a run, and holds the state of an earlier run to continue from.

    Attributes:
      every: rounds between two checkpoints.
      position: where to continue; empty to start at the beginning.
      finished: whether the earlier run has finished; then `values` are its outputs.
      values: at that position, as the runner has them.
      stacks: entries of the stacked results of unfinished loops.
      provenance: the kinds of machine that computed these.
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


class ControlFlow(abc.ABC, Generic[V]):
    """Runs a plan. A subclass runs *segments*, which are steps in a row without control flow.

    A value is dropped as soon as no later step needs it. A checkpoint is saved after each round at
    which one is due.

    Args:
      plan: what to run.
      values: its inputs, by name; `value` finds those that are missing.
      monitor: of the run.
      checkpointer: saves the run as it goes on; None saves nothing.

    Raises:
      WorkerError: the run is strict, and the earlier one had other machines or versions.
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
        # Entries of the stacked results of loops that are under way.
        self.stacks: dict[str, list[V]] = {}
        self._checkpointer = checkpointer
        self._path: list[tuple[str, int]] = []
        self._deciding = 0
        self._until_checkpoint = checkpointer.every if checkpointer else sys.maxsize
        if checkpointer is not None:
            monitor.computed(checkpointer.provenance)
            self.values.update(checkpointer.values)
            self.stacks.update(checkpointer.stacks)

    # ---------------------------------------------------------------- what a subclass runs

    @abc.abstractmethod
    def segment(self, steps: Sequence[Step], prefix: str, needed: set[str]) -> None:
        """Runs steps without control flow, and adds their results to `values`.

        Args:
          steps: in order.
          prefix: the rounds and branches that they are in, as `loop[3]/cond(1)/`.
          needed: names of the values that must be known afterwards.
        """

    @abc.abstractmethod
    def array(self, value: V) -> np.ndarray:
        """A server value in memory."""

    @abc.abstractmethod
    def entry(self, name: str, whole: V, index: int) -> V:
        """The value `name` of a round: an entry of one that `lax.scan` slices."""

    @abc.abstractmethod
    def stacked(self, name: str, entries: Sequence[V]) -> V:
        """The entries of all rounds as the one value `name`."""

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
        outputs = dict.fromkeys(out.value for out in self.plan.outputs if out.value is not None)
        whole = Block(self.plan.steps, tuple(outputs))
        if saved is not None and saved.finished:
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
          block: what to run.
          prefix: of the names of its steps.
          own: names of the values that it may drop, besides those that it makes.
          at: where to go on in it; empty to start at its beginning.

        Returns:
          The outputs.
        """
        own = set(own)
        groups = _segments(block.steps)
        for number, steps in enumerate(groups):
            if at and steps[0].name != at[0][0]:
                own.update(name for step in steps for name in made(step))
                continue
            later = set(block.outputs).union(
                *(used(step) for group in groups[number + 1 :] for step in group)
            )
            match steps:
                case [Loop() as loop]:
                    inits = {value.init for value in loop.carried} & own
                    self._loop(loop, prefix, inits - later - used_by_rounds(loop), at)
                case [Branch() as branch]:
                    self._branch(branch, prefix, at)
                case _:
                    self.segment(steps, prefix, later)
                    self._record(steps, prefix)
            at = ()
            own.update(name for step in steps for name in made(step))
            self.drop(own - later)
        outputs = [self.value(name) for name in block.outputs]
        self.drop(own)
        return outputs

    def _record(self, steps: Iterable[Step], prefix: str) -> None:
        """Records checksums of small server values of rounds, for `beamjax.diff`."""
        if not prefix or not self.monitor.checksums.enabled:
            return
        for step in steps:
            for name in made(step):
                value = self.plan.values[name]
                if value.placement is None and value.nbytes <= MAX_RECORDED and name in self.values:
                    array = np.ascontiguousarray(self.array(self.values[name]))
                    self.monitor.checksums.add(f"{prefix}{step.name}", name, zlib.crc32(array))

    def drop(self, names: Iterable[str]) -> None:
        """Drops values."""
        for name in names:
            self.values.pop(name, None)

    # ----------------------------------------------------------------- branches and loops

    def _branch(self, branch: Branch, prefix: str, at: Position) -> None:
        """Runs one of several blocks; from a position in it on, if one is given."""
        index = at[0][1] if at else int(self.array(self.value(branch.index)))
        index = min(max(index, 0), len(branch.blocks) - 1)
        with self._within(branch.name, index):
            where = f"{prefix}{branch.name}({index})/"
            outputs = self.block(branch.blocks[index], where, (), at[1:])
        self.values.update(zip(branch.results, outputs, strict=True))

    def _loop(self, loop: Loop, prefix: str, gone: Iterable[str], at: Position) -> None:
        """Runs all rounds of a loop.

        Args:
          loop: what to run.
          prefix: of the names of its steps.
          gone: initial values that no step needs once the loop has started.
          at: where to go on in it; empty to start with its first round.
        """
        first = at[0][1] if at else 0
        if not at:
            self._carry(loop, [self.value(value.init) for value in loop.carried])
            # A loop inside of another one starts anew in each round of that.
            self.stacks |= {name: [] for name in loop.stacked}
        self.drop(gone)
        wholes = {value.param: self.value(value.operand) for value in loop.sliced}
        at = at[1:]
        for number in itertools.count(first) if loop.rounds is None else range(first, loop.rounds):
            if not at and not self._goes_on(loop, f"{prefix}{loop.name}[{number}]/"):
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
        self.monitor.rounds()

    def _carry(self, loop: Loop, carried: Sequence[V]) -> None:
        params = (value.param for value in loop.carried)
        self.values.update(zip(params, carried, strict=True))

    def _goes_on(self, loop: Loop, prefix: str) -> bool:
        """Whether the condition of a loop, if it has one, asks for another round."""
        if loop.condition is None:
            return True
        self._deciding += 1
        try:
            (value,) = self.block(loop.condition, prefix)
        finally:
            self._deciding -= 1
        return bool(self.array(value))

    # --------------------------------------------------------------------------- checkpoints

    @contextlib.contextmanager
    def _within(self, name: str, number: int) -> Iterator[None]:
        """While a round of a loop is under way, or a block of a branch."""
        self._path.append((name, number))
        try:
            yield
        finally:
            self._path.pop()

    def _save_if_due(self, at: tuple[str, int]) -> None:
        """Counts a round, and saves a checkpoint if it is due.

        Args:
          at: the name of the loop, and how many of its rounds are done.
        """
        # No checkpoint is saved within a condition: it is computed again after a restart.
        if self._checkpointer is None or self._deciding:
            return
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._checkpointer.provenance = self.monitor.provenance
            self._checkpointer.save((*self._path, at), self.values, self.stacks)
            self._until_checkpoint = self._checkpointer.every
            self.monitor.saved()


def _segments(steps: Iterable[Step]) -> list[list[Step]]:
    """Groups steps: consecutive ones without control flow together, each loop and branch alone."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and is_straight([*groups[-1], step]):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups
