"""Passes the mask of dropped members from each pass over a placement to the next one.

If members may be dropped, each pass returns a mask, a placed boolean that is False for dropped
members, and reads the mask of the pass before. So a member that one pass drops is left out of all
later ones. Loops carry the mask of members that are the same in all rounds, and branches return it.
At the end, the masks that no pass reads are removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from beamjax.options import Options
from beamjax.plan.liveness import used_by_block
from beamjax.plan.steps import (
    Block,
    Branch,
    Carried,
    Guard,
    Loop,
    Map,
    Plan,
    Rows,
    Scatter,
    Step,
    ValueType,
    walk,
)

Masks = dict[str, str]
"""For each placement, the name of the current mask of members that were not dropped."""


def guard_of(options: Options) -> Guard | None:
    """The guard that the options ask for, None if errors and NaN need no handling."""
    if options.on_error == "raise" and options.on_nonfinite == "keep":
        return None
    return Guard(options.on_error, options.on_nonfinite)


def with_dropped_masks(plan: Plan, empty_pass: Callable[[str], Map]) -> Plan:
    """Adds the masks of dropped members to a plan whose passes have guards."""
    # `empty_pass` makes a pass that computes nothing, which goes before a loop or a branch that no
    # pass precedes, to give it a mask with all members.
    return _Adding(plan, empty_pass).plan


class _Adding:
    def __init__(self, plan: Plan, empty_pass: Callable[[str], Map]):
        self.empty_pass = empty_pass
        self.values = dict(plan.values)
        self.numbers = itertools.count()
        steps = self.steps(plan.steps, {})
        read = set(_read(steps))
        self.plan = replace(plan, steps=_without_unread(steps, read), values=self.values)

    def name(self, placement: str) -> str:
        """A new name for a mask."""
        name = f"kept.{next(self.numbers)}@{placement}"
        self.values[name] = ValueType((), "bool", None, placement)
        return name

    def steps(self, steps: Sequence[Step], masks: Masks) -> tuple[Step, ...]:
        """The steps with masks added; updates `masks`."""
        masked: list[Step] = []
        for step in steps:
            match step:
                case Map():
                    masked.append(self.map(step, masks))
                case Loop() | Branch():
                    masked += self.first_passes(step, masks)
                    through = self.loop if isinstance(step, Loop) else self.branch
                    masked.append(through(step, masks))  # type: ignore[arg-type]
                case _:
                    masked.append(step)
        return tuple(masked)

    def map(self, step: Map, masks: Masks) -> Map:
        before = masks.get(step.placement)
        after = masks[step.placement] = self.name(step.placement)
        return replace(
            step,
            operands=step.operands if before is None else (*step.operands, before),
            results=(*step.results, after),
            guard=step.guard and step.guard._replace(reads=before is not None, emits_mask=True),
        )

    def first_passes(self, step: Step, masks: Masks) -> list[Map]:
        """Empty passes over those placements of a loop or branch that have no mask yet."""
        placements = self.lasting(step) if isinstance(step, Loop) else _placements([step])
        return [
            self.map(self.empty_pass(placement), masks)
            for placement in placements
            if placement not in masks
        ]

    def lasting(self, loop: Loop) -> list[str]:
        """The placements in a loop whose members are the same in all rounds."""
        # A round that takes all members from server values or rows, such as a cohort `x[i]`, has
        # new ones: that one was dropped says nothing about those of later rounds.
        outside = used_by_block(loop.block)
        if loop.condition is not None:
            outside |= used_by_block(loop.condition)
        taken = {step.result for step in walk([loop]) if isinstance(step, Scatter | Rows)}
        old, new = ({self.values[name].placement for name in names} for names in (outside, taken))
        return [placement for placement in _placements([loop]) if placement not in new - old]

    def loop(self, loop: Loop, masks: Masks) -> Loop:
        placements = self.lasting(loop)
        # loop (carry) with passes over p  becomes  loop (carry, mask of p), whose rounds return it.
        params = {placement: self.name(placement) for placement in placements}
        condition, inner = loop.condition, {**masks, **params}
        for placement in set(_placements([loop])).difference(placements):
            inner.pop(placement, None)
        if condition is not None:
            condition = replace(condition, steps=self.steps(condition.steps, dict(inner)))
        steps = self.steps(loop.block.steps, inner)
        carried = list(loop.carried)
        for placement, param in params.items():
            result = self.name(placement)
            carried.append(Carried(masks[placement], param, result))
            masks[placement] = result
        # Outputs of a block are the carried values, then the stacked ones.
        first = len(loop.carried)
        outputs = loop.block.outputs
        last_masks = tuple(inner[placement] for placement in placements)
        block = Block(steps, (*outputs[:first], *last_masks, *outputs[first:]))
        return replace(loop, condition=condition, block=block, carried=tuple(carried))

    def branch(self, branch: Branch, masks: Masks) -> Branch:
        placements = _placements([branch])
        blocks = []
        for block in branch.blocks:
            inner = dict(masks)
            steps = self.steps(block.steps, inner)
            last_masks = tuple(inner[placement] for placement in placements)
            blocks.append(Block(steps, (*block.outputs, *last_masks)))
        masks |= {placement: self.name(placement) for placement in placements}
        results = (*branch.results, *(masks[placement] for placement in placements))
        return replace(branch, blocks=tuple(blocks), results=results)


def _placements(steps: Iterable[Step]) -> list[str]:
    return list(dict.fromkeys(step.placement for step in walk(steps) if isinstance(step, Map)))


def _read(steps: Iterable[Step]) -> Iterable[str]:
    """Names of all placed values that steps read or return."""
    for step in walk(steps):
        match step:
            case Map():
                yield from step.operands
            case Loop():
                yield from (value.init for value in step.carried)
                yield from step.block.outputs
            case Branch():
                for block in step.blocks:
                    yield from block.outputs


def _without_unread(steps: Sequence[Step], read: set[str]) -> tuple[Step, ...]:
    """The steps without masks that no step reads."""
    pruned: list[Step] = []
    for step in steps:
        match step:
            case Map(guard=Guard(emits_mask=True) as guard) if step.results[-1] not in read:
                pruned.append(
                    replace(step, results=step.results[:-1], guard=guard._replace(emits_mask=False))
                )
            case Loop():
                condition = step.condition and _with_steps(step.condition, read)
                block = _with_steps(step.block, read)
                pruned.append(replace(step, condition=condition, block=block))
            case Branch():
                blocks = tuple(_with_steps(block, read) for block in step.blocks)
                pruned.append(replace(step, blocks=blocks))
            case _:
                pruned.append(step)
    return tuple(pruned)


def _with_steps(block: Block, read: set[str]) -> Block:
    return replace(block, steps=_without_unread(block.steps, read))
