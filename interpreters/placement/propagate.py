"""Propagates placements: decides which values of a flat program are placed.

One pass backward finds the values that placed operators need placed (`demand`). They decide the
places of the inputs. One pass forward then finds for each equation one of four answers: it acts on
each member; it reduces over the members; a shard can create its results; else it runs on the
server, and its placed operands are gathered (`rules.rule_table`).
"""

# Both passes visit the rounds of a loop until the places of its carried values do not change. No
# decision is taken back.
#
# These invariants hold in a placed program:
#
# * A value has one place. An equation that reads it at another place makes the cut gather it,
#   scatter it, or compute it again in a pass that can create it.
# * A carried value of a loop has the same place in all rounds, and an output of a branch the same
#   place in all blocks.
# * Passes compute the equations in `PlacedProgram.rules`. All others run on the server, but for
#   loops, branches, and equations whose results a pass can create (`PlacedProgram.creations`).

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from beamjax.errors import PlacementError, StagingError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.demand import PlacementKeys, find_demand, requirements
from beamjax.interpreters.placement.gathers import (
    gather_from_passes,
    gather_selections,
    share_gathers,
)
from beamjax.interpreters.placement.member_loops import as_member_equation
from beamjax.interpreters.placement.places import Border, MemberAxis, Place, PlacedProgram
from beamjax.interpreters.placement.rewrites import BlockRewriter, Pattern, by_index, expanded
from beamjax.interpreters.placement.row_groups import by_rows
from beamjax.interpreters.program import (
    Atom,
    BranchEqn,
    Eqn,
    FlatBlock,
    FlatProgram,
    LoopEqn,
    Var,
    WholeEqn,
)
from beamjax.interpreters.rules import rule_table as rules
from beamjax.interpreters.rules.rows import take_rows_p
from beamjax.interpreters.rules.sharding_rules import (
    MemberwiseRule,
    ReductionRule,
    any_placed,
    shape_of,
)
from beamjax.interpreters.staging.simplify import prune
from beamjax.ops.placements import check_limit

PATTERNS = expanded, by_rows
"""The rewrites of equations without a rule; the first one that matches is used."""


def place(
    flat: FlatProgram,
    known: Mapping[Var, str],
    placements: Iterable[tuple[str, int]] = (),
    guarded: bool = False,
    shard_size: int | None = None,
) -> PlacedProgram:
    """Finds a place for every value; inputs that are reshaped into members become views."""
    # `known` has the inputs that come from sources, with their names for messages. They are placed
    # along axis 0, however they are used. Another input is placed if a placed operator needs it
    # placed, or if it has one row per member and none needs it as a server value. `placements` has
    # the names and sizes of the programs that were called.
    flat = flat.copied()
    keys = PlacementKeys(flat, ((name, n) for name, n in placements if is_unknown(n) or n > 0))
    for key, n in keys.sizes.items():
        check_limit(key, n)
    demand, served = find_demand(flat, keys, known)
    program = PlacedProgram(
        flat,
        keys.sizes,
        _places_of_inputs(flat, known, keys, demand, served),
        by_shards=frozenset(known),
        guarded=guarded,
        shard_size=shard_size,
    )
    _Placing(program, keys, demand, guarded).block(flat)
    program.settle()
    create_at_borders(program, flat)
    prune(flat, narrow_maps=False)
    _check_sources(program, known)
    flat.drop_unused_constants()
    gather_selections(program)
    share_gathers(program, flat)
    if guarded:
        gather_from_passes(program)
    return program


def _places_of_inputs(
    flat: FlatProgram,
    known: Mapping[Var, str],
    keys: PlacementKeys,
    demand: Mapping[Var, MemberAxis],
    served: Set[Var],
) -> dict[Var, MemberAxis]:
    """The places of the inputs that are placed."""
    places = {}
    for var in flat.inputs:
        if var in known:
            along = _source_place(var, known[var], demand.get(var), keys)
        else:
            along = demand.get(var) or (keys.rows(var) if var not in served else None)
        if along is not None:
            places[var] = along
    return places


