"""What moves in a plan, and how much in all, as text."""

from __future__ import annotations

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import PlanFacts, walk_facts


def move_lines(facts: PlanFacts) -> list[str]:
    """What is gathered and scattered, with the reason and the line."""
    lines = []
    steps = list(walk_facts(facts.steps))
    if all(step.kind != "Gather" for step in steps):
        lines.append("  nothing is gathered")
    sources = {(edge.target, edge.value): edge.source for edge in facts.edges}
    for step in steps:
        if step.kind not in ("Gather", "Scatter"):
            continue
        (value,) = (*step.served, *step.placed)
        lines.append(
            f"  {step.name}: {value.name} of {sources[step.name, value.name]}, "
            f"{human_bytes(value.nbytes)}, along axis {step.axis}, because {step.reason}"
        )
        lines += [f"    at {line}" for line in step.lines if line]
    return lines


def total_rows(facts: PlanFacts) -> list[tuple[str, str]]:
    """What is read, sent and compiled in all."""
    rows = [
        (f"read by {step.name}", f"{human_bytes(step.read_bytes)} of members")
        for step in walk_facts(facts.steps)
        if step.kind == "Map"
    ]
    rows.append(("read by all passes", human_bytes(facts.read_bytes)))
    rows.append(("broadcast", human_bytes(facts.broadcast_bytes)))
    rows.append(("gathered", human_bytes(facts.gathered_bytes)))
    rows.append(("reduced", f"{human_bytes(facts.partial_bytes)} a shard"))
    if facts.saved_bytes:
        rows.append(("saved", f"{human_bytes(facts.saved_bytes)} a shard, by compression"))
    if any(step.kind == "Loop" for step in walk_facts(facts.steps)):
        rows.append(("rounds", "each round of a loop is counted once in these totals"))
    return rows + [(f"code for {p}", human_bytes(n)) for p, n in facts.executable_bytes.items()]
