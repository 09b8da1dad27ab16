"""The stages of a program; each becomes a step of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from beamjax.interpreters.placement.places import Along, Place
from beamjax.interpreters.program import BranchEqn, Eqn, FlatBlock, LoopEqn, Var
from beamjax.interpreters.rules.table import Fold, Local


@dataclass(eq=False)
class ServerPiece:
    """Server equations of one level, in order."""

    eqns: list[Eqn]
    inputs: list[Var]
    outputs: list[Var] = field(default_factory=list)


@dataclass(eq=False)
class Emission:
    """One equation of a pass, with its sharding rule."""

    eqn: Eqn
    reading: Local | Fold


@dataclass(eq=False)
class MapPiece:
    """One pass over the members of a placement.

    Attributes:
      emissions: its equations, in order.
      broadcasts: server values that they read.
      operands: placed values that they read, with their places.
      results: placed values that later stages or the outputs read.
    """

    placement: str
    emissions: list[Emission]
    broadcasts: list[Var]
    operands: list[tuple[Var, Along]]
    results: list[Var]

    @property
    def folds(self) -> list[Eqn]:
        return [e.eqn for e in self.emissions if isinstance(e.reading, Fold)]


@dataclass(eq=False)
class GatherPiece:
    """Gathers a placed value, which the equation `user` needs on the server."""

    var: Var
    along: Along
    user: Eqn


@dataclass(eq=False)
class ScatterPiece:
    """Scatters a server value, which the equation `user` needs by shards."""

    var: Var
    along: Along
    user: Eqn


@dataclass(eq=False)
class BlockPiece:
    """A block of a loop or a branch: its stages, and the places of its outputs."""

    block: FlatBlock
    pieces: list[Piece]
    outputs: tuple[Place, ...]


@dataclass(eq=False)
class LoopPiece:
    """A loop: a block for a round, and for a while one for the condition.

    Attributes:
      inputs: the places of its inputs.
      served: server values of enclosing blocks that it reads.
    """

    eqn: LoopEqn
    inputs: tuple[Place, ...]
    condition: BlockPiece | None
    block: BlockPiece
    served: list[Var]


@dataclass(eq=False)
class BranchPiece:
    """A branch; `served` are the server values that its blocks read, and its index."""

    eqn: BranchEqn
    branches: list[BlockPiece]
    served: list[Var]


Piece = ServerPiece | MapPiece | GatherPiece | ScatterPiece | LoopPiece | BranchPiece


def walk(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """All stages, including those in the blocks of loops and branches."""
    for piece in pieces:
        yield piece
        for block in _blocks(piece):
            yield from walk(block.pieces)


def _blocks(piece: Piece) -> list[BlockPiece]:
    match piece:
        case LoopPiece(condition=condition, block=block):
            return [condition, block] if condition else [block]
        case BranchPiece(branches=branches):
            return branches
    return []
