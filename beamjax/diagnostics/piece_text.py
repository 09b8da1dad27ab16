"""The stages that a program was cut to, as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from beamjax.interpreters.cutting import stages as _pieces


def graph_text(stages: Sequence[_pieces.Stage]) -> str:
    """The stages that a program was cut to."""
    return "\n".join(line for stage in stages for line in _piece_lines(stage))


def _piece_lines(stage: _pieces.Stage) -> list[str]:
    match stage:
        case _pieces.ServerStage(eqns, inputs, outputs):
            return [f"server: {inputs} -> {outputs}", *(f"  {eqn!r}" for eqn in eqns)]
        case _pieces.MapStage():
            operands = ", ".join(f"{var!r} ({along})" for var, along in stage.operands)
            return [
                f"map over {stage.placement}: broadcasts {stage.broadcasts}, "
                f"operands [{operands}], results {stage.results}",
                *(f"  {emission.eqn!r}" for emission in stage.emissions),
            ]
        case _pieces.GatherStage(var, along, user):
            return [f"gather: {var!r} ({along}) for", f"  {user!r}"]
        case _pieces.ScatterStage(var, along, user):
            return [f"scatter: {var!r} ({along}) for", f"  {user!r}"]
        case _pieces.LoopStage(eqn, _, condition, block):
            while_ = _block_lines("while", condition) if condition else []
            return [f"loop: {eqn!r}", *while_, *_block_lines("round", block)]
        case _pieces.BranchStage(eqn, branches):
            blocks = (_block_lines(f"branch {i}", block) for i, block in enumerate(branches))
            return [f"branch: {eqn!r}", *itertools.chain(*blocks)]


def _block_lines(name: str, stage: _pieces.BlockStages) -> list[str]:
    lines = graph_text(stage.stages).splitlines()
    ends = ", ".join(map(repr, stage.block.outputs))
    return [f"  {name}:", *(f"    {line}" for line in lines), f"    outputs {ends}"]
