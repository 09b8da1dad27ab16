"""Pieces of a program, in the order in which they run; each becomes a step of the plan."""

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
    """One equation of a pass, and how it is read."""

    eqn: Eqn
    reading: Local | Fold


@dataclass(eq=False)
class MapPiece:
    """One pass over the members of a placement.

    Attributes:
      emissions: the equations, in order.
      broadcasts: server values that they read.
      operands: placed values that they read, and where the members lie.
      results: placed values that leave the pass.
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
    """A placed value that `user` needs on the server."""

    var: Var
    along: Along
    user: Eqn


@dataclass(eq=False)
class ScatterPiece:
    """A server value that `user` needs by shards."""

    var: Var
    along: Along
    user: Eqn


@dataclass(eq=False)
class BlockPiece:
    """A block of a loop or a branch: its pieces, and the places of its outputs when it ends."""

    block: FlatBlock
    pieces: list[Piece]
    outputs: tuple[Place, ...]


@dataclass(eq=False)
class LoopPiece:
    """Rounds of a block, and the condition for a further one.

    Attributes:
      inputs: the places at which it takes its inputs.
      served: the server values that it reads.
    """

    eqn: LoopEqn
    inputs: tuple[Place, ...]
    condition: BlockPiece | None
    block: BlockPiece
    served: list[Var]


@dataclass(eq=False)
class BranchPiece:
    """One of several blocks; `served` are the server values that they and the choice read."""

    eqn: BranchEqn
    branches: list[BlockPiece]
    served: list[Var]


Piece = ServerPiece | MapPiece | GatherPiece | ScatterPiece | LoopPiece | BranchPiece


def walk(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """All pieces, those in the blocks of loops and branches included."""
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
