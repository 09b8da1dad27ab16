"""A plan as a flowchart of Mermaid."""

from __future__ import annotations

from collections.abc import Mapping

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import PlanFacts, StepFact, walk_facts
from beamjax.diagnostics.memory_text import step_texts


def plan_mermaid(facts: PlanFacts) -> str:
    """A plan as a Mermaid flowchart; steps that gather or scatter are red.

    Loops and branches are subgraphs, with a node that stands for the loop or branch itself: what
    its rounds read comes from there, and what they hand on comes back.
    """
    ends = {edge.source for edge in facts.edges}
    inputs = [fact for fact in facts.inputs if fact.path in ends]
    steps = list(walk_facts(facts.steps))
    keys = [*(i.path for i in inputs), *(s.name for s in steps), *(o.path for o in facts.outputs)]
    names = {key: f"n{i}" for i, key in enumerate(keys)}
    lines = ["flowchart TD"]
    lines += [f"  {_node(names[i.path], '([', '])', i.path, i.type)}" for i in inputs]
    told = step_texts(facts.memory) if facts.memory else {}
    lines += [f"  {line}" for step in facts.steps for line in _step_nodes(step, names, told)]
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


def _step_nodes(step: StepFact, names: Mapping[str, str], told: Mapping[str, str]) -> list[str]:
    """A node; for a loop or a branch also a subgraph with those of its blocks around it."""
    name = names[step.name]
    if not step.blocks:
        texts = (*step.functions, step.reason, told.get(step.name, ""))
        return [_node(name, "[", "]", step.name, *texts)]
    left, right = ("{{", "}}") if step.kind == "Loop" else ("{", "}")
    rounds = rounds_text(step) if step.kind == "Loop" else ""
    lines = [f'subgraph {name}_all["{_escaped(step.name)}"]']
    lines.append(f"  {_node(name, left, right, step.name, rounds)}")
    for i, block in enumerate(step.blocks):
        if block.steps:
            lines.append(f'  subgraph {name}_{i}["{_escaped(block.title)}"]')
            lines += [
                f"    {line}" for inner in block.steps for line in _step_nodes(inner, names, told)
            ]
            lines.append("  end")
    return [*lines, "end"]


def _escaped(text: str) -> str:
    """Text for a quoted Mermaid label, where other characters than these mean something."""
    plain = " ".join(text.split())
    return "".join(c if c.isalnum() or c in " _.,:@-/" else f"#{ord(c)};" for c in plain)


def rounds_text(step: StepFact) -> str:
    """How many rounds a loop has, in words."""
    if step.rounds is None:
        return "rounds while a condition holds"
    rounds = "1 round" if step.rounds == 1 else f"{step.rounds} rounds"
    return rounds + (", the last entry first" if step.reverse else "")
