"""Chooses how many members a shard has, and how many of them are computed at once.

Both follow from the bytes that passes hold and the operations that they compute for a member, as
counted from their equations, and from constants that are the same on all machines:

- As many members are computed at once as the cache holds (`PassSize.at_once`).
- A shard has as few members as pay for the call of its executable and for merging its partials
  (`_shard_size`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from beamjax._text import human_bytes
from beamjax.bodies.held_bytes import SHARED, Held, Operations, Value
from beamjax.bodies.jaxprs import nbytes_of
from beamjax.interpreters.cutting.member_cost import member_cost
from beamjax.interpreters.cutting.stages import MapStage, Stage, walk
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering.callbacks import reason_for_python
from beamjax.interpreters.lowering.map_bodies import can_run_sequentially
from beamjax.interpreters.placement.places import FileGroups, PlacedProgram
from beamjax.interpreters.program import Atom, MemberEqn, with_nested
from beamjax.interpreters.rules.sharding_rules import ReductionRule
from beamjax.options import Options
from beamjax.options.rules import MULTIPLE
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import VMAP, Cost, FusedBuffer, Vectorization

CACHE_BYTES = 1 << 19
"""Assumed share of the second-level cache that one thread has, in bytes."""
STREAMED_BYTES = 8 * CACHE_BYTES
"""Most bytes at once outside of loops, where values are read once or twice."""
MAX_SHARD_BYTES = 32 << 20
"""Largest size of what a shard reads or returns, in bytes: Beam elements must be below 64 MiB. Also
that of what members hold at once."""
REDUCED_SHARE = 16
"""Members at once hold this many times the bytes that they are reduced to, so that adding up
batches takes little time."""
CALL_OPERATIONS = 1e7
"""Operations that take as long as the call of an executable with what belongs to it: 0.2 ms."""
MERGE_OPERATIONS = 140
"""Operations that take as long as to add up a byte of partials exactly: 2.8 ns."""
PAYING = 32
"""A shard computes this many times the operations of its call and of adding up its partials."""
FEWEST_SHARDS = 8
"""Fewest shards of a placement, unless partials are large: two for each of four workers."""
UNKNOWN_SIZE = 4096
"""Most members per shard of a placement of unknown size, which may have few."""
GROUP_SHARDS = 4
"""Fewest shards of a group of files, so that the padding of its last shard is little."""
FEWEST_GROUPS = 4
"""Fewest groups of files of a placement. With fewer, a changed file would be most of the data."""


class ShardSize(NamedTuple):
    """How many members a shard has, and the rules that decided it."""

    members: int
    reasons: tuple[SizeReason, ...]


class PassSize(NamedTuple):
    """What a pass holds and computes, as far as the size of shards depends on it."""

    moved: float  # bytes that it reads and returns per member
    peak: float  # bytes that it holds at once per member, operands included
    looped: float  # the most bytes per member that a round of a loop reads and holds; 0 without
    reduced: int  # bytes of the partials of a shard
    cost: Cost  # per member

    @staticmethod
    def of(stage: MapStage, n: Any) -> PassSize:
        """What a pass over n members holds and computes."""
        held = _held(stage, n)
        read = sum(_per_member(var, n) for var, _ in stage.operands)
        return PassSize(
            read + sum(_per_member(var, n) for var in stage.results),
            read + held.peak,
            held.looped,
            sum(nbytes_of(var.aval) for eqn in stage.reductions for var in eqn.outputs),
            member_cost(stage, n),
        )

    @property
    def at_once(self) -> int:
        """How many members a core should compute at once: a power of two from 8 on, or 1."""
        # A round of a loop reads what the round before has written, so it stays in the cache.
        # Outside of loops values may come from the next cache. If not even 8 members fit, one
        # member is computed after the other.
        peak = max(self.peak, 1)
        most = max(STREAMED_BYTES, REDUCED_SHARE * self.reduced, MULTIPLE * peak)
        members = min(min(most, MAX_SHARD_BYTES) / peak, CACHE_BYTES / max(self.looped, 1))
        return power_of_two(members) if members >= MULTIPLE else 1


def _passes(stages: Sequence[Stage], placement: str) -> list[MapStage]:
    return [s for s in walk(stages) if isinstance(s, MapStage) and s.placement == placement]


# --- members per shard


def pass_sizes(program: PlacedProgram, stages: Sequence[Stage]) -> dict[MapStage, PassSize]:
    """What each pass holds and computes."""
    passes = (stage for stage in walk(stages) if isinstance(stage, MapStage))
    return {stage: PassSize.of(stage, program.sizes[stage.placement]) for stage in passes}


def shard_sizes(
    program: PlacedProgram, passes: Mapping[MapStage, PassSize], options: Options
) -> dict[str, ShardSize]:
    """The members per shard of each placement: a multiple of 8, one size for all passes."""
    # With a fixed multiple of 8, the bits of a member do not depend on its row in the shard on
    # XLA's CPU backend.
    sizes = {}
    for placement, n in program.sizes.items():
        mine = [size for stage, size in passes.items() if stage.placement == placement]
        groups = program.file_groups.get(placement)
        if options.shard_size is None:
            sizes[placement] = _shard_size(mine, n, groups)
        else:
            chosen = ShardSize(options.shard_size, (SizeReason.OPTION,))
            sizes[placement] = _at_most_all(chosen, n)
    return sizes


def _shard_size(passes: Sequence[PassSize], n: Any, groups: FileGroups | None = None) -> ShardSize:
    """The number of members per shard of a placement, if a user does not set it."""
    # The smallest for which the operations of a shard pay for its call and for merging, so that
    # there are as many shards as possible. It does not depend on the number of workers.
    if not passes:
        return ShardSize(MULTIPLE, (SizeReason.MULTIPLE,))
    limit, reason = _limit(passes, n, groups)
    size = power_of_two(math.sqrt(2) * limit)
    bound = power_of_two(MAX_SHARD_BYTES / max(*(pass_size.moved for pass_size in passes), 1))
    if bound < size:
        size, reason = bound, SizeReason.BYTES
    if size < MULTIPLE:
        size, reason = MULTIPLE, SizeReason.MULTIPLE
    if is_unknown(n) or n >= FEWEST_SHARDS * size:
        return ShardSize(size, (reason,))
    shards = max(math.ceil(n / size), 1)
    equal = max(_equal_size(passes, n / shards), MULTIPLE)
    if equal == size:
        return ShardSize(size, (reason,))
    return ShardSize(equal, (reason, SizeReason.EQUAL if shards > 1 else SizeReason.ALL))


def _limit(
    passes: Sequence[PassSize], n: Any, groups: FileGroups | None
) -> tuple[float, SizeReason]:
    """The most members that a shard has by operations, shards and files, and which of them."""
    paying = _paying(passes)
    limits = [(paying, SizeReason.PAYING)]
    if is_unknown(n):
        limits.append((UNKNOWN_SIZE, SizeReason.UNKNOWN_SIZE))
    else:
        fewest = FEWEST_SHARDS, SizeReason.FEWEST_SHARDS
        if _merging(passes) > _calling(passes):
            fewest = 2, SizeReason.TWO_SHARDS
        few_calls = paying / FEWEST_SHARDS, SizeReason.FEW_CALLS
        limits.append(max((n / fewest[0], fewest[1]), few_calls, key=_members))
    if groups is not None:
        limits.append((groups.rows / GROUP_SHARDS, SizeReason.FILES))
    return min(limits, key=_members)


def _members(limit: tuple[float, SizeReason]) -> float:
    return limit[0]


def _equal_size(passes: Sequence[PassSize], members: float) -> int:
    """The size of a few shards of equal sizes. Else the last one would be mostly padding."""
    batches = math.ceil(members / max(MULTIPLE, min(pass_size.at_once for pass_size in passes)))
    steps = batches * MULTIPLE, max(MULTIPLE, power_of_two(members) // 16)
    return min(math.ceil(members / step) * step for step in steps)


def _calling(passes: Sequence[PassSize]) -> float:
    return len(passes) * CALL_OPERATIONS


def _merging(passes: Sequence[PassSize]) -> float:
    return sum(pass_size.reduced for pass_size in passes) * MERGE_OPERATIONS


def _paying(passes: Sequence[PassSize]) -> float:
    """The number of members whose operations pay for the calls and the partials of a shard."""
    operations = sum(pass_size.cost.weight for pass_size in passes)
    return PAYING * (_calling(passes) + _merging(passes)) / max(operations, 1)


def _at_most_all(size: ShardSize, n: Any) -> ShardSize:
    if is_unknown(n) or size.members <= -(-n // MULTIPLE) * MULTIPLE:
        return size
    reasons = (reason for reason in size.reasons if reason is not SizeReason.ALL)
    return ShardSize(-(-n // MULTIPLE) * MULTIPLE, (*reasons, SizeReason.ALL))


def power_of_two(most: float) -> int:
    """The largest power of two that is at most `most`, and at least 1."""
    return 1 << max(int(most).bit_length() - 1, 0)


def file_groups(
    program: PlacedProgram,
    placement: str,
    rows: int,
    stages: Sequence[Stage],
    options: Options,
) -> FileGroups | str:
    """The groups of files of about `rows` members to cut shards at, or why there are none."""
    # A group has the members of a shard that pays for its call, and is then cut into four. If a
    # user sets the size of shards, it has those of four shards.
    n, mine = program.sizes[placement], _passes(stages, placement)
    # They find their ranges by the index of the first member, see `rules.by_shard`.
    if any(emission.rule.by_shard for stage in mine for emission in stage.emissions):
        return "a pass depends on the order of the members"
    paying = _paying([PassSize.of(stage, n) for stage in mine])
    fewest = GROUP_SHARDS * options.shard_size if options.shard_size else paying
    groups = FileGroups(1, rows)
    while groups.rows < fewest:
        groups = FileGroups(2 * groups.files, 2 * groups.rows)
        if groups.rows * FEWEST_GROUPS > n:
            return f"there would be fewer than {FEWEST_GROUPS} groups with enough members"
    return groups


def with_whole_blocks(
    program: PlacedProgram, stages: Sequence[Stage], sizes: Mapping[str, ShardSize]
) -> dict[str, ShardSize]:
    """Shard sizes such that each shard begins where a range does; see `rules.by_shard`."""
    whole = {placement: size.members for placement, size in sizes.items()}
    for stage in (stage for stage in walk(stages) if isinstance(stage, MapStage)):
        for emission in (emission for emission in stage.emissions if emission.rule.by_shard):
            size, block = whole[stage.placement], emission.eqn.params["block"]
            whole[stage.placement] = -(-size // block) * block
    return {
        placement: size
        if whole[placement] == size.members
        else _at_most_all(
            ShardSize(whole[placement], (*size.reasons, SizeReason.WHOLE_RANGES)),
            program.sizes[placement],
        )
        for placement, size in sizes.items()
    }


# --- how a shard is computed


def choose_vectorization(
    stage: MapStage,
    pass_size: PassSize,
    buffers: Sequence[FusedBuffer],
    size: int,
    options: Options,
    platforms: Sequence[str],
    chosen: Vectorization | None = None,  # by the launching process, for a plan that a worker makes
) -> tuple[Vectorization, str]:
    """How a pass computes a shard, and why if it is not vmap over all members."""
    if not can_run_sequentially(stage, buffers):
        return VMAP, ""
    if options.member_loop is not None:
        kind, why = options.member_loop, f"the option member_loop={options.member_loop!r}"
    elif chosen is not None:
        kind, why = chosen.kind, "as in the plan of the launching process"
    else:
        kind, why = _kind(stage, pass_size, size, options, platforms)
    if kind == "loop":
        return Vectorization("loop"), why
    batch = _batch(size, max(pass_size.at_once, MULTIPLE)) if kind == "batches" else None
    return (VMAP, "") if batch is None else (Vectorization("batches", batch), why)


def _batch(size: int, most: int) -> int | None:
    """The largest multiple of 8 up to `most` of which a shard has two or more; None without one."""
    largest = min(most, size // 2) // MULTIPLE * MULTIPLE
    return next((b for b in range(largest, 0, -MULTIPLE) if size % b == 0), None)


def _kind(
    stage: MapStage, pass_size: PassSize, size: int, options: Options, platforms: Sequence[str]
) -> tuple[str, str]:
    """The kind of vectorization that the rules choose for shards of a size, and why."""
    if MULTIPLE * pass_size.peak > MAX_SHARD_BYTES:
        return "loop", f"a member holds {human_bytes(round(pass_size.peak))}"
    calls_back = reason_for_python([emission.eqn for emission in stage.emissions], options)
    if calls_back or tuple(platforms) != ("cpu",):
        return "vmap", ""
    # Of convolutions whose input and kernel both differ between members, `vmap` makes one grouped
    # convolution, which XLA's CPU backend computes at a fraction of the speed of separate ones.
    if pass_size.cost.grouped:
        return "loop", "convolutions whose kernels differ between members"
    if pass_size.at_once == 1:
        return "loop", f"a round of a loop holds {human_bytes(round(pass_size.looped))} of a member"
    if pass_size.at_once >= size:
        return "vmap", ""
    return "batches", "no more members fit in the cache"


# --- bytes of a member


def _per_member(atom: Atom, n: Any) -> float:
    """Bytes of a placed value; `nbytes_of` leaves out an unknown number of members."""
    return nbytes_of(atom.aval) / (1 if is_unknown(n) else max(n, 1))


def _held(stage: MapStage, n: Any) -> Held:
    """The bytes that a pass holds at once for a member, besides its operands."""
    operations = Operations()
    values = {var: Value(_per_member(var, n)) for var, _ in stage.operands}
    for emission in stage.emissions:
        eqn, rule = emission.eqn, emission.rule
        ins = [
            SHARED if axis is None or atom not in values else values[atom]
            for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)
        ]
        if isinstance(rule, ReductionRule):
            operations.add(eqn.primitive.name, ins, [])
        elif eqn.primitive.name == "bj_map":
            values.update(zip(eqn.outputs, operations.call(eqn.params["jaxpr"], ins), strict=True))
        else:
            outs = [Value(_per_member(var, n)) for var in eqn.outputs]
            inside = max((_per_equation(inner, n) for inner in _inside(eqn)), default=0)
            if isinstance(eqn, MemberEqn):
                operations.loop(ins, Held(inside))
            operations.add(eqn.primitive.name, ins, outs, inside)
            values.update(zip(eqn.outputs, outs, strict=True))
    return operations.held(values[var] for var in stage.results)


def _inside(eqn: Any) -> Sequence[Any]:
    """The equations of the loops and branches that an equation of a program holds."""
    return list(with_nested(eqn))[1:]


def _per_equation(eqn: Any, n: Any) -> float:
    """Bytes of a member among the results of an equation."""
    outs = eqn.outvars if hasattr(eqn, "outvars") else eqn.outputs
    return sum(_per_member(var, n) for var in outs)
