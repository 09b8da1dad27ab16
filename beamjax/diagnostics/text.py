"""A plan as text and as a flowchart, and the tables that the text and the page share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from beamjax._text import aligned, human_bytes
from beamjax.diagnostics.plan_json import Json, all_steps
from beamjax.interpreters.cutting import stages as cut
from beamjax.interpreters.cutting.member_cost import GUESSED_ROUNDS

Row = tuple[str, ...]


class Table(NamedTuple):
    """A table; only pages show the titles of its columns."""

    head: Row
    rows: list[Row]
    code: tuple[int, ...] = ()  # indices of the columns that hold names and types


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


def rounds_text(step: Json) -> str:
    """Returns how many rounds a loop has, in words."""
    if step["rounds"] is None:
        return "rounds while a condition holds"
    return count(step["rounds"], "round") + (", the last entry first" if step["reverse"] else "")


# --- tables


def tables(plan: Json) -> dict[str, Table]:
    """Returns the tables of a plan by their titles, in order."""
    inputs: list[Row] = [
        (i["path"], " ".join(i["names"]), i["type"], human_bytes(i["nbytes"]), i["read"])
        for i in plan["inputs"]
    ]
    outputs: list[Row] = [
        (o["path"], o["type"], human_bytes(o["nbytes"]), f"from {o['source']}")
        for o in plan["outputs"]
    ]
    choices: list[Row] = [tuple(choice.values()) for choice in plan["choices"]]
    return {
        "inputs": Table(("input", "names in the plan", "type", "bytes", "read"), inputs, (0, 1, 2)),
        "outputs": Table(("output", "type", "bytes", "from"), outputs, (0, 1)),
        "totals": Table((), list(_totals(plan))),
        "choices": Table(("what", "chosen", "because", "option"), choices, (3,)),
        **dict(_memory(plan["memory"])),
    }


def _totals(plan: Json) -> Iterator[Row]:
    steps = list(all_steps(plan["steps"]))
    for step in steps:
        if step["kind"] == "Map":
            yield f"read by {step['name']}", f"{human_bytes(step['read_bytes'])} of members"
    yield "read by all passes", human_bytes(plan["read_bytes"])
    yield "broadcast", human_bytes(plan["broadcast_bytes"])
    yield "gathered", human_bytes(plan["gathered_bytes"])
    yield "reduced", f"{human_bytes(plan['partial_bytes'])} a shard"
    if any(step["kind"] == "Loop" for step in steps):
        yield "rounds", "each round of a loop is counted once in these totals"
    for platform, nbytes in plan["executable_bytes"].items():
        yield f"code for {platform}", human_bytes(nbytes)


def _memory(memory: Json) -> Iterator[tuple[str, Table]]:
    head = ("", "bytes", "for")
    rows = _parts(memory["kept"], memory["steps"])
    rows.append(("a worker process", human_bytes(memory["worker_bytes"]), _LARGEST))
    what = "the same process" if memory["shared"] else _row("", memory["launcher"])[2]
    rows.append(("the launching process", human_bytes(memory["launcher_bytes"]), what))
    yield f"peak memory (upper bound), {memory['where']}", Table(head, rows)
    for device in memory["devices"]:
        rows = _parts(device["kept"], device["steps"])
        rows.append(("a device", human_bytes(device["nbytes"]), _LARGEST))
        excluded = "the driver, its libraries and what JAX reserves are not included"
        rows.append(("estimated from", "", f"{device['made_from']}; {excluded}"))
        yield f"peak memory of a device (estimate), {device['platform']}", Table(head, rows)


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


def step_values(step: Json) -> list[Row]:
    """Returns rows of the values of a step: how it uses the value, its name, type and bytes."""
    served = "broadcast" if step["kind"] == "Map" else "reads"
    groups = [(served, step["served"]), ("reads", step["placed"]), ("makes", step["results"])]
    rows: list[Row] = [
        (label, v["name"], v["type"], _value_bytes(v)) for label, values in groups for v in values
    ]
    if step["kind"] == "Loop":
        rows = []
        for h in step["handed"]:
            inside = h["inside"]
            names = " -> ".join(filter(None, (h["outside"], inside["name"], h["afterwards"])))
            rows.append((h["how"], names, inside["type"], _value_bytes(inside)))
    for r in step["reductions"]:
        nbytes, result = human_bytes(r["nbytes"]), r["result"]
        how = f"{r['reducer']} in buffer {r['buffer']}, {nbytes} a shard, {r['exactness']}"
        rows.append(("reduces", result["name"], result["type"], how))
    return rows


def _value_bytes(value: Json) -> str:
    if value["member_bytes"] is None:
        return human_bytes(value["nbytes"])
    member, shard = human_bytes(value["member_bytes"]), human_bytes(value["shard_bytes"])
    return f"{member} a member, {human_bytes(value['nbytes'])} in total, {shard} a shard"


def step_notes(step: Json, plan: Json) -> Iterator[Row]:
    """Yields rows on a step besides its values: a label and a text."""
    if step["rule"] and step["kind"] not in ("Gather", "Scatter"):  # These say why.
        yield "rule", step["rule"]
    if merge := step.get("merge"):
        yield "merges", _merge_text(merge)
    if functions := step.get("functions"):
        yield "functions", ", ".join(functions)
    if cost := step.get("cost"):
        unit = "a member: " if step["kind"] == "Map" else ""
        guess = f", if loops have {GUESSED_ROUNDS} rounds" if cost["guessed"] else ""
        nbytes = human_bytes(round(cost["moved_bytes"]))
        yield "computes", f"{unit}{cost['operations']:,.0f} operations, {nbytes} moved{guess}"
    if step["reason"]:
        yield "why", step["reason"]
    for line in step["lines"]:
        yield "line", line
    if python := step.get("python"):
        yield "code", f"Python, pickled with {plan['program']}: {python}"
    for platform, size in step.get("executables", {}).items():
        yield "code", f"{human_bytes(size)} for {platform}"


def _merge_text(merge: Json) -> str:
    pieces = count(merge["pieces"], "range")
    groups = f", each first in {merge['groups']} groups" if merge["groups"] > 1 else ""
    size = human_bytes(merge["nbytes"])
    return f"{size} of accumulators, merged in {pieces}{groups}: {merge['why']}"


def step_title(step: Json, plan: Json) -> str:
    """Returns the kind of a step in words, such as `Map, a pass over clients, 3 shards`."""
    match step["kind"]:
        case "Map":
            (placement,) = (p for p in plan["placements"] if p["name"] == step["placement"])
            shards = f"shards of {placement['shard_size']}"
            if placement["shards"] is not None:
                shards = count(placement["shards"], "shard")
            return f"Map, a pass over {placement['name']}, {shards}"
        case "Loop":
            return f"Loop, {rounds_text(step)}"
        case "Branch":
            return f"Branch, one of {count(len(step['blocks']), 'block')}"
    return str(step["kind"])


# --- the text


def plan_text(plan: Json) -> str:
    """Returns a plan as text."""
    shown = tables(plan)
    lines = [
        f"plan of {plan['program']}",
        f"  jax {plan['jax_version']}, 64-bit types {'on' if plan['x64'] else 'off'}",
        f"  {count(plan['passes'], 'pass', 'es')} over members, "
        f"{count(len(list(all_steps(plan['steps']))), 'step')}",
        *(
            f"  {p['name']}: {count(p['members'], 'member')} in {count(p['shards'], 'shard')} of "
            f"{p['shard_size']}"
            for p in plan["placements"]
        ),
        *(f"  {note}" for note in plan["notes"]),
        *_section("inputs", shown.pop("inputs").rows),
        *["", "steps", *(line for step in plan["steps"] for line in _step_lines(step, plan))],
        *["", "gathered and scattered", *_moves(plan)],
    ]
    for title, table in shown.items():
        rows = table.rows
        if title == "choices":
            rows = [(*row, f"{why} (option {to})" if to else why) for *row, why, to in rows]
        lines += _section(title, rows)
    return "\n".join(lines)


def _section(title: str, rows: Sequence[Row]) -> list[str]:
    return ["", title, *(f"  {line}" for line in (aligned(rows) if rows else ["none"]))]


def _step_lines(step: Json, plan: Json) -> list[str]:
    rows = aligned((f"{label:<9}", *rest) for label, *rest in step_values(step))
    rows += [f"{label:<9}  {text}" for label, text in step_notes(step, plan)]
    for block in step["blocks"]:
        returned = ", ".join(value["name"] for value in block["outputs"]) or "nothing"
        rows.append(f"{block['title']}, returns {returned}")
        rows += [line for inner in block["steps"] for line in _step_lines(inner, plan)]
    return [f"  {step['name']}: {step_title(step, plan)}", *(f"    {row}" for row in rows)]


def _moves(plan: Json) -> Iterator[str]:
    steps = [s for s in all_steps(plan["steps"]) if s["kind"] in ("Gather", "Scatter")]
    if all(step["kind"] != "Gather" for step in steps):
        yield "  nothing is gathered"
    sources = {(edge["target"], edge["value"]): edge["source"] for edge in plan["edges"]}
    for step in steps:
        (value,) = step["served"] + step["placed"]
        yield (
            f"  {step['name']}: {value['name']} of {sources[step['name'], value['name']]}, "
            f"{human_bytes(value['nbytes'])}, along axis {step['axis']}, because {step['reason']}"
        )
        yield from (f"    at {line}" for line in step["lines"])


# --- the flowchart


def plan_mermaid(plan: Json) -> str:
    """Returns a plan as a Mermaid flowchart; steps that gather or scatter are red."""
    # Loops and branches are subgraphs. A node in each stands for the loop or branch itself: edges
    # of values that its rounds read begin there, and edges of values that they return end there.
    ends = {edge["source"] for edge in plan["edges"]}
    inputs = [value for value in plan["inputs"] if value["path"] in ends]
    steps = list(all_steps(plan["steps"]))
    keys = [value["path"] for value in inputs] + [step["name"] for step in steps]
    names = {key: f"n{i}" for i, key in enumerate([*keys, *(o["path"] for o in plan["outputs"])])}

    def end(value: Json) -> str:
        return f"  {_node(names[value['path']], '([', '])', value['path'], value['type'])}"

    memory = plan["memory"]["steps"].items()
    notes = {name: f"memory up to {human_bytes(sum(parts.values()))}" for name, parts in memory}
    lines = ["flowchart TD", *map(end, inputs)]
    lines += [f"  {line}" for step in plan["steps"] for line in _step_nodes(step, names, notes)]
    lines += map(end, plan["outputs"])
    for edge in plan["edges"]:
        label = _escaped(f"{edge['value']} {human_bytes(edge['nbytes'])}")
        lines.append(f'  {names[edge["source"]]} -->|"{label}"| {names[edge["target"]]}')
    moves = [names[step["name"]] for step in steps if step["kind"] in ("Gather", "Scatter")]
    if moves:
        lines.append("  classDef moved fill:#fdd,stroke:#c00,color:#900")
        lines.append(f"  class {','.join(moves)} moved")
    return "\n".join(lines) + "\n"


def _node(name: str, left: str, right: str, *texts: str) -> str:
    return f'{name}{left}"{"<br/>".join(_escaped(text) for text in texts if text)}"{right}'


def _step_nodes(step: Json, names: Mapping[str, str], notes: Mapping[str, str]) -> list[str]:
    """Returns a node; a loop or a branch also has a subgraph with the nodes of its blocks."""
    name = names[step["name"]]
    if not step["blocks"]:
        texts = (*step.get("functions", ()), step["reason"], notes.get(step["name"], ""))
        return [_node(name, "[", "]", step["name"], *texts)]
    left, right = ("{{", "}}") if step["kind"] == "Loop" else ("{", "}")
    rounds = rounds_text(step) if step["kind"] == "Loop" else ""
    lines = [f'subgraph {name}_all["{_escaped(step["name"])}"]']
    lines.append(f"  {_node(name, left, right, step['name'], rounds)}")
    for i, block in enumerate(step["blocks"]):
        if block["steps"]:
            inner = [line for child in block["steps"] for line in _step_nodes(child, names, notes)]
            lines.append(f'  subgraph {name}_{i}["{_escaped(block["title"])}"]')
            lines += [*(f"    {line}" for line in inner), "  end"]
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
        case cut.RowsStage(eqn, along, place):
            return [f"rows ({along}) -> {place}: {eqn!r}"]
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
