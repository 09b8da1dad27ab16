"""Lowers the stages of a program to steps of a plan, each with an executable of fixed shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from beamjax import _compat
from beamjax.bodies.export import NotExportedError, export_body, value_type
from beamjax.bodies.load import default_platform, unwrap, wrap
from beamjax.errors import StagingError
from beamjax.interpreters.cutting.member_cost import server_cost
from beamjax.interpreters.cutting.stages import (
    BlockStages,
    BranchStage,
    GatherStage,
    LoopStage,
    MapStage,
    RowsStage,
    ScatterStage,
    ServerStage,
    Stage,
)
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.lowering import callbacks
from beamjax.interpreters.lowering.convolutions import with_channels_last
from beamjax.interpreters.lowering.dropped_members import guard_of, with_dropped_masks
from beamjax.interpreters.lowering.fused_reductions import fuse_reductions
from beamjax.interpreters.lowering.map_bodies import (
    map_body,
    sequential_body,
)
from beamjax.interpreters.lowering.reasons import rule_of, short_name, why_on_server
from beamjax.interpreters.lowering.shard_size import (
    PassSize,
    ShardSize,
    choose_vectorization,
    pass_sizes,
    shard_sizes,
    with_whole_blocks,
)
from beamjax.interpreters.placement.places import MemberAxis, Place, PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    ReductionRule,
    evaluate,
    read,
    shape_of,
)
from beamjax.ops.primitives import default_promotion
from beamjax.options import Options
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import (
    Block,
    Body,
    Branch,
    Carried,
    Combine,
    Cost,
    Gather,
    Input,
    Loop,
    Map,
    Output,
    Plan,
    Rows,
    Scatter,
    Server,
    Sliced,
    Step,
    ValueType,
    Vectorization,
    View,
)

MASKED_VALUES = 300_000_000
"""Values that take as long to mask as one more executable takes to make, about 0.3 s."""
UNKNOWN_MEMBERS = 1 << 20
"""Assumed number of members if it is unknown."""


def lower(
    program: PlacedProgram,
    stages: Sequence[Stage],
    paths: Sequence[str],
    name: str,
    options: Options,
    sizes: Mapping[str, int] | None = None,
    vectorizations: Mapping[str, Vectorization] | None = None,
) -> Plan:
    """Makes a plan of the stages of a placed program; `paths` names its inputs in messages."""
    passes = pass_sizes(program, stages)
    if sizes is None:
        chosen = shard_sizes(program, passes, options)
    else:
        chosen = {name: ShardSize(size, (SizeReason.GIVEN,)) for name, size in sizes.items()}
    chosen = with_whole_blocks(program, stages, chosen)
    lowering = _Lowering(program, passes, options, chosen, vectorizations or {})
    return lowering.plan(stages, name, paths)


class _Lowering:
    """Makes the steps of one plan."""

    def __init__(
        self,
        program: PlacedProgram,
        passes: Mapping[MapStage, PassSize],
        options: Options,
        sizes: Mapping[str, ShardSize],
        vectorizations: Mapping[str, Vectorization],
    ):
        self.program = program
        self.passes = passes
        self.options = options
        self.platforms = (default_platform(),) if options.platforms is None else options.platforms
        self.sizes = {placement: size.members for placement, size in sizes.items()}
        self.size_reasons = {placement: size.reasons for placement, size in sizes.items()}
        self.vectorizations = vectorizations
        # The tables of the plan, to which each step adds.
        self.costs: dict[str, Cost] = {}
        self.rules: dict[str, str] = {}
        self.values: dict[str, ValueType] = {}
        self.bodies: dict[str, Body] = {}
        # The inputs that steps read as server or as placed values.
        self.served_inputs: set[Var] = set()
        self.placed_inputs: set[Var] = set()
        # For each kind of name, the number of the last one.
        self.counts: dict[str, int] = {}
        # By name of the step, why a step runs as Python that JAX could not export.
        self.reasons: dict[str, str] = {}
        self.guard = guard_of(options)

    def plan(self, stages: Sequence[Stage], name: str, paths: Sequence[str]) -> Plan:
        # Steps come first: they find out which inputs are read, and how.
        steps = tuple(map(self.step, stages))
        flat = self.program.flat
        outputs = tuple(map(self.output, flat.outputs))
        plan = Plan(
            name=name,
            sizes={k: None if is_unknown(n) else n for k, n in self.program.sizes.items()},
            shard_sizes=self.sizes,
            values=self.values,
            inputs=tuple(map(self.input, flat.inputs, paths)),
            steps=steps,
            outputs=outputs,
            bodies=self.bodies,
            x64=bool(_compat.config.jax_enable_x64),
            jax_version=jax.__version__,
            file_starts=dict.fromkeys(self.program.file_groups, ()),
            constants=tuple(flat.constants),
            costs=self.costs,
            rules=self.rules,
            size_reasons=self.size_reasons,
        )
        if self.guard is None or not self.guard.drops:
            return plan
        return with_dropped_masks(plan, self.empty_pass)

    def empty_pass(self, placement: str) -> Map:
        """A pass that computes nothing, for the mask of all members."""
        name, size = self.name(f"members_{placement}"), self.sizes[placement]
        key = self.export(name, lambda members: lambda *heads: [], size, self.heads(size), [])
        guard = self.guard and self.guard._replace(on_nonfinite="keep")
        return Map(name, placement, key, (), (), (), (), guard=guard, short_body=key)

    # ------------------------------------------------------------------------------- values

    def served(self, var: Var) -> str:
        """The name of a value as a server value."""
        self.values.setdefault(var.name, value_type(var.aval))
        if self.program.is_in_memory(var):
            self.served_inputs.add(var)
        return var.name

    def placed(self, var: Var, along: MemberAxis) -> str:
        """The name of a value as a placed value; a server value is scattered."""
        # A value is placed natively along one axis, and has a name for each other axis along which
        # steps read it as well.
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

    def step(self, stage: Stage) -> Step:
        step = self.lowered(stage)
        self.rules[step.name] = rule_of(stage, self.program.sizes.values())
        return step

    def lowered(self, stage: Stage) -> Step:
        match stage:
            case ServerStage():
                return self.server(stage)
            case MapStage():
                return self.map(stage)
            case GatherStage():
                return self.gather(stage)
            case ScatterStage():
                operand, result = self.served(stage.var), self.placed(stage.var, stage.along)
                axis, line = stage.along.axis, stage.user.line
                reason = f"{short_name(stage.user)} reads it along the members"
                return Scatter(self.name("scatter"), operand, result, axis, reason, line)
            case RowsStage(eqn=eqn, along=along, place=place):
                operand, numbers = self.at(eqn.inputs[0], along), self.at(eqn.inputs[1], None)
                result = self.at(eqn.outputs[0], place)
                return Rows(self.name("rows"), operand, numbers, result, eqn.line)
            case LoopStage():
                return self.loop(stage)
            case BranchStage():
                return self.branch(stage)

    def gather(self, stage: GatherStage) -> Gather:
        operand, result = self.placed(stage.var, stage.along), self.served(stage.var)
        line = stage.user.line
        reason = why_on_server(stage.user)
        nbytes, limit = self.values[result].nbytes, self.options.gather_limit
        if limit is not None and nbytes > limit:
            raise StagingError(
                f"{line or 'in the program'}: {reason}, so {nbytes} bytes of "
                f"{self.values[operand]} ({self.program.sizes[stage.along.placement]} members) "
                f"would be gathered to the server; the option gather_limit allows {limit}. Reduce "
                "over the members first, do it for each member inside a map_fn, or raise the limit"
            )
        return Gather(self.name("gather"), operand, result, stage.along.axis, reason, line)

    def block(self, stage: BlockStages) -> Block:
        outputs = tuple(map(self.at, stage.block.outputs, stage.outputs))
        return Block(tuple(self.step(inner) for inner in stage.stages), outputs)

    def loop(self, stage: LoopStage) -> Loop:
        eqn, name = stage.eqn, self.name("loop")
        inits = list(map(self.at, eqn.inputs, stage.inputs))
        params = list(map(self.native, eqn.block.inputs))
        results = list(map(self.native, eqn.outputs))
        carried = zip(inits[: eqn.carried], params, results, strict=False)
        return Loop(
            name,
            eqn.rounds,
            self.block(stage.condition) if stage.condition else None,
            self.block(stage.block),
            tuple(Carried(*names) for names in carried),
            tuple(map(Sliced, inits[eqn.carried :], params[eqn.carried :])),
            tuple(results[eqn.carried :]),
            eqn.reverse,
            eqn.line,
        )

    def branch(self, stage: BranchStage) -> Branch:
        eqn, name = stage.eqn, self.name("branch")
        blocks = tuple(map(self.block, stage.branches))
        results = tuple(map(self.native, eqn.outputs))
        return Branch(name, self.at(eqn.inputs[0], None), blocks, results, eqn.line)

    def name(self, kind: str) -> str:
        """A new name for a step."""
        number = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{number}"

    def server(self, stage: ServerStage) -> Server:
        name = self.name("server")
        impls = [self.values[self.served(var)].key_impl for var in stage.inputs]

        def body(*raw: jax.Array) -> list[jax.Array]:
            env = dict(zip(stage.inputs, map(wrap, raw, impls), strict=True))
            evaluate(((eqn, None) for eqn in stage.eqns), env, None)
            return [unwrap(env[var]) for var in stage.outputs]

        inputs = tuple(self.served(var) for var in stage.inputs)
        arguments = [_argument(self.values[x]) for x in inputs]
        key = self.export(name, lambda members: body, None, arguments, stage.eqns)
        reasons = (why_on_server(eqn) for eqn in stage.eqns if eqn.primitive.name == "bj_map")
        outputs = tuple(self.served(var) for var in stage.outputs)
        self.costs[name] = server_cost(stage)
        return Server(name, key, inputs, outputs, next(reasons, ""))

    def map(self, stage: MapStage) -> Map:
        functions: list[str] = []
        for emission in stage.emissions:
            called = emission.eqn.params.get("name")
            # An operator with results in order may consist of several equations.
            if called and not (emission.rule.by_shard and called in functions):
                functions.append(called)
        name = self.name(f"map_{stage.placement}")
        size = self.sizes[stage.placement]
        broadcasts = tuple(self.served(var) for var in stage.broadcasts)
        operands = tuple(self.placed(var, along) for var, along in stage.operands)
        results = tuple(self.placed(var, self.program.places[var]) for var in stage.results)
        buffers = fuse_reductions(stage, self.served, self.values)
        combines = tuple(
            self.combine(e.eqn, e.rule)
            for e in stage.emissions
            if isinstance(e.rule, FunctionReductionRule)
        )
        types: list[tuple[ValueType, int | None]] = [(self.values[x], None) for x in broadcasts]
        types += [(self.values[x], size) for x in operands]
        impls = [value.key_impl for value, _ in types]
        arguments = [*self.heads(size), *(_argument(value, members) for value, members in types)]
        guard = self.guard
        n, chosen = self.program.sizes[stage.placement], self.vectorizations.get(name)
        vectorization, loop_reason = choose_vectorization(
            stage, self.passes[stage], buffers, size, self.options, self.platforms, chosen
        )
        sized = functools.partial(map_body, self.program, stage, buffers, impls, guard)
        if vectorization.kind != "vmap":
            batch = vectorization.batch or 1
            sized = functools.partial(sequential_body, sized, stage, buffers, guard, batch)
        self.costs[name] = self.passes[stage].cost
        eqns = [e.eqn for e in stage.emissions]
        full = functools.partial(sized, full=True)
        # A Python function needs no variants: it is called without padding.
        exported = not callbacks.reason_for_python(eqns, self.options)
        all_full = _are_all_full(n, size) and stage.placement not in self.program.file_groups
        # A guard that drops members passes shards with gaps even where all shards are full.
        if exported and all_full and not (guard and guard.drops):
            key, short = self.export(name, full, size, arguments, eqns), None
        elif exported and _separate_executables_pay(stage, n, size):
            key = self.export(name, full, size, arguments, eqns)
            short = self.export(name, sized, size, arguments, eqns)
        else:
            key = short = self.export(name, sized, size, arguments, eqns)
        return Map(
            name, stage.placement, key, broadcasts, operands, results, buffers, tuple(functions),
            combines, guard, loop_reason=loop_reason, vectorization=vectorization,
            short_body=short,
        )  # fmt: skip

    def heads(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """Types of the first arguments of the body of a pass; see `Map` and `Guard`."""
        integer = np.dtype("int32")
        start = jax.ShapeDtypeStruct((), integer)
        if self.guard is None:
            return [start, start]
        mask = jax.ShapeDtypeStruct((size,), np.dtype("bool"))
        return [start, jax.ShapeDtypeStruct((size,), integer), mask]

    def combine(self, eqn: Eqn, rule: FunctionReductionRule) -> Combine:
        """Lowers a reduction by a function; its body merges partials of two ranges of members."""
        axes = zip(eqn.inputs, rule.in_axes, strict=True)
        served = [atom for atom, axis in axes if axis is None]
        variables = [atom for atom in served if isinstance(atom, Var)]
        leaves = tuple(map(value_type, rule.leaves))
        names: list[str | None] = [None] * len(leaves)
        for var, leaf in zip(eqn.outputs, rule.results, strict=True):
            names[leaf] = self.served(var)
        inputs = tuple(map(self.served, variables))
        types = [self.values[name] for name in inputs] + [*leaves, *leaves]
        impls = [value.key_impl for value in types]

        def body(*raw: jax.Array) -> list[jax.Array]:
            values = list(map(wrap, raw, impls))
            env = dict(zip(variables, values, strict=False))
            left, right = values[len(inputs) : -len(leaves)], values[-len(leaves) :]
            outs = rule.combine(eqn, [read(env, atom) for atom in served], left, right)
            return list(map(unwrap, outs))

        key = self.export(
            rule.reducer, lambda members: body, None, list(map(_argument, types)), [eqn]
        )
        return Combine(rule.reducer, key, inputs, leaves, tuple(names))

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
                reason = callbacks.reason_not_exported(error, eqns, self.platforms)
                self.reasons[name] = reason
        key, body = callbacks.as_python(name, sized, size, arguments, eqns, reason)
        self.bodies[key] = body
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
        with default_promotion():
            if self.platforms == ("cpu",):
                function = with_channels_last(function, arguments, eqns)
            key, body = export_body(name, function, arguments, self.platforms, lines)
        self.bodies[key] = body
        return key


def _are_all_full(n: Any, size: int) -> bool:
    """Whether n members are a whole number of shards."""
    return not is_unknown(n) and n % size == 0


def _separate_executables_pay(stage: MapStage, n: Any, size: int) -> bool:
    """Whether an executable for full shards saves more time than it takes to make."""
    # Reductions mask padding and dropped members. A mask between the members and their sum keeps
    # XLA from making one matrix product of a sum of products, such as the gradients of a dense
    # layer or the terms of a covariance, which then takes up to 80 times as long. All shards but
    # the last are full and need no mask.
    if not is_unknown(n) and n < size:
        return False
    members = UNKNOWN_MEMBERS if is_unknown(n) else n
    return _masked_values(stage, n) * members > MASKED_VALUES


def _masked_values(stage: MapStage, n: Any) -> float:
    """The number of values per member that reductions read."""
    values = 0.0
    for emission in stage.emissions:
        if isinstance(emission.rule, ReductionRule):
            for atom, axis in zip(emission.eqn.inputs, emission.rule.in_axes, strict=True):
                if axis is not None:
                    values += known_size(shape_of(atom)) / (1 if is_unknown(n) else n)
    return values


def _argument(value: ValueType, members: int | None = None) -> jax.ShapeDtypeStruct:
    shape = value.shape if members is None else (members, *value.shape)
    return jax.ShapeDtypeStruct(shape, np.dtype(value.dtype))
