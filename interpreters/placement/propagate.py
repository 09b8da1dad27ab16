"""Propagates placements: decides which values of a flat program are placed.

Placement starts at the placed operators. It propagates backward to the values that must be placed
for them (`demand`), and forward through every equation with a rule that acts on each member. All
other equations run on the server, and their placed operands are gathered.

These invariants hold in a placed program:

* A value has one place. An equation that reads it at another place makes the cut gather it, scatter
  it, or compute it again in a pass that can create it.
* A carried value of a loop has the same place in all rounds, and an output of a branch the same
  place in all blocks.
* Passes compute the equations in `PlacedProgram.rules`. All others run on the server, but for
  loops, branches, and equations whose results a pass can create (`PlacedProgram.creations`).

The backward pass runs once. The forward pass rewrites equations as it goes, and is repeated from
the start if the result shows that one of its assumptions was wrong: see `place`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

from beamjax.errors import PlacementError, StagingError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.placement.demand import PlacementKeys, find_demand, requirements
from beamjax.interpreters.placement.gathers import gather_from_passes, share_gathers
from beamjax.interpreters.placement.member_loops import (
    OpenedLoops,
    as_member_equation,
    distributes,
    gathers,
)
from beamjax.interpreters.placement.places import Border, MemberAxis, Place, PlacedProgram
from beamjax.interpreters.placement.reshaped import reshaped
from beamjax.interpreters.placement.rewrites import (
    BlockRewriter,
    Rewrites,
    expansions,
)
from beamjax.interpreters.placement.views import drop_view, make_views
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
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.indexing import MAX_SHARE
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule, shape_of
from beamjax.interpreters.staging.simplify import prune
from beamjax.ops.placements import check_limit

PATTERNS = expansions, reshaped
"""The rewrites of equations without a rule; the first one that matches is used."""


def place(
    flat: FlatProgram,
    known: Mapping[Var, str],
    placements: Iterable[tuple[str, int]] = (),
    guarded: bool = False,
    shard_size: int | None = None,
) -> PlacedProgram:
    """Finds a place for every value; inputs that are reshaped into members become views.

    Args:
      flat: the program. It stays as it is: the result holds a rewritten copy.
      known: inputs that come from sources, with their names for messages. They are placed along
        axis 0, however they are used.
      placements: names and sizes of the programs that were called. An input with as many rows as
        one of these has members is placed even if no placed operator reads it, unless it would have
        to be gathered: `jnp.mean(x, 0)` in a program is a reduction.
      guarded: whether members may be dropped or are checked for NaN. In this case an input with as
        many rows is placed unless the program broadcasts it, so that the handling of a member does
        not depend on what else is computed; and only results of passes are gathered.
      shard_size: members per shard, if the user gives it.

    Raises:
      PlacementError: a source has another number of members than the placement that it is used for,
        or a placement has too many members.
      StagingError: a source is not used as a placed value.
    """
    flat = flat.copied()
    keys = PlacementKeys(flat, ((name, n) for name, n in placements if is_unknown(n) or n > 0))
    _check_sizes(keys)
    demand = find_demand(flat, keys)
    views = make_views(flat, demand, keys.sizes)
    fixed, tried = _places_of_inputs(flat, known, keys, demand, views)
    # Results of selections that are computed on the server after all.
    gathering: set[Var] = set()
    # Dropped members leave gaps in a shard, so its rows are not neighbours.
    rewrites, opened = Rewrites(PATTERNS, moves=not guarded), OpenedLoops(flat)
    # This ends: each repetition adds to what `rewrites` refuses, opens or settles a loop, adds to
    # `gathering`, or takes from `tried`. New `Rewrites` only begin with a loop or an input.
    while True:
        rewrites.begin()
        inputs = {**fixed, **tried}
        program = PlacedProgram(flat.copied(), keys.sizes, inputs, shard_size=shard_size)
        placing = _Placing(program, keys, demand, gathering, rewrites)
        placing.block(program.flat)
        program.settle()
        prune(program.flat, narrow_maps=False)
        if not rewrites.are_settled(program):
            continue
        if opened.have_changed(program, placing.gathering_loops):
            # Equations may have been refused a rewrite because of what those loops gathered.
            rewrites = Rewrites(PATTERNS, moves=not guarded)
            continue
        if selected := _selected_too_often(program):
            gathering |= {eqn.outputs[0] for eqn in selected}
            # A selection that a rewrite makes has other results in each attempt.
            rewrites.refuse(eqn.outputs[0] for eqn in selected)
            continue
        gathered = _gathered_inputs(program, tried.keys(), guarded)
        if not gathered:
            break
        rewrites = Rewrites(PATTERNS, moves=not guarded)
        for view in gathered & views.keys():
            drop_view(flat, view)
        tried = {var: along for var, along in tried.items() if var not in gathered}
    share_gathers(program, program.flat)
    if guarded:
        gather_from_passes(program)
    return program


def _check_sizes(keys: PlacementKeys) -> None:
    for key, n in keys.sizes.items():
        check_limit(key, n)


def _places_of_inputs(
    flat: FlatProgram,
    known: Mapping[Var, str],
    keys: PlacementKeys,
    demand: Mapping[Var, MemberAxis],
    views: Mapping[Var, MemberAxis],
) -> tuple[dict[Var, MemberAxis], dict[Var, MemberAxis]]:
    """The inputs that are placed in any case, and those that are unless they would be gathered."""
    read = {atom for atom in flat.reads() if isinstance(atom, Var)}
    viewed = set(flat.views.values()) - read
    fixed = {view: along for view, along in views.items() if flat.views[view] in known}
    for var in flat.inputs:
        if var in known and var not in viewed:
            fixed[var] = _source_place(var, known[var], demand.get(var), keys)
        elif var in demand:
            fixed[var] = demand[var]
    tried = {v: along for v in flat.inputs if v not in fixed and (along := keys.rows(v))}
    tried |= {view: along for view, along in views.items() if view not in fixed}
    return fixed, tried


def _source_place(var: Var, name: str, demand: Place, keys: PlacementKeys) -> MemberAxis:
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
        raise PlacementError(
            f"{name}: it has {n} members, but the program's placements have "
            f"{keys.sizes}; give the placement that size"
        )
    if len(fitting) > 1:
        raise StagingError(
            f"{name}: it is not used as a placed value, and fits more than one placement "
            f"({', '.join(fitting)}); use it in a map_fn or a reduction"
        )
    return MemberAxis(fitting[0], 0)


class _Placing:
    """The forward pass.

    Attributes:
      program: the program; places, rules and replacements are added to it.
      rewriter: rewrites the current block; None inside a loop or a branch without placed operators,
        whose equations are not rewritten.
      gathering_loops: first results of the loops without placed operators that gather members, with
        whether their rounds are passes nevertheless.
      used: the values that are read, including those read in expanded loops and rewrites.
    """

    def __init__(
        self,
        program: PlacedProgram,
        keys: PlacementKeys,
        demand: Mapping[Var, MemberAxis],
        gathering: Set[Var],
        rewrites: Rewrites,
    ):
        self.program = program
        self.keys = keys
        self.demand = demand
        self.gathering = gathering
        self.rewrites = rewrites
        self.rewriter: BlockRewriter | None = None
        self.is_inside_whole = False
        self.gathering_loops: dict[Var, bool] = {}
        self.used = {atom for atom in program.flat.reads() if isinstance(atom, Var)}

    def block(self, block: FlatBlock) -> None:
        """Places the results of the equations of a block."""
        outer = self.rewriter
        if not self.is_inside_whole:
            self.rewriter = BlockRewriter(self.program, self.rewrites)
        self.equations(block.eqns)
        self.rewriter = outer

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
            if self.rewriter is not None and eqn not in self.program.expanded:
                self.rewriter.makers.update(dict.fromkeys(eqn.outputs, eqn))

    def whole(self, eqn: WholeEqn) -> None:
        """Places a scan, while or cond without placed operators.

        If it acts on each member separately, it runs inside a pass. If it reduces over the members,
        its rounds are passes.
        """
        program = self.program
        if not any(program.place(atom) for atom in eqn.inputs):
            return
        if self.rewrite(eqn):
            return
        # It is placed on trial, without rewrites, and forgotten if it runs on the server.
        structure = eqn.expand(program.flat)
        inside = (atom for block in structure.blocks for atom in block.reads())
        self.used.update(atom for atom in inside if isinstance(atom, Var))
        outer, self.rewriter, self.is_inside_whole = self.rewriter, None, True
        self.loop(structure) if isinstance(structure, LoopEqn) else self.branch(structure)
        self.rewriter, self.is_inside_whole = outer, outer is None
        found = as_member_equation(program, eqn, structure, self.used)
        if found is not None:
            new, placement, rule = found
            program.expanded[eqn], program.rules[new] = [new], (placement, rule)
            return
        are_passes = not program.flat.unrolled and distributes(program, structure)
        # A loop without results is there for its effects, and stays as it is.
        opens = outer is not None and eqn.outputs and not program.flat.unrolled
        if opens and gathers(program, structure):
            self.gathering_loops[eqn.outputs[0]] = are_passes
        if are_passes:
            program.expanded[eqn] = [structure]
        else:
            self.forget_equation(structure)

    def equation(self, eqn: Eqn) -> None:
        program, key = self.program, self.keys.of(eqn)
        places = [program.place(atom) for atom in eqn.inputs]
        placements = {along.placement for along in places if along is not None}
        if key is None and len(placements) == 1:
            (key,) = placements
        if key is not None:
            axes = [along.axis if along and along.placement == key else None for along in places]
            rule = rules.classify(eqn, axes, program.sizes[key])
            if rule is not None and self.gathering.isdisjoint(eqn.outputs):
                program.rules[eqn] = (key, rule)
                if isinstance(rule, MemberwiseRule):
                    for var, axis in zip(eqn.outputs, rule.out_axes, strict=True):
                        self.put(var, None if axis is None else MemberAxis(key, axis))
                return
        if not placements:
            self.note_creations(eqn)
        self.rewrite(eqn)

    def rewrite(self, eqn: Eqn) -> bool:
        """Rewrites an equation that runs on the server, if that is possible."""
        new = self.rewriter.rewritten(eqn) if self.rewriter is not None else None
        if new is None:
            return False
        self.program.expanded[eqn] = new
        self.used.update(atom for each in new for atom in each.inputs if isinstance(atom, Var))
        self.equations(new)
        return True

    def note_creations(self, eqn: Eqn) -> None:
        """Records for which axes with one entry per member shards can compute the results."""
        creations = self.program.creations
        for placement, n in self.program.sizes.items():
            for out, var in enumerate(eqn.outputs):
                for axis, dim in enumerate(shape_of(var)):
                    found = rules.invert(eqn, out, axis, n) if dim == n else None
                    if found is not None and all(
                        (operand, MemberAxis(placement, k)) in creations
                        for operand, k in requirements(eqn, found.in_axes)
                    ):
                        creations[var, MemberAxis(placement, axis)] = (eqn, found)

    def loop(self, eqn: LoopEqn) -> None:
        """Finds a place for each carried value that fits before and after all rounds."""
        program, carried, block = self.program, eqn.carried, eqn.block
        chosen: list[Place] = []
        for number, (atom, var) in enumerate(zip(eqn.inputs, block.inputs, strict=True)):
            stacked = 0 if number < carried else 1
            found = program.place(atom)
            found = found.moved(-stacked) if found is not None else None
            chosen.append(self.demand.get(var) or found)
        settled: set[int] = set()
        # A carried value changes its place at most twice, so this ends.
        while True:
            for var, along in zip(block.inputs, chosen, strict=True):
                self.put(var, along)
            for inner in eqn.blocks:
                self.block(inner)
            given = [program.place(atom) for atom in block.outputs]
            differing = [
                i
                for i in range(carried)
                if i not in settled and self.differs(chosen[i], block.outputs[i])
            ]
            if not differing:
                break
            for i in differing:
                # A server value gets the place that a round returns; any other conflict puts the
                # value on the server, where it stays.
                if chosen[i] is not None:
                    settled.add(i)
                chosen[i] = given[i] if chosen[i] is None else None
            for inner in eqn.blocks:
                self.forget(inner)
        outputs = (*chosen[:carried], *given[carried:])
        inputs = (*chosen[:carried], *(p.moved(1) if p else None for p in chosen[carried:]))
        conditions = ((None,),) if eqn.condition else ()
        self.enclose(eqn, inputs, (*conditions, outputs))
        for var, along in zip(eqn.outputs, outputs, strict=True):
            stacked = 0 if var in eqn.outputs[:carried] else 1
            self.put(var, along.moved(stacked) if along else None)

    def differs(self, chosen: Place, atom: Atom) -> bool:
        """Whether a value that a round returns is not at `chosen`, and can't be created there."""
        given = self.program.place(atom)
        if given is None and chosen is not None and isinstance(atom, Var):
            return (atom, chosen) not in self.program.creations
        return given != chosen

    def branch(self, eqn: BranchEqn) -> None:
        """Finds the places of a branch's outputs: an output is placed if it is so in any block."""
        for block in eqn.branches:
            self.block(block)
        places: list[Place] = []
        for number, var in enumerate(eqn.outputs):
            given = [self.program.place(block.outputs[number]) for block in eqn.branches]
            places.append(self.demand.get(var) or next((along for along in given if along), None))
            self.put(var, places[-1])
        self.enclose(eqn, (None,), (tuple(places),) * len(eqn.branches))

    def enclose(
        self, eqn: Eqn, inputs: tuple[Place, ...], outputs: tuple[tuple[Place, ...], ...]
    ) -> None:
        """Records the places of the inputs and outputs of a loop or a branch.

        A server value that it needs placed is from now on computed by shards, if shards can do so.
        """
        self.program.borders[eqn] = Border(inputs, outputs)
        ends = zip(eqn.blocks, outputs, strict=True)
        pairs = [*zip(eqn.inputs, inputs, strict=True)]
        pairs += [
            pair for block, places in ends for pair in zip(block.outputs, places, strict=True)
        ]
        for atom, along in pairs:
            if along is None or not isinstance(atom, Var) or self.program.place(atom) is not None:
                continue
            created = self.program.creations.get((atom, along))
            if created is not None:
                maker, rule = created
                self.program.rules[maker] = (along.placement, rule)
                for var, axis in zip(maker.outputs, rule.out_axes, strict=True):
                    self.put(var, None if axis is None else MemberAxis(along.placement, axis))

    def put(self, var: Var, along: Place) -> None:
        self.program.places.pop(var, None)
        if along is not None:
            self.program.places[var] = along

    def forget(self, block: FlatBlock) -> None:
        """Removes everything recorded for the equations of a block."""
        for eqn in block.eqns:
            self.forget_equation(eqn)

    def forget_equation(self, eqn: Eqn) -> None:
        for made in self.program.expanded.pop(eqn, ()):
            self.rewrites.sources.pop(eqn.outputs[0], None)
            self.forget_equation(made)
        self.program.rules.pop(eqn, None)
        self.program.borders.pop(eqn, None)
        for block in eqn.blocks:
            self.forget(block)
        for var in eqn.outputs:
            self.program.places.pop(var, None)
            for placement in self.program.sizes:
                for axis in range(len(shape_of(var))):
                    self.program.creations.pop((var, MemberAxis(placement, axis)), None)


