"""Lowers the stages of a program to steps of a plan, each with an executable of fixed shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.bodies.export import (
    NotExportedError,
    default_platform,
    export_body,
    unwrap,
    value_type,
    wrap,
)
from beamjax.errors import StagingError
from beamjax.interpreters.cutting.cost import server_cost
from beamjax.interpreters.cutting.pieces import (
    BlockPiece,
    BranchPiece,
    GatherPiece,
    LoopPiece,
    MapPiece,
    Piece,
    ScatterPiece,
    ServerPiece,
    walk,
)
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering import callbacks, masks
from beamjax.interpreters.lowering.convolutions import with_channels_last
from beamjax.interpreters.lowering.keeping import guard_of, with_kept_members
from beamjax.interpreters.lowering.lanes import lanes_of, saved_bytes
from beamjax.interpreters.lowering.map_bodies import map_body, one_by_one, read
from beamjax.interpreters.lowering.shard_size import cost_of_member, shard_sizes
from beamjax.interpreters.lowering.vectorize import looping_of
from beamjax.interpreters.placement.places import Along, Place, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules import table as rules
from beamjax.interpreters.rules.readings import draw_by_batch
from beamjax.interpreters.rules.table import Combination
from beamjax.interpreters.staging.flatten import HOST_CALLS
from beamjax.options import Options
from beamjax.options.choices import Looping
from beamjax.plan.cost import Cost
from beamjax.plan.steps import (
    Block,
    Body,
    Branch,
    Carried,
    Combine,
    Gather,
    Input,
    Loop,
    Map,
    Output,
    Plan,
    Scatter,
    Server,
    Sliced,
    Step,
    ValueType,
    View,
)


def lower(
    program: PlacedProgram,
    pieces: Sequence[Piece],
    paths: Sequence[str],
    name: str,
    options: Options,
    sizes: Mapping[str, int] | None = None,
    loopings: Mapping[str, Looping] | None = None,
) -> Plan:
    """Makes a plan.

    Args:
      program: the placed program.
      pieces: its stages, in order.
      paths: where each input is in the user's arguments, for messages.
      name: name of the plan.
      options: options of the run.
      sizes: members per shard of each placement; by default chosen by rules.
      loopings: how each pass, by name, vectorizes over a shard; by default chosen by rules.

    Raises:
      StagingError: a stage can't be exported, or more would be gathered than the options allow.
    """
    if sizes is None:
        sizes = shard_sizes(program, pieces, options, _platforms(options))
    return _Lowering(program, pieces, options, sizes, loopings or {}).plan(name, paths)


def lower_passes(
    program: PlacedProgram,
    pieces: Sequence[Piece],
    placement: str,
    options: Options,
    size: int,
    loopings: Mapping[str, Looping],
) -> Plan:
    """A plan of only the passes over one placement, with the given shard size."""
    sizes = {**dict.fromkeys(program.sizes, size)}
    lowering = _Lowering(program, pieces, options, sizes, loopings)
    passes = [p for p in walk(pieces) if isinstance(p, MapPiece) and p.placement == placement]
    return lowering.with_steps([lowering.map(piece) for piece in passes], "passes")


class _Lowering:
    def __init__(
        self,
        program: PlacedProgram,
        pieces: Sequence[Piece],
        options: Options,
        sizes: Mapping[str, int],
        loopings: Mapping[str, Looping],
    ):
        self.program = program
        self.pieces = pieces
        self.options = options
        self.platforms = _platforms(options)
        self.sizes = sizes
        self.loopings = loopings
        self.costs: dict[str, Cost] = {}
        self.values: dict[str, ValueType] = {}
        self.bodies: dict[str, Body] = {}
        self.served_inputs: set[Var] = set()
        self.placed_inputs: set[Var] = set()
        self.counts: dict[str, int] = {}
        # Reasons of steps that run as Python because JAX could not export them, by name.
        self.reasons: dict[str, str] = {}
        self.guard = guard_of(options)

    def plan(self, name: str, paths: Sequence[str]) -> Plan:
        steps = [self.step(piece) for piece in self.pieces]
        outputs = tuple(self.output(atom) for atom in self.program.flat.outputs)
        plan = self.with_steps(steps, name, outputs, paths)
        if self.guard is None or not self.guard.drops:
            return plan
        return with_kept_members(plan, self.empty_pass)

    def with_steps(
        self,
        steps: Sequence[Step],
        name: str,
        outputs: tuple[Output, ...] = (),
        paths: Sequence[str] | None = None,
    ) -> Plan:
        """A plan of lowered steps; without paths it has no inputs."""
        inputs = self.program.flat.inputs if paths is not None else []
        return Plan(
            name=name,
            sizes={k: None if is_unknown(n) else n for k, n in self.program.sizes.items()},
            shard_sizes=self.sizes,
            values=self.values,
            inputs=tuple(self.input(v, p) for v, p in zip(inputs, paths or (), strict=True)),
            steps=tuple(steps),
            outputs=outputs,
            bodies=self.bodies,
            x64=bool(_compat.config.jax_enable_x64),
            jax_version=jax.__version__,
            constants=tuple(self.program.flat.constants) if paths is not None else (),
            costs=self.costs,
        )

    def empty_pass(self, placement: str) -> Map:
        """A pass that computes nothing."""
        name, size = self.name(f"members_{placement}"), self.sizes[placement]
        key = self.export(name, lambda members: lambda *heads: [], size, self.heads(size), [])
        guard = self.guard and replace(self.guard, on_nonfinite="keep")
        return Map(name, placement, key, (), (), (), (), guard=guard, short_body=key)

    # ------------------------------------------------------------------------------- values

    def served(self, var: Var) -> str:
        """The name of a value as a server value."""
        self.values.setdefault(var.name, value_type(var.aval))
        if var in self.program.flat.inputs and self.program.place(var) is None:
            self.served_inputs.add(var)
        return var.name

    def placed(self, var: Var, along: Along) -> str:
        """The name of a value as a placed value; a server value is scattered."""
        name = f"{var.name}@{along.placement}"
        if self.program.place(var) != along:
            name += f".{along.axis}"
        elif var in self.program.flat.inputs or var in self.program.flat.views:
            self.placed_inputs.add(var)
        self.values.setdefault(name, value_type(var.aval, along.placement, along.axis))
        return name

    def at(self, atom: Atom, along: Place) -> str:
        """The name of a value at a place."""
        assert isinstance(atom, Var)
        return self.served(atom) if along is None else self.placed(atom, along)

    def native(self, var: Var) -> str:
        """The name of a value at the place where it is computed."""
        return self.at(var, self.program.place(var))

    def input(self, var: Var, path: str) -> Input:
        along = self.program.place(var)
        served = var.name if var in self.served_inputs else None
        views = tuple(
            View(self.placed(view, self.program.places[view]), view.aval.shape[1])
            for view, origin in self.program.flat.views.items()
            if origin is var and view in self.placed_inputs
        )
        if along is None or var not in self.placed_inputs:
            return Input(path, served, None, views=views)
        return Input(path, served, self.placed(var, along), along.axis, views)

    def output(self, atom: Atom) -> Output:
        if not isinstance(atom, Var):
            return Output(constant=np.asarray(atom.val, aval_of(atom).dtype))
        if atom in self.program.flat.inputs:
            return Output(input=self.program.flat.inputs.index(atom))
        along = self.program.place(atom)
        if along is None:
            return Output(value=self.served(atom))
        return Output(value=self.placed(atom, along), axis=along.axis)

    # ------------------------------------------------------------------------------- steps

    def step(self, piece: Piece) -> Step:
        match piece:
            case ServerPiece():
                return self.server(piece)
            case MapPiece():
                return self.map(piece)
            case GatherPiece():
                return self.gather(piece)
            case ScatterPiece():
                operand, result = self.served(piece.var), self.placed(piece.var, piece.along)
                axis, line = piece.along.axis, piece.user.line
                reason = f"{piece.user.primitive.name} reads it along the members"
                return Scatter(self.name("scatter"), operand, result, axis, reason, line)
            case LoopPiece():
                return self.loop(piece)
            case BranchPiece():
                return self.branch(piece)

    def gather(self, piece: GatherPiece) -> Gather:
        operand, result = self.placed(piece.var, piece.along), self.served(piece.var)
        line, reason = piece.user.line, why_on_server(piece.user)
        nbytes, limit = self.values[result].nbytes, self.options.gather_limit
        if limit is not None and nbytes > limit:
            raise StagingError(
                f"{line or 'in the program'}: {reason}, so {nbytes} bytes of "
                f"{self.values[operand]} ({self.program.sizes[piece.along.placement]} members) "
                f"would be gathered to the server; the option gather_limit allows {limit}. Reduce "
                "over the members first, do it for each member inside a map_fn, or raise the limit"
            )
        return Gather(self.name("gather"), operand, result, piece.along.axis, reason, line)

    def block(self, piece: BlockPiece) -> Block:
        outputs = tuple(map(self.at, piece.block.outputs, piece.outputs))
        return Block(tuple(self.step(inner) for inner in piece.pieces), outputs)

    def loop(self, piece: LoopPiece) -> Loop:
        eqn, name = piece.eqn, self.name("loop")
        inits = list(map(self.at, eqn.inputs, piece.inputs))
        params = list(map(self.native, eqn.block.inputs))
        results = list(map(self.native, eqn.outputs))
        carried = zip(inits[: eqn.carried], params, results, strict=False)
        return Loop(
            name,
            eqn.rounds,
            self.block(piece.condition) if piece.condition else None,
            self.block(piece.block),
            tuple(Carried(*names) for names in carried),
            tuple(map(Sliced, inits[eqn.carried :], params[eqn.carried :])),
            tuple(results[eqn.carried :]),
            eqn.reverse,
            eqn.line,
        )

    def branch(self, piece: BranchPiece) -> Branch:
        eqn, name = piece.eqn, self.name("branch")
        blocks = tuple(map(self.block, piece.branches))
        results = tuple(map(self.native, eqn.outputs))
        return Branch(name, self.at(eqn.inputs[0], None), blocks, results, eqn.line)

    def name(self, kind: str) -> str:
        """A new name for a step."""
        number = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{number}"

    def server(self, piece: ServerPiece) -> Server:
        name = self.name("server")
        impls = [self.values[self.served(var)].key_impl for var in piece.inputs]

        def body(*raw: jax.Array) -> list[jax.Array]:
            env = dict(zip(piece.inputs, map(wrap, raw, impls), strict=True))
            for eqn in piece.eqns:
                args = [read(env, atom) for atom in eqn.inputs]
                env.update(zip(eqn.outputs, rules.bind(eqn, args), strict=True))
            return [unwrap(env[var]) for var in piece.outputs]

        inputs = tuple(self.served(var) for var in piece.inputs)
        arguments = [_argument(self.values[x]) for x in inputs]
        key = self.export(name, lambda members: body, None, arguments, piece.eqns)
        reasons = (why_on_server(eqn) for eqn in piece.eqns if eqn.primitive.name == "bj_map")
        outputs = tuple(self.served(var) for var in piece.outputs)
        self.costs[name] = server_cost(piece)
        return Server(name, key, inputs, outputs, next(reasons, ""))

    def map(self, piece: MapPiece) -> Map:
        functions = [e.eqn.params["name"] for e in piece.emissions if "name" in e.eqn.params]
        name = self.name(f"map_{piece.placement}")
        size = self.sizes[piece.placement]
        broadcasts = tuple(self.served(var) for var in piece.broadcasts)
        operands = tuple(self.placed(var, along) for var, along in piece.operands)
        results = tuple(self.placed(var, self.program.places[var]) for var in piece.results)
        lanes = lanes_of(piece, self.served, self.values)
        combines = tuple(
            self.combine(e.eqn, e.reading)
            for e in piece.emissions
            if isinstance(e.reading, Combination)
        )
        types: list[tuple[ValueType, int | None]] = [(self.values[x], None) for x in broadcasts]
        types += [(self.values[x], size) for x in operands]
        impls = [value.key_impl for value, _ in types]
        arguments = [*self.heads(size), *(_argument(*each) for each in types)]
        guard = self.guard
        n, chosen = self.program.sizes[piece.placement], self.loopings.get(name)
        looping, turns = looping_of(piece, lanes, n, size, self.options, self.platforms, chosen)
        sized = functools.partial(map_body, self.program, piece, lanes, impls, guard)
        if looping.kind != "vmap":
            batch = looping.batch or 1
            sized = functools.partial(
                one_by_one, self.program, piece, lanes, impls, guard, batch=batch
            )
        self.costs[name] = cost_of_member(piece, n)
        eqns = [e.eqn for e in piece.emissions]
        full = functools.partial(sized, full=True)
        # A Python function needs no variants: it is called without padding.
        exported = not callbacks.reason_for_python(eqns, self.options)
        if exported and masks.are_all_full(n, size) and not (guard and guard.drops):
            key, short = self.export(name, full, size, arguments, eqns), None
        elif exported and masks.pays_apart(piece, n, size):
            key = self.export(name, full, size, arguments, eqns)
            short = self.export(name, sized, size, arguments, eqns)
        else:
            key = short = self.export(name, sized, size, arguments, eqns)
        return Map(
            name, piece.placement, key, broadcasts, operands, results, lanes, tuple(functions),
            combines, guard, turns=turns, looping=looping,
            saved=saved_bytes(piece), short_body=short,
        )  # fmt: skip

    def heads(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """Types of the first arguments of the body of a pass; see `Map` and `Guard`."""
        integer = np.dtype("int32")
        start = jax.ShapeDtypeStruct((), integer)
        if self.guard is None:
            return [start, start]
        kept = jax.ShapeDtypeStruct((size,), np.dtype("bool"))
        return [start, jax.ShapeDtypeStruct((size,), integer), kept]

    def combine(self, eqn: Eqn, reading: Combination) -> Combine:
        """Lowers a reduction by a function; its body merges partials of two ranges of members."""
        axes = zip(eqn.inputs, reading.in_axes, strict=True)
        served = [atom for atom, axis in axes if axis is None]
        variables = [atom for atom in served if isinstance(atom, Var)]
        leaves = tuple(map(value_type, reading.leaves))
        names: list[str | None] = [None] * len(leaves)
        for var, leaf in zip(eqn.outputs, reading.kept, strict=True):
            names[leaf] = self.served(var)
        inputs = tuple(map(self.served, variables))
        types = [self.values[name] for name in inputs] + [*leaves, *leaves]
        impls = [value.key_impl for value in types]

        def body(*raw: jax.Array) -> list[jax.Array]:
            values = list(map(wrap, raw, impls))
            env = dict(zip(variables, values, strict=False))
            left, right = values[len(inputs) : -len(leaves)], values[-len(leaves) :]
            outs = reading.combine(eqn, [read(env, atom) for atom in served], left, right)
            return list(map(unwrap, outs))

        key = self.export(
            reading.reducer, lambda members: body, None, list(map(_argument, types)), [eqn]
        )
        return Combine(reading.reducer, key, inputs, leaves, tuple(names))

    def export(
        self,
        name: str,
        sized: Callable[[Any], Callable[..., Any]],
        size: int | None,
        arguments: Sequence[jax.ShapeDtypeStruct],
        eqns: Sequence[Eqn],
    ) -> str:
        """Makes the body of a step from `sized(size)`, which evaluates `eqns` on `arguments`."""
        reason = self.reasons.get(name) or callbacks.reason_for_python(eqns, self.options)
        if not reason:
            try:
                return self.exported(name, sized(size), arguments, eqns)
            except NotExportedError as error:
                reason = callbacks.reason_not_exported(error, eqns, self.platforms, self.options)
                self.reasons[name] = reason
        key, made = callbacks.as_python(name, sized, size, arguments, eqns, reason)
        self.bodies[key] = made
        return key

    def exported(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[jax.ShapeDtypeStruct],
        eqns: Sequence[Eqn],
    ) -> str:
        """Makes the body of a step as StableHLO."""
        lines = tuple(dict.fromkeys(eqn.line for eqn in eqns if eqn.line))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if self.platforms == ("cpu",):
                function = with_channels_last(function, arguments, eqns)
            key, made = export_body(name, function, arguments, self.platforms, lines)
        self.bodies[key] = made
        return key


def _platforms(options: Options) -> tuple[str, ...]:
    return (default_platform(),) if options.platforms is None else options.platforms


def _argument(value: ValueType, members: int | None = None) -> jax.ShapeDtypeStruct:
    shape = value.shape if members is None else (members, *value.shape)
    return jax.ShapeDtypeStruct(shape, np.dtype(value.dtype))


def why_on_server(user: Eqn) -> str:
    """Why an equation reads a placed value on the server, as text."""
    name = user.primitive.name
    if name == "bj_map":
        draw = draw_by_batch(user.params["jaxpr"])
        if draw is not None:
            return (
                f"the body {user.params['name']} draws from rbg keys ({draw[0]} at "
                f"{draw[1] or user.line}), and such draws depend on all members"
            )
        return f"the body {user.params['name']} closes over a placed value"
    if user.is_placed_operator:
        return f"{name.removeprefix('bj_')} reads it as a server value"
    if name in HOST_CALLS:
        return f"{name} calls back to the host with all members"
    return f"{name} mixes members"
