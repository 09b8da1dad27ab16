"""Runs a plan step by step: its loops and branches, checkpoints, and which values are held."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from beamjax.bodies.provenance import Provenance
from beamjax.errors import BeamjaxError
from beamjax.plan.liveness import Position, defined, used, used_by_rounds
from beamjax.plan.steps import Block, Branch, Loop, Plan, Rows, Scatter, Step
from beamjax.runtime.values import Ref, Values, rows_of, scattered, server, stacked
from beamjax.spans import timed
from beamjax.telemetry.monitor import Monitor


class Checkpointer(Protocol):
    """Saves the state of a run, and holds the state of an earlier run to continue from."""

    # The kinds of machine that computed `values` and `stacks`.
    provenance: Provenance

    # The number of rounds between two checkpoints.
    @property
    def every(self) -> int: ...
    # Where to continue; empty to start at the beginning.
    @property
    def position(self) -> Position: ...
    # Whether the earlier run has finished; then `values` are its outputs.
    @property
    def finished(self) -> bool: ...
    # The values at that position.
    @property
    def values(self) -> Values: ...
    # The entries of the stacked results of unfinished loops.
    @property
    def stacks(self) -> Mapping[str, list[Ref]]: ...

    def save(self, position: Position, values: Values, stacks: Mapping[str, Sequence[Ref]]) -> None:
        """Saves a checkpoint with those of these values that later steps read."""

    def finish(self, values: Values) -> None:
        """Saves the outputs of a finished run."""


def starts_anew(checkpointer: Checkpointer | None) -> bool:
    """Whether a run starts at the beginning, not from a checkpoint."""
    return checkpointer is None or not (checkpointer.position or checkpointer.finished)


class Executor(Protocol):
    """Computes steps: in this process, or on the workers of a Beam job."""

    # Later steps read the values whose names are `needed`. The results are these, and all server
    # values.
    def run(self, step: Step, values: Values, needed: Collection[str]) -> Values:
        """Computes a step without control flow."""


class Turn(NamedTuple):
    """A step of a block, and the names of values around it."""

    step: Step
    reads: frozenset[str]
    defines: tuple[str, ...]
    later: frozenset[str]  # what the steps after it and the outputs of the block need


class Schedule:
    """The steps of a plan with the values that they need, the same in each run and round."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.whole = Block(plan.steps, tuple(plan.returned()))
        # By the identity of a block, which the plan keeps alive: its hash takes long.
        self._turns: dict[int, list[Turn]] = {}

    def turns(self, block: Block) -> list[Turn]:
        """The steps of a block, in order."""
        turns = self._turns.get(id(block))
        if turns is None:
            turns, later = [], frozenset(block.outputs)
            for step in reversed(block.steps):
                reads, defines = frozenset(used(step)), defined(step)
                turns.append(Turn(step, reads, defines, later))
                later |= reads
            turns.reverse()
            self._turns[id(block)] = turns
        return turns


