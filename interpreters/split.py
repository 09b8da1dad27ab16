"""A placed program cut at its reductions into pieces that run one after the other.

The *level* of a value is the number of passes over the members that must be over before it can be
computed. All equations of one level and placement are one pass, whatever the number of maps and
reductions among them; all server equations of one level are one executable. Everything is computed
as late as its uses allow, so that a placed value is made in the pass that reads it. Only what an
output needs is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from beamjax.interpreters import rules
from beamjax.interpreters.flatten import Atom, Eqn, Var
from beamjax.interpreters.place import Along, PlacedProgram
from beamjax.interpreters.rules import Fold, Local


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


Piece = ServerPiece | MapPiece | GatherPiece | ScatterPiece


def split(program: PlacedProgram) -> list[Piece]:
    """Cuts a program into pieces, in an order in which they can run."""
    return _Splitter(program).pieces()


# Results of these are made again in a later pass rather than sent there.
CHEAP = frozenset(rules.ELEMENTWISE) - {"threefry2x32", "random_gamma"} | {
    "bj_broadcast", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "pad", "rev",
    "concatenate", "split", "stack", "unstack", "random_wrap", "random_unwrap", "iota",
}  # fmt: skip


class _Splitter:
    """Works from the last level to the first, so that the needs of later pieces are known."""

    def __init__(self, program: PlacedProgram):
        self.program = program
        self.flat = program.flat
        self.inputs = set(self.flat.inputs)
        self.numbers = {eqn: i for i, eqn in enumerate(self.flat.eqns)}
        self.makers = {var: eqn for eqn in self.flat.eqns for var in eqn.outputs}
        self.levels = _levels(program)
        self.eqns: dict[int, list[Eqn]] = {}
        for eqn in self.flat.eqns:
            if eqn in self.levels:
                self.eqns.setdefault(self.levels[eqn], []).append(eqn)
        self.cheap: set[Var] = set()
        self._find_cheap()
        # Server values, and placed values of earlier passes, that a later piece reads.
        self.served: set[Var] = set()
        self.live: set[Var] = set()
        # Placed values to be gathered, by the level of the pass that makes them (None: inputs).
        self.gathered: dict[int | None, list[Piece]] = {}
        for atom in self.flat.outputs:
            if isinstance(atom, Var) and atom not in self.inputs:
                (self.live if program.place(atom) else self.served).add(atom)

    def pieces(self) -> list[Piece]:
        backward: list[Piece] = []
        for level in range(max(self.levels.values(), default=0), -1, -1):
            backward += self.gathered.get(level, [])
            backward += self._maps(level)
            server = self._server(level)
            backward += [server] if server else []
        backward += self.gathered.get(None, [])
        pieces = backward[::-1]
        self._find_server_outputs(pieces)
        return pieces

    def serve(self, var: Var, user: Eqn) -> None:
        """Notes that `user` reads a value on the server."""
        along = self.program.place(var)
        if var not in self.served and along is not None:
            level = None if var in self.inputs else self.levels[var]
            self.gathered.setdefault(level, []).append(GatherPiece(var, along, user))
        self.served.add(var)

    def _maps(self, level: int) -> list[Piece]:
        folds: dict[str, list[Eqn]] = {}
        results: dict[str, list[Var]] = {}
        for eqn in self.eqns.get(level, []):
            if eqn not in self.program.readings:
                continue
            placement, reading = self.program.readings[eqn]
            if not isinstance(reading, Fold):
                wanted = [v for v in eqn.outputs if v in self.served or v in self.live]
                results.setdefault(placement, []).extend(wanted)
            elif any(v in self.served for v in eqn.outputs):
                folds.setdefault(placement, []).append(eqn)
        found: list[Piece] = []
        for placement in self.program.sizes:
            if folds.get(placement) or results.get(placement):
                one = _Pass(self, level, placement)
                found += one.pieces(folds.get(placement, []), results.get(placement, []))
        return found

    def made_here(self, eqn: Eqn, var: Var, along: Along, level: int) -> Local | None:
        """How a pass makes a value that it needs by itself, if it does."""
        if self.program.place(var) == along:
            _, reading = self.program.readings[eqn]
            if isinstance(reading, Local) and (self.levels[var] == level or var in self.cheap):
                return reading
            return None
        created = self.program.creations.get((var, along))
        return created[1] if created else None

    def _server(self, level: int) -> ServerPiece | None:
        eqns: list[Eqn] = []
        for eqn in reversed(self.eqns.get(level, [])):
            if eqn in self.program.readings or not any(v in self.served for v in eqn.outputs):
                continue
            eqns.append(eqn)
            for atom in eqn.inputs:
                if isinstance(atom, Var):
                    self.serve(atom, eqn)
        if not eqns:
            return None
        made = {var for eqn in eqns for var in eqn.outputs}
        read = dict.fromkeys(a for e in eqns[::-1] for a in e.inputs if isinstance(a, Var))
        return ServerPiece(eqns[::-1], [var for var in read if var not in made])

    def _find_cheap(self) -> None:
        for eqn, (placement, reading) in self.program.readings.items():
            if not isinstance(reading, Local) or eqn.primitive.name not in CHEAP:
                continue
            needs = zip(eqn.inputs, reading.in_axes, strict=True)
            if all(
                axis is None or self._at_hand(atom, Along(placement, axis)) for atom, axis in needs
            ):
                self.cheap.update(eqn.outputs)

    def _at_hand(self, atom: Atom, along: Along) -> bool:
        if not isinstance(atom, Var) or (atom, along) in self.program.creations:
            return True
        native = self.program.place(atom) == along
        return native and (atom in self.inputs or atom in self.cheap)

    def _find_server_outputs(self, pieces: Iterable[Piece]) -> None:
        read = {atom for atom in self.flat.outputs if isinstance(atom, Var)}
        for piece in pieces:
            match piece:
                case ServerPiece():
                    read.update(piece.inputs)
                case MapPiece():
                    read.update(piece.broadcasts)
                case ScatterPiece():
                    read.add(piece.var)
        for piece in pieces:
            if isinstance(piece, ServerPiece):
                made = (var for eqn in piece.eqns for var in eqn.outputs)
                piece.outputs = [var for var in made if var in read]


class _Pass:
    """One pass over the members of a placement, put together from its last equation to its first.

    Attributes:
      need: the values that it reads along the members, and the equation that does.
      agenda: numbers, negative, of the equations to look at: a heap.
    """

    def __init__(self, splitter: _Splitter, level: int, placement: str):
        self.splitter = splitter
        self.level = level
        self.placement = placement
        self.need: dict[Var, dict[Along, Eqn | None]] = {}
        self.agenda: list[int] = []
        self.emissions: list[Emission] = []
        self.broadcasts: dict[Var, Eqn] = {}
        self.operands: list[tuple[Var, Along]] = []
        self.scatters: list[Piece] = []

    def pieces(self, folds: Iterable[Eqn], results: list[Var]) -> list[Piece]:
        """The pass, and the scatters that it needs, in backward order."""
        splitter = self.splitter
        for var in results:
            self.require(var, splitter.program.places[var], None)
        reduced = set(folds)
        for eqn in reduced:
            heapq.heappush(self.agenda, -splitter.numbers[eqn])
        last = None
        while self.agenda:
            eqn = splitter.flat.eqns[-heapq.heappop(self.agenda)]
            if eqn is not last:
                self.visit(eqn, eqn in reduced)
            last = eqn
        for var in [var for var in self.need if var in splitter.inputs]:
            for along in self.need[var]:
                self.supply(var, along)
        for var, user in self.broadcasts.items():
            splitter.serve(var, user)
        broadcasts, emissions = list(self.broadcasts), self.emissions[::-1]
        piece = MapPiece(self.placement, emissions, broadcasts, self.operands, results)
        return [piece, *self.scatters]

    def require(self, var: Var, along: Along, user: Eqn | None) -> None:
        alongs = self.need.setdefault(var, {})
        if not alongs and var in self.splitter.makers:
            heapq.heappush(self.agenda, -self.splitter.numbers[self.splitter.makers[var]])
        alongs.setdefault(along, user)

    def visit(self, eqn: Eqn, is_fold: bool) -> None:
        """Emits an equation, or takes its results from outside."""
        if is_fold:
            self.emit(eqn, self.splitter.program.readings[eqn][1])
            return
        emitted: list[Local] = []
        for var in eqn.outputs:
            for along in self.need.get(var, {}):
                reading = self.splitter.made_here(eqn, var, along, self.level)
                if reading is None:
                    self.supply(var, along)
                elif not any(reading is other for other in emitted):
                    emitted.append(reading)
                    self.emit(eqn, reading)

    def emit(self, eqn: Eqn, reading: Local | Fold) -> None:
        self.emissions.append(Emission(eqn, reading))
        for atom, axis in zip(eqn.inputs, reading.in_axes, strict=True):
            if not isinstance(atom, Var):
                continue
            if axis is None:
                self.broadcasts.setdefault(atom, eqn)
            else:
                self.require(atom, Along(self.placement, axis), eqn)

    def supply(self, var: Var, along: Along) -> None:
        """Takes a value from outside: an input, an earlier pass, or the server."""
        splitter = self.splitter
        self.operands.append((var, along))
        if splitter.program.place(var) == along:
            if var not in splitter.inputs:
                splitter.live.add(var)
            return
        user = self.need[var][along]
        assert user is not None
        self.scatters.append(ScatterPiece(var, along, user))
        splitter.serve(var, user)


def _levels(program: PlacedProgram) -> dict[Eqn | Var, int]:
    """The level of each equation that an output needs, and of each value."""
    levels = _earliest(program)
    last = max((levels[v] for v in program.flat.outputs if isinstance(v, Var)), default=0)
    inputs = set(program.flat.inputs)
    latest: dict[Var, int] = {}

    def use(atom: Atom, level: int) -> None:
        if isinstance(atom, Var):
            latest[atom] = min(latest.get(atom, last), level)

    for atom in program.flat.outputs:
        use(atom, levels[atom] if isinstance(atom, Var) and program.place(atom) else last)
    for eqn in reversed(program.flat.eqns):
        reading = program.readings.get(eqn)
        uses = [latest[var] for var in eqn.outputs if var in latest]
        if not uses:
            del levels[eqn]
            continue
        if reading is None or isinstance(reading[1], Local):
            level = max(levels[eqn], min(uses))
            levels.update(dict.fromkeys((eqn, *eqn.outputs), level))
        for operand, along in _operands(program, eqn):
            level = levels[eqn]
            place = program.place(operand)
            if isinstance(operand, Var) and place not in (None, along) and operand not in inputs:
                level = levels[operand]  # gathered, so it stays in the pass that makes it
            use(operand, level)
    return levels


def _earliest(program: PlacedProgram) -> dict[Eqn | Var, int]:
    inputs = set(program.flat.inputs)
    levels: dict[Eqn | Var, int] = dict.fromkeys(inputs, 0)

    def available(atom: Atom, along: Along | None) -> int:
        """The level from which on a value can be read at a place."""
        if not isinstance(atom, Var):
            return 0
        if atom in inputs or program.place(atom) == along:
            return levels[atom]
        return levels[atom] + (program.place(atom) is not None)

    for eqn in program.flat.eqns:
        level = max((available(a, along) for a, along in _operands(program, eqn)), default=0)
        levels[eqn] = level
        folds = eqn in program.readings and isinstance(program.readings[eqn][1], Fold)
        levels.update(dict.fromkeys(eqn.outputs, level + folds))
    return levels


def _operands(program: PlacedProgram, eqn: Eqn) -> Iterator[tuple[Atom, Along | None]]:
    """The operands of an equation, with the place at which it reads them."""
    placement, reading = program.readings.get(eqn, ("", None))
    axes = reading.in_axes if reading else (None,) * len(eqn.inputs)
    for atom, axis in zip(eqn.inputs, axes, strict=True):
        yield atom, None if axis is None else Along(placement, axis)
