"""A plan as JSON values: its inputs, steps, edges, outputs, bytes, memory and choices.

`explain` prints them, the pages show them, `--json` writes them, and the folder of a job has them.
Bytes are numbers; nothing is formatted. Bytes that depend on an unknown number of members are
`{"each": bytes of a member, "fixed": other bytes}`. Of a loop, each round counts once in the sums.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from beamjax._text import Bytes, add_bytes, human_bytes
from beamjax.bodies.export import value_type
from beamjax.diagnostics.memory import device_estimates, estimate
from beamjax.diagnostics.topology import Workers
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering.buckets import padding_notes
from beamjax.interpreters.lowering.shard_size import (
    FEWEST_SHARDS,
    GROUP_SHARDS,
    MAX_SHARD_BYTES,
    PAYING,
    UNKNOWN_SIZE,
)
from beamjax.interpreters.planning import Planned
from beamjax.interpreters.staging.arguments import Argument
from beamjax.numerics.reducers import accumulator_kind
from beamjax.options import Options
from beamjax.options.rules import MULTIPLE
from beamjax.plan.merging import fan_out, workers_of
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import (
    Block,
    Body,
    Branch,
    Gather,
    Loop,
    Map,
    Plan,
    Rows,
    Scatter,
    Server,
    Step,
    size_name,
    walk,
)
from beamjax.runtime.cached_shards import count_cached, uncached_reason
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.ordered_pool import chosen_threads
from beamjax.storage.arrays import dtype_name
from beamjax.storage.schema import to_plain

Json = dict[str, Any]


def plan_json(
    planned: Planned,
    arguments: Sequence[Argument],
    options: Options,
    notes: tuple[str, ...],
    runner: str,
    inputs: Inputs | None = None,
) -> Json:
    """Returns a plan as JSON values; with `inputs`, it counts the shards that the cache has."""
    plan = planned.plan
    read = list(_inputs(plan, arguments))
    steps = [_step(plan, step, options) for step in plan.steps]
    flat = list(all_steps(steps))
    # The names of values are unique in a plan, so a name leads to one input or step.
    makers = {name: leaf["path"] for leaf in read for name in leaf["names"]}
    makers |= {value["name"]: step["name"] for step in flat for value in _made(step)}
    outputs = list(_outputs(planned, read, makers))
    edges = [edge for step in flat for edge in _edges(step, makers)]
    edges += [_edge(o["source"], o["path"], o["value"], o["nbytes"]) for o in outputs if o["value"]]
    return {
        "program": plan.name,
        "jax_version": plan.jax_version,
        "x64": plan.x64,
        "passes": plan.passes(),
        "placements": [
            {
                "name": name, "members": n, "shard_size": plan.shard_sizes[name],
                "shards": plan.shards(name).count,
            }
            for name, n in plan.sizes.items()
        ],
        "inputs": read,
        "steps": steps,
        # A step that reads a value twice has one edge for it.
        "edges": list({tuple(edge.values())[:3]: edge for edge in edges}.values()),
        "outputs": outputs,
        **_sums(flat),
        "notes": [*notes, *padding_notes(plan, arguments), *_cache_notes(plan, options, inputs)],
        "memory": _memory(plan, arguments, options, runner),
        "choices": [
            dict(zip(("what", "chosen", "why", "option"), row, strict=True))
            for row in _choices(plan, flat, options, runner)
        ],
        "source_lines": _source_lines(flat),
    }  # fmt: skip


def all_steps(steps: Iterable[Json]) -> Iterator[Json]:
    """Yields all steps, including those in the blocks of loops and branches."""
    for step in steps:
        yield step
        for block in step["blocks"]:
            yield from all_steps(block["steps"])


def _sums(steps: Sequence[Json]) -> Json:
    passes = [step for step in steps if step["kind"] == "Map"]
    gathered = (v["nbytes"] for step in steps if step["kind"] == "Gather" for v in step["placed"])
    executables: dict[str, int] = {}
    for step in steps:
        for platform, nbytes in step.get("executables", {}).items():
            executables[platform] = executables.get(platform, 0) + nbytes
    return {
        "read_bytes": add_bytes(step["read_bytes"] for step in passes),
        "broadcast_bytes": sum(step["broadcast_bytes"] for step in passes),
        "partial_bytes": sum(step["partial_bytes"] for step in passes),
        "gathered_bytes": add_bytes(gathered),
        "executable_bytes": executables,
    }


def _memory(plan: Plan, arguments: Sequence[Argument], options: Options, runner: str) -> Json:
    sources = {i: a.value for i, a in enumerate(arguments) if a.is_source}
    workers = Workers.of(runner, options)
    devices = device_estimates(plan, options, workers.beam)
    bound: Json = to_plain(estimate(plan, sources, options, workers))
    return bound | {"where": f"{runner}, {workers.text()}", "devices": to_plain(devices)}


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


_LINE = re.compile(r"(.+):(\d+)(?: \(|$)")  # "file.py:12 (function)" or "file.py:12"


def _source_lines(steps: Iterable[Json]) -> dict[str, str]:
    """Returns the text of the user's lines that are readable, by `file:line (function)`."""
    texts = {}
    for line in dict.fromkeys(line for step in steps for line in step["lines"]):
        match = _LINE.match(line)
        text = linecache.getline(match[1], int(match[2])).strip() if match else ""
        if text:
            texts[line] = text
    return texts