def _source_place(var: Var, name: str, demand: Place, keys: PlacementKeys) -> Place:
    """The place of a source; None if no placement has as many members."""
    if not var.aval.shape:
        raise PlacementError(
            f"{name}: found a scalar of type {var.aval.dtype}, expected an array (n, ...) with the "
            "members along its first axis; give a scalar as a value"
        )
    n = var.aval.shape[0]
    fitting = [key for key, size in keys.sizes.items() if size == n]
    if demand is not None and demand.axis == 0:
        return demand
    if not fitting:
        return None
    if len(fitting) > 1:
        raise StagingError(
            f"{name}: it is not used as a placed value, and fits more than one placement "
            f"({', '.join(fitting)}); use it in a map_fn or a reduction"
        )
    return MemberAxis(fitting[0], 0)


def _check_sources(program: PlacedProgram, known: Mapping[Var, str]) -> None:
    """Raises a PlacementError for a source that has neither members nor groups of their rows."""
    read = {atom for atom in program.flat.reads() if isinstance(atom, Var)}
    for var, name in known.items():
        is_grouped = var in program.flat.views.values() and var not in read
        if program.place(var) is None and not is_grouped:
            raise PlacementError(
                f"{name}: it has {var.aval.shape[0]} members, but the program's placements have "
                f"{program.sizes}; give the placement that size"
            )


