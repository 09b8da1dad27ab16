"""The graph of a plan as JSON values: boxes and the lines between them, which `page.js` draws.

Loops and branches are boxes that contain an area for each of their blocks. A line that enters or
leaves a block ends at its border: the box "in" stands for all values that the block reads,
and the box "out" for those that it returns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from beamjax._text import MemberBytes, human_bytes
from beamjax.diagnostics.fact_types import (
    BlockFact,
    Edge,
    InputFact,
    OutputFact,
    PlanFacts,
    StepFact,
    ValueFact,
    walk_facts,
)
from beamjax.diagnostics.text import human_seconds, step_title

GROUPED = 4
"""Largest number of inputs of an argument, or outputs of a step, that have a box each."""

Json = dict[str, Any]

Home = tuple[tuple[str, int], ...]
"""The blocks around an area, from the outside: a step, and the number of its block."""

Path = tuple[tuple[Home, str], ...]
"""The areas around something, from the outside, with its box in each."""


def plan_graph(
    facts: PlanFacts, seconds: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]
) -> Json:
    """Returns the outermost area of the graph of a plan.

    An area has a `title`, `nodes` and `edges`. A node has a `key`, which edges name as `source` and
    `target`; a `kind`, which is a class of the style sheet; `words`, the lines of text in its box,
    each with a class; the `names` of its step, inputs or outputs; a `title` for the pointer; and
    `blocks`, which are areas. An edge has the `words` of its label, a `kind`, a `title`, its
    `values`, and its `nbytes`.

    Args:
      facts: the facts of the plan.
      seconds: the `measured` seconds and the `share` of steps, by their names.
      sources: the text of the user's lines, by `file:line (function)`.
    """
    return _Graph(facts, seconds, sources).outermost()


class _Graph:
    def __init__(
        self,
        facts: PlanFacts,
        seconds: Mapping[str, Mapping[str, Any]],
        sources: Mapping[str, str],
    ):
        self.facts = facts
        self.seconds = seconds
        self.sources = sources
        self.values = {value.name: value for value in _values(facts)}
        self.kinds = {step.name: step.kind for step in walk_facts(facts.steps)}
        self.paths = dict(_paths(facts.steps, (), ()))
        read = {edge.source for edge in facts.edges}
        self.inputs = _groups([i for i in facts.inputs if i.path in read], self._readers)
        self.outputs = _groups([o for o in facts.outputs if o.value], lambda o: o.source)
        self.paths |= {fact.path: (((), k),) for k, group in self.inputs.items() for fact in group}
        self.paths |= {fact.path: (((), k),) for k, group in self.outputs.items() for fact in group}

    def _readers(self, fact: InputFact) -> str:
        """Returns the boxes of the outermost area that read an input, as a key."""
        readers = (edge.target for edge in self.facts.edges if edge.source == fact.path)
        return " ".join(sorted({_within(self.paths.get(name, ()), ()) or name for name in readers}))

    def outermost(self) -> Json:
        nodes = [_ends("input", key, group) for key, group in self.inputs.items()]
        nodes += [self.step(step, ()) for step in self.facts.steps]
        nodes += [_ends("output", key, group) for key, group in self.outputs.items()]
        return {"title": "", "nodes": nodes, "edges": self.edges(())}

    def step(self, step: StepFact, home: Home) -> Json:
        """Returns the box of a step."""
        words = [[step.name, "name"], *self._words(step)]
        times = self.seconds.get(step.name, {})
        if times:
            part = "" if times["share"] is None else f", {times['share']:.0%}"
            words.append([f"measured {human_seconds(times['measured'])}{part}", "time"])
        blocks = [
            self.block(step, block, (*home, (step.name, i))) for i, block in enumerate(step.blocks)
        ]
        title = "\n".join(filter(None, [step.name, *step.functions, step.reason, *step.lines]))
        return _node(step.name, step.kind.lower(), words, [step.name], title, blocks)

    def _words(self, step: StepFact) -> Iterator[list[str]]:
        moved = human_bytes(sum(v.nbytes for v in (*step.served, *step.placed)))
        where = "".join(f" at {place_of(line)}" for line in step.lines[:1] if line)
        match step.kind:
            case "Map":
                yield [step_title(step, self.facts), ""]
                if step.functions:
                    yield [", ".join(step.functions) + where, "code"]
                if step.partial_bytes:
                    yield [f"reduces to {human_bytes(step.partial_bytes)} a shard", ""]
                if step.python:
                    yield ["runs as Python", ""]
            case "Gather":
                yield [f"GATHERS {moved} to the server", "loud"]
            case "Scatter":
                yield [f"scatters {moved} over {step.placement}", ""]
            case "Loop" | "Branch":
                yield [step_title(step, self.facts), ""]
            case _:
                yield [f"Server{where}", ""]
        if step.kind in ("Gather", "Scatter"):
            yield [f"because {step.reason}", ""]
            for line in filter(None, step.lines[:1]):
                yield [where.strip(), ""]
                if line in self.sources:
                    yield [self.sources[line], "code"]

    def block(self, step: StepFact, block: BlockFact, home: Home) -> Json:
        """Returns the area of a block."""
        read, given = _handed_words(step, block)
        nodes = [_node("in", "in", [[word, ""] for word in read])]
        nodes += [self.step(inner, home) for inner in block.steps]
        nodes.append(_node("out", "out", [[word, ""] for word in given]))
        return {"title": block.title, "nodes": nodes, "edges": self.edges(home)}

    def edges(self, home: Home) -> list[Json]:
        """Returns the lines of an area: one for each pair of boxes between which values pass."""
        found: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.facts.edges:
            source = _within(self.paths.get(edge.source, ()), home)
            target = _within(self.paths.get(edge.target, ()), home)
            if home and target is not None:
                source = source or "in"  # from outside, or from the step of the block
            elif home and edge.target == home[-1][0]:
                target = "out"
            if source is not None and target is not None and source != target:
                found.setdefault((source, target), []).append(edge)
        return [self.edge(*ends, edges) for ends, edges in found.items()]

    def edge(self, source: str, target: str, edges: Sequence[Edge]) -> Json:
        """Returns one line for these values."""
        distinct = {edge.value: edge for edge in edges}
        total = sum(edge.nbytes for edge in distinct.values())
        title, members = [], 0
        for name, edge in distinct.items():
            value = self.values.get(name)
            each = value.member_bytes if value is not None else None
            members += each or 0
            kind = value.type if value is not None else ""
            more = f", {human_bytes(each)} a member" if each is not None else ""
            title.append(f"{name}: {kind}, {human_bytes(edge.nbytes)}{more}")
        first = next(iter(distinct)) if len(distinct) == 1 else f"{len(distinct)} values"
        words = [first, human_bytes(total)]
        if members and not isinstance(total, MemberBytes):
            words.append(f"{human_bytes(members)} a member")
        ends = {self.kinds.get(end) for edge in edges for end in (edge.source, edge.target)}
        is_gathered = "Gather" in ends and members
        return {
            "source": source, "target": target, "values": list(distinct), "words": words,
            "kind": "gathered" if is_gathered else "placed" if members else "served",
            "title": "\n".join(title),
            "nbytes": total.each if isinstance(total, MemberBytes) else total,
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


def _ends(kind: str, key: str, group: Sequence[InputFact | OutputFact]) -> Json:
    """Returns the box of some inputs, or of some outputs."""
    names = [fact.path for fact in group]
    if len(group) == 1:
        (fact,) = group
        words = [[fact.path, "name"], [fact.type, ""], [human_bytes(fact.nbytes), ""]]
    else:
        arrays = f"{len(group)} arrays, {human_bytes(sum(f.nbytes for f in group))}"
        words = [[f"{_root(names[0])}…", "name"], [arrays, ""]]
    title = "\n".join(f"{f.path}: {f.type}, {human_bytes(f.nbytes)}" for f in group)
    return _node(key, kind, words, names, title)


def _paths(steps: Sequence[StepFact], home: Home, path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the names of steps with their paths."""
    for step in steps:
        here = (*path, (home, step.name))
        yield step.name, here
        for number, block in enumerate(step.blocks):
            yield from _paths(block.steps, (*home, (step.name, number)), here)