# --- steps


def _step(plan: Plan, step: Step, options: Options) -> Json:
    more: Json = {}
    placement: str | None = None
    reads: Sequence[str]
    makes: Sequence[str]
    match step:
        case Server():
            body = plan.bodies[step.body]
            reads, makes, lines = step.inputs, step.outputs, body.lines
            more = {"executables": _sizes([body]), "python": _python(body), "reason": step.reason}
            more["cost"] = _cost(plan, step)
        case Map():
            body = plan.bodies[step.body]
            reads, makes, lines = (*step.broadcasts, *step.operands), step.results, body.lines
            placement, more = step.placement, _pass(plan, step, options)
        case Gather() | Scatter():
            reads, makes, lines = [step.operand], [step.result], (step.line,)
            more = {"axis": step.axis, "reason": step.reason}
            placed = step.operand if isinstance(step, Gather) else step.result
            placement = plan.values[placed].placement
        case Rows():
            reads, makes, lines = [step.operand, step.numbers], [step.result], (step.line,)
            placement = plan.values[step.operand].placement
        case Loop():
            reads = [v.init for v in step.carried] + [v.operand for v in step.sliced]
            makes = [*(v.result for v in step.carried), *step.stacked]
            lines, more = (step.line,), _loop(plan, step, options)
        case Branch():
            reads, makes, lines = [step.index], step.results, (step.line,)
            blocks = enumerate(step.blocks)
            more["blocks"] = [_block(plan, f"block {i}", x, options) for i, x in blocks]
    read = [_value(plan, name) for name in reads]
    return {
        "name": step.name,
        "kind": type(step).__name__,
        "placement": placement,
        "served": [value for value in read if value["member_bytes"] is None],
        "placed": [value for value in read if value["member_bytes"] is not None],
        "results": [_value(plan, name) for name in makes],
        "reductions": [],
        "reason": "",
        "rule": plan.rules.get(step.name, ""),
        "lines": list(filter(None, lines)),
        "blocks": [],
        **more,
    }


def _pass(plan: Plan, step: Map, options: Options) -> Json:
    """Returns what only a pass has."""
    reductions = list(_reductions(plan, step, options.reduction))
    shards = plan.shards(step.placement).count
    merge = fan_out(step, shards, workers_of(options.beam), options.reduction)
    ways = []
    if step.loop_reason:
        how = "sequentially" if step.vectorization.kind == "loop" else f"in {step.vectorization}"
        ways.append(f"members {how}: {step.loop_reason}")
    if step.short_body not in (None, step.body):
        ways.append("full shards by a separate executable, without a mask")
    return {
        "functions": list(step.functions),
        "member_loop": str(step.vectorization),
        "reductions": reductions,
        "executables": _sizes([plan.bodies[key] for key in step.executables]),
        "python": _python(plan.bodies[step.body]),
        "cost": _cost(plan, step),
        "read_bytes": add_bytes(_value(plan, name)["nbytes"] for name in step.operands),
        "broadcast_bytes": sum(plan.values[name].nbytes for name in step.broadcasts),
        "partial_bytes": sum(reduction["nbytes"] for reduction in reductions),
        "reason": "; ".join(ways),
        "merge": to_plain(merge) if step.buffers else None,
    }


