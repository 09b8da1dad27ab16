"""Scan, while and cond without placed operators that act on each member separately.

Such a loop runs inside a pass, on the members of a shard. An example is `jax.vmap` of a function
with a loop, outside of `map_fn`.
"""

# ys = scan[body] c x   ->   ys = scan c x, a `MemberEqn` with a rule: for each shard, it emits the
#                            scan of the same equations, each by its own rule.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax

from beamjax.interpreters.placement.places import MemberAxis, Place, PlacedProgram
from beamjax.interpreters.program import (
    Atom,
    BranchEqn,
    Eqn,
    FlatBlock,
    LoopEqn,
    MemberEqn,
    Var,
    WholeEqn,
)
from beamjax.interpreters.rules.sharding_rules import (
    Emit,
    MemberwiseRule,
    ReductionRule,
    TracedShard,
    bind,
)


def as_member_equation(
    program: PlacedProgram, eqn: WholeEqn, structure: LoopEqn | BranchEqn, used: set[Var]
) -> tuple[Eqn, str, MemberwiseRule] | None:
    """A loop or a branch as an equation by shards, with placement and rule; None if it mixes."""
    # `structure` is the same as `eqn`, expanded and placed. `used` are all values that are read: a
    # result that a pass does not compute must not be.
    check = _Check(program, eqn)
    places = [program.place(var) for var in eqn.outputs]
    if any(place is None and v in used for place, v in zip(places, eqn.outputs, strict=True)):
        return None
    if not check.control(structure) or len(check.placements) != 1:
        return None
    (placement,) = check.placements
    in_axes = tuple(along.axis if along else None for _, along in check.operands)
    out_axes = tuple(along.axis if along else None for along in places)
    operands: list[Atom] = [var for var, _ in check.operands]
    whole = MemberEqn(eqn.primitive, {}, operands, eqn.outputs, eqn.line, structure)
    emit = _emission(program, structure, list(check.operands))
    return whole, placement, MemberwiseRule(in_axes, out_axes, emit)


class _Check:
    """Checks whether all equations in a loop or a branch act on each member separately."""

    def __init__(self, program: PlacedProgram, eqn: Eqn):
        self.program = program
        constants = program.flat.inputs
        self.outside = {atom for atom in (*eqn.inputs, *constants) if isinstance(atom, Var)}
        # The values from outside that are read, with the places at which they are read.
        self.operands: dict[tuple[Var, Place], None] = {}
        self.placements: set[str] = set()  # Of all placed values that are read.

    def control(self, eqn: Eqn) -> bool:
        border = self.program.borders[eqn]
        ends = zip(eqn.blocks, border.outputs, strict=True)
        return self.reads(zip(eqn.inputs, border.inputs, strict=True)) and all(
            self.block(eqn, block) and self.reads(zip(block.outputs, places, strict=True))
            for block, places in ends
        )

    def block(self, around: Eqn, block: FlatBlock) -> bool:
        is_condition = isinstance(around, LoopEqn) and around.selects and block is around.condition
        for eqn in self.program.equations(block):
            if eqn.blocks:
                if not self.control(eqn):
                    return False
                continue
            if eqn in self.program.rows:  # which other shards may have
                return False
            _, rule = self.program.rules.get(eqn, ("", None))
            if isinstance(rule, ReductionRule):
                # The `any` at the end of the condition of a vmapped while may be one over a shard:
                # further rounds do not change the rows that are finished.
                is_last = eqn.outputs == block.outputs
                if not (is_condition and rule.reducer == "any" and is_last):
                    return False
            if not self.reads(self.program.reads(eqn)):
                return False
        return True

    def reads(self, pairs: Iterable[tuple[Atom, Place]]) -> bool:
        """Whether a pass can read values at these places."""
        for atom, along in pairs:
            if along is not None:
                self.placements.add(along.placement)
            if not isinstance(atom, Var):
                continue
            if atom in self.outside:
                self.operands[atom, along] = None
                # A server value may be read both whole and by shards, a placed value at one place.
                if self.program.place(atom) and sum(var is atom for var, _ in self.operands) > 1:
                    return False
            elif self.program.place(atom) != along:
                if along is None or (atom, along) not in self.program.creations:
                    return False
                if not self.reads(self.program.reads_to_create(atom, along)):
                    return False
        return True


