"""The page of a plan: the graph of its steps, and the facts of each step beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import InputFact, OutputFact, PlanFacts, StepFact, walk_facts
from beamjax.diagnostics.pages.graph import plan_graph
from beamjax.diagnostics.pages.page import Page
from beamjax.diagnostics.text import (
    Row,
    count,
    human_seconds,
    parts_text,
    rounds_text,
    step_notes,
    step_values,
    tables,
)
from beamjax.storage.schema import to_plain
from beamjax.telemetry.progress import SECONDS, Tally

KINDS = {
    "Map": "a pass over members",
    "Server": "computes on the server",
    "Gather": "gathers members to the server",
    "Scatter": "scatters a value over members",
    "Loop": "repeats a block",
    "Branch": "runs one of several blocks",
}


def plan_page(
    facts: PlanFacts,
    sources: Mapping[str, str],
    steps: Mapping[str, Tally] | None = None,
    wall: float | None = None,
) -> Page:
    """Returns the page of a plan.

    Args:
      facts: the facts of the plan.
      sources: the text of the user's lines, from `source_lines`.
      steps: the measurements of each step, after a run.
      wall: the seconds of the run.
    """
    every = list(walk_facts(facts.steps))
    moved = [
        (step, value)
        for step in every
        if step.kind in ("Gather", "Scatter")
        for value in (*step.served, *step.placed)
    ]
    values, data = steps_section(facts, sources, steps or {})
    values |= {"tiles": list(_tiles(facts, steps or {}, wall)), "tables": tables(facts)}
    values |= {"moved": moved, "gathers": any(step.kind == "Gather" for step in every)}
    data |= {"plan": to_plain(facts), "source_lines": dict(sources)}
    return Page(f"plan of {facts.program}", "plan", values, data)


def text_page(title: str, text: str) -> Page:
    """Returns a page of text alone."""
    return Page(title, "text", {"text": text}, {"text": text})


def steps_section(
    facts: PlanFacts, sources: Mapping[str, str], steps: Mapping[str, Tally]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of the template "steps", and the data of the graph in it."""
    spent = {name: seconds_by_kind(tally) for name, tally in steps.items()}
    seconds = seconds_of(facts, spent)
    every = list(walk_facts(facts.steps))
    kinds = {step.kind for step in every}
    legend = [
        (kind.lower(), "", f"{kind}: {text}") for kind, text in KINDS.items() if kind in kinds
    ]
    legend.append(("served", "flat", "a server value"))
    legend.append(("placed", "flat", "a placed value, one entry per member"))
    if "Gather" in kinds:
        legend.append(("gather", "flat", "a gathered value"))
    ends: list[InputFact | OutputFact] = [*facts.inputs, *facts.outputs]
    values = {
        "facts": facts,
        "sources": sources,
        "legend": legend,
        "second_kinds": SECONDS,
        "spent": spent,
        "steps": [
            {
                "name": step.name,
                "kind": step.kind,
                "title": f"{step.kind}, "
                + (rounds_text(step) if step.kind == "Loop" else KINDS[step.kind]),
                "notes": list(_notes(step, facts, seconds.get(step.name, {}))),
                "values": step_values(step),
            }
            for step in every
        ],
        "ends": [(end.path, end.type, human_bytes(end.nbytes)) for end in ends],
    }
    return values, {"graph": plan_graph(facts, seconds, sources), "seconds": seconds}


def seconds_by_kind(tally: Tally) -> dict[str, float]:
    """Returns the seconds of reading, transfers, compilation, computing and merging."""
    return {kind: getattr(tally, kind) for kind in SECONDS}


def seconds_of(
    facts: PlanFacts, spent: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float | None]]:
    """Returns the measured seconds of each step that has any, and its share."""
    measured = {name: sum(kinds.values()) for name, kinds in spent.items()}
    total = sum(measured.values())
    return {
        step.name: {
            "measured": measured[step.name],
            "share": measured[step.name] / total if total else None,
        }
        for step in walk_facts(facts.steps)
        if step.name in measured
    }


def _notes(step: StepFact, facts: PlanFacts, seconds: Mapping[str, float | None]) -> Iterator[Row]:
    """Yields rows of the table of a step: a label, and a text."""
    if (measured := seconds.get("measured")) is not None:
        yield "measured", f"{human_seconds(measured)}, the sum over all workers"
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
    yield from step_notes(step, facts)
    memory = facts.memory.steps.get(step.name) if facts.memory else None
    if memory:
        yield "memory", f"up to {human_bytes(sum(memory.values()))}: {parts_text(memory)}"
    for block in step.blocks:
        yield block.title, ", ".join(inner.name for inner in block.steps) or "no steps"


Tile = tuple[Any, str, bool]
"""A number, its label, and whether it needs attention."""


def _tiles(facts: PlanFacts, steps: Mapping[str, Tally], wall: float | None) -> Iterator[Tile]:
    every = list(walk_facts(facts.steps))
    yield len(every), "step" if len(every) == 1 else "steps", False
    yield facts.passes, f"{'pass' if facts.passes == 1 else 'passes'} over members", False
    for p in facts.placements:
        members = "n" if p.members is None else f"{p.members:,}"
        yield members, f"{p.name} in {count(p.shards, 'shard')} of {p.shard_size}", False
    yield human_bytes(facts.read_bytes), "read by all passes", False
    yield human_bytes(facts.broadcast_bytes), "broadcast", False
    if any(step.kind == "Gather" for step in every):
        yield human_bytes(facts.gathered_bytes), "gathered to the server", True
    else:
        yield "nothing", "is gathered", False
    if wall is not None:
        yield human_seconds(wall), "measured, in total", False
    if steps:
        spent = sum(sum(seconds_by_kind(tally).values()) for tally in steps.values())
        yield human_seconds(spent), "measured, sum over all workers", False
