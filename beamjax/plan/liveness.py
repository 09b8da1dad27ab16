"""Liveness: which values of a plan are needed later, at the end of any round of its loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from beamjax.plan.steps import Block, Branch, Gather, Loop, Map, Rows, Scatter, Server, Step

Position: TypeAlias = tuple[tuple[str, int], ...]
"""A point in a run: the loops and branches around it, from the outermost to the innermost.

Each is a pair of the name of the step and a number: of completed rounds for a loop, of the chosen
block for a branch.
"""


def defined(step: Step) -> tuple[str, ...]:
    """Names of the values that a step defines."""
    match step:
        case Server(outputs=outputs):
            return outputs
        case Map():
            return (*step.results, *step.reduced)
        case Gather(result=result) | Scatter(result=result) | Rows(result=result):
            return (result,)
        case Loop(carried=carried, stacked=stacked):
            return (*(value.result for value in carried), *stacked)
        case Branch(results=results):
            return results


def used(step: Step) -> set[str]:
    """Names of the values that a step reads and does not define itself."""
    match step:
        case Server(inputs=inputs):
            return set(inputs)
        case Map(broadcasts=broadcasts, operands=operands, combines=combines):
            return {*broadcasts, *operands, *(name for c in combines for name in c.inputs)}
        case Gather(operand=operand) | Scatter(operand=operand):
            return {operand}
        case Rows(operand=operand, numbers=numbers):
            return {operand, numbers}
        case Loop(carried=carried):
            return {value.init for value in carried} | used_by_rounds(step)
        case Branch(index=index, blocks=blocks):
            return {index}.union(*map(used_by_block, blocks))


def used_by_block(block: Block) -> set[str]:
    """Names of the values that a block reads and does not define itself."""
    return live_before(block.steps, block.outputs)


def used_by_rounds(loop: Loop) -> set[str]:
    """Names of the values from outside that rounds of a loop read, without the carried ones."""
    names = used_by_block(loop.block)
    if loop.condition is not None:
        names |= used_by_block(loop.condition)
    own = {value.param for value in loop.carried} | {value.param for value in loop.sliced}
    return (names - own) | {value.operand for value in loop.sliced}


def live_before(steps: Sequence[Step], after: Iterable[str]) -> set[str]:
    """Names of the values that are live before some steps, if `after` are live after them."""
    live = set(after)
    for step in reversed(steps):
        live = live.difference(defined(step)) | used(step)
    return live


def live_at(block: Block, position: Position) -> set[str]:
    """Names of the values that the rest of a block needs from a position on."""
    # Entries of the stacked results of unfinished loops are not included. A KeyError says that the
    # position is of another plan.
    (name, number), *inner = position
    index = step_index(block.steps, name)
    step = block.steps[index]
    live = live_before(block.steps[index + 1 :], block.outputs).difference(defined(step))
    match step:
        case Loop() if inner:
            # A resumed round reads its entries of the sliced values again.
            read = live_at(step.block, tuple(inner)) - {value.param for value in step.sliced}
            return live | used_by_rounds(step) | read
        case Loop():
            return live | used_by_rounds(step) | {value.param for value in step.carried}
        case Branch(blocks=blocks) if inner and 0 <= number < len(blocks):
            return live | live_at(blocks[number], tuple(inner))
    raise KeyError(position)


def step_index(steps: Sequence[Step], name: str) -> int:
    """The index of the step of this name; a KeyError if there is none."""
    for index, step in enumerate(steps):
        if step.name == name:
            return index
    raise KeyError(name)


def loops_at(block: Block, position: Position) -> list[tuple[Loop, int]]:
    """The loops that are unfinished at a position, with their numbers of completed rounds."""
    loops = []
    for name, number in position:
        step = block.steps[step_index(block.steps, name)]
        if isinstance(step, Loop):
            loops.append((step, number))
            block = step.block
        elif isinstance(step, Branch) and 0 <= number < len(step.blocks):
            block = step.blocks[number]
        else:
            raise KeyError(name)
    return loops
