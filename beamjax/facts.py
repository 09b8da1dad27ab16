"""What a plan does, step by step, as plain facts: types, bytes, passes, what moves and why.

Everything here is computed from the plan alone, and nothing is formatted; `beamjax.explanation`
lays it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.arrays import dtype_name
from beamjax.bodies import value_type
from beamjax.interpreters.stage import Argument
from beamjax.plan import Body, Gather, Map, Output, Plan, Scatter, Server, Step


@dataclass(frozen=True)
class ValueFact:
    """A value, its type (`float32[5,3]@clients`) and its bytes, of all members if it is placed.

    The bytes of a member, and of a shard with its padding, are None for server values.
    """

    name: str
    type: str
    nbytes: int
    member_bytes: int | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True)
class InputFact:
    """One input: `read` says how, `values` under which names the steps read it."""

    path: str
    type: str
    nbytes: int
    read: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class ReductionFact:
    """One reduction that ends in a pass; `nbytes` is what each shard sends for it."""

    result: ValueFact
    reducer: str
    lane: str
    exactness: str
    nbytes: int


@dataclass(frozen=True)
class StepFact:
    """One step.

    Attributes:
      kind: "Server", "Map", "Gather" or "Scatter".
      placement: whose members it deals with, or None.
      functions: names of the user's functions in a map.
      served: server values that it reads.
      placed: placed values that it reads.
      results: what it makes, but for reductions.
      executables: bytes of StableHLO by platform.
      axis: of the members, if the step gathers or scatters; `reason` says why it does, or why a
        step on the server holds a map.
      lines: the user's `file:line (function)`.
      python: why the step runs as Python, if it does.
      read_bytes: of the placed values that a pass reads, all members.
      broadcast_bytes: of the server values that a pass reads, once.
      partial_bytes: that each shard sends to the reductions.
    """

    name: str
    kind: str
    placement: str | None
    served: tuple[ValueFact, ...]
    placed: tuple[ValueFact, ...]
    results: tuple[ValueFact, ...]
    functions: tuple[str, ...] = ()
    reductions: tuple[ReductionFact, ...] = ()
    executables: Mapping[str, int] = dataclasses.field(default_factory=dict)
    axis: int | None = None
    reason: str = ""
    lines: tuple[str, ...] = ()
    python: str = ""
    read_bytes: int = 0
    broadcast_bytes: int = 0
    partial_bytes: int = 0


@dataclass(frozen=True)
class OutputFact:
    """One output, the input or step it comes from, and the value's name there."""

    path: str
    type: str
    nbytes: int
    source: str
    value: str


@dataclass(frozen=True)
class Edge:
    """A value that goes from an input or a step to a step or an output."""

    source: str
    target: str
    value: str
    nbytes: int


@dataclass(frozen=True)
class PlacementFact:
    """A placement, the number of its members, and how they are cut to shards."""

    name: str
    members: int
    shard_size: int
    shards: int