class _Placing:
    """The forward pass: adds places, rules and replacements to a program."""

    def __init__(
        self,
        program: PlacedProgram,
        keys: PlacementKeys,
        demand: Mapping[Var, MemberAxis],
        guarded: bool,
    ):
        self.program = program
        self.keys = keys
        self.demand = demand
        self.guarded = guarded
        self.names = map("all{}".format, itertools.count())
        # Dropped members leave gaps in a shard, so its rows are not neighbours.
        self.rewriter = BlockRewriter(program, self.names, demand, ordered=not guarded)
        # All values that are read, including those read in expanded loops and rewrites.
        self.used = {atom for atom in program.flat.reads() if isinstance(atom, Var)}

    def block(self, block: FlatBlock) -> None:
        """Places the results of the equations of a block."""
        outer, self.rewriter.own = self.rewriter.own, set()
        self.equations(block.eqns)
        self.rewriter.own = outer

    def equations(self, eqns: Iterable[Eqn]) -> None:
        for eqn in eqns:
            match eqn:
                case LoopEqn():
                    self.loop(eqn)
                case BranchEqn():
                    self.branch(eqn)
                case WholeEqn():
                    self.whole(eqn)
                case _:
                    self.equation(eqn)
            if eqn not in self.program.expanded:
                self.rewriter.makers.update(dict.fromkeys(eqn.outputs, eqn))
                self.rewriter.own.update(eqn.outputs)

    def whole(self, eqn: WholeEqn) -> None:
        """Places a scan, while or cond without placed operators."""
        # If it acts on each member separately, it runs inside a pass. If it gathers nothing, its
        # rounds are passes. Else it runs on the server.
        program = self.program
        if not any(program.place(atom) for atom in eqn.inputs):
            return
        if self.rewrite(eqn, PATTERNS):
            return
        # No value outside of the blocks depends on how they are placed.
        structure = eqn.expand(program.flat)
        inside = (atom for block in structure.blocks for atom in block.reads())
        self.used.update(atom for atom in inside if isinstance(atom, Var))
        self.loop(structure) if isinstance(structure, LoopEqn) else self.branch(structure)
        member_equation = as_member_equation(program, eqn, structure, self.used)
        if member_equation is not None:
            new, placement, rule = member_equation
            program.expanded[eqn], program.rules[new] = [new], (placement, rule)
        elif not program.flat.unrolled and not self.gathers(structure):
            program.expanded[eqn] = [structure]
        else:
            self.forget_equation(structure)

    def gathers(self, structure: Eqn) -> bool:
        """Whether a loop or a branch reads placed values on the server."""
        reads = self.program.reads(structure)
        return any(self.program.place(atom) not in (None, along) for atom, along in reads)

    def equation(self, eqn: Eqn) -> None:
        program, key = self.program, self.keys.of(eqn)
        if eqn.primitive is take_rows_p:
            along = program.place(eqn.inputs[0])
            assert along is not None
            program.rows[eqn], key = along, eqn.params["key"]
            self.put(eqn.outputs[0], key and MemberAxis(key, 0))
            return
        if self.rewrite(eqn, [by_index]):
            return
        places = [program.place(atom) for atom in eqn.inputs]
        placements = {along.placement for along in places if along is not None}
        if key is None and len(placements) == 1:
            (key,) = placements
        if key is not None:
            rule = self.rule(eqn, key, places)
            if rule is not None and not self.selects_from_memory(eqn, rule):
                program.rules[eqn] = (key, rule)
                if isinstance(rule, MemberwiseRule):
                    for var, axis in zip(eqn.outputs, rule.out_axes, strict=True):
                        self.put(var, None if axis is None else MemberAxis(key, axis))
                return
        if not placements:
            self.note_creations(eqn)
        self.rewrite(eqn, PATTERNS)

    def rule(
        self, eqn: Eqn, key: str, places: Sequence[Place]
    ) -> MemberwiseRule | ReductionRule | None:
        """The rule of an equation with operands at these places."""
        # An input in memory is a server value as well, and is used as one if the operands have
        # their members along axes that do not match: in `x @ x.T`, a shard of `x.T` reads all of x.
        axes = [along.axis if along and along.placement == key else None for along in places]
        rule = rules.classify(eqn, axes, self.program.sizes[key])
        # Where members may be dropped, only passes know which.
        if rule is not None or eqn.is_placed_operator or self.guarded:
            return rule
        in_memory = [isinstance(a, Var) and self.program.is_in_memory(a) for a in eqn.inputs]
        others = [None if mine else axis for axis, mine in zip(axes, in_memory, strict=True)]
        if others == axes or not any_placed(others):
            return None
        return rules.classify(eqn, others, self.program.sizes[key])

    def selects_from_memory(self, eqn: Eqn, rule: MemberwiseRule | ReductionRule) -> bool:
        """Whether an equation takes few members of an input that the launching process holds."""
        is_selection = isinstance(rule, ReductionRule) and rule.selects_members
        (atom, *_) = eqn.inputs or (None,)
        in_memory = isinstance(atom, Var) and self.program.is_in_memory(atom)
        # Where members may be dropped, a pass has to find out which.
        return is_selection and in_memory and not self.guarded

    def rewrite(self, eqn: Eqn, patterns: Sequence[Pattern]) -> bool:
        """Rewrites an equation that runs on the server, if that is possible."""
        new = self.rewriter.rewritten(eqn, patterns)
        if new is None:
            return False
        self.program.expanded[eqn] = new
        self.used.update(
            atom for replacement in new for atom in replacement.inputs if isinstance(atom, Var)
        )
        self.equations(new)
        return True

    def note_creations(self, eqn: Eqn) -> None:
        """Records for which axes with one entry per member shards can compute the results."""
        creations = self.program.creations
        for placement, n in self.program.sizes.items():
            for out, var in enumerate(eqn.outputs):
                for axis, dim in enumerate(shape_of(var)):
                    rule = rules.invert(eqn, out, axis, n) if dim == n else None
                    if rule is not None and all(
                        (operand, MemberAxis(placement, k)) in creations
                        for operand, k in requirements(eqn, rule.in_axes)
                    ):
                        creations[var, MemberAxis(placement, axis)] = (eqn, rule)

    def loop(self, eqn: LoopEqn) -> None:
        """Finds a place for each carried value, which it has before and after all rounds."""
        # The place is one of two: the server, or where the value is before the first round or after
        # one. First all values are placed that can be, then those become server values that rounds
        # do not return placed. So each value changes its place at most twice.
        program, carried, block = self.program, eqn.carried, eqn.block
        chosen: list[Place] = []
        for number, (atom, var) in enumerate(zip(eqn.inputs, block.inputs, strict=True)):
            initial = program.place(atom)
            if initial is not None and number >= carried:
                initial = initial.moved(-1)
            chosen.append(self.demand.get(var) or initial)
        raising = True
        while True:
            for var, along in zip(block.inputs, chosen, strict=True):
                self.put(var, along)
            for inner in eqn.blocks:
                self.block(inner)
            after = [program.place(atom) for atom in block.outputs]
            before = chosen[:carried]
            if raising:
                chosen[:carried] = [a or b for a, b in zip(before, after, strict=False)]
                raising = chosen[:carried] != before
            if not raising:
                ends = zip(before, block.outputs, strict=False)
                chosen[:carried] = [
                    along if self.returns(along, atom) else None for along, atom in ends
                ]
            if chosen[:carried] == before:
                break
            for inner in eqn.blocks:
                self.forget(inner)
        outputs = (*chosen[:carried], *after[carried:])
        inputs = (*chosen[:carried], *(p.moved(1) if p else None for p in chosen[carried:]))
        conditions = ((None,),) if eqn.condition else ()
        program.borders[eqn] = Border(inputs, (*conditions, outputs))
        for number, (var, along) in enumerate(zip(eqn.outputs, outputs, strict=True)):
            self.put(var, along.moved(number >= carried) if along else None)

    def returns(self, along: Place, atom: Atom) -> bool:
        """Whether a round returns a value at a place, or a shard can create it there."""
        is_created = along is not None and (atom, along) in self.program.creations
        return self.program.place(atom) == along or is_created

    def branch(self, eqn: BranchEqn) -> None:
        """Finds the places of a branch's outputs: an output is placed if it is so in any block."""
        for block in eqn.branches:
            self.block(block)
        places: list[Place] = []
        for number, var in enumerate(eqn.outputs):
            in_branches = [self.program.place(block.outputs[number]) for block in eqn.branches]
            places.append(
                self.demand.get(var) or next((along for along in in_branches if along), None)
            )
            self.put(var, places[-1])
        self.program.borders[eqn] = Border((None,), (tuple(places),) * len(eqn.branches))

    def put(self, var: Var, along: Place) -> None:
        self.program.places.pop(var, None)
        if along is not None:
            self.program.places[var] = along

    def forget(self, block: FlatBlock) -> None:
        """Removes everything recorded for the equations of a block."""
        for eqn in block.eqns:
            self.forget_equation(eqn)

    def forget_equation(self, eqn: Eqn) -> None:
        for replacement in self.program.expanded.pop(eqn, ()):
            self.forget_equation(replacement)
        self.program.rules.pop(eqn, None)
        self.program.rows.pop(eqn, None)
        self.program.borders.pop(eqn, None)
        for block in eqn.blocks:
            self.forget(block)
        for var in eqn.outputs:
            self.program.places.pop(var, None)
            for placement in self.program.sizes:
                for axis in range(len(shape_of(var))):
                    self.program.creations.pop((var, MemberAxis(placement, axis)), None)