def _within(path: Path, home: Home) -> str | None:
    """Returns the box of an area that is a step or contains it."""
    return next((key for area, key in path if area == home), None)


def place_of(line: str) -> str:
    """Returns `file.py:3` of a line of the user, without the folder and the function."""
    return os.path.basename(line.partition(" (")[0])


def _handed_words(step: StepFact, block: BlockFact) -> tuple[list[str], list[str]]:
    """Returns the texts of the boxes "in" and "out" of a block."""
    if step.kind == "Branch":
        return [block.title], [f"returns {_sized(block.outputs)}"]
    by: dict[str, list[ValueFact]] = {"carries": [], "slices": [], "stacks": []}
    for fact in step.handed:
        by[fact.how].append(fact.inside)
    read = {"carried:": by["carries"], "one entry of:": by["slices"]}
    given = {"carries": by["carries"], "stacks": by["stacks"]}
    above, below = (
        [f"{how} {_sized(values)}" for how, values in each.items() if values]
        for each in (read, given)
    )
    if block.title == "condition":
        below = ["another round?"]
    return [block.title, *above], below or ["returns nothing"]


def _sized(values: Sequence[ValueFact]) -> str:
    if not values:
        return "nothing"
    names = values[0].name if len(values) == 1 else f"{len(values)} values"
    return f"{names}, {human_bytes(sum(v.nbytes for v in values))}"


def _values(facts: PlanFacts) -> Iterator[ValueFact]:
    for step in walk_facts(facts.steps):
        yield from (*step.served, *step.placed, *step.results)
        yield from (reduction.result for reduction in step.reductions)
        yield from (fact.inside for fact in step.handed)
        for block in step.blocks:
            yield from block.outputs


def _root(path: str) -> str:
    """Returns `args[0]` of `args[0]['w']`, `result` of `result[1]`."""
    found = re.match(r"args\[\d+\]|\w+", path)
    return found[0] if found else path


Fact = TypeVar("Fact", InputFact, OutputFact)


def _groups(facts: Sequence[Fact], other: Callable[[Fact], str]) -> dict[str, list[Fact]]:
    """Groups facts into boxes: many of one argument with the same other end share a box."""
    found: dict[str, list[Fact]] = {}
    for fact in facts:
        found.setdefault(f"{_root(fact.path)} {other(fact)}", []).append(fact)
    groups: dict[str, list[Fact]] = {}
    for key, group in found.items():
        groups |= {key: group} if len(group) > GROUPED else {fact.path: [fact] for fact in group}
    return groups
