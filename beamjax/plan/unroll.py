"""Unrolls rounds of a loop into steps of one graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamjax.plan.liveness import made
from beamjax.plan.steps import Block, Branch, Gather, Loop, Map, Scatter, Server, Step


def is_straight(steps: Iterable[Step]) -> bool:
    """Whether steps have no control flow."""
    return not any(isinstance(step, Loop | Branch) for step in steps)


def read(step: Step) -> set[str]:
    """Names of the values that a step reads, including those that its own blocks define."""
    match step:
        case Server(inputs=inputs):
            return set(inputs)
        case Map(broadcasts=broadcasts, operands=operands):
            return {*broadcasts, *operands}
        case Gather(operand=operand) | Scatter(operand=operand):
            return {operand}
        case Loop():
            return {value.init for value in step.carried} | read_by_rounds(step)
        case Branch():
            return {step.index} | read_by_blocks(step)


def read_by_rounds(loop: Loop) -> set[str]:
    """Names of the values that the rounds of a loop read, besides the initial ones."""
    return {value.operand for value in loop.sliced} | read_by_blocks(loop)


def read_by_blocks(step: Loop | Branch) -> set[str]:
    """Names of the values that the blocks of a step read, including those that they define."""
    blocks: tuple[Block, ...]
    if isinstance(step, Branch):
        blocks = step.blocks
    else:
        blocks = (step.block, step.condition) if step.condition else (step.block,)
    names = {name for block in blocks for name in block.outputs}
    return names.union(*(read(inner) for block in blocks for inner in block.steps))


def renamed(step: Step, prefix: str, new_names: Mapping[str, str] | None = None) -> Step:
    """A copy of a step without blocks: `prefix` before its name, and its values renamed."""

    def name(old: str) -> str:
        return (new_names or {}).get(old, old)

    def names(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(name, old))

    new: dict[str, Any]
    match step:
        case Server():
            new = {"inputs": names(step.inputs), "outputs": names(step.outputs)}
        case Map():
            lanes = [
                replace(lane, reductions=tuple(
                    replace(r, result=name(r.result)) for r in lane.reductions
                ))
                for lane in step.lanes
            ]  # fmt: skip
            new = {"broadcasts": names(step.broadcasts), "operands": names(step.operands)}
            combines = [
                replace(c, inputs=names(c.inputs), results=tuple(r and name(r) for r in c.results))
                for c in step.combines
            ]
            new |= {"results": names(step.results), "lanes": tuple(lanes)}
            new["combines"] = tuple(combines)
        case Gather() | Scatter():
            new = {"operand": name(step.operand), "result": name(step.result)}
        case _:
            raise TypeError(step)
    return replace(step, name=f"{prefix}{step.name}", **new)


@dataclass(frozen=True)
class Rounds:
    """Rounds of a loop as straight-line steps.

    Attributes:
      steps: the steps of all rounds; values and steps have other names in each round.
      origin: for each new name of a value, its name in the plan.
      slices: for each entry that a round reads, the name of the sliced value and the index.
      carried: names of the carried values after the last of these rounds.
      stacked: for each stacked result, the names of its entries, in order of the rounds.
    """

    steps: tuple[Step, ...]
    origin: Mapping[str, str]
    slices: Mapping[str, tuple[str, int]]
    carried: tuple[str, ...]
    stacked: tuple[tuple[str, ...], ...]


def unrolled(loop: Loop, rounds: Iterable[int], prefix: str = "") -> Rounds:
    """Unrolls rounds of a loop.

    Args:
      loop: a loop whose block has no control flow.
      rounds: the numbers of the rounds to unroll.
      prefix: put before the names of steps and values.
    """
    own = {name for step in loop.block.steps for name in made(step)}
    steps: list[Step] = []
    origin: dict[str, str] = {}
    slices: dict[str, tuple[str, int]] = {}
    carried = tuple(value.param for value in loop.carried)
    entries = []
    for number in rounds:
        where = f"{prefix}{loop.name}[{number}]/"
        fresh = own | {value.param for value in loop.sliced}
        names = {name: where + name for name in fresh}
        origin |= {new: old for old, new in names.items()}
        index = entry_index(loop, number)
        slices |= {names[value.param]: (value.operand, index) for value in loop.sliced}
        params = (value.param for value in loop.carried)
        names |= dict(zip(params, carried, strict=True))
        steps += [renamed(step, where, names) for step in loop.block.steps]
        outputs = [names.get(name, name) for name in loop.block.outputs]
        carried = tuple(outputs[: len(carried)])
        entries.append(outputs[len(carried) :])
    return Rounds(tuple(steps), origin, slices, carried, tuple(zip(*entries, strict=True)))


def entry_index(loop: Loop, number: int) -> int:
    """The index at which round `number` reads its slices and writes its stacked results."""
    return (loop.rounds or 0) - 1 - number if loop.reverse else number
