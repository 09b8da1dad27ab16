"""What holds of every explanation: of its steps, its text, its flowchart and its page."""

import json
import re

import html_checks

from beamjax.diagnostics.plan_json import all_steps

LABEL = r'"(?:[^"<>\[\](){}|`]|<br/>)*"'
NODE = re.compile(rf" +(n\d+)(?:\[{LABEL}\]|\(\[{LABEL}\]\)|{{{{{LABEL}}}}}|{{{LABEL}}})")
EDGE = re.compile(rf"  (n\d+) -->\|{LABEL}\| (n\d+)")
KINDS = ("server", "map", "gather", "scatter", "loop", "branch")


def check_mermaid(text):
    """The part of Mermaid's grammar that is used; every node is declared once before its edges."""
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    nodes, depth = [], 0
    for line in lines:
        if opened := re.fullmatch(rf" +subgraph (n\d+_\w+)\[{LABEL}\]", line):
            nodes.append(opened[1])
            depth += 1
        elif line.strip() == "end":
            depth -= 1
            assert depth >= 0
        elif edge := EDGE.fullmatch(line):
            assert set(edge.groups()) <= set(nodes)
        elif styled := re.fullmatch(r"  class ((?:n\d+,?)+) moved", line):
            assert set(styled[1].split(",")) <= set(nodes)
        elif not line.startswith("  classDef moved fill:"):
            node = NODE.fullmatch(line)
            assert node, line
            nodes.append(node[1])
    assert len(nodes) == len(set(nodes))
    assert depth == 0


class Facts(dict):
    """A JSON object, whose keys are attributes as well."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


def facts_of(explanation):
    """The plan that `--json` prints."""
    return json.loads(json.dumps(explanation.to_json()), object_hook=Facts)


def areas_of(area):
    """An area of the graph of a page, and all those in it."""
    yield area
    for node in area["nodes"]:
        for block in node["blocks"]:
            yield from areas_of(block)


def check_explanation(explanation):
    """Steps, edges and totals agree, and the text, flowchart and page hold each step once."""
    facts, text = facts_of(explanation), str(explanation)
    steps = list(all_steps(facts.steps))
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert facts.passes == sum(step.kind == "Map" for step in steps)
    assert facts.read_bytes == sum(step.read_bytes for step in steps if step.kind == "Map")
    known = {fact.path for fact in facts.inputs}
    for step in facts.steps:
        assert f"\n  {step.name}: " in text
        if not any(other.blocks for other in facts.steps):  # Each reads what came before it.
            assert {edge.source for edge in facts.edges if edge.target == step.name} <= known
        known.add(step.name)
    assert {edge.source for edge in facts.edges} <= known | set(names)
    assert not [edge for edge in facts.edges if edge.source == edge.target]
    mermaid = explanation.to_mermaid()
    check_mermaid(mermaid)
    blocks = [block for step in steps for block in step.blocks if block.steps]
    assert mermaid.count("subgraph ") == len(blocks) + sum(bool(step.blocks) for step in steps)
    page = html_checks.parsed(explanation.to_html())
    assert page.data["plan"] == json.loads(json.dumps(explanation.to_json()))
    areas = list(areas_of(page.data["graph"]))
    boxes = [node for area in areas for node in area["nodes"] if node["kind"] in KINDS]
    assert sorted(box["key"] for box in boxes) == sorted(names)
    drawn = {value for area in areas for edge in area["edges"] for value in edge["values"]}
    assert drawn == {edge.value for edge in facts.edges}
    for area in areas:  # `page.js` needs each line to lead to a later box.
        place = {node["key"]: i for i, node in enumerate(area["nodes"])}
        assert all(place[edge["source"]] < place[edge["target"]] for edge in area["edges"])
