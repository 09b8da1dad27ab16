"""Cuts a placed program at its reductions into stages that run in order.

The *level* of a value is the number of passes over the members that must be complete before it can
be computed. All equations of one level and placement become one pass, which may hold any number of
maps and reductions; all server equations of one level become one executable.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence, Set

from beamjax import _compat
from beamjax.interpreters.cutting.remat import MOST_OPERATIONS, elementwise_operations
from beamjax.interpreters.cutting.stages import (
    BlockStages,
    BranchStage,
    Emission,
    GatherStage,
    LoopStage,
    MapStage,
    RowsStage,
    ScatterStage,
    ServerStage,
    Stage,
)
from beamjax.interpreters.placement.places import MemberAxis, Place, PlacedProgram
from beamjax.interpreters.program import Atom, BranchEqn, Eqn, FlatBlock, LoopEqn, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule


def split(program: PlacedProgram) -> list[Stage]:
    """Cuts a program into stages, in an order in which they can run."""
    flat = program.flat
    places = tuple(program.place(atom) for atom in flat.outputs)
    return _Splitter(program, flat, places, None, None).stages()


# An example, in which x is placed and c is not. Levels are in front:
#
#     0  a = mul x c          pass 0: a, s
#     0  s = reduce_sum a
#     1  m = div s n          server 1: m
#     1  d = sub x m          pass 1: d, v (x is read again, a is not needed)
#     1  v = reduce_max d
#     2  out = neg v          server 2: out
#
# Every equation is put as late as its uses allow, so that a placed value is computed in the pass
# that reads it. Equations without an effect that no output needs are dropped.
#
# Within a level, the server equations run first, then the passes, then the loops and branches, then
# the gathers of values of this level. A loop or a branch is a separate stage, which holds the
# stages of its blocks. Values from outside that a block needs gathered or scattered are gathered or
# scattered once, before it.
class _Splitter:
    """Works from the last level to the first, so that it knows what later stages read."""

    def __init__(
        self,
        program: PlacedProgram,
        block: FlatBlock,
        outputs: tuple[Place, ...],
        around: _Splitter | None,
        user: Eqn | None,
    ):
        self.program = program
        self.block = block
        self.outputs = outputs
        self.around = around
        self.user = user
        self.params = set(block.inputs)
        self.defined = {var for eqn in block.eqns for var in eqn.outputs}
        # A pass of a nested block may also evaluate equations of enclosing blocks, to create
        # members of server values.
        self.eqns: list[Eqn] = [*(around.eqns if around else ()), *block.eqns]
        self.numbers = {eqn: i for i, eqn in enumerate(self.eqns)}
        self.makers = {var: eqn for eqn in self.eqns for var in eqn.outputs}
        self.levels = find_levels(program, block)
        self.by_level: dict[int, list[Eqn]] = {}
        for eqn in block.eqns:
            if eqn in self.levels:
                self.by_level.setdefault(self.levels[eqn], []).append(eqn)
        self.recomputed = self._elementwise()
        # Server values, and placed values of earlier stages, that a later stage reads.
        self.served: set[Var] = set()
        self.live: set[Var] = set()
        # For a nested block, the values of enclosing blocks that it reads, each with the equation
        # that reads it: those read on the server by variable, those read by shards by variable and
        # place. The enclosing block gathers and scatters them.
        self.outside: tuple[dict[Var, Eqn], dict[tuple[Var, MemberAxis], Eqn]] = ({}, {})
        # Placed values to gather, by the level of the pass that computes them (None: inputs).
        self.gathered: dict[int | None, list[Stage]] = {}

    def stages(self) -> list[Stage]:
        # In reverse order, so that what later stages read is known when an earlier one is made.
        backward = self._ends()
        for level in range(max(self.levels.values(), default=0), -1, -1):
            backward += self.gathered.get(level, [])
            backward += self._control(level)
            backward += self._maps(level)
            server = self._server(level)
            backward += [server] if server else []
        backward += self.gathered.get(None, [])
        stages = backward[::-1]
        self._find_server_outputs(stages)
        return stages

    def serve(self, var: Var, user: Eqn) -> None:
        """Records that `user` reads a value on the server."""
        along = self.program.place(var)
        if self.is_outside(var):
            self.outside[0].setdefault(var, user)
        elif var not in self.served and along is not None and not self.program.is_in_memory(var):
            level = self.levels[var] if var in self.defined else None
            self.gathered.setdefault(level, []).append(GatherStage(var, along, user))
        self.served.add(var)

    def bring(self, var: Var, along: MemberAxis, user: Eqn) -> list[Stage]:
        """Records that `user` reads a value by shards; returns the scatter if one is needed."""
        if self.is_outside(var):
            self.outside[1].setdefault((var, along), user)
            return []
        if self.program.place(var) == along:
            if var in self.defined:
                self.live.add(var)
            return []
        self.serve(var, user)
        return [ScatterStage(var, along, user)]

    def is_outside(self, var: Var) -> bool:
        """Whether a value belongs to an enclosing block."""
        return var not in self.defined and var not in self.params and self.around is not None

    def _ends(self) -> list[Stage]:
        """Records the outputs of the block; returns the gathers and scatters that they need."""
        scatters: list[Stage] = []
        for atom, along in zip(self.block.outputs, self.outputs, strict=True):
            if not isinstance(atom, Var):
                continue
            if self.around is None and atom in self.params:
                continue
            if self.user is None:
                (self.served if along is None else self.live).add(atom)
            elif along is None:
                self.serve(atom, self.user)
            else:
                scatters += self.bring(atom, along, self.user)
        return scatters

    def _control(self, level: int) -> list[Stage]:
        """The loops, branches and reads of rows of a level, with their scatters, in reverse."""
        stages: list[Stage] = []
        for eqn in reversed(self.by_level.get(level, [])):
            read = any(v in self.served or v in self.live for v in eqn.outputs)
            if not self.program.runs_alone(eqn) or not (read or eqn.effects):
                continue
            if not eqn.blocks:
                stages += self._rows(eqn)
                continue
            border = self.program.borders[eqn]
            inners, blocks = [], []
            for block, places in zip(eqn.blocks, border.outputs, strict=True):
                inners.append(self._inside(block, places, eqn))
                blocks.append(BlockStages(block, inners[-1].stages(), places))
            pairs = list(zip(eqn.inputs, border.inputs, strict=True))
            served = [atom for atom, along in pairs if along is None and isinstance(atom, Var)]
            served += [var for inner in inners for var in inner.outside[0]]
            if isinstance(eqn, LoopEqn):
                condition = blocks[0] if eqn.condition else None
                stages.append(LoopStage(eqn, border.inputs, condition, blocks[-1], served))
            elif isinstance(eqn, BranchEqn):
                stages.append(BranchStage(eqn, blocks, served))
            # The blocks were built above, so `outside` now holds what they read of this block.
            scatters: dict[tuple[Var, MemberAxis], list[Stage]] = {}
            for atom, along in pairs:
                assert isinstance(atom, Var)
                if along is None:
                    self.serve(atom, eqn)
                elif (atom, along) not in scatters:
                    scatters[atom, along] = self.bring(atom, along, eqn)
            for inner in inners:
                for var, user in inner.outside[0].items():
                    self.serve(var, user)
                for (var, along), user in inner.outside[1].items():
                    if (var, along) not in scatters:
                        scatters[var, along] = self.bring(var, along, user)
            stages += [stage for brought in scatters.values() for stage in brought]
        return stages

    def _rows(self, eqn: Eqn) -> list[Stage]:
        """A read of rows, with the scatter that it needs, in reverse order."""
        operand, numbers = eqn.inputs
        along = self.program.rows[eqn]
        assert isinstance(operand, Var)
        if isinstance(numbers, Var):
            self.serve(numbers, eqn)
        stage = RowsStage(eqn, along, self.program.place(eqn.outputs[0]))
        return [stage, *self.bring(operand, along, eqn)]

    def _maps(self, level: int) -> list[Stage]:
        """The passes of a level, with the scatters that they need, in reverse order."""
        reductions: dict[str, list[Eqn]] = {}
        results: dict[str, list[Var]] = {}
        effects: dict[str, list[Eqn]] = {}
        for eqn in self.by_level.get(level, []):
            if eqn not in self.program.rules:
                continue
            placement, rule = self.program.rules[eqn]
            if eqn.effects:
                effects.setdefault(placement, []).append(eqn)
            if not isinstance(rule, ReductionRule):
                requested = [v for v in eqn.outputs if v in self.served or v in self.live]
                results.setdefault(placement, []).extend(requested)
            elif any(v in self.served for v in eqn.outputs):
                reductions.setdefault(placement, []).append(eqn)
        stages: list[Stage] = []
        for placement in self.program.sizes:
            if reductions.get(placement) or results.get(placement) or effects.get(placement):
                builder = _PassBuilder(
                    self, level, placement, frozenset(effects.get(placement, []))
                )
                stages += builder.stages(reductions.get(placement, []), results.get(placement, []))
        return stages

    def made_here(self, eqn: Eqn, var: Var, along: MemberAxis, level: int) -> MemberwiseRule | None:
        """The rule by which a pass of this level computes a value that it reads, or None."""
        if self.program.place(var) == along:
            if var not in self.defined or self.program.runs_alone(eqn):
                return None
            _, rule = self.program.rules[eqn]
            if isinstance(rule, MemberwiseRule) and (
                self.levels[var] == level or var in self.recomputed
            ):
                return rule
            return None
        # A server value with members made on workers, such as iota and the bits of random numbers.
        created = self.program.creations.get((var, along))
        return created[1] if created else None

    def _server(self, level: int) -> ServerStage | None:
        """The server equations of a level that later stages need, if there are any."""
        eqns: list[Eqn] = []
        for eqn in reversed(self.by_level.get(level, [])):
            if self.program.runs_alone(eqn) or eqn in self.program.rules:
                continue
            if not eqn.effects and not any(v in self.served for v in eqn.outputs):
                continue
            eqns.append(eqn)
            for atom in eqn.inputs:
                if isinstance(atom, Var):
                    self.serve(atom, eqn)
        if not eqns:
            return None
        defined = {var for eqn in eqns for var in eqn.outputs}
        read = dict.fromkeys(a for e in eqns[::-1] for a in e.inputs if isinstance(a, Var))
        return ServerStage(eqns[::-1], [var for var in read if var not in defined])

    def _inside(self, block: FlatBlock, places: tuple[Place, ...], user: Eqn) -> _Splitter:
        return _Splitter(self.program, block, places, self, user)

    def _elementwise(self) -> Set[Var]:
        """The values that few elementwise equations compute from what every pass can read."""
        # For each of them, these equations, with the number of operations of each.
        recomputed: dict[Var, dict[Eqn, int]] = {}
        for eqn in self.block.eqns:
            placement, rule = self.program.rules.get(eqn, ("", None))
            operations = elementwise_operations(eqn)
            if not isinstance(rule, MemberwiseRule) or not operations:
                continue
            # A pass checks the members that a map returns, and the next one reads what it found.
            if self.program.guarded and eqn.primitive.name == "bj_map":
                continue
            needs = zip(eqn.inputs, rule.in_axes, strict=True)
            if not all(
                axis is None or self._at_hand(atom, MemberAxis(placement, axis), recomputed)
                for atom, axis in needs
            ):
                continue
            eqns = {eqn: operations}
            for atom in eqn.inputs:
                eqns |= recomputed.get(atom, {}) if isinstance(atom, Var) else {}
            if sum(eqns.values()) <= MOST_OPERATIONS:
                recomputed.update(dict.fromkeys(eqn.outputs, eqns))
        return recomputed.keys()

    def _at_hand(self, atom: Atom, along: MemberAxis, recomputed: Container[Var]) -> bool:
        """Whether every pass can create an operand, read it from outside, or recompute it."""
        if not isinstance(atom, Var) or (atom, along) in self.program.creations:
            return True
        native = self.program.place(atom) == along
        return native and (atom not in self.defined or atom in recomputed)

    def _find_server_outputs(self, stages: Sequence[Stage]) -> None:
        """Sets the outputs of the server stages: the values that other stages read."""
        read = {atom for atom in self.block.outputs if isinstance(atom, Var)}
        for stage in stages:
            match stage:
                case ServerStage():
                    read.update(stage.inputs)
                case MapStage():
                    read.update(stage.broadcasts)
                case ScatterStage():
                    read.add(stage.var)
                case RowsStage(eqn=eqn):
                    read.update(a for a in eqn.inputs[1:] if isinstance(a, Var))
                case LoopStage() | BranchStage():
                    read.update(stage.served)
        for stage in stages:
            if isinstance(stage, ServerStage):
                defined = (var for eqn in stage.eqns for var in eqn.outputs)
                stage.outputs = [var for var in defined if var in read]


class _PassBuilder:
    """Builds one pass over the members of a placement, from its last equation to its first."""

    def __init__(self, splitter: _Splitter, level: int, placement: str, effects: frozenset[Eqn]):
        self.splitter = splitter
        self.level = level
        self.placement = placement
        # Equations that must be evaluated even if their results are not used.
        self.effects = effects
        # The placed values that it reads, at which places, with an equation that reads each.
        self.need: dict[Var, dict[MemberAxis, Eqn | None]] = {}
        # A heap of the negated numbers of the equations to visit, so that the last comes first.
        self.agenda: list[int] = []
        self.emissions: list[Emission] = []
        self.broadcasts: dict[Var, Eqn] = {}
        self.operands: list[tuple[Var, MemberAxis]] = []
        self.scatters: list[Stage] = []

    def stages(self, reductions: Iterable[Eqn], results: list[Var]) -> list[Stage]:
        """The pass and the scatters that it needs, in reverse order."""
        splitter = self.splitter
        for var in results:
            self.require(var, splitter.program.places[var], None)
        reduced = set(reductions)
        for eqn in reduced | self.effects:
            heapq.heappush(self.agenda, -splitter.numbers[eqn])
        # An equation is visited after all its readers, so all requirements on it are known. It may
        # be on the heap more than once.
        last = None
        while self.agenda:
            eqn = splitter.eqns[-heapq.heappop(self.agenda)]
            if eqn is not last:
                self.visit(eqn, eqn in reduced)
            last = eqn
        for var in [var for var in self.need if var not in splitter.makers]:
            for along in self.need[var]:
                self.supply(var, along)
        for var, user in self.broadcasts.items():
            splitter.serve(var, user)
        broadcasts, emissions = list(self.broadcasts), self.emissions[::-1]
        stage = MapStage(self.placement, emissions, broadcasts, self.operands, results)
        return [stage, *self.scatters]

    def require(self, var: Var, along: MemberAxis, user: Eqn | None) -> None:
        """Records that `user`, or a result of the pass if None, reads a value at a place."""
        alongs = self.need.setdefault(var, {})
        if not alongs and var in self.splitter.makers:
            heapq.heappush(self.agenda, -self.splitter.numbers[self.splitter.makers[var]])
        alongs.setdefault(along, user)

    def visit(self, eqn: Eqn, is_reduction: bool) -> None:
        """Adds an equation to the pass, or reads its results from outside."""
        if is_reduction:
            self.emit(eqn, self.splitter.program.rules[eqn][1])
            return
        emitted: list[MemberwiseRule] = []
        # At another place, the rule is another one, and the equation is emitted once for each rule.
        for var in eqn.outputs:
            for along in self.need.get(var, {}):
                rule = self.splitter.made_here(eqn, var, along, self.level)
                if rule is None:
                    self.supply(var, along)
                elif not any(rule is other for other in emitted):
                    emitted.append(rule)
                    self.emit(eqn, rule)
        if eqn in self.effects and not emitted:
            self.emit(eqn, self.splitter.program.rules[eqn][1])

    def emit(self, eqn: Eqn, rule: MemberwiseRule | ReductionRule) -> None:
        self.emissions.append(Emission(eqn, rule))
        for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True):
            if not isinstance(atom, Var):
                continue
            if axis is None:
                self.broadcasts.setdefault(atom, eqn)
            else:
                self.require(atom, MemberAxis(self.placement, axis), eqn)

    def supply(self, var: Var, along: MemberAxis) -> None:
        """Reads a value from outside of the pass: an input, an earlier stage, or the server."""
        self.operands.append((var, along))
        user = self.need[var][along]
        if user is not None:
            self.scatters += self.splitter.bring(var, along, user)


# --- levels


def find_levels(program: PlacedProgram, block: FlatBlock) -> dict[Eqn | Var, int]:
    """The level of each live equation of a block, and of each value defined in it."""
    # An equation is live if an output needs it or if it has an effect. A forward walk finds the
    # first level of each, and a backward walk moves it to the last one that its readers allow.
    levels = _earliest(program, block)
    last = max((levels.get(v, 0) for v in block.outputs if isinstance(v, Var)), default=0)
    defined = {var for eqn in block.eqns for var in eqn.outputs}
    latest: dict[Var, int] = {}

    def use(atom: Atom, level: int) -> None:
        if isinstance(atom, Var) and atom in defined:
            latest[atom] = min(latest.get(atom, last), level)

    for atom in block.outputs:
        use(atom, levels.get(atom, 0) if isinstance(atom, Var) and program.place(atom) else last)
    for eqn in reversed(block.eqns):
        uses = [latest[var] for var in eqn.outputs if var in latest]
        if not uses and not eqn.effects:
            del levels[eqn]
            continue
        rule = program.rules.get(eqn)
        # Reductions stay: what reads their results is at later levels anyway. So do loops, and
        # effects whose order matters.
        movable = uses and not program.runs_alone(eqn) and not _is_ordered(eqn)
        if movable and (rule is None or isinstance(rule[1], MemberwiseRule)):
            level = max(levels[eqn], min(uses))
            levels.update(dict.fromkeys((eqn, *eqn.outputs), level))
        for operand, along in program.reads(eqn):
            level = levels[eqn]
            place = program.place(operand)
            if isinstance(operand, Var) and operand in defined and place not in (None, along):
                level = levels[operand]  # It is gathered after the pass that computes it.
            use(operand, level)
    return levels


def _earliest(program: PlacedProgram, block: FlatBlock) -> dict[Eqn | Var, int]:
    """The first level at which each equation can run, and at which each value is known."""
    levels: dict[Eqn | Var, int] = {}

    def available(atom: Atom, along: Place) -> int:
        """The first level at which a value can be read at a place."""
        if not isinstance(atom, Var) or atom not in levels:
            return 0  # An input, or a value of an enclosing block.
        if program.place(atom) == along:
            return levels[atom]
        return levels[atom] + (program.place(atom) is not None)

    # Equations with ordered effects run in program order: none before the level of the last one.
    turn = 0
    for eqn in block.eqns:
        level = max((available(a, along) for a, along in program.reads(eqn)), default=0)
        if _is_ordered(eqn):
            level = max(level, turn)
            turn = level + bool(eqn.blocks)
        levels[eqn] = level
        reductions = eqn in program.rules and isinstance(program.rules[eqn][1], ReductionRule)
        # Results of a loop, a branch or a read of rows exist after the passes of its own level.
        after = reductions or program.runs_alone(eqn)
        levels.update(dict.fromkeys(eqn.outputs, level + after))
    return levels


def _is_ordered(eqn: Eqn) -> bool:
    return any(map(_compat.is_ordered, eqn.effects))
