"""The stages of a program; each becomes a step of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from beamjax.interpreters.placement.places import MemberAxis, Place
from beamjax.interpreters.program import BranchEqn, Eqn, FlatBlock, LoopEqn, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule


@dataclass(eq=False)
class ServerStage:
    """Server equations of one level, in order, which become one executable."""

    eqns: list[Eqn]
    inputs: list[Var]
    outputs: list[Var] = field(default_factory=list)


@dataclass(eq=False)
class Emission:
    """One equation of a pass, with its sharding rule."""

    eqn: Eqn
    rule: MemberwiseRule | ReductionRule


@dataclass(eq=False)
class MapStage:
    """One pass over the members of a placement."""

    placement: str
    emissions: list[Emission]  # its equations, in order
    broadcasts: list[Var]  # server values that they read
    operands: list[tuple[Var, MemberAxis]]  # placed values that they read, with their places
    results: list[Var]  # placed values that later stages or the outputs read

    @property
    def reductions(self) -> list[Eqn]:
        return [e.eqn for e in self.emissions if isinstance(e.rule, ReductionRule)]


@dataclass(eq=False)
class GatherStage:
    """Gathers a placed value, which the equation `user` needs on the server."""

    var: Var
    along: MemberAxis
    user: Eqn


@dataclass(eq=False)
class ScatterStage:
    """Scatters a server value, which the equation `user` needs by shards."""

    var: Var
    along: MemberAxis
    user: Eqn


@dataclass(eq=False)
class RowsStage:
    """Reads rows of a placed value by index: the equation `take_rows`."""

    eqn: Eqn
    along: MemberAxis  # the place of that value
    place: Place  # of the rows


@dataclass(eq=False)
class BlockStages:
    """A block of a loop or a branch: its stages, and the places of its outputs."""

    block: FlatBlock
    stages: list[Stage]
    outputs: tuple[Place, ...]


@dataclass(eq=False)
class LoopStage:
    """A loop: a block for a round, and for a while one for the condition."""

    eqn: LoopEqn
    inputs: tuple[Place, ...]  # the places of its inputs
    condition: BlockStages | None
    block: BlockStages
    served: list[Var]  # server values of enclosing blocks that it reads


@dataclass(eq=False)
class BranchStage:
    """A branch; `served` are the server values that its blocks read, and its index."""

    eqn: BranchEqn
    branches: list[BlockStages]
    served: list[Var]


Stage = ServerStage | MapStage | GatherStage | ScatterStage | RowsStage | LoopStage | BranchStage


def walk(stages: Iterable[Stage]) -> Iterator[Stage]:
    """All stages, including those in the blocks of loops and branches."""
    for stage in stages:
        yield stage
        for block in blocks_of(stage):
            yield from walk(block.stages)


def blocks_of(stage: Stage) -> list[BlockStages]:
    """The blocks of a loop or a branch, in the order in which they are lowered."""
    match stage:
        case LoopStage(condition=condition, block=block):
            return [condition, block] if condition else [block]
        case BranchStage(branches=branches):
            return branches
    return []
