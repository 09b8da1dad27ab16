"""A plan as text and as a flowchart, and the tables that the text and the page share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from beamjax._text import aligned, human_bytes
from beamjax.diagnostics.fact_types import PlanFacts, StepFact, ValueFact, walk_facts
from beamjax.interpreters.cutting import stages as cut
from beamjax.interpreters.cutting.cost import GUESSED_ROUNDS

Row = tuple[str, ...]


class Table(NamedTuple):
    """A table of text.

    Attributes:
      head: the titles of the columns, which the text of a plan leaves out.
      rows: the cells of each row.
      code: the numbers of the columns that hold names and types.
    """

    head: Row
    rows: list[Row]
    code: tuple[int, ...] = ()


def human_seconds(seconds: float) -> str:
    """Returns seconds with a unit, such as `12 ms`, `3.4 s`, `5 min 10 s` or `2 h 5 min`."""
    if not seconds:
        return "0 s"
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: int | None, noun: str, ending: str = "s") -> str:
    """Returns a number with its noun, such as `3 shards`; `shards` if the number is unknown."""
    if number is None:
        return f"n {noun}{ending}" if noun == "member" else f"{noun}{ending}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


def rounds_text(step: StepFact) -> str:
    """Returns how many rounds a loop has, in words."""
    if step.rounds is None:
        return "rounds while a condition holds"
    return count(step.rounds, "round") + (", the last entry first" if step.reverse else "")


# --- tables


def tables(facts: PlanFacts) -> dict[str, Table]:
    """Returns the tables of a plan by their titles, in order."""
    found = {
        "inputs": Table(
            ("input", "names in the plan", "type", "bytes", "read"),
            [
                (i.path, " ".join(i.values), i.type, human_bytes(i.nbytes), i.read)
                for i in facts.inputs
            ],
            (0, 1, 2),
        ),
        "outputs": Table(
            ("output", "type", "bytes", "from"),
            [
                (o.path, o.type, human_bytes(o.nbytes), f"from {o.source}")
                for o in facts.outputs
            ],
            (0, 1),
        ),
        "totals": Table((), list(_totals(facts))),
        "choices": Table(
            ("what", "chosen", "because", "option"),
            [(c.what, c.chosen, c.why, c.option) for c in facts.choices],
            (3,),
        ),
    }  # fmt: skip
    return found | dict(_memory(facts))


def _totals(facts: PlanFacts) -> Iterator[Row]:
    for step in walk_facts(facts.steps):
        if step.kind == "Map":
            yield f"read by {step.name}", f"{human_bytes(step.read_bytes)} of members"
    yield "read by all passes", human_bytes(facts.read_bytes)
    yield "broadcast", human_bytes(facts.broadcast_bytes)
    yield "gathered", human_bytes(facts.gathered_bytes)
    yield "reduced", f"{human_bytes(facts.partial_bytes)} a shard"
    if any(step.kind == "Loop" for step in walk_facts(facts.steps)):
        yield "rounds", "each round of a loop is counted once in these totals"
    for platform, nbytes in facts.executable_bytes.items():
        yield f"code for {platform}", human_bytes(nbytes)


def _memory(facts: PlanFacts) -> Iterator[tuple[str, Table]]:
    memory, head = facts.memory, ("", "bytes", "for")
    if memory is None:
        return
    rows = _parts(memory.kept, memory.steps)
    rows.append(("a worker process", human_bytes(memory.worker_bytes), _LARGEST))
    what = "the same process" if memory.shared else _row("", memory.launcher)[2]
    rows.append(("the launching process", human_bytes(memory.launcher_bytes), what))
    yield f"memory at most, {memory.where}", Table(head, rows)
    for device in memory.devices:
        rows = _parts(device.kept, device.steps)
        rows.append(("a device", human_bytes(device.nbytes), _LARGEST))
        excluded = "the driver, its libraries and what JAX reserves are not included"
        rows.append(("estimated from", "", f"{device.made_from}; {excluded}"))
        yield f"memory of a device, {device.platform}, about", Table(head, rows)


def _parts(kept: Mapping[str, int], steps: Mapping[str, Mapping[str, int]]) -> list[Row]:
    rows = [_row("during all steps", kept)] if kept else []
    return [*rows, *(_row(f"during {name}", parts) for name, parts in steps.items())]


_LARGEST = "in total, during the step that takes most"


def _row(name: str, parts: Mapping[str, int]) -> Row:
    return name, human_bytes(sum(parts.values())), parts_text(parts)


def parts_text(parts: Mapping[str, int]) -> str:
    """Returns what takes memory, the largest first."""
    largest = sorted(parts, key=lambda what: -parts[what])
    return ", ".join(f"{what} {human_bytes(parts[what])}" for what in largest)


# --- steps


def step_values(step: StepFact) -> list[Row]:
    """Returns rows of the values of a step: how it uses the value, its name, type and bytes."""
    served = "broadcast" if step.kind == "Map" else "reads"
    groups = [(served, step.served), ("reads", step.placed), ("makes", step.results)]
    rows: list[Row] = [
        (label, v.name, v.type, _value_bytes(v)) for label, values in groups for v in values
    ]
    if step.kind == "Loop":
        rows = []
        for h in step.handed:
            names = " -> ".join(filter(None, (h.outside, h.inside.name, h.afterwards)))
            rows.append((h.how, names, h.inside.type, _value_bytes(h.inside)))
    for r in step.reductions:
        how = f"{r.reducer} in buffer {r.buffer}, {human_bytes(r.nbytes)} a shard, {r.exactness}"
        rows.append(("reduces", r.result.name, r.result.type, how))
    return rows


def _value_bytes(value: ValueFact) -> str:
    if value.member_bytes is None or value.shard_bytes is None:
        return human_bytes(value.nbytes)
    member, shard = human_bytes(value.member_bytes), human_bytes(value.shard_bytes)
    return f"{member} a member, {human_bytes(value.nbytes)} in total, {shard} a shard"


def step_notes(step: StepFact, facts: PlanFacts) -> Iterator[Row]:
    """Yields rows on a step besides its values: a label and a text."""
    if step.merge is not None:
        yield "merges", step.merge.text(human_bytes(step.merge.nbytes))
    if step.functions:
        yield "functions", ", ".join(step.functions)
    if step.cost is not None:
        each = "a member: " if step.kind == "Map" else ""
        guess = f", if loops have {GUESSED_ROUNDS} rounds" if step.cost.guessed else ""
        nbytes = human_bytes(round(step.cost.nbytes))
        yield "computes", f"{each}{step.cost.flops:,.0f} operations, {nbytes} moved{guess}"
    if step.reason:
        yield "why", step.reason
    for line in filter(None, step.lines):
        yield "line", line
    if step.python:
        yield "code", f"Python, pickled with {facts.program}: {step.python}"
    for platform, size in step.executables.items():
        yield "code", f"{human_bytes(size)} for {platform}"


def step_title(step: StepFact, facts: PlanFacts) -> str:
    """Returns the kind of a step in words, such as `Map, a pass over clients, 3 shards`."""
    match step.kind:
        case "Map":
            (placement,) = (p for p in facts.placements if p.name == step.placement)
            shards = f"shards of {placement.shard_size}"
            if placement.shards is not None:
                shards = count(placement.shards, "shard")
            return f"Map, a pass over {placement.name}, {shards}"
        case "Loop":
            return f"Loop, {rounds_text(step)}"
        case "Branch":
            return f"Branch, one of {count(len(step.blocks), 'block')}"
    return step.kind


# --- the text


def plan_text(facts: PlanFacts) -> str:
    """Returns a plan as text."""
    shown = tables(facts)
    lines = [
        f"plan of {facts.program}",
        f"  jax {facts.jax_version}, 64-bit types {'on' if facts.x64 else 'off'}",
        f"  {count(facts.passes, 'pass', 'es')} over members, "
        f"{count(len(list(walk_facts(facts.steps))), 'step')}",
        *(
            f"  {p.name}: {count(p.members, 'member')} in {count(p.shards, 'shard')} of "
            f"{p.shard_size}"
            for p in facts.placements
        ),
        *(f"  {note}" for note in facts.notes),
        *_section("inputs", shown.pop("inputs").rows),
        *["", "steps", *(line for step in facts.steps for line in _step_lines(step, facts))],
        *["", "gathered and scattered", *_moves(facts)],
    ]
    for title, table in shown.items():
        lines += _choices(table.rows) if title == "choices" else _section(title, table.rows)
    return "\n".join(lines)


def _section(title: str, rows: Sequence[Row]) -> list[str]:
    return ["", title, *(f"  {line}" for line in (aligned(rows) if rows else ["none"]))]


def _choices(rows: Sequence[Row]) -> list[str]:
    short = [
        (what, chosen, why + (f" (option {option})" if option else ""))
        for what, chosen, why, option in rows
    ]
    return _section("choices", short)


def _step_lines(step: StepFact, facts: PlanFacts) -> list[str]:
    rows = aligned((f"{label:<9}", *rest) for label, *rest in step_values(step))
    rows += [f"{label:<9}  {text}" for label, text in step_notes(step, facts)]
    for block in step.blocks:
        returned = ", ".join(value.name for value in block.outputs) or "nothing"
        rows.append(f"{block.title}, returns {returned}")
        rows += [line for inner in block.steps for line in _step_lines(inner, facts)]
    return [f"  {step.name}: {step_title(step, facts)}", *(f"    {row}" for row in rows)]


def _moves(facts: PlanFacts) -> Iterator[str]:
    steps = [s for s in walk_facts(facts.steps) if s.kind in ("Gather", "Scatter")]
    if all(step.kind != "Gather" for step in steps):
        yield "  nothing is gathered"
    sources = {(edge.target, edge.value): edge.source for edge in facts.edges}
    for step in steps:
        (value,) = (*step.served, *step.placed)
        yield (
            f"  {step.name}: {value.name} of {sources[step.name, value.name]}, "
            f"{human_bytes(value.nbytes)}, along axis {step.axis}, because {step.reason}"
        )
        yield from (f"    at {line}" for line in step.lines if line)


# --- the flowchart


def plan_mermaid(facts: PlanFacts) -> str:
    """Returns a plan as a Mermaid flowchart; steps that gather or scatter are red.

    Loops and branches are subgraphs. A node in each stands for the loop or branch itself: edges of
    the values that its rounds read begin there, and those of the values that they return end there.
    """
    ends = {edge.source for edge in facts.edges}
    inputs = [fact for fact in facts.inputs if fact.path in ends]
    steps = list(walk_facts(facts.steps))
    keys = [*(i.path for i in inputs), *(s.name for s in steps), *(o.path for o in facts.outputs)]
    names = {key: f"n{i}" for i, key in enumerate(keys)}
    lines = ["flowchart TD"]
    lines += [f"  {_node(names[i.path], '([', '])', i.path, i.type)}" for i in inputs]
    memory = facts.memory.steps.items() if facts.memory else ()
    notes = {name: f"memory up to {human_bytes(sum(parts.values()))}" for name, parts in memory}
    lines += [f"  {line}" for step in facts.steps for line in _step_nodes(step, names, notes)]
    lines += [f"  {_node(names[o.path], '([', '])', o.path, o.type)}" for o in facts.outputs]
    for edge in facts.edges:
        label = _escaped(f"{edge.value} {human_bytes(edge.nbytes)}")
        lines.append(f'  {names[edge.source]} -->|"{label}"| {names[edge.target]}')
    moves = [names[step.name] for step in steps if step.kind in ("Gather", "Scatter")]
    if moves:
        lines.append("  classDef moved fill:#fdd,stroke:#c00,color:#900")
        lines.append(f"  class {','.join(moves)} moved")
    return "\n".join(lines) + "\n"


def _node(name: str, left: str, right: str, *texts: str) -> str:
    return f'{name}{left}"{"<br/>".join(_escaped(text) for text in texts if text)}"{right}'


def _step_nodes(step: StepFact, names: Mapping[str, str], notes: Mapping[str, str]) -> list[str]:
    """Returns a node; a loop or a branch also has a subgraph with the nodes of its blocks."""
    name = names[step.name]
    if not step.blocks:
        texts = (*step.functions, step.reason, notes.get(step.name, ""))
        return [_node(name, "[", "]", step.name, *texts)]
    left, right = ("{{", "}}") if step.kind == "Loop" else ("{", "}")
    rounds = rounds_text(step) if step.kind == "Loop" else ""
    lines = [f'subgraph {name}_all["{_escaped(step.name)}"]']
    lines.append(f"  {_node(name, left, right, step.name, rounds)}")
    for i, block in enumerate(step.blocks):
        if block.steps:
            lines.append(f'  subgraph {name}_{i}["{_escaped(block.title)}"]')
            lines += [
                f"    {line}" for inner in block.steps for line in _step_nodes(inner, names, notes)
            ]
            lines.append("  end")
    return [*lines, "end"]


def _escaped(text: str) -> str:
    """Returns text for a quoted Mermaid label, in which other characters have a meaning."""
    plain = " ".join(text.split())
    return "".join(c if c.isalnum() or c in " _.,:@-/" else f"#{ord(c)};" for c in plain)


# --- the stage "graph"


def graph_text(stages: Sequence[cut.Stage]) -> str:
    """Returns the stages into which a program was cut, as text."""
    return "\n".join(line for stage in stages for line in _stage_lines(stage))


def _stage_lines(stage: cut.Stage) -> list[str]:
    match stage:
        case cut.ServerStage(eqns, inputs, outputs):
            return [f"server: {inputs} -> {outputs}", *(f"  {eqn!r}" for eqn in eqns)]
        case cut.MapStage():
            operands = ", ".join(f"{var!r} ({along})" for var, along in stage.operands)
            return [
                f"map over {stage.placement}: broadcasts {stage.broadcasts}, "
                f"operands [{operands}], results {stage.results}",
                *(f"  {emission.eqn!r}" for emission in stage.emissions),
            ]
        case cut.GatherStage(var, along, user):
            return [f"gather: {var!r} ({along}) for", f"  {user!r}"]
        case cut.ScatterStage(var, along, user):
            return [f"scatter: {var!r} ({along}) for", f"  {user!r}"]
        case cut.LoopStage(eqn, _, condition, block):
            while_ = _block_lines("while", condition) if condition else []
            return [f"loop: {eqn!r}", *while_, *_block_lines("round", block)]
        case cut.BranchStage(eqn, branches):
            blocks = (_block_lines(f"branch {i}", block) for i, block in enumerate(branches))
            return [f"branch: {eqn!r}", *itertools.chain(*blocks)]


def _block_lines(name: str, stage: cut.BlockStages) -> list[str]:
    lines = graph_text(stage.stages).splitlines()
    ends = ", ".join(map(repr, stage.block.outputs))
    return [f"  {name}:", *(f"    {line}" for line in lines), f"    outputs {ends}"]
