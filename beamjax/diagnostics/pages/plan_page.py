"""The page of a plan: its graph, and beside it what there is to say of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from beamjax._text import human_bytes
from beamjax.diagnostics.choice_facts import told_of
from beamjax.diagnostics.fact_types import PlanFacts, StepFact, ValueFact, walk_facts
from beamjax.diagnostics.memory_text import memory_sections
from beamjax.diagnostics.mermaid import rounds_text
from beamjax.diagnostics.pages.charts import shares_bar, shares_legend
from beamjax.diagnostics.pages.drawing import drawing
from beamjax.diagnostics.pages.graph import Seconds, plan_area
from beamjax.diagnostics.pages.markup import Markup, joined, table, tag
from beamjax.diagnostics.pages.shell import Page
from beamjax.diagnostics.pages.words import human_seconds
from beamjax.diagnostics.total_text import total_rows
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
    """The page of a plan.

    Args:
      facts: of the plan.
      sources: the text of lines of the user, see `beamjax.diagnostics.fact_types`.
      steps: what was measured of each step, after a run.
      wall: seconds that the run took.
    """
    found = seconds_of(facts, steps)

    def body(prefix: str) -> Markup:
        return joined(
            [
                tag("h1", "plan of ", tag("code", facts.program)),
                tag("p", _versions(facts), class_="under"),
                _tiles(facts, steps, wall),
                graph_section(facts, sources, steps, prefix),
                _moved(facts, sources),
                _choices(facts),
                _section("Notes", tag("ul", *(tag("li", note) for note in facts.notes)))
                if facts.notes
                else None,
                _inputs(facts),
                _outputs(facts),
                _totals(facts),
                *_memory(facts),
            ]
        )

    data: dict[str, Any] = {"plan": dataclasses.asdict(facts), "source_lines": dict(sources)}
    data["seconds"] = {name: dataclasses.asdict(each) for name, each in found.items()}
    return Page(f"plan of {facts.program}", body, data)


def text_page(title: str, text: str) -> Page:
    """A page of text alone."""
    body = joined([tag("h1", title), tag("pre", text, tabindex=0)])
    return Page(title, lambda prefix: body, {"text": text})


def seconds_of(facts: PlanFacts, steps: Mapping[str, Tally] | None) -> dict[str, Seconds]:
    """The time of each step, of which there is any."""
    spent = {
        name: sum(getattr(tally, kind) for kind in SECONDS) for name, tally in (steps or {}).items()
    }
    total = sum(spent.values())
    told = facts.predicted.steps if facts.predicted else ()
    predicted = {step.step: step.read + step.compute + step.merge for step in told}
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
    """The graph with its legend and a panel of steps."""
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
        table(_told(step, facts, sources, seconds), class_="facts"),
        _values(step, facts),
        shares_bar(tally) if tally is not None else None,
    ]
    return tag("details", *parts, id=targets[step.name], class_=step.kind.lower())


def _told(
    step: StepFact, facts: PlanFacts, sources: Mapping[str, str], seconds: Seconds | None
) -> Iterator[tuple[Any, ...]]:
    """Rows on a step: what, and how."""
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
    if step.functions:
        yield "holds", joined([tag("code", ", ".join(step.functions))])
    if step.reason:
        yield "why", step.reason
    if step.merge is not None:
        yield "merged", step.merge.text(human_bytes(step.merge.nbytes))
    for line in filter(None, step.lines):
        yield "line", _line(line, sources)
    if step.python:
        yield "code", f"runs from cloudpickle of {facts.program}: {step.python}"
    for platform, size in step.executables.items():
        yield "code", f"{human_bytes(size)} for {platform}"
    memory = facts.memory.steps.get(step.name) if facts.memory else None
    if memory:
        parts = ", ".join(f"{what} {human_bytes(n)}" for what, n in memory.items())
        yield "memory", f"up to {human_bytes(sum(memory.values()))}: {parts}"
    for block in step.blocks:
        yield block.title, ", ".join(inner.name for inner in block.steps) or "no steps"


def _line(line: str, sources: Mapping[str, str]) -> Markup:
    parts: list[Any] = [line]
    if line in sources:
        parts += [tag("br"), tag("code", sources[line])]
    return joined(parts)


def _values(step: StepFact, facts: PlanFacts) -> Markup | None:
    served = "broadcast" if step.kind == "Map" else "reads"
    rows = [_value(served, v) for v in step.served] + [_value("reads", v) for v in step.placed]
    if step.kind == "Loop":
        rows = [
            _value(f"{h.how} {h.outside or ''} → {h.afterwards or ''}".strip(" →"), h.inside)
            for h in step.handed
        ]
    rows += [_value("makes", v) for v in step.results if step.kind != "Loop"]
    rows += [
        _value("reduces", r.result, f"{r.reducer} in lane {r.lane}: {r.exactness}", r.nbytes)
        for r in step.reductions
    ]
    return table(rows, ("", "value", "bytes")) if rows else None


def _value(label: str, value: ValueFact, how: str = "", sent: int | None = None) -> tuple[Any, ...]:
    size = [human_bytes(value.nbytes)]
    if value.member_bytes is not None and value.shard_bytes is not None:
        size.append(f"{human_bytes(value.member_bytes)} a member")
        size.append(f"{human_bytes(value.shard_bytes)} a shard")
    if sent is not None:
        size = [f"{human_bytes(sent)} a shard"]
    what = [tag("code", value.name), tag("code", value.type), how]
    return label, _lines(filter(None, what)), _lines(size)


def _lines(texts: Iterable[Any]) -> Markup:
    return joined(tag("div", text) for text in texts)


# --- around the graph


def _versions(facts: PlanFacts) -> str:
    return f"jax {facts.jax_version}, 64-bit types {'on' if facts.x64 else 'off'}"


def tile(value: Any, label: str, loud: bool = False) -> Markup:
    """A number and what it is."""
    return tag("div", tag("b", value), tag("span", label), class_="tile loud" if loud else "tile")


def _tiles(facts: PlanFacts, steps: Mapping[str, Tally] | None, wall: float | None) -> Markup:
    every = list(walk_facts(facts.steps))
    gathers = sum(step.kind == "Gather" for step in every)
    tiles = [tile(len(every), "step" if len(every) == 1 else "steps")]
    tiles.append(
        tile(facts.passes, "pass over members" if facts.passes == 1 else "passes over members")
    )
    for p in facts.placements:
        shards = (
            "shards" if p.shards is None else f"{p.shards:,} shards" if p.shards > 1 else "1 shard"
        )
        members = "n" if p.members is None else f"{p.members:,}"
        tiles.append(tile(members, f"{p.name} in {shards} of {p.shard_size}"))
    tiles.append(tile(human_bytes(facts.read_bytes), "read by all passes"))
    tiles.append(tile(human_bytes(facts.broadcast_bytes), "broadcast"))
    if gathers:
        tiles.append(tile(human_bytes(facts.gathered_bytes), "gathered to the server", loud=True))
    else:
        tiles.append(tile("nothing", "is gathered"))
    if facts.predicted is not None:
        told = f"predicted on {facts.predicted.runner}, without compiling"
        tiles.append(tile(human_seconds(facts.predicted.seconds), told))
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
        told = (*cells, step.reason, where or "no line is known")
        rows.append(tag("tr", *(tag("td", cell) for cell in told), class_=loud))
    if rows:
        head = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in _MOVED)))
        made = tag("table", head, tag("tbody", *rows))
        parts.append(tag("div", made, class_="table", tabindex=0))
    return _section("Gathered and scattered", *parts)


_MOVED = ("step", "bytes", "value", "because", "your line")


def _choices(facts: PlanFacts) -> Markup | None:
    """What could be otherwise, and what was timed for it."""
    if not facts.choices:
        return None
    parts = [
        table(
            [(c.what, c.chosen, told_of(c), c.why, tag("code", c.option)) for c in facts.choices],
            _CHOSEN,
        )
    ]
    if facts.tried:
        rows = [
            (tag("code", t.step), t.shard_size, t.member_loop, human_seconds(t.member_seconds),
             "chosen" if t.is_chosen else "")
            for t in facts.tried
        ]  # fmt: skip
        parts.append(table(rows, _TRIED))
    return _section("Choices", *parts)


_CHOSEN = ("what", "chosen", "told to take", "because", "option")
_TRIED = ("step", "shard size", "members", "seconds of one", "")


def _inputs(facts: PlanFacts) -> Markup:
    rows = [
        (tag("code", i.path), tag("code", i.type), human_bytes(i.nbytes), i.read)
        for i in facts.inputs
    ]
    return _section("Inputs", _or_none(rows, ("input", "type", "bytes", "read")))


def _outputs(facts: PlanFacts) -> Markup:
    rows = [
        (tag("code", o.path), tag("code", o.type), human_bytes(o.nbytes), tag("code", o.source))
        for o in facts.outputs
    ]
    return _section("Outputs", _or_none(rows, ("output", "type", "bytes", "from")))


def _ends(facts: PlanFacts) -> Markup:
    rows = [(tag("code", i.path), tag("code", i.type), human_bytes(i.nbytes)) for i in facts.inputs]
    rows += [
        (tag("code", o.path), tag("code", o.type), human_bytes(o.nbytes)) for o in facts.outputs
    ]
    return table(rows)


def _or_none(rows: Sequence[Iterable[Any]], head: Sequence[str]) -> Markup:
    return table(rows, head) if rows else tag("p", "none")


def _totals(facts: PlanFacts) -> Markup:
    return _section("Totals", table(total_rows(facts), class_="facts"))


def _memory(facts: PlanFacts) -> Iterator[Markup]:
    for title, rows in memory_sections(facts.memory) if facts.memory else ():
        yield _section(title.capitalize(), table(rows, ("", "bytes", "for")))
