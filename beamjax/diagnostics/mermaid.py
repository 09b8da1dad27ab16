"""A plan as a flowchart of Mermaid."""

from __future__ import annotations

from collections.abc import Mapping

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import PlanFacts, StepFact, walk_facts
from beamjax.diagnostics.text import rounds_text


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
    """A node; for a loop or a branch also a subgraph with those of its blocks around it."""
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
    """Text for a quoted Mermaid label, where other characters than these mean something."""
    plain = " ".join(text.split())
    return "".join(c if c.isalnum() or c in " _.,:@-/" else f"#{ord(c)};" for c in plain)
