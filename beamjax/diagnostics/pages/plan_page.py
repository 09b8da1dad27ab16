"""The page of a plan: the graph of its steps, and the facts of each step beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import (
    InputFact,
    OutputFact,
    PlanFacts,
    StepFact,
    walk_facts,
)
from beamjax.diagnostics.pages.charts import shares_bar, shares_legend
from beamjax.diagnostics.pages.drawing import drawing
from beamjax.diagnostics.pages.graph import Seconds, plan_area
from beamjax.diagnostics.pages.markup import Markup, joined, table, tag
from beamjax.diagnostics.pages.shell import Page
from beamjax.diagnostics.text import (
    Table,
    count,
    human_seconds,
    parts_text,
    rounds_text,
    step_notes,
    step_values,
    tables,
)
from beamjax.telemetry.progress import SECONDS, Tally

KINDS = {
    "Map": "a pass over members",
    "Server": "on the server",
    "Gather": "gathers members to the server",
    "Scatter": "scatters a value over members",
    "Loop": "rounds",
    "Branch": "one of several blocks",
}


def plan_page(
    facts: PlanFacts,
    sources: Mapping[str, str],
    steps: Mapping[str, Tally] | None = None,
    wall: float | None = None,
) -> Page:
    """Makes the page of a plan.

    Args:
      facts: the facts of the plan.
      sources: the text of the user's lines, from `source_lines`.
      steps: the measurements of each step, after a run.
      wall: the seconds of the run.
    """
    found = seconds_of(facts, steps)
    shown = {title: each for title, each in tables(facts).items() if each.rows}

    def body(prefix: str) -> Markup:
        return joined(
            [
                tag("h1", "plan of ", tag("code", facts.program)),
                tag("p", _versions(facts), class_="under"),
                _tiles(facts, steps, wall),
                graph_section(facts, sources, steps, prefix),
                _moved(facts, sources),
                _section("Notes", tag("ul", *(tag("li", note) for note in facts.notes)))
                if facts.notes
                else None,
                *(_section(title.capitalize(), _table(each)) for title, each in shown.items()),
            ]
        )

    data: dict[str, Any] = {"plan": dataclasses.asdict(facts), "source_lines": dict(sources)}
    data["seconds"] = {name: dataclasses.asdict(each) for name, each in found.items()}
    return Page(f"plan of {facts.program}", body, data)


def text_page(title: str, text: str) -> Page:
    """Makes a page of text alone."""
    body = joined([tag("h1", title), tag("pre", text, tabindex=0)])
    return Page(title, lambda prefix: body, {"text": text})


def seconds_of(facts: PlanFacts, steps: Mapping[str, Tally] | None) -> dict[str, Seconds]:
    """Returns the predicted and measured time of each step that has any."""
    spent = {
        name: sum(getattr(tally, kind) for kind in SECONDS) for name, tally in (steps or {}).items()
    }
    total = sum(spent.values())
    predicted = {s.step: s.busy for s in facts.predicted.steps} if facts.predicted else {}
    found = {}
    for step in walk_facts(facts.steps):
        measured = spent.get(step.name)
        share = measured / total if measured is not None and total else None
        each = Seconds(predicted.get(step.name), measured, share)
        if each != Seconds():
            found[step.name] = each
    return found


# --- the graph, and the steps beside it


def graph_section(
    facts: PlanFacts,
    sources: Mapping[str, str],
    steps: Mapping[str, Tally] | None,
    prefix: str,
) -> Markup:
    """Makes the graph with its legend and the panel of steps."""
    found = seconds_of(facts, steps)
    numbered = list(walk_facts(facts.steps))
    targets = {step.name: f"{prefix}-step-{i}" for i, step in enumerate(numbered)}
    ends = f"{prefix}-ends"
    targets |= dict.fromkeys((fact.path for fact in facts.inputs), ends)
    targets |= dict.fromkeys((fact.path for fact in facts.outputs), ends)
    area = plan_area(facts, found, sources)
    picture = drawing(area, targets, f"The steps of the plan of {facts.program}", prefix)
    panel = [
        _step(step, facts, sources, found.get(step.name), (steps or {}).get(step.name), targets)
        for step in numbered
    ]
    both = tag("details", tag("summary", "inputs and outputs"), _ends(facts), id=ends)
    return tag(
        "section",
        tag("h2", "Steps"),
        _legend(facts, steps),
        tag(
            "div",
            tag("div", picture, class_="graph-box", role="region", aria_label="graph of the steps"),
            tag("div", *panel, both, class_="panel", role="region", aria_label="steps", tabindex=0),
            class_="work",
        ),
    )


def _legend(facts: PlanFacts, steps: Mapping[str, Tally] | None) -> Markup:
    kinds = dict.fromkeys(step.kind for step in walk_facts(facts.steps))
    keys = [_key(kind.lower(), f"{kind}: {KINDS[kind]}") for kind in KINDS if kind in kinds]
    keys.append(_key("served", "a server value, one copy", "flat"))
    keys.append(_key("placed", "a placed value, one a member", "flat"))
    if "Gather" in kinds:
        keys.append(_key("gather", "what is gathered", "flat"))
    hint = "Drag moves, + and - or Ctrl and the wheel zoom; a click or Enter chooses a step."
    return joined(
        [
            tag("div", *keys, class_="legend"),
            shares_legend() if steps else None,
            tag("div", tag("p", hint, class_="under hint"), class_="bar"),
        ]
    )


def _key(kind: str, text: str, shape: str = "") -> Markup:
    return tag("span", tag("i", class_=shape or None), text, class_=f"key {kind}")


def _step(
    step: StepFact,
    facts: PlanFacts,
    sources: Mapping[str, str],
    seconds: Seconds | None,
    tally: Tally | None,
    targets: Mapping[str, str],
) -> Markup:
    kind = f"{step.kind}, {rounds_text(step) if step.kind == 'Loop' else KINDS[step.kind]}"
    parts = [
        tag("summary", tag("code", step.name), " ", tag("span", kind, class_="under")),
        table(_notes(step, facts, sources, seconds), class_="facts"),
        _values(step),
        shares_bar(tally) if tally is not None else None,
    ]
    return tag("details", *parts, id=targets[step.name], class_=step.kind.lower())


def _notes(
    step: StepFact, facts: PlanFacts, sources: Mapping[str, str], seconds: Seconds | None
) -> Iterator[tuple[Any, ...]]:
    """Yields rows of the table of a step: a label, and a text."""
    if seconds is not None and seconds.predicted is not None:
        yield "predicted", human_seconds(seconds.predicted)
    if seconds is not None and seconds.measured is not None:
        yield "measured", f"{human_seconds(seconds.measured)} of all workers together"
    if step.kind == "Map":
        (placement,) = (p for p in facts.placements if p.name == step.placement)
        members = "n" if placement.members is None else f"{placement.members:,}"
        shards = "" if placement.shards is None else f", {placement.shards:,} of them"
        yield "members", f"{members} of {placement.name}"
        yield "shards", f"of {placement.shard_size}{shards}"
        served = human_bytes(step.broadcast_bytes)
        yield "reads", f"{human_bytes(step.read_bytes)} of members, {served} broadcast"
    if step.axis is not None:
        yield "along axis", str(step.axis)
    for label, text in step_notes(step, facts):
        yield label, _line(text, sources) if label == "line" else text
    memory = facts.memory.steps.get(step.name) if facts.memory else None
    if memory:
        yield "memory", f"up to {human_bytes(sum(memory.values()))}: {parts_text(memory)}"
    for block in step.blocks:
        yield block.title, ", ".join(inner.name for inner in block.steps) or "no steps"


def _line(line: str, sources: Mapping[str, str]) -> Markup:
    parts: list[Any] = [line]
    if line in sources:
        parts += [tag("br"), tag("code", sources[line])]
    return joined(parts)


def _values(step: StepFact) -> Markup | None:
    rows = [
        (label, joined([tag("code", name), tag("br"), tag("code", kind), tag("div", text)]))
        for label, name, kind, text in step_values(step)
    ]
    return table(rows, class_="facts") if rows else None


# --- around the graph


def _versions(facts: PlanFacts) -> str:
    return f"jax {facts.jax_version}, 64-bit types {'on' if facts.x64 else 'off'}"


def tile(value: Any, label: str, loud: bool = False) -> Markup:
    """Makes a tile: a number and its label."""
    return tag("div", tag("b", value), tag("span", label), class_="tile loud" if loud else "tile")


def _tiles(facts: PlanFacts, steps: Mapping[str, Tally] | None, wall: float | None) -> Markup:
    every = list(walk_facts(facts.steps))
    gathers = sum(step.kind == "Gather" for step in every)
    tiles = [
        tile(len(every), "step" if len(every) == 1 else "steps"),
        tile(facts.passes, f"{'pass' if facts.passes == 1 else 'passes'} over members"),
    ]
    for p in facts.placements:
        members = "n" if p.members is None else f"{p.members:,}"
        tiles.append(tile(members, f"{p.name} in {count(p.shards, 'shard')} of {p.shard_size}"))
    tiles.append(tile(human_bytes(facts.read_bytes), "read by all passes"))
    tiles.append(tile(human_bytes(facts.broadcast_bytes), "broadcast"))
    if gathers:
        tiles.append(tile(human_bytes(facts.gathered_bytes), "gathered to the server", loud=True))
    else:
        tiles.append(tile("nothing", "is gathered"))
    if facts.predicted is not None:
        label = f"predicted on {facts.predicted.runner}, without compiling"
        tiles.append(tile(human_seconds(facts.predicted.seconds), label))
    if wall is not None:
        tiles.append(tile(human_seconds(wall), "measured, from start to end"))
    if steps:
        spent = sum(getattr(tally, kind) for tally in steps.values() for kind in SECONDS)
        tiles.append(tile(human_seconds(spent), "measured, of all workers"))
    return tag("div", *tiles, class_="tiles")


def _section(title: str, *parts: Any) -> Markup:
    return tag("section", tag("h2", title), *parts)


def _moved(facts: PlanFacts, sources: Mapping[str, str]) -> Markup:
    steps = [s for s in walk_facts(facts.steps) if s.kind in ("Gather", "Scatter")]
    gathers = [step for step in steps if step.kind == "Gather"]
    parts: list[Markup] = []
    if not gathers:
        parts.append(tag("p", "Nothing is gathered."))
    rows = []
    for step in steps:
        (value,) = (*step.served, *step.placed)
        where = joined([_line(line, sources) for line in step.lines[:1] if line])
        cells = (tag("code", step.name), human_bytes(value.nbytes), tag("code", value.type))
        loud = "loud" if step.kind == "Gather" else None
        whole = (*cells, step.reason, where or "no line is known")
        rows.append(tag("tr", *(tag("td", cell) for cell in whole), class_=loud))
    if rows:
        head = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in _MOVED)))
        made = tag("table", head, tag("tbody", *rows))
        parts.append(tag("div", made, class_="table", tabindex=0))
    return _section("Gathered and scattered", *parts)


_MOVED = ("step", "bytes", "value", "because", "your line")


def _table(found: Table) -> Markup:
    rows = [
        [tag("code", cell) if i in found.code and cell else cell for i, cell in enumerate(row)]
        for row in found.rows
    ]
    return table(rows, found.head, None if any(found.head) else "facts")


def _ends(facts: PlanFacts) -> Markup:
    """Returns the table of inputs and outputs beside the graph."""
    ends: list[InputFact | OutputFact] = [*facts.inputs, *facts.outputs]
    return table(
        (tag("code", each.path), tag("code", each.type), human_bytes(each.nbytes)) for each in ends
    )
