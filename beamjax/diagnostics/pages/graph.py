"""The graph of a plan: boxes and the lines between them, which `page.js` draws.

Loops and branches are boxes that contain an area for each of their blocks. A line that enters or
leaves a block ends at its border: the box "in" stands for all values that the block reads,
and the box "out" for those that it returns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from beamjax._text import add_bytes, human_bytes
from beamjax.diagnostics.plan_json import Json, all_steps
from beamjax.diagnostics.text import human_seconds, step_title

LISTED = 4
"""Largest number of arrays of an argument that its box lists."""

Home = tuple[tuple[str, int], ...]
"""The blocks around an area, from the outside: a step, and the number of its block."""

Path = tuple[tuple[Home, str], ...]
"""The areas around something, from the outside, with its box in each."""


def plan_graph(plan: Json, spent: Mapping[str, Mapping[str, float]]) -> Json:
    """Returns the outermost area of the graph of a plan, with the measured seconds of its steps."""
    # An area has a `title`, `nodes` and `edges`. A node has a `key`, which edges name as `source`
    # or `target`; a `kind`, which is a class of the style sheet; `words`, the lines of text in its
    # box, each with a class; the `names` of its step, inputs or outputs; a `title` for the pointer;
    # and `blocks`, which are areas. An edge has the `words` of its label, a `kind`, a `title`, its
    # `values`, and its `nbytes`.
    return _Graph(plan, spent).outermost()


class _Graph:
    def __init__(self, plan: Json, spent: Mapping[str, Mapping[str, float]]):
        self.plan = plan
        self.seconds = {name: sum(kinds.values()) for name, kinds in spent.items()}
        self.values = {value["name"]: value for value in _values(plan)}
        self.kinds = {step["name"]: step["kind"] for step in all_steps(plan["steps"])}
        self.paths = dict(_paths(plan["steps"], (), ()))
        read = {edge["source"] for edge in plan["edges"]}
        self.inputs: dict[str, list[Json]] = {}
        for end in plan["inputs"]:
            if end["path"] in read:
                self.inputs.setdefault(_root(end["path"]), []).append(end)
        self.outputs: dict[str, list[Json]] = {}
        for end in plan["outputs"]:
            if end["value"]:
                self.outputs.setdefault(f"result of {end['source']}", []).append(end)
        for ends in (self.inputs, self.outputs):
            self.paths |= {end["path"]: (((), k),) for k, group in ends.items() for end in group}

    def outermost(self) -> Json:
        nodes = [_ends("input", key, group) for key, group in self.inputs.items()]
        nodes += [self.step(step, ()) for step in self.plan["steps"]]
        nodes += [_ends("output", key, group) for key, group in self.outputs.items()]
        return {"title": "", "nodes": nodes, "edges": self.edges(())}

    def step(self, step: Json, home: Home) -> Json:
        """Returns the box of a step."""
        name = step["name"]
        words = [[name, "name"], *self._words(step)]
        if name in self.seconds:
            total = sum(self.seconds.values())
            part = f", {self.seconds[name] / total:.0%}" if total else ""
            words.append([f"measured {human_seconds(self.seconds[name])}{part}", "time"])
        blocks = [
            self.block(step, block, (*home, (name, i))) for i, block in enumerate(step["blocks"])
        ]
        texts = [name, *step.get("functions", ()), step["reason"], *step["lines"]]
        return _node(
            name, step["kind"].lower(), words, [name], "\n".join(filter(None, texts)), blocks
        )

    def _words(self, step: Json) -> Iterator[list[str]]:
        moved = human_bytes(add_bytes(v["nbytes"] for v in (*step["served"], *step["placed"])))
        where = "".join(f" at {place_of(line)}" for line in step["lines"][:1])
        match step["kind"]:
            case "Map":
                yield [step_title(step, self.plan), ""]
                if step["functions"]:
                    yield [", ".join(step["functions"]) + where, "code"]
                if step["partial_bytes"]:
                    yield [f"reduces to {human_bytes(step['partial_bytes'])} a shard", ""]
                if step["python"]:
                    yield ["runs as Python", ""]
            case "Gather":
                yield [f"GATHERS {moved} to the server", "loud"]
            case "Scatter":
                yield [f"scatters {moved} over {step['placement']}", ""]
            case "Rows":
                yield [step["rule"], ""]
            case "Loop" | "Branch":
                yield [step_title(step, self.plan), ""]
            case _:
                yield [f"Server{where}", ""]
        if step["kind"] in ("Gather", "Scatter"):
            yield [f"because {step['reason']}", ""]
            for line in step["lines"][:1]:
                yield [where.strip(), ""]
                if line in self.plan["source_lines"]:
                    yield [self.plan["source_lines"][line], "code"]

    def block(self, step: Json, block: Json, home: Home) -> Json:
        """Returns the area of a block."""
        read, returned = _handed_words(step, block)
        nodes = [_node("in", "in", [[word, ""] for word in read])]
        nodes += [self.step(inner, home) for inner in block["steps"]]
        nodes.append(_node("out", "out", [[word, ""] for word in returned]))
        return {"title": block["title"], "nodes": nodes, "edges": self.edges(home)}

    def edges(self, home: Home) -> list[Json]:
        """Returns the lines of an area: one for each pair of boxes between which values pass."""
        lines: dict[tuple[str, str], list[Json]] = {}
        for edge in self.plan["edges"]:
            source = _within(self.paths.get(edge["source"], ()), home)
            target = _within(self.paths.get(edge["target"], ()), home)
            if home and target is not None:
                source = source or "in"  # from outside, or from the step of the block
            elif home and edge["target"] == home[-1][0]:
                target = "out"
            if source is not None and target is not None and source != target:
                lines.setdefault((source, target), []).append(edge)
        return [self.edge(*ends, edges) for ends, edges in lines.items()]

    def edge(self, source: str, target: str, edges: Sequence[Json]) -> Json:
        """Returns one line for these values."""
        distinct = {edge["value"]: edge["nbytes"] for edge in edges}
        total = add_bytes(distinct.values())
        title, members = [], 0
        for name, nbytes in distinct.items():
            value = self.values.get(name, {})
            member = value.get("member_bytes")
            members += member or 0
            more = f", {human_bytes(member)} a member" if member is not None else ""
            title.append(f"{name}: {value.get('type', '')}, {human_bytes(nbytes)}{more}")
        first = next(iter(distinct)) if len(distinct) == 1 else f"{len(distinct)} values"
        words = [first, human_bytes(total)]
        if members and not isinstance(total, dict):
            words.append(f"{human_bytes(members)} a member")
        ends = {self.kinds.get(end) for edge in edges for end in (edge["source"], edge["target"])}
        is_gathered = "Gather" in ends and members
        return {
            "source": source, "target": target, "values": list(distinct), "words": words,
            "kind": "gathered" if is_gathered else "placed" if members else "served",
            "title": "\n".join(title),
            "nbytes": total["each"] if isinstance(total, dict) else total,
        }  # fmt: skip


def _node(
    key: str,
    kind: str,
    words: Sequence[Sequence[str]],
    names: Sequence[str] = (),
    title: str = "",
    blocks: Sequence[Json] = (),
) -> Json:
    return {
        "key": key, "kind": kind, "words": list(words), "names": list(names), "title": title,
        "blocks": list(blocks),
    }  # fmt: skip


def _ends(kind: str, key: str, group: Sequence[Json]) -> Json:
    """Returns the box of the inputs of an argument, or of the outputs of a step."""
    names = [end["path"] for end in group]
    total = human_bytes(add_bytes(end["nbytes"] for end in group))
    if len(group) == 1:
        words = [[names[0], "name"], [group[0]["type"], ""], [total, ""]]
    else:
        root = _root(names[0])
        title = "constants" if root == "constant" else root
        words = [[title, "name"], [f"{len(group)} arrays, {total}", ""]]
        if len(group) <= LISTED:
            words += [[f"{end['path'].removeprefix(root)} {end['type']}", ""] for end in group]
    title = "\n".join(f"{e['path']}: {e['type']}, {human_bytes(e['nbytes'])}" for e in group)
    return _node(key, kind, words, names, title)


def _paths(steps: Sequence[Json], home: Home, path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the names of steps with their paths."""
    for step in steps:
        here = (*path, (home, step["name"]))
        yield step["name"], here
        for number, block in enumerate(step["blocks"]):
            yield from _paths(block["steps"], (*home, (step["name"], number)), here)


