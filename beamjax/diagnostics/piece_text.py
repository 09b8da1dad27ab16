"""The pieces that a program was cut to, as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from beamjax.interpreters.cutting import pieces as _pieces


def graph_text(pieces: Sequence[_pieces.Piece]) -> str:
    """The pieces that a program was cut to."""
    return "\n".join(line for piece in pieces for line in _piece_lines(piece))


def _piece_lines(piece: _pieces.Piece) -> list[str]:
    match piece:
        case _pieces.ServerPiece(eqns, inputs, outputs):
            return [f"server: {inputs} -> {outputs}", *(f"  {eqn!r}" for eqn in eqns)]
        case _pieces.MapPiece():
            operands = ", ".join(f"{var!r} ({along})" for var, along in piece.operands)
            return [
                f"map over {piece.placement}: broadcasts {piece.broadcasts}, "
                f"operands [{operands}], results {piece.results}",
                *(f"  {emission.eqn!r}" for emission in piece.emissions),
            ]
        case _pieces.GatherPiece(var, along, user):
            return [f"gather: {var!r} ({along}) for", f"  {user!r}"]
        case _pieces.ScatterPiece(var, along, user):
            return [f"scatter: {var!r} ({along}) for", f"  {user!r}"]
        case _pieces.LoopPiece(eqn, _, condition, block):
            while_ = _block_lines("while", condition) if condition else []
            return [f"loop: {eqn!r}", *while_, *_block_lines("round", block)]
        case _pieces.BranchPiece(eqn, branches):
            blocks = (_block_lines(f"branch {i}", block) for i, block in enumerate(branches))
            return [f"branch: {eqn!r}", *itertools.chain(*blocks)]


def _block_lines(name: str, piece: _pieces.BlockPiece) -> list[str]:
    lines = graph_text(piece.pieces).splitlines()
    ends = ", ".join(map(repr, piece.block.outputs))
    return [f"  {name}:", *(f"    {line}" for line in lines), f"    outputs {ends}"]