def _selected_too_often(program: PlacedProgram) -> list[Eqn]:
    """The selections from a value of which they together read a large share."""
    selections: dict[Var, list[Eqn]] = {}
    for eqn in program.flat.walk():
        _, rule = program.rules.get(eqn, ("", None))
        if (
            isinstance(rule, ReductionRule)
            and rule.selects_members
            and isinstance(eqn.inputs[0], Var)
        ):
            selections.setdefault(eqn.inputs[0], []).append(eqn)
    many: list[Eqn] = []
    for var, eqns in selections.items():
        taken = sum(math.prod(eqn.outputs[0].aval.shape) for eqn in eqns)
        if len(eqns) > 1 and taken > MAX_SHARE * math.prod(var.aval.shape):
            many += eqns
    return many


def _gathered_inputs(program: PlacedProgram, tried: Set[Var], guarded: bool) -> set[Var]:
    """The inputs of `tried` from which gathered values are computed.

    A value counts as gathered if the server reads it or selects members of it. A view only counts
    if no placed operator reads it before. With `guarded`, only server reads of placed operators and
    loops count.
    """
    # For each placed value, those that it is computed from, and whether by a placed operator.
    sources: dict[Var, list[tuple[Atom, bool]]] = {}
    gathered: list[Atom] = []
    if not guarded:
        gathered += [a for a in program.flat.outputs if isinstance(a, Var) and a in tried]

    def link(outs: Iterable[Var], atoms: Sequence[Atom], by_operator: bool = False) -> None:
        for var in outs:
            sources.setdefault(var, []).extend((atom, by_operator) for atom in atoms)

    for eqn in program.flat.walk():
        reads = [*program.border_reads(eqn)] if eqn.blocks else [*program.reads(eqn)]
        counts = not guarded or eqn.is_placed_operator or bool(eqn.blocks)
        _, rule = program.rules.get(eqn, ("", None))
        selects = isinstance(rule, ReductionRule) and rule.selects_members
        gathered += [a for a, along in reads if counts and (selects or program.place(a) != along)]
        if isinstance(eqn, LoopEqn):
            pairs = zip(eqn.block.inputs, eqn.inputs, strict=True)
            carried = zip(eqn.params_of_carried, eqn.block.outputs, strict=False)
            for param, atom in (*pairs, *carried):
                link([param], [atom])
        # The last block of a loop is the round; the condition returns nothing that is placed.
        for block in eqn.blocks[-1:] if isinstance(eqn, LoopEqn) else eqn.blocks:
            for var, atom in zip(eqn.outputs, block.outputs, strict=True):
                link([var], [atom])
        if not eqn.blocks and not isinstance(rule, ReductionRule):
            link(eqn.outputs, [atom for atom, _ in reads], eqn.is_placed_operator)
    found: set[Var] = set()
    seen: set[tuple[Atom, bool]] = set()
    agenda = [(atom, False) for atom in gathered]
    while agenda:
        atom, after_operator = agenda.pop()
        if not isinstance(atom, Var) or program.place(atom) is None:
            continue
        if (atom, after_operator) in seen:
            continue
        seen.add((atom, after_operator))
        if atom in tried and not (after_operator and atom in program.flat.views):
            found.add(atom)
        agenda += ((source, after_operator or by) for source, by in sources.get(atom, ()))
    return found
