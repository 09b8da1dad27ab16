"""What a plan does, step by step, as plain facts: types, bytes, passes, what moves and why.

Everything here is computed from the plan alone, and nothing is formatted; `beamjax.explanation`
lays it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax._text import Bytes, MemberBytes
from beamjax.bodies.export import value_type
from beamjax.diagnostics.device_memory import device_estimates
from beamjax.diagnostics.fact_types import (
    BlockFact,
    DeviceFact,
    Edge,
    HandedFact,
    InputFact,
    MemoryFact,
    OutputFact,
    PlacementFact,
    PlanFacts,
    ReductionFact,
    StepFact,
    ValueFact,
    walk_facts,
)
from beamjax.diagnostics.memory import Part, StepMemory, estimate
from beamjax.diagnostics.topology import Workers
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.staging.stage import Argument
from beamjax.options import Options
from beamjax.plan.merging import FanOut, fan_out
from beamjax.plan.steps import (
    Block,
    Body,
    Branch,
    Gather,
    Loop,
    Map,
    Output,
    Plan,
    Scatter,
    Server,
    Step,
    size_name,
)
from beamjax.sources.source_base import Source
from beamjax.storage.dtypes import dtype_name


def plan_facts(
    plan: Plan,
    inputs: Sequence[InputFact],
    paths: Sequence[str],
    reduction: str = "exact",
    workers: int | None = None,
    groups: int | None = None,
) -> PlanFacts:
    """Everything that is told about a plan.

    Args:
      plan: the plan.
      inputs: from `input_facts`.
      paths: where each output stands in the result.
      reduction: of `Options`.
      workers: that options of Beam ask for, if they do.
      groups: the option `merge_fan_out`.
    """
    steps = tuple(step_fact(plan, step, reduction, workers, groups) for step in plan.steps)
    everything = list(walk_facts(steps))
    makers = {name: fact.path for fact in inputs for name in fact.values}
    for fact in everything:
        makers |= {value.name: fact.name for value in _made(fact)}
    outputs = tuple(
        _output_fact(plan, out, path, inputs, makers)
        for out, path in zip(plan.outputs, paths, strict=True)
    )
    edges = list(dict.fromkeys(edge for fact in everything for edge in _edges(fact, makers)))
    edges += [Edge(o.source, o.path, o.value, o.nbytes) for o in outputs if o.value]
    platforms = dict.fromkeys(p for fact in everything for p in fact.executables)
    placements = tuple(
        PlacementFact(name, n, plan.shard_sizes[name], plan.shards(name) if n else None)
        for name, n in plan.sizes.items()
    )
    return PlanFacts(
        program=plan.name, jax_version=plan.jax_version, x64=plan.x64, passes=plan.passes(),
        placements=placements, inputs=tuple(inputs), steps=steps, edges=tuple(edges),
        outputs=outputs,
        read_bytes=_total(v for fact in everything if fact.kind == "Map" for v in fact.placed),
        broadcast_bytes=sum(fact.broadcast_bytes for fact in everything),
        partial_bytes=sum(fact.partial_bytes for fact in everything),
        saved_bytes=sum(fact.saved_bytes for fact in everything),
        gathered_bytes=_total(v for f in everything if f.kind == "Gather" for v in f.placed),
        executable_bytes={p: sum(f.executables.get(p, 0) for f in everything) for p in platforms},
    )  # fmt: skip


def memory_fact(
    plan: Plan, sources: Mapping[int, Source], options: Options, runner: Any
) -> MemoryFact:
    """What a plan takes of memory on a runner; see `beamjax.diagnostics.memory.estimate`."""

    def parts(of: Sequence[Part]) -> dict[str, int]:
        return {part.what: part.nbytes for part in of}

    def by_step(steps: Sequence[StepMemory]) -> dict[str, dict[str, int]]:
        return {step.step: parts(step.parts) for step in steps if step.parts}

    name = runner if isinstance(runner, str) else type(runner).__name__
    workers = Workers.of(name, options)
    found = estimate(plan, sources, options, workers)
    devices = device_estimates(plan, options, workers.beam)
    return MemoryFact(
        parts(found.kept), by_step(found.steps), found.worker_bytes, parts(found.launcher),
        found.launcher_bytes, found.shared, f"{name}, {workers.text()}",
        tuple(
            DeviceFact(d.platform, parts(d.kept), by_step(d.steps), d.nbytes, d.made_from)
            for d in devices
        ),
    )  # fmt: skip


def step_fact(
    plan: Plan,
    step: Step,
    reduction: str = "exact",
    workers: int | None = None,
    groups: int | None = None,
) -> StepFact:
    """The facts of one step."""

    def values(names: Sequence[str]) -> tuple[ValueFact, ...]:
        return tuple(value_fact(plan, name) for name in names)

    match step:
        case Server(name, body, ins, outs, reason):
            code = plan.bodies[body]
            return StepFact(
                name, "Server", None, values(ins), (), values(outs),
                executables=_sizes([code]), lines=code.lines, python=_python(code),
                reason=reason,
            )  # fmt: skip
        case Map():
            code = plan.bodies[step.body]
            codes = [plan.bodies[key] for key in step.executables]
            broadcasts, operands = values(step.broadcasts), values(step.operands)
            reductions = tuple(_reduction_facts(plan, step, reduction))
            return StepFact(
                step.name, "Map", step.placement, broadcasts, operands, values(step.results),
                step.functions, reductions, _sizes(codes), lines=code.lines,
                python=_python(code),
                read_bytes=_total(operands),
                broadcast_bytes=sum(plan.values[name].nbytes for name in step.broadcasts),
                partial_bytes=sum(fact.nbytes for fact in reductions),
                saved_bytes=step.saved,
                reason=_ways(step),
                merge=_merge(plan, step, reduction, workers, groups),
            )  # fmt: skip
        case Gather(name, operand, result, axis, reason, line):
            moved, lines, placement = values([operand]), (line,), plan.values[operand].placement
            return StepFact(
                name, "Gather", placement, (), moved, values([result]),
                axis=axis, reason=reason, lines=lines,
            )  # fmt: skip
        case Scatter(name, operand, result, axis, reason, line):
            moved, lines, placement = values([operand]), (line,), plan.values[result].placement
            return StepFact(
                name, "Scatter", placement, moved, (), values([result]),
                axis=axis, reason=reason, lines=lines,
            )  # fmt: skip
        case Loop():
            return _loop_fact(plan, step, reduction, workers, groups)
        case Branch(name, index, blocks, results, line):
            facts = tuple(
                _block_fact(plan, f"block {i}", block, reduction, workers, groups)
                for i, block in enumerate(blocks)
            )
            return StepFact(
                name, "Branch", None, values([index]), (), values(results), lines=(line,),
                blocks=facts,
            )  # fmt: skip


def _ways(step: Map) -> str:
    """How shards are computed, where it is not all members at once by one executable."""
    told = []
    if step.loop_reason:
        how = (
            "one after the other"
            if step.vectorization.kind == "loop"
            else f"in {step.vectorization}"
        )
        told.append(f"members {how}: {step.loop_reason}")
    if step.short_body not in (None, step.body):
        told.append("full shards by an executable of their own, without a mask")
    return "; ".join(told)


def _merge(
    plan: Plan, step: Map, mode: str, workers: int | None, groups: int | None
) -> FanOut | None:
    shards = plan.shards(step.placement) if plan.sizes[step.placement] else None
    return fan_out(step, shards, workers, mode, groups) if step.lanes else None


def _loop_fact(
    plan: Plan, loop: Loop, reduction: str, workers: int | None, groups: int | None
) -> StepFact:
    handed = [
        HandedFact("carries", value_fact(plan, v.param), v.init, v.result) for v in loop.carried
    ]
    handed += [HandedFact("slices", value_fact(plan, v.param), v.operand) for v in loop.sliced]
    entries = loop.block.outputs[len(loop.carried) :]
    handed += [
        HandedFact("stacks", value_fact(plan, entry), None, name)
        for entry, name in zip(entries, loop.stacked, strict=True)
    ]
    read = [value_fact(plan, fact.outside) for fact in handed if fact.outside is not None]
    made = [value_fact(plan, fact.afterwards) for fact in handed if fact.afterwards is not None]
    blocks = [_block_fact(plan, "each round", loop.block, reduction, workers, groups)]
    if loop.condition is not None:
        blocks.insert(0, _block_fact(plan, "condition", loop.condition, reduction, workers, groups))
    return StepFact(
        loop.name, "Loop", None,
        tuple(value for value in read if value.member_bytes is None),
        tuple(value for value in read if value.member_bytes is not None),
        tuple(made), lines=(loop.line,), rounds=loop.rounds, reverse=loop.reverse,
        handed=tuple(handed), blocks=tuple(blocks),
    )  # fmt: skip


def _block_fact(
    plan: Plan, title: str, block: Block, reduction: str, workers: int | None, groups: int | None
) -> BlockFact:
    steps = tuple(step_fact(plan, step, reduction, workers, groups) for step in block.steps)
    return BlockFact(title, steps, tuple(value_fact(plan, name) for name in block.outputs))


def value_fact(plan: Plan, name: str) -> ValueFact:
    """The facts of one value."""
    value = plan.values[name]
    if value.placement is None:
        return ValueFact(name, str(value), value.nbytes)
    shard = value.nbytes * plan.shard_sizes[value.placement]
    known = plan.sizes[value.placement] is not None
    nbytes = plan.nbytes(name) if known else MemberBytes(value.nbytes)
    return ValueFact(name, str(value), nbytes, value.nbytes, shard)


def _total(values: Iterable[ValueFact]) -> Bytes:
    total: Bytes = 0
    for value in values:
        total = total + value.nbytes
    return total


def exactness(kind: str, dtype: str, reduction: str = "exact") -> str:
    """What is promised of the reductions of a lane, in words."""
    rounds = kind in ("sum", "prod") and jnp.issubdtype(np.dtype(dtype), np.inexact)
    if not rounds:
        return "exact"
    if reduction == "fast":
        return "fast: in float64, the last bits depend on the order"
    if kind == "sum":
        return "exact over shards: rounded once, the same bits in any order"
    return "in the order of the shards, the same bits on any runner"


def _reduction_facts(plan: Plan, step: Map, mode: str) -> Iterator[ReductionFact]:
    for lane in step.lanes:
        for reduction in lane.reductions:
            yield ReductionFact(
                value_fact(plan, reduction.result), reduction.reducer, f"{lane.kind} {lane.dtype}",
                exactness(lane.kind, lane.dtype, mode),
                reduction.size * np.dtype(lane.dtype).itemsize,
            )  # fmt: skip
    for combine in step.combines:
        pairs = list(zip(combine.results, combine.leaves, strict=True))
        # What is sent beside the results counts for the first of them.
        beside = sum(leaf.nbytes for name, leaf in pairs if name is None)
        for name, leaf in pairs:
            if name is not None:
                yield ReductionFact(
                    value_fact(plan, name), combine.name, "of its own",
                    "in the order of the members, the same bits on any runner",
                    leaf.nbytes + beside,
                )  # fmt: skip
                beside = 0


def _python(body: Body) -> str:
    return body.python.reason if body.python else ""


def _sizes(bodies: Sequence[Body]) -> dict[str, int]:
    platforms = dict.fromkeys(platform for body in bodies for platform in body.artefacts)
    return {name: sum(len(body.artefacts.get(name, b"")) for body in bodies) for name in platforms}


def _made(fact: StepFact) -> tuple[ValueFact, ...]:
    """What a step makes for others, for those in its own blocks included."""
    params = (value.inside for value in fact.handed if value.outside is not None)
    return (*fact.results, *(reduction.result for reduction in fact.reductions), *params)


def _edges(fact: StepFact, makers: Mapping[str, str]) -> Iterator[Edge]:
    """From the makers of what a step reads; what leaves its blocks comes back to it."""
    given = (value for block in fact.blocks for value in block.outputs)
    for value in (*fact.served, *fact.placed, *given):
        if makers[value.name] != fact.name:
            yield Edge(makers[value.name], fact.name, value.name, value.nbytes)


def input_facts(plan: Plan, arguments: Sequence[Argument]) -> tuple[InputFact, ...]:
    """The facts of a plan's inputs: the user's arguments, then the closed-over constants."""
    whole = [(argument.aval, _where(argument)) for argument in arguments]
    whole += [(jax.typeof(value), "closed over") for value in plan.constants]
    returned = {out.input for out in plan.outputs}
    facts = []
    for i, (spec, (aval, where)) in enumerate(zip(plan.inputs, whole, strict=True)):
        views = tuple(view.placed for view in spec.views)
        names = tuple(x for x in (spec.server, spec.placed, *views) if x is not None)
        placement = plan.values[spec.placed].placement if spec.placed else None
        ways = ["whole"] if spec.server else []
        ways += ["by shards"] if spec.placed else []
        ways += [f"by shards of {view.rows} rows a member" for view in spec.views]
        how = " and ".join(ways) or ("returned as it is" if i in returned else "not read")
        if aval.dtype == jax.dtypes.float0:
            described = _float0(aval.shape)
        else:
            described = str(value_type(aval, placement, spec.axis if placement else None))
        nbytes = _whole_bytes(aval)
        facts.append(InputFact(spec.path, described, nbytes, f"{how}, {where}", names))
    for placement, n in plan.sizes.items():
        if n is None:
            name = size_name(placement)
            read = "whole, found while the pipeline runs"
            facts.append(InputFact(f"number of {placement}", "int32[]", 4, read, (name,)))
    return tuple(facts)


def _whole_bytes(aval: Any) -> Bytes:
    """Bytes of an input, members included; their axis is the first one if it is symbolic."""
    if aval.dtype == jax.dtypes.float0:
        return 0
    if not any(map(is_unknown, aval.shape)):
        return value_type(aval).nbytes
    return MemberBytes(value_type(aval, axis=0).nbytes)


def _where(argument: Argument) -> str:
    if argument.is_source:
        return argument.value.describe()
    return "abstract" if argument.value is None else "in memory"


def _float0(shape: Sequence[int]) -> str:
    return f"float0[{','.join(map(str, shape))}]"


def _output_fact(
    plan: Plan,
    out: Output,
    path: str,
    inputs: Sequence[InputFact],
    makers: Mapping[str, str],
) -> OutputFact:
    if out.value is not None:
        value = value_fact(plan, out.value)
        return OutputFact(path, value.type, value.nbytes, makers[value.name], value.name)
    if out.input is not None:
        fact = inputs[out.input]
        return OutputFact(path, fact.type, fact.nbytes, fact.path, fact.path)
    constant = np.asarray(out.constant)
    dims = ",".join(map(str, constant.shape))
    described = f"{dtype_name(constant.dtype)}[{dims}]"
    return OutputFact(path, described, constant.nbytes, "constant", "")