def _cost(plan: Plan, step: Map | Server) -> Json | None:
    """Returns the counted work of a member in a pass, or of a server step."""
    cost = plan.costs.get(step.name)
    if cost is None:
        return None
    return {"operations": cost.flops, "moved_bytes": cost.nbytes, "guessed": cost.guessed}


def _loop(plan: Plan, loop: Loop, options: Options) -> Json:
    """Returns what only a loop has."""
    entries = loop.block.outputs[len(loop.carried) :]
    handed: list[tuple[str, str, str | None, str | None]] = [
        *(("carries", v.param, v.init, v.result) for v in loop.carried),
        *(("slices", v.param, v.operand, None) for v in loop.sliced),
        *(("stacks", x, None, name) for x, name in zip(entries, loop.stacked, strict=True)),
    ]
    blocks = [_block(plan, "each round", loop.block, options)]
    if loop.condition is not None:
        blocks.insert(0, _block(plan, "condition", loop.condition, options))
    return {
        "rounds": loop.rounds,
        "reverse": loop.reverse,
        "handed": [
            {"how": how, "inside": _value(plan, inside), "outside": before, "afterwards": after}
            for how, inside, before, after in handed
        ],
        "blocks": blocks,
    }


def _block(plan: Plan, title: str, block: Block, options: Options) -> Json:
    steps = [_step(plan, step, options) for step in block.steps]
    return {
        "title": title, "steps": steps, "outputs": [_value(plan, name) for name in block.outputs]
    }  # fmt: skip


def _value(plan: Plan, name: str) -> Json:
    """Returns a value: its name, type and bytes; those of a member and a shard if it is placed."""
    value = plan.values[name]
    facts = {"name": name, "type": str(value), "nbytes": value.nbytes}
    if value.placement is None:
        return facts | {"member_bytes": None, "shard_bytes": None}
    # `nbytes` of a placed type are those of one member.
    shard = value.nbytes * plan.shard_sizes[value.placement]
    known = plan.sizes[value.placement] is not None
    nbytes: Bytes = plan.nbytes(name) if known else {"each": value.nbytes, "fixed": 0}
    return facts | {"nbytes": nbytes, "member_bytes": value.nbytes, "shard_bytes": shard}


def _reductions(plan: Plan, step: Map, mode: str) -> Iterator[Json]:
    def entry(result: str, reducer: str, buffer: str, exact: str, nbytes: int) -> Json:
        facts = {"result": _value(plan, result), "reducer": reducer, "buffer": buffer}
        return facts | {"exactness": exact, "nbytes": nbytes}

    for buffer in step.buffers:
        dtype, kind = np.dtype(buffer.dtype), f"{buffer.kind} {buffer.dtype}"
        exact = accumulator_kind(buffer.kind, dtype, mode).exactness(dtype)
        for reduction in buffer.reductions:
            nbytes = reduction.size * dtype.itemsize
            yield entry(reduction.result, reduction.reducer, kind, exact, nbytes)
    for combine in step.combines:
        pairs = list(zip(combine.results, combine.leaves, strict=True))
        # The leaves that are no results count for the first result.
        beside = sum(leaf.nbytes for name, leaf in pairs if name is None)
        exact = "in the order of the members, the same bits on any runner"
        for name, leaf in pairs:
            if name is not None:
                yield entry(name, combine.name, "separate", exact, leaf.nbytes + beside)
                beside = 0


def _python(body: Body) -> str:
    return body.python.reason if body.python else ""