class Driver:
    """Runs a plan step by step, with its loops and branches."""

    def __init__(
        self,
        schedule: Schedule,
        values: Values,
        executor: Executor,
        monitor: Monitor,
        checkpointer: Checkpointer | None = None,
    ):
        self.schedule = schedule
        self.plan = schedule.plan
        self.values = dict(values)
        self.executor = executor
        self.monitor = monitor
        # Entries of the stacked results of loops that have begun and not ended.
        self.stacks: dict[str, list[Ref]] = {}
        self._checkpointer = checkpointer
        # The rounds and branches that the current step is in, from the outermost.
        self._path: list[tuple[str, int]] = []
        # The same for messages, as `loop_0, round 3`.
        self._where: list[str] = []
        # Depth of conditions of loops that are being computed; a condition may contain loops.
        self._conditions = 0
        self._until_checkpoint = checkpointer.every if checkpointer else sys.maxsize
        if checkpointer is not None:
            monitor.computed(checkpointer.provenance)
            self.values.update(checkpointer.values)
            self.stacks.update(checkpointer.stacks)

    # ---------------------------------------------------------------------- blocks of steps

    def run(self) -> dict[str, Ref]:
        """Runs all steps, and returns each output that is a value of the plan, by name."""
        saved, whole = self._checkpointer, self.schedule.whole
        if saved is not None and saved.finished:
            self.monitor.resumed(whole.steps)
            refs = [self.values[name] for name in whole.outputs]
        else:
            refs = self._block(whole, self.values, saved.position if saved else ())
        results = dict(zip(whole.outputs, refs, strict=True))
        if saved is not None and not saved.finished:
            saved.provenance = self.monitor.provenance
            saved.finish(results)
        return results

    def _block(self, block: Block, own: Iterable[str] = (), at: Position = ()) -> list[Ref]:
        """Runs a block, or the rest of it from a position, and returns its outputs."""
        # Values that the block may drop: those that it makes, and those that its caller gives away.
        # A value is dropped as soon as no later step needs it, which bounds the memory of a run.
        own = set(own)
        for turn in self.schedule.turns(block):
            step = turn.step
            if at and step.name != at[0][0]:
                # The earlier run has finished this step; the checkpoint has its live results.
                self.monitor.resumed([step])
                own.update(turn.defines)
                continue
            match step:
                case Loop():
                    # An initial value can be dropped when the loop has copied it to its state,
                    # unless rounds or later steps read it too.
                    inits = {value.init for value in step.carried} & own
                    self._loop(step, inits - turn.later - used_by_rounds(step), at)
                case Branch():
                    self._branch(step, at)
                case _:
                    self.step(turn)
            at = ()
            own.update(turn.defines)
            for name in own - turn.later:
                own.remove(name)
                self.values.pop(name, None)
        outputs = [self.values[name] for name in block.outputs]
        for name in own:
            self.values.pop(name, None)
        return outputs

    def step(self, turn: Turn) -> None:
        """Runs a step without control flow."""
        step, values = turn.step, {name: self.values[name] for name in turn.reads}
        try:
            match step:
                case Scatter():
                    whole = values[step.operand]
                    self.values[step.result] = scattered(whole, step.axis)
                case Rows():
                    self.values[step.result] = self._rows(step, values)
                case _:
                    self.values.update(self.executor.run(step, values, turn.later))
        except BeamjaxError as error:
            # Executors know a step by its name in the plan, which is the same in all rounds.
            if not self._where or "step '" not in str(error):
                raise
            located = type(error)(f"{', '.join(self._where)}: {error}")
            located.failure = error.failure
            raise located from error

    def _rows(self, step: Rows, values: Values) -> Ref:
        """Rows of a placed value; this process reads those of a server value."""
        taken = rows_of(values[step.operand], values[step.numbers].array())
        if self.plan.values[step.result].placement is not None:
            return taken
        with timed(self.monitor.spans, step.name, "read") as span:
            array = taken.array()
            span.nbytes = array.nbytes
        return server(array)

    # ----------------------------------------------------------------- branches and loops

    def _branch(self, branch: Branch, at: Position) -> None:
        """Runs the block of a branch that its index selects, or the rest of it from a position."""
        index = at[0][1] if at else int(self.values[branch.index].array())
        index = min(max(index, 0), len(branch.blocks) - 1)
        with self._within(branch.name, index, "block"):
            outputs = self._block(branch.blocks[index], (), at[1:])
        self.values.update(zip(branch.results, outputs, strict=True))

    def _loop(self, loop: Loop, unneeded: Iterable[str], at: Position) -> None:
        """Runs all rounds of a loop, or the rest of them from a position."""
        # `unneeded` are initial values that no step reads once the loop has started.
        first = at[0][1] if at else 0
        if at:
            self.monitor.resumed([dataclasses.replace(loop, rounds=first)])
        else:
            self._carry(loop, [self.values[value.init] for value in loop.carried])
            # Replaces the entries from the previous round of an enclosing loop.
            self.stacks |= {name: [] for name in loop.stacked}
        for name in unneeded:
            self.values.pop(name, None)
        wholes = {value.param: self.values[value.operand] for value in loop.sliced}
        at = at[1:]
        for number in itertools.count(first) if loop.rounds is None else range(first, loop.rounds):
            # A run that continues inside of a round has already computed its condition.
            if not at and not self._continues(loop, number):
                break
            self._round(loop, number, wholes, at)
            self._save_if_due((loop.name, number + 1))
            at = ()
        for value in loop.carried:
            self.values[value.result] = self.values.pop(value.param)
        for name in loop.stacked:
            entries, of = self.stacks.pop(name), self.plan.values[name]
            n = None if of.placement is None else self.plan.sizes[of.placement]
            self.values[name] = stacked(of, n, entries[::-1] if loop.reverse else entries)

    def _round(self, loop: Loop, number: int, wholes: Values, at: Position) -> None:
        """Runs one round of a loop, or the rest of it."""
        index = loop.entry_index(number)
        self.values |= {name: whole.entry(index) for name, whole in wholes.items()}
        with self._within(loop.name, number, "round"):
            outputs = self._block(loop.block, wholes, at)
        self._carry(loop, outputs[: len(loop.carried)])
        for name, entry in zip(loop.stacked, outputs[len(loop.carried) :], strict=True):
            self.stacks[name].append(entry)
        self.monitor.round_ended()

    def _carry(self, loop: Loop, carried: Sequence[Ref]) -> None:
        params = (value.param for value in loop.carried)
        self.values.update(zip(params, carried, strict=True))

    def _continues(self, loop: Loop, number: int) -> bool:
        """Whether a loop runs another round: its condition is true, or it has none."""
        if loop.condition is None:
            return True
        self._conditions += 1
        try:
            with self._within(loop.name, number, "round"):
                (value,) = self._block(loop.condition)
        finally:
            self._conditions -= 1
        return bool(value.array())

    # --------------------------------------------------------------------------- checkpoints

    @contextlib.contextmanager
    def _within(self, name: str, number: int, kind: str) -> Iterator[None]:
        """A context in which a round of a loop, or a block of a branch, runs."""
        self._path.append((name, number))
        self._where.append(f"{name}, {kind} {number}")
        try:
            yield
        finally:
            self._path.pop()
            self._where.pop()

    def _save_if_due(self, at: tuple[str, int]) -> None:
        """Counts a round, and saves a checkpoint if it is due."""
        # `at` is the name of the loop, and the number of its rounds that are done. A condition is
        # computed again after a restart, so its own loops save nothing.
        if self._checkpointer is None or self._conditions:
            return
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._checkpointer.provenance = self.monitor.provenance
            self._checkpointer.save((*self._path, at), self.values, self.stacks)
            self._until_checkpoint = self._checkpointer.every
            self.monitor.saved()
