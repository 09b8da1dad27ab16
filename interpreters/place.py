"""Where every value of a flat program lives: on the server, or along the members of a placement.

Placement starts at the placed operators and flows both ways: backward to the arguments that must be
placed for them, forward through every equation that a rule reads as member-wise. What no rule reads
that way stays on the server, and its placed operands are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from beamjax.errors import PlacementError, StagingError
from beamjax.interpreters import rules
from beamjax.interpreters.flatten import (
    PLACED_OPERATOR_PREFIX,
    Atom,
    Eqn,
    FlatProgram,
    Var,
    aval_of,
)
from beamjax.interpreters.rules import Fold, Local

MAX_MEMBERS = 2**31 - 1


@dataclass(frozen=True)
class Along:
    """The members of `placement` lie along `axis`."""

    placement: str
    axis: int

    def __str__(self) -> str:
        return f"{self.placement} along axis {self.axis}"


@dataclass(eq=False)
class PlacedProgram:
    """A flat program with a place for every value.

    Attributes:
      sizes: number of members of each placement.
      places: where placed values have their members; values not in it are server values.
      readings: for each equation that is computed by shards, its placement and how.
      creations: for server values that a shard can make by itself, the equation and how, by value
        and place.
    """

    flat: FlatProgram
    sizes: dict[str, int]
    places: dict[Var, Along] = field(default_factory=dict)
    readings: dict[Eqn, tuple[str, Local | Fold]] = field(default_factory=dict)
    creations: dict[tuple[Var, Along], tuple[Eqn, Local]] = field(default_factory=dict)

    def place(self, atom: Atom) -> Along | None:
        return self.places.get(atom) if isinstance(atom, Var) else None

    def __str__(self) -> str:
        lines = [f"{var!r}: {self._label(var)}" for var in self.flat.inputs]
        for eqn in self.flat.eqns:
            where = ", ".join(self._label(var) for var in eqn.outputs)
            lines.append(f"{eqn!r}    -> {where}")
        return "\n".join(lines)

    def _label(self, var: Var) -> str:
        return str(self.places.get(var, "server"))


def place(
    flat: FlatProgram, known: Mapping[Var, str], placements: Iterable[tuple[str, int]] = ()
) -> PlacedProgram:
    """Finds a place for every value.

    Args:
      flat: the program.
      known: inputs that come from sources, which are placed along axis 0 whatever uses them; the
        value is the reader's name for messages.
      placements: names and sizes of the programs that were called. An input that no placed operator
        asks for, with as many rows as one of them has members, is placed too if nothing then has
        to be gathered: `jnp.mean(x, 0)` in a program is a reduction.

    Raises:
      PlacementError: a source has another number of members than the placement it is used for, or
        a placement has too many.
      StagingError: a source is not used as a placed value.
    """
    keys = _PlacementKeys(flat, placements)
    for key, n in keys.sizes.items():
        if n > MAX_MEMBERS:
            raise PlacementError(
                f"placement {key!r} has {n} members, expected at most {MAX_MEMBERS}: a shard knows "
                "its first member by an int32"
            )
    wanted = _wanted(flat, keys)
    fixed: dict[Var, Along] = {}
    for var in flat.inputs:
        if var in known:
            fixed[var] = _source_place(var, known[var], wanted.get(var), keys)
        elif var in wanted:
            fixed[var] = wanted[var]
    tried = {v: along for v in flat.inputs if v not in fixed and (along := keys.rows(v))}
    while True:
        program = PlacedProgram(flat, keys.sizes, {**fixed, **tried})
        for eqn in flat.eqns:
            _place_outputs(program, eqn, keys)
        refuted = _gathered_inputs(program, set(tried))
        if not refuted:
            return program
        tried = {var: along for var, along in tried.items() if var not in refuted}


def _gathered_inputs(program: PlacedProgram, inputs: set[Var]) -> set[Var]:
    """Those of `inputs` that are gathered or picked from, or a value computed from them is."""
    origins: dict[Var, frozenset[Var]] = {var: frozenset({var}) for var in inputs}
    gathered: set[Var] = set()
    for eqn in program.flat.eqns:
        placement, reading = program.readings.get(eqn, ("", None))
        axes = reading.in_axes if reading else (None,) * len(eqn.inputs)
        found: frozenset[Var] = frozenset()
        for atom, axis in zip(eqn.inputs, axes, strict=True):
            place = program.place(atom)
            if place is None or not isinstance(atom, Var):
                continue
            found |= origins.get(atom, frozenset())
            picked = isinstance(reading, Fold) and reading.picks
            if picked or axis is None or place != Along(placement, axis):
                gathered |= origins.get(atom, frozenset())
        if found and not isinstance(reading, Fold):
            origins.update(dict.fromkeys(eqn.outputs, found))
    outputs = {atom for atom in program.flat.outputs if isinstance(atom, Var)}
    return gathered | (inputs & outputs)


class _PlacementKeys:
    """Names for the placements of a program.

    Programs that are composed may use one name with different sizes; such placements are kept
    apart as `clients[10]` and `clients[20]`.
    """

    def __init__(self, flat: FlatProgram, placements: Iterable[tuple[str, int]]):
        pairs = dict.fromkeys(placements)
        pairs.update(
            dict.fromkeys(
                (eqn.params["placement"], _members(eqn)) for eqn in flat.eqns if _is_operator(eqn)
            )
        )
        names = [name for name, _ in pairs]
        self._keys = {
            (name, n): name if names.count(name) == 1 else f"{name}[{n}]" for name, n in pairs
        }
        self.sizes = {key: n for (_, n), key in self._keys.items()}

    def rows(self, var: Var) -> Along | None:
        """The place of a value with as many rows as one placement has members, if it is one."""
        fitting = [key for key, n in self.sizes.items() if var.aval.shape[:1] == (n,)]
        return Along(fitting[0], 0) if len(fitting) == 1 and self.sizes[fitting[0]] > 1 else None

    def of(self, eqn: Eqn) -> str | None:
        """The placement of a placed operator, or None."""
        return self._keys[eqn.params["placement"], _members(eqn)] if _is_operator(eqn) else None


def _is_operator(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    return name.startswith(PLACED_OPERATOR_PREFIX) and name != "bj_size"


def _members(eqn: Eqn) -> int:
    n = eqn.params.get("n")
    return aval_of(eqn.inputs[0]).shape[0] if n is None else n


def _requirements(eqn: Eqn, in_axes: rules.Axes) -> Iterator[tuple[Var, int]]:
    """Operands that are variables, with the axis along which their members must be."""
    for atom, axis in zip(eqn.inputs, in_axes, strict=True):
        if axis is not None and isinstance(atom, Var):
            yield atom, axis


def _wanted(flat: FlatProgram, keys: _PlacementKeys) -> dict[Var, Along]:
    """Backward: the place that the first of its uses wants for each value."""
    wanted: dict[Var, Along] = {}
    for eqn in reversed(flat.eqns):
        key = keys.of(eqn)
        reading = rules.classify(eqn, [None] * len(eqn.inputs), None) if key else None
        if key and reading is not None:
            for var, axis in _requirements(eqn, reading.in_axes):
                wanted[var] = Along(key, axis)
            continue
        for out, var in enumerate(eqn.outputs):
            along = wanted.get(var)
            if along is None:
                continue
            found = rules.invert(eqn, out, along.axis, keys.sizes[along.placement])
            for operand, axis in _requirements(eqn, found.in_axes) if found else ():
                wanted[operand] = Along(along.placement, axis)
    return wanted


def _source_place(var: Var, name: str, wanted: Along | None, keys: _PlacementKeys) -> Along:
    if not var.aval.shape:
        raise PlacementError(
            f"{name}: found a scalar of type {var.aval.dtype}, expected an array (n, ...) with the "
            "members along its first axis; give a scalar as a value"
        )
    n = var.aval.shape[0]
    fitting = [key for key, size in keys.sizes.items() if size == n]
    if wanted is not None and wanted.axis == 0:
        return wanted
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
    return Along(fitting[0], 0)


def _place_outputs(program: PlacedProgram, eqn: Eqn, keys: _PlacementKeys) -> None:
    key = keys.of(eqn)
    places = [program.place(atom) for atom in eqn.inputs]
    placements = {along.placement for along in places if along is not None}
    if key is None and len(placements) == 1:
        (key,) = placements
    if key is not None:
        axes = [along.axis if along and along.placement == key else None for along in places]
        reading = rules.classify(eqn, axes, program.sizes[key])
        if reading is not None:
            program.readings[eqn] = (key, reading)
            if isinstance(reading, Local):
                for var, axis in zip(eqn.outputs, reading.out_axes, strict=True):
                    program.places[var] = Along(key, axis)
            return
    if not placements:
        _note_creations(program, eqn)


def _note_creations(program: PlacedProgram, eqn: Eqn) -> None:
    """Server values with an axis as long as a placement, which shards can make piece by piece."""
    for placement, n in program.sizes.items():
        for out, var in enumerate(eqn.outputs):
            for axis, dim in enumerate(getattr(var.aval, "shape", ())):
                found = rules.invert(eqn, out, axis, n) if dim == n else None
                if found is not None and all(
                    (operand, Along(placement, k)) in program.creations
                    for operand, k in _requirements(eqn, found.in_axes)
                ):
                    program.creations[var, Along(placement, axis)] = (eqn, found)