def _sizes(bodies: Sequence[Body]) -> dict[str, int]:
    platforms = dict.fromkeys(platform for body in bodies for platform in body.artefacts)
    return {name: sum(len(body.artefacts.get(name, b"")) for body in bodies) for name in platforms}


def _made(step: Json) -> list[Json]:
    """Returns the values that a step makes for other steps, or for those in its own blocks."""
    # Parameters of a loop's block stand for carried and sliced values from outside. A stacked entry
    # has no value outside before the loop: a step of the block makes it.
    params = [value["inside"] for value in step.get("handed", ()) if value["outside"] is not None]
    return [*step["results"], *(reduction["result"] for reduction in step["reductions"]), *params]


def _edges(step: Json, makers: Mapping[str, str]) -> Iterator[Json]:
    """Yields the edges to a step: from the makers of what it reads, and from its own blocks."""
    returned = [value for block in step["blocks"] for value in block["outputs"]]
    for value in (*step["served"], *step["placed"], *returned):
        maker = makers[value["name"]]
        if maker != step["name"]:  # a block may return a parameter of its own step
            yield _edge(maker, step["name"], value["name"], value["nbytes"])


def _edge(source: str, target: str, value: str, nbytes: Bytes) -> Json:
    return {"source": source, "target": target, "value": value, "nbytes": nbytes}


# --- inputs and outputs


def _inputs(plan: Plan, arguments: Sequence[Argument]) -> Iterator[Json]:
    """Yields the inputs: the arguments, then the constants that are closed over."""
    whole = [(argument.aval, _where(argument)) for argument in arguments]
    whole += [(jax.typeof(value), "closed over") for value in plan.constants]
    returned = {out.input for out in plan.outputs}
    for i, (spec, (aval, where)) in enumerate(zip(plan.inputs, whole, strict=True)):
        names = (spec.server, spec.placed, *(view.placed for view in spec.views))
        placement = plan.values[spec.placed].placement if spec.placed else None
        ways = ["whole"] if spec.server else []
        ways += ["by shards"] if spec.placed else []
        ways += [f"by shards of {view.rows} rows a member" for view in spec.views]
        how = " and ".join(ways) or ("returned as it is" if i in returned else "not read")
        if aval.dtype == jax.dtypes.float0:
            described = _type_text("float0", aval.shape)
        else:
            described = str(value_type(aval, placement, spec.axis if placement else None))
        yield {
            "path": spec.path, "type": described, "nbytes": _whole_bytes(aval),
            "read": f"{how}, {where}", "names": [name for name in names if name is not None],
        }  # fmt: skip
    for placement, n in plan.sizes.items():
        if n is None:
            yield {
                "path": f"number of {placement}", "type": "int32[]", "nbytes": 4,
                "read": "whole, found while the pipeline runs", "names": [size_name(placement)],
            }  # fmt: skip


def _whole_bytes(aval: Any) -> Bytes:
    """Returns the bytes of an input; a symbolic axis is the first one, of the members."""
    if aval.dtype == jax.dtypes.float0:
        return 0
    if not any(map(is_unknown, aval.shape)):
        return value_type(aval).nbytes
    return {"each": value_type(aval, axis=0).nbytes, "fixed": 0}


def _where(argument: Argument) -> str:
    if argument.is_source:
        return str(argument.value)
    return "abstract" if argument.value is None else "in memory"


def _type_text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _outputs(planned: Planned, inputs: Sequence[Json], makers: Mapping[str, str]) -> Iterator[Json]:
    plan, tree = planned.plan, planned.staged.out_tree
    leaves = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(leaves)[0]
    for out, (keys, _) in zip(plan.outputs, paths, strict=True):
        if out.value is not None:
            output, source, value = _value(plan, out.value), makers[out.value], out.value
            kind, nbytes = output["type"], output["nbytes"]
        elif out.input is not None:
            known = inputs[out.input]
            kind, nbytes, source = known["type"], known["nbytes"], known["path"]
            value = source
        else:
            constant = np.asarray(out.constant)
            kind = _type_text(dtype_name(constant.dtype), constant.shape)
            nbytes, source, value = constant.nbytes, "constant", ""
        yield {
            "path": f"result{jax.tree_util.keystr(keys)}", "type": kind, "nbytes": nbytes,
            "source": source, "value": value,
        }  # fmt: skip