def _emission(
    program: PlacedProgram, structure: LoopEqn | BranchEqn, operands: Sequence[tuple[Var, Place]]
) -> Emit:
    def emit(eqn: Eqn, args: Sequence[Any], shard: TracedShard) -> list[Any]:
        outside = dict(zip(operands, args, strict=True))
        return _Emitter(program, shard, outside).control(structure, {})

    return emit


class _Emitter:
    """Evaluates blocks on the members of a shard, as JAX control flow."""

    def __init__(
        self, program: PlacedProgram, shard: TracedShard, outside: Mapping[tuple[Var, Place], Any]
    ):
        # `outside` has the values from outside of the blocks.
        self.program = program
        self.shard = shard
        self.outside = outside

    def control(self, eqn: Eqn, env: Mapping[Var, Any]) -> list[Any]:
        border = self.program.borders[eqn]
        pairs = zip(eqn.inputs, border.inputs, strict=True)
        inputs = [self.value(env, atom, along) for atom, along in pairs]
        if isinstance(eqn, BranchEqn):
            branches = [lambda b=block: self.block(eqn, b, env) for block in eqn.branches]
            return lax.switch(inputs[0].astype("int32"), branches)
        assert isinstance(eqn, LoopEqn)
        carried, stacked = inputs[: eqn.carried], inputs[eqn.carried :]

        def round_(carry: Any, entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            params = dict(zip(eqn.block.inputs, [*carry, *entries], strict=True))
            outs = self.block(eqn, eqn.block, {**env, **params})
            return outs[: eqn.carried], outs[eqn.carried :]

        if eqn.condition is None:
            last, stacks = lax.scan(round_, carried, stacked, eqn.rounds, eqn.reverse)
            return [*last, *stacks]
        condition = eqn.condition

        def holds(carry: Any) -> Any:
            params = dict(zip(condition.inputs, carry, strict=True))
            return self.block(eqn, condition, {**env, **params})[0]

        return list(lax.while_loop(holds, lambda carry: round_(carry, [])[0], carried))

    def block(self, around: Eqn, block: FlatBlock, env: Mapping[Var, Any]) -> list[Any]:
        known = dict(env)
        for eqn in self.program.equations(block):
            known.update(zip(eqn.outputs, self.equation(eqn, known), strict=True))
        border = self.program.borders[around]
        places = border.outputs[around.blocks.index(block)]
        pairs = zip(block.outputs, places, strict=True)
        return [self.value(known, atom, along) for atom, along in pairs]

    def equation(self, eqn: Eqn, env: Mapping[Var, Any]) -> list[Any]:
        if eqn.blocks:
            return self.control(eqn, env)
        args = [self.value(env, atom, along) for atom, along in self.program.reads(eqn)]
        _, rule = self.program.rules.get(eqn, ("", None))
        if rule is None:
            return bind(eqn, args)
        if isinstance(rule, ReductionRule):
            return [rule.partial(eqn, args, self.shard)]
        return rule.emit(eqn, args, self.shard)

    def value(self, env: Mapping[Var, Any], atom: Atom, along: Place) -> Any:
        if not isinstance(atom, Var):
            return atom.val
        if (atom, along) in self.outside:
            return self.outside[atom, along]
        if self.program.place(atom) == along:
            return env[atom]
        assert along is not None
        return self.created(env, atom, along)

    def created(self, env: Mapping[Var, Any], var: Var, along: MemberAxis) -> Any:
        """The members of a server value that a shard can compute."""
        maker, rule = self.program.creations[var, along]
        args = [self.value(env, *pair) for pair in self.program.reads_to_create(var, along)]
        outs = rule.emit(maker, args, self.shard)
        return outs[maker.outputs.index(var)]