def create_at_borders(program: PlacedProgram, flat: FlatProgram) -> None:
    """Creates by shards what loops and branches need placed, if it is a server value, in place."""
    # For a loop that carries a server value along the members; a pass computes `c`:
    #
    #     z = broadcast_in_dim 0.0; y = loop z    ->    c = broadcast_in_dim 0.0; y = loop c
    _AtBorders(program).block(flat)


class _AtBorders:
    """Adds the equations that create such values, each once in a block."""

    def __init__(self, program: PlacedProgram):
        self.program = program
        self.names = map("created{}".format, itertools.count())

    def block(self, block: FlatBlock) -> dict[tuple[Atom, Place], Var]:
        """Adds those of a block; returns the copies that its equations create."""
        eqns: list[Eqn] = []
        known: dict[tuple[Atom, Place], Var] = {}
        for eqn in block.eqns:
            if eqn.blocks:
                border = self.program.borders[eqn]
                eqn.inputs = [
                    self.created(*pair, eqns, known)
                    for pair in zip(eqn.inputs, border.inputs, strict=True)
                ]
                for inner, places in zip(eqn.blocks, border.outputs, strict=True):
                    of_inner = self.block(inner)
                    inner.outputs = [
                        self.created(*pair, inner.eqns, of_inner)
                        for pair in zip(inner.outputs, places, strict=True)
                    ]
            eqns.append(eqn)
        block.eqns[:] = eqns
        return known

    def created(
        self, atom: Atom, along: Place, eqns: list[Eqn], known: dict[tuple[Atom, Place], Var]
    ) -> Atom:
        """The atom, or its copy along the members; adds the equation that creates that."""
        # `known` has the copies that `eqns` create.
        program = self.program
        if along is None or not isinstance(atom, Var) or program.place(atom) is not None:
            return atom
        maker, rule = program.creations.get((atom, along), (None, None))
        if maker is None or rule is None:
            return atom
        if (atom, along) not in known:
            outputs = [Var(next(self.names), var.aval) for var in maker.outputs]
            eqns.append(Eqn(maker.primitive, maker.params, maker.inputs, outputs, maker.line))
            program.rules[eqns[-1]] = along.placement, rule
            for original, var, axis in zip(maker.outputs, outputs, rule.out_axes, strict=True):
                if axis is not None:
                    program.places[var] = own = MemberAxis(along.placement, axis)
                    known[original, own] = var
        return known[atom, along]