# --- choices

Choice = tuple[str, str, str, str]
"""What is chosen, the choice, the reason for it, and the option that fixes it, or ""."""


_SIZE_REASONS = {
    SizeReason.PAYING: "as few as pay for a call and for merging, by counted operations",
    SizeReason.FEWEST_SHARDS: f"at least {FEWEST_SHARDS} shards",
    SizeReason.TWO_SHARDS: "at least 2 shards, since merging costs more than calls",
    SizeReason.FEW_CALLS: (
        f"fewer would compute less than {PAYING // FEWEST_SHARDS} times their overhead"
    ),
    SizeReason.UNKNOWN_SIZE: f"at most {UNKNOWN_SIZE:,}, since the number of members is unknown",
    SizeReason.FILES: f"at least {GROUP_SHARDS} shards in a group of files",
    SizeReason.BYTES: f"a shard reads and returns at most {human_bytes(MAX_SHARD_BYTES)}",
    SizeReason.MULTIPLE: f"at least {MULTIPLE} members",
    SizeReason.EQUAL: "shards have equal sizes",
    SizeReason.ALL: "no more than there are",
    SizeReason.WHOLE_RANGES: "whole ranges of members in order",
    SizeReason.OPTION: "the option shard_size",
    SizeReason.GIVEN: "as in the plan of the launching process",
}


def _at_once_bytes(plan: Plan, step: Map) -> int:
    """Returns the bytes that the members hold that a pass computes at once."""
    how, size = step.vectorization, plan.shard_sizes[step.placement]
    members = {"vmap": size, "batches": how.batch, "loop": 1}[how.kind]
    operands: int = sum(plan.values[name].nbytes for name in step.operands)
    return members * operands + plan.bodies[step.body].working


def _choices(plan: Plan, steps: Iterable[Json], options: Options, runner: str) -> Iterator[Choice]:
    passes = {step.name: step for step in walk(plan.steps) if isinstance(step, Map)}
    for placement in dict.fromkeys(step.placement for step in passes.values()):
        size = plan.shard_sizes[placement]
        why = "; ".join(_SIZE_REASONS[reason] for reason in plan.size_reasons[placement])
        cut = ", cut at files" if placement in plan.file_starts else ""
        chosen = f"{size} members{cut}"
        yield f"shards of {placement}", chosen, why, "shard_size"
    for name, step in passes.items():
        why = step.loop_reason or "all members of a shard"
        why += f": {human_bytes(_at_once_bytes(plan, step))} at once"
        yield f"members in {name}", str(step.vectorization), why, "member_loop"
    workers = Workers.of(runner, options)
    for name, step in passes.items() if workers.computing > 1 else ():
        threads, why = chosen_threads(plan, step, workers.computing)
        chosen = f"{threads} threads" if threads else "the thread that reads shards"
        yield f"threads of {name}", chosen, why, "local_threads"
    for entry in steps:
        if merge := entry.get("merge"):
            groups = f"{merge['groups']} groups" if merge["groups"] > 1 else "one step"
            chosen = f"{human_bytes(entry['partial_bytes'])} a shard, merged in {groups}"
            yield f"reduction of {entry['name']}", chosen, merge["why"], ""
    for name, step in passes.items():
        readers = [x for x, other in passes.items() if set(step.results) & set(other.operands)]
        if readers:
            nbytes = add_bytes(_value(plan, value)["nbytes"] for value in step.results)
            why = f"read by {', '.join(readers)}"
            yield f"results of {name}", f"{human_bytes(nbytes)} stored", why, ""
    where = "in this process", "no pipeline is needed"
    if workers.beam:
        where = "on resident workers", "one job serves all rounds"
    for loop in walk(plan.steps):
        if isinstance(loop, Loop):
            yield f"rounds of {loop.name}", *where, ""
