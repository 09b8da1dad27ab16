"""Names the unknown numbers of members in a program, and refuses uses that need a known number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from beamjax import _compat
from beamjax.bodies.jaxprs import equations_inside
from beamjax.errors import StagingError
from beamjax.interpreters.cutting.stages import (
    BranchStage,
    GatherStage,
    LoopStage,
    MapStage,
    RowsStage,
    ScatterStage,
    ServerStage,
    Stage,
    walk,
)
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, shape_of
from beamjax.interpreters.staging.unknown_sizes import ADVICE, INSTEAD
from beamjax.plan.steps import size_name


def settle_sizes(program: PlacedProgram, stages: Sequence[Stage]) -> None:
    """Names the values that hold unknown numbers of members, and refuses all other uses of them."""
    opened = {str(n): key for key, n in program.sizes.items() if is_unknown(n)}
    for symbol, var in program.flat.sizes.items():
        if symbol not in opened:
            raise StagingError(
                f"the program uses {symbol!r}, an unknown number, as a value, but no placement has "
                f"that many members: they have {_sizes(program)}. {ADVICE}."
            )
        # A run sets the server value of this name as soon as it has counted the members.
        var.name = size_name(opened[symbol])
    if opened:
        for stage in walk(stages):
            _check(program, stage)


def _check(program: PlacedProgram, stage: Stage) -> None:
    match stage:
        case GatherStage(var=var, along=along, user=user):
            if is_unknown(program.sizes[along.placement]):
                raise _refusal(program, user, "reads all members at once", [var])
        case ScatterStage(var=var, along=along, user=user):
            if is_unknown(program.sizes[along.placement]):
                raise _refusal(program, user, "reads a server value by shards", [var])
        case ServerStage(eqns=eqns):
            for eqn in eqns:
                if any(_symbolic(shape_of(atom)) for atom in (*eqn.outputs, *eqn.inputs)):
                    what = "needs all members at once, on the server"
                    raise _refusal(program, eqn, what, [*eqn.inputs, *eqn.outputs])
                _check_inside(program, eqn)
        case MapStage():
            for emission in stage.emissions:
                eqn, rule = emission.eqn, emission.rule
                pairs = list(zip(eqn.inputs, rule.in_axes, strict=True))
                if isinstance(rule, MemberwiseRule):
                    pairs += zip(eqn.outputs, rule.out_axes, strict=True)
                for atom, axis in pairs:
                    rest = [d for i, d in enumerate(shape_of(atom)) if i != axis]
                    if _symbolic(rest):
                        what = "has, for each member, a value with one entry per member of "
                        raise _refusal(program, eqn, f"{what}{stage.placement!r}", [atom])
                if eqn.is_placed_operator:
                    _check_inside(program, eqn)
        case LoopStage(eqn=eqn):
            if eqn.rounds is not None and is_unknown(eqn.rounds):
                raise _refusal(program, eqn, "has a round for each member", eqn.inputs)
        case BranchStage() | RowsStage():
            pass


def _check_inside(program: PlacedProgram, eqn: Eqn) -> None:
    """Checks the jaxprs inside an equation for symbolic dimensions, as values and in shapes."""
    if any(
        inner.primitive.name == _compat.DIM_AS_VALUE
        or any(_symbolic(shape_of(var)) for var in inner.outvars)
        for inner in equations_inside(eqn)
    ):
        what = "reads the number of members in a loop, a branch or a function inside of it"
        instead = "or read it before, as in n = jnp.float32(x.shape[0])"
        raise _refusal(program, eqn, what, [], instead)


def _refusal(
    program: PlacedProgram, eqn: Eqn, what: str, atoms: Iterable[Atom], instead: str = INSTEAD
) -> StagingError:
    name = eqn.primitive.name
    if name == "bj_map":
        name = f"the map_fn of {eqn.params['name']}"
    shown = next((atom for atom in atoms if _symbolic(shape_of(atom))), None)
    held = f" ({shown.aval.str_short()})" if isinstance(shown, Var) else ""
    reason = f"{eqn.line or 'in the program'}: {name.removeprefix('bj_')} {what}{held}"
    return StagingError(
        f"{reason}, but the number of members is found only while the program runs: the placements "
        f"have {_sizes(program)}. {ADVICE}; {instead}."
    )


def _sizes(program: PlacedProgram) -> str:
    return ", ".join(f"{key}={n}" for key, n in program.sizes.items())


def _symbolic(shape: Iterable[Any]) -> bool:
    return any(map(is_unknown, shape))