@dataclass(frozen=True)
class PlanFacts:
    """A plan as numbers and text; bytes are the sums of those of the steps."""

    program: str
    jax_version: str
    x64: bool
    passes: int
    placements: tuple[PlacementFact, ...]
    inputs: tuple[InputFact, ...]
    steps: tuple[StepFact, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[OutputFact, ...]
    read_bytes: int
    broadcast_bytes: int
    partial_bytes: int
    gathered_bytes: int
    executable_bytes: Mapping[str, int]


def plan_facts(
    plan: Plan, inputs: Sequence[InputFact], paths: Sequence[str], reduction: str = "exact"
) -> PlanFacts:
    """Everything that is told about a plan.

    Args:
      plan: the plan.
      inputs: from `input_facts`.
      paths: where each output stands in the result.
      reduction: of `Options`.
    """
    steps = tuple(step_fact(plan, step, reduction) for step in plan.steps)
    makers = {name: fact.path for fact in inputs for name in fact.values}
    for fact in steps:
        makers |= {value.name: fact.name for value in _made(fact)}
    outputs = tuple(
        _output_fact(plan, out, path, inputs, makers)
        for out, path in zip(plan.outputs, paths, strict=True)
    )
    edges = [
        Edge(makers[value.name], fact.name, value.name, value.nbytes)
        for fact in steps
        for value in (*fact.served, *fact.placed)
    ]
    edges += [Edge(o.source, o.path, o.value, o.nbytes) for o in outputs if o.value]
    platforms = dict.fromkeys(p for fact in steps for p in fact.executables)
    placements = tuple(
        PlacementFact(name, n, plan.shard_sizes[name], plan.shards(name))
        for name, n in plan.sizes.items()
    )
    return PlanFacts(
        program=plan.name, jax_version=plan.jax_version, x64=plan.x64, passes=plan.passes(),
        placements=placements, inputs=tuple(inputs), steps=steps, edges=tuple(edges),
        outputs=outputs,
        read_bytes=sum(fact.read_bytes for fact in steps),
        broadcast_bytes=sum(fact.broadcast_bytes for fact in steps),
        partial_bytes=sum(fact.partial_bytes for fact in steps),
        gathered_bytes=sum(v.nbytes for f in steps if f.kind == "Gather" for v in f.placed),
        executable_bytes={p: sum(f.executables.get(p, 0) for f in steps) for p in platforms},
    )  # fmt: skip


def step_fact(plan: Plan, step: Step, reduction: str = "exact") -> StepFact:
    """The facts of one step."""

    def values(names: Sequence[str]) -> tuple[ValueFact, ...]:
        return tuple(value_fact(plan, name) for name in names)

    match step:
        case Server(name, body, ins, outs, reason):
            code = plan.bodies[body]
            return StepFact(
                name, "Server", None, values(ins), (), values(outs),
                executables=_sizes(code.artefacts), lines=code.lines, python=_python(code),
                reason=reason,
            )  # fmt: skip
        case Map():
            code = plan.bodies[step.body]
            broadcasts, operands = values(step.broadcasts), values(step.operands)
            reductions = tuple(_reduction_facts(plan, step, reduction))
            return StepFact(
                step.name, "Map", step.placement, broadcasts, operands, values(step.results),
                step.functions, reductions, _sizes(code.artefacts), lines=code.lines,
                python=_python(code),
                read_bytes=sum(value.nbytes for value in operands),
                broadcast_bytes=sum(value.nbytes for value in broadcasts),
                partial_bytes=sum(fact.nbytes for fact in reductions),
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


def value_fact(plan: Plan, name: str) -> ValueFact:
    """The facts of one value."""
    value = plan.values[name]
    if value.placement is None:
        return ValueFact(name, str(value), value.nbytes)
    shard = value.nbytes * plan.shard_sizes[value.placement]
    return ValueFact(name, str(value), plan.nbytes(name), value.nbytes, shard)


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


def _sizes(artefacts: Mapping[str, bytes]) -> dict[str, int]:
    return {platform: len(data) for platform, data in artefacts.items()}


def _made(fact: StepFact) -> tuple[ValueFact, ...]:
    return (*fact.results, *(reduction.result for reduction in fact.reductions))


def input_facts(plan: Plan, arguments: Sequence[Argument]) -> tuple[InputFact, ...]:
    """The facts of a plan's inputs: the user's arguments, then the closed-over constants."""
    whole = [(argument.aval, _where(argument)) for argument in arguments]
    whole += [(jax.typeof(value), "closed over") for value in plan.constants]
    returned = {out.input for out in plan.outputs}
    facts = []
    for i, (spec, (aval, where)) in enumerate(zip(plan.inputs, whole, strict=True)):
        names = tuple(name for name in (spec.server, spec.placed) if name is not None)
        placement = plan.values[spec.placed].placement if spec.placed else None
        unread = "returned as it is" if i in returned else "not read"
        how = "by shards" if placement else "whole" if names else unread
        if aval.dtype == jax.dtypes.float0:
            described, nbytes = _float0(aval.shape), 0
        else:
            value = value_type(aval, placement, spec.axis if placement else None)
            described, nbytes = str(value), value_type(aval).nbytes
        facts.append(InputFact(spec.path, described, nbytes, f"{how}, {where}", names))
    return tuple(facts)


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
