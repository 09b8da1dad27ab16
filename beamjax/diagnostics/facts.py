"""Makes the facts of a plan: steps, types, operations, bytes, memory and choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax._text import Bytes, MemberBytes, human_bytes
from beamjax.bodies.export import value_type
from beamjax.diagnostics.fact_types import (
    BlockFact,
    ChoiceFact,
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
from beamjax.diagnostics.memory import device_estimates, estimate
from beamjax.diagnostics.topology import Workers
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering.buckets import padding_notes
from beamjax.interpreters.planning import Planned
from beamjax.interpreters.staging.stage import Argument
from beamjax.options import Options
from beamjax.plan.merging import FanOut, fan_out, workers_of
from beamjax.plan.steps import (
    Block,
    Body,
    Branch,
    Gather,
    Loop,
    Map,
    Plan,
    Scatter,
    Server,
    Step,
    size_name,
    walk,
)
from beamjax.runtime.cached_shards import count_cached, uncached_reason
from beamjax.runtime.inputs import Inputs
from beamjax.storage.dtypes import dtype_name


def facts_of(
    planned: Planned,
    arguments: Sequence[Argument],
    options: Options,
    notes: tuple[str, ...],
    runner: str,
    inputs: Inputs | None = None,
) -> PlanFacts:
    """Returns all facts of a plan.

    Args:
      planned: the plan, and the program that it is of.
      arguments: the flattened arguments of the program.
      options: the options of the run.
      notes: notes of how the arguments are read.
      runner: the name of the runner.
      inputs: the values of the inputs, to count the shards that the cache has; None not to.
    """
    plan = planned.plan
    found = input_facts(plan, arguments)
    steps = tuple(step_fact(plan, step, options) for step in plan.steps)
    every = list(walk_facts(steps))
    makers = {name: fact.path for fact in found for name in fact.values}
    for fact in every:
        makers |= {value.name: fact.name for value in _made(fact)}
    outputs = tuple(_output_facts(planned, found, makers))
    edges = list(dict.fromkeys(edge for fact in every for edge in _edges(fact, makers)))
    edges += [Edge(o.source, o.path, o.value, o.nbytes) for o in outputs if o.value]
    platforms = dict.fromkeys(p for fact in every for p in fact.executables)
    return PlanFacts(
        program=plan.name, jax_version=plan.jax_version, x64=plan.x64, passes=plan.passes(),
        placements=tuple(
            PlacementFact(name, n, plan.shard_sizes[name], plan.shards(name).count)
            for name, n in plan.sizes.items()
        ),
        inputs=found, steps=steps, edges=tuple(edges), outputs=outputs,
        read_bytes=sum(v.nbytes for f in every if f.kind == "Map" for v in f.placed),
        broadcast_bytes=sum(fact.broadcast_bytes for fact in every),
        partial_bytes=sum(fact.partial_bytes for fact in every),
        gathered_bytes=sum(v.nbytes for f in every if f.kind == "Gather" for v in f.placed),
        executable_bytes={p: sum(f.executables.get(p, 0) for f in every) for p in platforms},
        notes=notes + padding_notes(plan, arguments) + _cache_notes(plan, options, inputs),
        memory=_memory(plan, arguments, options, runner),
        choices=tuple(_choices(plan, steps, options, runner)),
    )  # fmt: skip


def _memory(plan: Plan, arguments: Sequence[Argument], options: Options, runner: str) -> MemoryFact:
    sources = {i: a.value for i, a in enumerate(arguments) if a.is_source}
    workers = Workers.of(runner, options)
    return dataclasses.replace(
        estimate(plan, sources, options, workers),
        where=f"{runner}, {workers.text()}",
        devices=tuple(device_estimates(plan, options, workers.beam)),
    )


def _cache_notes(plan: Plan, options: Options, inputs: Inputs | None) -> tuple[str, ...]:
    """Returns for each pass how many shards the cache has, or why it is not cached."""
    if options.cache is None:
        return ()
    return tuple(
        f"the shards of {step.name} are {_cached_text(plan, step, options, inputs)}"
        for step in walk(plan.steps)
        if isinstance(step, Map)
    )


def _cached_text(plan: Plan, step: Map, options: Options, inputs: Inputs | None) -> str:
    if why := uncached_reason(plan, step):
        return f"not cached: {why}"
    n = plan.sizes[step.placement]
    most = "" if n is None else f", {len(plan.shards(step.placement))} at most"
    if inputs is None:
        return f"looked up in the cache{most}"
    known = count_cached(inputs, step, options)
    if isinstance(known, int):
        return f"looked up in the cache, which has {known} of {len(plan.shards(step.placement))}"
    return f"looked up in the cache{most}; how many it has is not known before the run, as {known}"


def step_fact(plan: Plan, step: Step, options: Options) -> StepFact:
    """Returns the facts of one step."""
    more: dict[str, Any] = {}
    placement: str | None = None
    reads: Sequence[str]
    made: Sequence[str]
    match step:
        case Server():
            body = plan.bodies[step.body]
            reads, made, lines = step.inputs, step.outputs, body.lines
            more = {"executables": _sizes([body]), "python": _python(body), "reason": step.reason}
        case Map():
            body = plan.bodies[step.body]
            reads, made, lines = (*step.broadcasts, *step.operands), step.results, body.lines
            placement, more = step.placement, _pass_facts(plan, step, options)
        case Gather() | Scatter():
            reads, made, lines = [step.operand], [step.result], (step.line,)
            more = {"axis": step.axis, "reason": step.reason}
            placed = step.operand if isinstance(step, Gather) else step.result
            placement = plan.values[placed].placement
        case Loop():
            reads = [v.init for v in step.carried] + [v.operand for v in step.sliced]
            made = [*(v.result for v in step.carried), *step.stacked]
            lines, more = (step.line,), _loop_facts(plan, step, options)
        case Branch():
            reads, made, lines = [step.index], step.results, (step.line,)
            blocks = enumerate(step.blocks)
            more["blocks"] = tuple(_block(plan, f"block {i}", x, options) for i, x in blocks)
    read = [value_fact(plan, name) for name in reads]
    return StepFact(
        step.name,
        type(step).__name__,
        placement,
        tuple(value for value in read if value.member_bytes is None),
        tuple(value for value in read if value.member_bytes is not None),
        tuple(value_fact(plan, name) for name in made),
        lines=tuple(lines),
        cost=plan.costs.get(step.name),
        **more,
    )


def _pass_facts(plan: Plan, step: Map, options: Options) -> dict[str, Any]:
    """Returns the facts of a step that only a pass has."""
    reductions = tuple(_reduction_facts(plan, step, options.reduction))
    shards = plan.shards(step.placement).count
    workers = workers_of(options.beam)
    merge = fan_out(step, shards, workers, options.reduction)
    ways = []
    if step.loop_reason:
        how = "sequentially" if step.vectorization.kind == "loop" else f"in {step.vectorization}"
        ways.append(f"members {how}: {step.loop_reason}")
    if step.short_body not in (None, step.body):
        ways.append("full shards by a separate executable, without a mask")
    return {
        "functions": step.functions,
        "reductions": reductions,
        "executables": _sizes([plan.bodies[key] for key in step.executables]),
        "python": _python(plan.bodies[step.body]),
        "read_bytes": sum(value_fact(plan, name).nbytes for name in step.operands),
        "broadcast_bytes": sum(plan.values[name].nbytes for name in step.broadcasts),
        "partial_bytes": sum(fact.nbytes for fact in reductions),
        "reason": "; ".join(ways),
        "merge": merge if step.buffers else None,
    }


def _loop_facts(plan: Plan, loop: Loop, options: Options) -> dict[str, Any]:
    """Returns the facts of a step that only a loop has."""
    entries = loop.block.outputs[len(loop.carried) :]
    handed = [
        *(HandedFact("carries", value_fact(plan, v.param), v.init, v.result) for v in loop.carried),
        *(HandedFact("slices", value_fact(plan, v.param), v.operand) for v in loop.sliced),
        *(
            HandedFact("stacks", value_fact(plan, entry), None, name)
            for entry, name in zip(entries, loop.stacked, strict=True)
        ),
    ]
    blocks = [_block(plan, "each round", loop.block, options)]
    if loop.condition is not None:
        blocks.insert(0, _block(plan, "condition", loop.condition, options))
    return {
        "rounds": loop.rounds,
        "reverse": loop.reverse,
        "handed": tuple(handed),
        "blocks": tuple(blocks),
    }


def _block(plan: Plan, title: str, block: Block, options: Options) -> BlockFact:
    steps = tuple(step_fact(plan, step, options) for step in block.steps)
    return BlockFact(title, steps, tuple(value_fact(plan, name) for name in block.outputs))


def value_fact(plan: Plan, name: str) -> ValueFact:
    """Returns the facts of one value."""
    value = plan.values[name]
    if value.placement is None:
        return ValueFact(name, str(value), value.nbytes)
    shard = value.nbytes * plan.shard_sizes[value.placement]
    known = plan.sizes[value.placement] is not None
    nbytes = plan.nbytes(name) if known else MemberBytes(value.nbytes)
    return ValueFact(name, str(value), nbytes, value.nbytes, shard)


def exactness(kind: str, dtype: str, reduction: str = "exact") -> str:
    """Returns what the bits of a fused reduction buffer depend on, in words."""
    rounds = kind in ("sum", "prod") and jnp.issubdtype(np.dtype(dtype), np.inexact)
    if not rounds:
        return "exact"
    if reduction == "fast":
        return "fast: in float64, the last bits depend on the order"
    if kind == "sum":
        return "exact over shards: rounded once, the same bits in any order"
    return "in the order of the shards, the same bits on any runner"


def _reduction_facts(plan: Plan, step: Map, mode: str) -> Iterator[ReductionFact]:
    for buffer in step.buffers:
        for reduction in buffer.reductions:
            yield ReductionFact(
                value_fact(plan, reduction.result),
                reduction.reducer,
                f"{buffer.kind} {buffer.dtype}",
                exactness(buffer.kind, buffer.dtype, mode),
                reduction.size * np.dtype(buffer.dtype).itemsize,
            )  # fmt: skip
    for combine in step.combines:
        pairs = list(zip(combine.results, combine.leaves, strict=True))
        # The leaves that are no results count for the first result.
        beside = sum(leaf.nbytes for name, leaf in pairs if name is None)
        for name, leaf in pairs:
            if name is not None:
                yield ReductionFact(
                    value_fact(plan, name), combine.name, "separate",
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
    """Returns the values that a step makes for other steps, or for those in its own blocks."""
    params = (value.inside for value in fact.handed if value.outside is not None)
    return (*fact.results, *(reduction.result for reduction in fact.reductions), *params)


def _edges(fact: StepFact, makers: Mapping[str, str]) -> Iterator[Edge]:
    """Yields the edges to a step: from the makers of what it reads, and from its own blocks."""
    given = (value for block in fact.blocks for value in block.outputs)
    for value in (*fact.served, *fact.placed, *given):
        if makers[value.name] != fact.name:
            yield Edge(makers[value.name], fact.name, value.name, value.nbytes)


def input_facts(plan: Plan, arguments: Sequence[Argument]) -> tuple[InputFact, ...]:
    """Returns the facts of the inputs: the arguments, then the constants that are closed over."""
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
            described = _type_text("float0", aval.shape)
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
    """Returns the bytes of an input; a symbolic axis is the first one, of the members."""
    if aval.dtype == jax.dtypes.float0:
        return 0
    if not any(map(is_unknown, aval.shape)):
        return value_type(aval).nbytes
    return MemberBytes(value_type(aval, axis=0).nbytes)


def _where(argument: Argument) -> str:
    if argument.is_source:
        return argument.value.describe()
    return "abstract" if argument.value is None else "in memory"


def _type_text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _output_facts(
    planned: Planned, inputs: Sequence[InputFact], makers: Mapping[str, str]
) -> Iterator[OutputFact]:
    plan, tree = planned.plan, planned.staged.out_tree
    leaves = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(leaves)[0]
    for out, (keys, _) in zip(plan.outputs, paths, strict=True):
        path = f"result{jax.tree_util.keystr(keys)}"
        if out.value is not None:
            value = value_fact(plan, out.value)
            kind, maker = value.type, makers[value.name]
            if out.members is not None:
                start, stop, stride = out.members
                last = stop - 1 if stride > 0 else max(stop, -1) + 1
                kind += f", members {start} to {last}"
                kind += "" if stride == 1 else f" in steps of {stride}"
            nbytes = value.nbytes
            if out.tail is not None:
                tail = value_fact(plan, out.tail)
                kind, nbytes = f"{kind}, then {tail.type}", nbytes + tail.nbytes
            yield OutputFact(path, kind, nbytes, maker, value.name)
        elif out.input is not None:
            fact = inputs[out.input]
            yield OutputFact(path, fact.type, fact.nbytes, fact.path, fact.path)
        else:
            constant = np.asarray(out.constant)
            kind = _type_text(dtype_name(constant.dtype), constant.shape)
            yield OutputFact(path, kind, constant.nbytes, "constant", "")


# --- choices


def _choices(
    plan: Plan, steps: Sequence[StepFact], options: Options, runner: str
) -> Iterator[ChoiceFact]:
    """Yields the choices of a plan."""
    passes = {step.name: step for step in walk(plan.steps) if isinstance(step, Map)}
    for placement in dict.fromkeys(step.placement for step in passes.values()):
        why = "by bytes and operations of a member"
        if options.shard_size is not None:
            why = "the option shard_size"
        cut = ", cut at files" if placement in plan.file_starts else ""
        chosen = f"{plan.shard_sizes[placement]} members{cut}"
        yield ChoiceFact(f"shards of {placement}", chosen, why, "shard_size")
    for name, step in passes.items():
        at_once = step.vectorization.kind == "vmap"
        why = step.loop_reason or ("all members of a shard at once" if at_once else "")
        yield ChoiceFact(f"members in {name}", str(step.vectorization), why, "member_loop")
    for fact in walk_facts(steps):
        if fact.merge is not None:
            yield _merged(fact, fact.merge)
    for name, step in passes.items():
        readers = [x for x, other in passes.items() if set(step.results) & set(other.operands)]
        if readers:
            nbytes = sum(value_fact(plan, value).nbytes for value in step.results)
            chosen, why = f"{human_bytes(nbytes)} stored", f"read by {', '.join(readers)}"
            yield ChoiceFact(f"results of {name}", chosen, why, "")
    yield from _rounds(plan, options, runner)


def _merged(fact: StepFact, merge: FanOut) -> ChoiceFact:
    """Returns how the partials of a pass are merged."""
    groups = f"{merge.groups} groups" if merge.groups > 1 else "one step"
    chosen = f"{human_bytes(fact.partial_bytes)} a shard, merged in {groups}"
    return ChoiceFact(f"reduction of {fact.name}", chosen, merge.why, "")


def _rounds(plan: Plan, options: Options, runner: str) -> Iterator[ChoiceFact]:
    chosen, why = "in this process", "no pipeline is needed"
    if Workers.of(runner, options).beam:
        chosen, why = "on resident workers", "one job serves all rounds"
    for loop in walk(plan.steps):
        if isinstance(loop, Loop):
            yield ChoiceFact(f"rounds of {loop.name}", chosen, why, "")