def _within(path: Path, home: Home) -> str | None:
    """Returns the box of an area that is a step or contains it."""
    return next((key for area, key in path if area == home), None)


def place_of(line: str) -> str:
    """Returns `file.py:3` of a line of the user, without the folder and the function."""
    return os.path.basename(line.partition(" (")[0])


def _handed_words(step: Json, block: Json) -> tuple[list[str], list[str]]:
    """Returns the texts of the boxes "in" and "out" of a block."""
    if step["kind"] == "Branch":
        return [block["title"]], [f"returns {_sized(block['outputs'])}"]
    by: dict[str, list[Json]] = {"carries": [], "slices": [], "stacks": []}
    for value in step["handed"]:
        by[value["how"]].append(value["inside"])
    read = {"carried:": by["carries"], "one entry of:": by["slices"]}
    returned = {"carries": by["carries"], "stacks": by["stacks"]}
    above, below = (
        [f"{how} {_sized(values)}" for how, values in side.items() if values]
        for side in (read, returned)
    )
    if block["title"] == "condition":
        below = ["another round?"]
    return [block["title"], *above], below or ["returns nothing"]


def _sized(values: Sequence[Json]) -> str:
    if not values:
        return "nothing"
    names = values[0]["name"] if len(values) == 1 else f"{len(values)} values"
    return f"{names}, {human_bytes(add_bytes(v['nbytes'] for v in values))}"


def _values(plan: Json) -> Iterator[Json]:
    for step in all_steps(plan["steps"]):
        yield from (*step["served"], *step["placed"], *step["results"])
        yield from (reduction["result"] for reduction in step["reductions"])
        yield from (value["inside"] for value in step.get("handed", ()))
        for block in step["blocks"]:
            yield from block["outputs"]


def _root(path: str) -> str:
    """Returns `params` of `params['w']`, `args[0]` of `args[0]['w']`, `result` of `result[1]`."""
    match = re.match(r"args\[\d+\]|\w+", path)
    return match[0] if match else path
