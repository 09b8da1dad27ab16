"""Levels: the number of passes over the members that must be complete before an equation."""

from __future__ import annotations

from beamjax import _compat
from beamjax.interpreters.placement.places import Place, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, Var
from beamjax.interpreters.rules.table import Fold, Local


def find_levels(program: PlacedProgram, block: FlatBlock) -> dict[Eqn | Var, int]:
    """The level of each live equation of a block, and of each value defined in it.

    An equation is live if an output needs it or if it has an effect.
    """
    levels = _earliest(program, block)
    last = max((levels.get(v, 0) for v in block.outputs if isinstance(v, Var)), default=0)
    made = {var for eqn in block.eqns for var in eqn.outputs}
    latest: dict[Var, int] = {}

    def use(atom: Atom, level: int) -> None:
        if isinstance(atom, Var) and atom in made:
            latest[atom] = min(latest.get(atom, last), level)

    for atom in block.outputs:
        use(atom, levels.get(atom, 0) if isinstance(atom, Var) and program.place(atom) else last)
    for eqn in reversed(block.eqns):
        uses = [latest[var] for var in eqn.outputs if var in latest]
        if not uses and not eqn.effects:
            del levels[eqn]
            continue
        reading = program.readings.get(eqn)
        movable = uses and not eqn.blocks and not _is_ordered(eqn)
        if movable and (reading is None or isinstance(reading[1], Local)):
            level = max(levels[eqn], min(uses))
            levels.update(dict.fromkeys((eqn, *eqn.outputs), level))
        for operand, along in program.reads(eqn):
            level = levels[eqn]
            place = program.place(operand)
            if isinstance(operand, Var) and operand in made and place not in (None, along):
                level = levels[operand]  # It is gathered after the pass that computes it.
            use(operand, level)
    return levels


def _earliest(program: PlacedProgram, block: FlatBlock) -> dict[Eqn | Var, int]:
    levels: dict[Eqn | Var, int] = {}

    def available(atom: Atom, along: Place) -> int:
        """The first level at which a value can be read at a place."""
        if not isinstance(atom, Var) or atom not in levels:
            return 0  # An input, or a value of an enclosing block.
        if program.place(atom) == along:
            return levels[atom]
        return levels[atom] + (program.place(atom) is not None)

    turn = 0
    for eqn in block.eqns:
        level = max((available(a, along) for a, along in program.reads(eqn)), default=0)
        if _is_ordered(eqn):
            level = max(level, turn)
            turn = level + bool(eqn.blocks)
        levels[eqn] = level
        folds = eqn in program.readings and isinstance(program.readings[eqn][1], Fold)
        # Results of a loop or a branch exist only after the passes of its own level.
        after = folds or bool(eqn.blocks)
        levels.update(dict.fromkeys(eqn.outputs, level + after))
    return levels


def _is_ordered(eqn: Eqn) -> bool:
    return any(map(_compat.is_ordered, eqn.effects))
