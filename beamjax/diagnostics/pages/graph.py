"""The graph of a plan: its boxes and lines, their texts and positions.

Loops and branches are boxes that contain a box for each of their blocks. A line that enters or
leaves a block ends at its border: a bar at the top stands for all that the block reads, and a bar
at the bottom for what it gives.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from beamjax._text import Bytes, MemberBytes, human_bytes
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
from beamjax.diagnostics.pages.layout import Box, Layout, Link, layered
from beamjax.diagnostics.text import human_seconds, rounds_text

GROUPED = 4
"""Largest number of inputs of an argument, or outputs of a step, that have a box each."""
TITLE, SMALL = 13.0, 11.0
"""Font sizes in pixels. All letters of the font are 0.61 of its size wide."""
LINE, PAD = 15.0, 9.0
MOST = 44
"""Largest number of letters of a line in a box."""


@dataclass(frozen=True)
class Words:
    """A line of text in a box; `kind` is its CSS class."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Item:
    """A box of the drawing.

    Attributes:
      key: the name of the box in its area.
      kind: "input", "output", "server", "map", "gather", "scatter", "loop", "branch", "in", "out".
      words: the lines of text in it; of a loop or a branch, at the top.
      names: the name of its step, or the names of its inputs or outputs.
      areas: the blocks in it, side by side.
      title: the complete text, which a browser shows under the pointer.
    """

    key: str
    kind: str
    words: tuple[Words, ...]
    names: tuple[str, ...] = ()
    areas: tuple[Area, ...] = ()
    title: str = ""

    @property
    def head(self) -> float:
        """The height of the words, with the space around them."""
        return PAD * 2 + LINE * len(self.words) if self.words else 0.0

    @property
    def size(self) -> tuple[float, float]:
        """The width and height."""
        width = max((text_width(w) for w in self.words), default=0.0) + 2 * PAD + 6
        if not self.areas:
            return max(width, 60.0), self.head
        inside = sum(area.layout.width + 2 * PAD for area in self.areas)
        inside += PAD * (len(self.areas) + 1)
        tallest = max(area.layout.height for area in self.areas)
        return max(width, inside), self.head + tallest + 3 * PAD


@dataclass(frozen=True)
class Line:
    """One or more values that pass from one box to another; `title` is the complete text."""

    source: str
    target: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    kind: str
    nbytes: int
    title: str


@dataclass(frozen=True)
class Area:
    """Boxes and the lines between them: the whole drawing, or a block."""

    title: str
    items: tuple[Item, ...]
    lines: tuple[Line, ...]
    layout: Layout


@dataclass(frozen=True)
class Seconds:
    """The predicted and measured seconds of a step, and its share; None if unknown."""

    predicted: float | None = None
    measured: float | None = None
    share: float | None = None

    @property
    def words(self) -> tuple[Words, ...]:
        """The lines of text in the box of the step."""
        found = []
        if self.predicted is not None:
            found.append(Words(f"predicted {human_seconds(self.predicted)}", "time"))
        if self.measured is not None:
            part = f", {self.share:.0%}" if self.share is not None else ""
            found.append(Words(f"measured {human_seconds(self.measured)}{part}", "time"))
        return tuple(found)


# --- boxes and lines


def plan_area(
    facts: PlanFacts,
    seconds: Mapping[str, Seconds] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Area:
    """Lays out the drawing of a plan.

    Args:
      facts: the facts of the plan.
      seconds: the times of steps, by their names.
      sources: the text of the user's lines, by `file:line (function)`.
    """
    return _Drawing(facts, seconds or {}, sources or {}).area()


class _Drawing:
    def __init__(
        self, facts: PlanFacts, seconds: Mapping[str, Seconds], sources: Mapping[str, str]
    ):
        self.facts = facts
        self.seconds = seconds
        self.sources = sources
        self.values = {value.name: value for value in _values(facts)}
        self.homes = dict(_homes(facts.steps, (), ()))
        self.inputs = _groups(_used_inputs(facts), self._readers)
        self.outputs = _groups([o for o in facts.outputs if o.value], lambda o: o.source)
        self.homes |= {fact.path: (((), k),) for k, group in self.inputs.items() for fact in group}
        self.homes |= {fact.path: (((), k),) for k, group in self.outputs.items() for fact in group}

    def _readers(self, fact: InputFact) -> str:
        """Returns the boxes of the outermost area that read an input, as a key."""
        readers = (e.target for e in self.facts.edges if e.source == fact.path)
        return " ".join(sorted({_within(self.homes.get(name, ()), ()) or name for name in readers}))

    def area(self) -> Area:
        """Lays out the outermost area."""
        items = [self.ends("input", key, group) for key, group in self.inputs.items()]
        items += [self.step(step, ()) for step in self.facts.steps]
        items += [self.ends("output", key, group) for key, group in self.outputs.items()]
        return self.laid_out("", items, ())

    def ends(self, kind: str, key: str, group: Sequence[InputFact | OutputFact]) -> Item:
        """Makes the box of some inputs, or of some outputs."""
        names = tuple(fact.path for fact in group)
        if len(group) == 1:
            (fact,) = group
            words = [Words(shortened(fact.path), "name"), Words(shortened(fact.type))]
            words.append(Words(human_bytes(fact.nbytes)))
        else:
            words = [Words(shortened(f"{_root(names[0])}…"), "name")]
            words.append(Words(f"{len(group)} arrays, {human_bytes(_total(group))}"))
        title = "\n".join(f"{f.path}: {f.type}, {human_bytes(f.nbytes)}" for f in group)
        return Item(key, kind, tuple(words), names, title=title)

    def step(self, step: StepFact, home: Home) -> Item:
        """Makes the box of a step."""
        words = [Words(shortened(step.name), "name"), *self._words(step)]
        words += self.seconds.get(step.name, Seconds()).words
        areas = tuple(
            self.block(step, number, block, (*home, (step.name, number)))
            for number, block in enumerate(step.blocks)
        )
        title = [step.name, *step.functions, step.reason, *step.lines]
        kind = step.kind.lower()
        return Item(
            step.name, kind, tuple(words), (step.name,), areas, "\n".join(filter(None, title))
        )

    def _words(self, step: StepFact) -> Iterator[Words]:
        moved = human_bytes(_total([*step.served, *step.placed]))
        match step.kind:
            case "Map":
                yield Words(shortened(f"Map over {step.placement}, {_shards(step, self.facts)}"))
                if step.functions:
                    where = "".join(f" at {place_of(line)}" for line in step.lines[:1] if line)
                    yield Words(shortened(", ".join(step.functions) + where), "code")
                if step.partial_bytes:
                    yield Words(f"reduces to {human_bytes(step.partial_bytes)} a shard")
                if step.python:
                    yield Words("runs as Python")
            case "Gather":
                yield Words(f"GATHERS {moved} to the server", "loud")
            case "Scatter":
                yield Words(f"scatters {moved} over {shortened(str(step.placement), 20)}")
            case "Loop":
                yield Words(f"Loop, {rounds_text(step)}")
            case "Branch":
                yield Words(f"Branch, one of {len(step.blocks)} blocks")
            case _:
                where = "".join(f" at {place_of(line)}" for line in step.lines[:1] if line)
                yield Words(shortened(f"Server{where}"))
        if step.kind in ("Gather", "Scatter"):
            yield Words(shortened(f"because {step.reason}"))
            for line in filter(None, step.lines[:1]):
                yield Words(shortened(f"at {place_of(line)}"))
                if line in self.sources:
                    yield Words(shortened(self.sources[line]), "code")

    def block(self, step: StepFact, number: int, block: BlockFact, home: Home) -> Area:
        """Lays out a block."""
        read, given = _handed_words(step, block)
        items = [Item("in", "in", tuple(Words(shortened(word, 60)) for word in read))]
        items += [self.step(inner, home) for inner in block.steps]
        items.append(Item("out", "out", tuple(Words(shortened(word, 60)) for word in given)))
        return self.laid_out(block.title, items, home)

    def laid_out(self, title: str, items: Sequence[Item], home: Home) -> Area:
        """Lays out an area with these boxes."""
        boxes = [Box(i.key, *i.size, {"in": "top", "out": "bottom"}.get(i.kind, "")) for i in items]
        order = {box.key: i for i, box in enumerate(boxes)}
        lines = [x for x in self.lines(home) if order[x.source] < order[x.target]]
        links = [Link(x.source, x.target, *label_size(x.words)) for x in lines]
        return Area(title, tuple(items), tuple(lines), layered(boxes, links))

    def lines(self, home: Home) -> list[Line]:
        """Returns the lines of an area."""
        found: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.facts.edges:
            ends = self._ends(edge, home)
            if ends is not None:
                found.setdefault(ends, []).append(edge)
        return [self.line(*ends, edges) for ends, edges in found.items()]

    def _ends(self, edge: Edge, home: Home) -> tuple[str, str] | None:
        """Returns the boxes of an area between which a value passes, if it does."""
        source = _within(self.homes.get(edge.source, ()), home)
        target = _within(self.homes.get(edge.target, ()), home)
        if home and target is not None:
            source = source or "in"  # from outside, or from the step of the block
        elif home and edge.target == home[-1][0]:
            target = "out"
        if source is None or target is None or source == target:
            return None
        return source, target

    def line(self, source: str, target: str, edges: Sequence[Edge]) -> Line:
        """Makes one line for these values."""
        distinct = {edge.value: edge for edge in edges}
        total = _total(distinct.values())
        members = [self._each(name) for name in distinct]
        title = [
            f"{name}: {self._type(name)}, {human_bytes(edge.nbytes)}"
            + (f", {human_bytes(each)} a member" if each is not None else "")
            for (name, edge), each in zip(distinct.items(), members, strict=True)
        ]
        first = (
            shortened(next(iter(distinct)), 28) if len(distinct) == 1 else f"{len(distinct)} values"
        )
        words = [f"{first}, {human_bytes(total)}"]
        known = [each for each in members if each is not None]
        if known and not isinstance(total, MemberBytes):
            words.append(f"{human_bytes(sum(known))} a member")
        kinds = {self.kinds[key] for edge in edges for key in (edge.source, edge.target)}
        kind = "gathered" if "Gather" in kinds and known else "placed" if known else "served"
        size = total.each if isinstance(total, MemberBytes) else total
        return Line(source, target, tuple(distinct), tuple(words), kind, size, "\n".join(title))

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        found = dict.fromkeys(self.homes, "")
        return found | {step.name: step.kind for step in walk_facts(self.facts.steps)}

    def _type(self, name: str) -> str:
        value = self.values.get(name)
        return value.type if value is not None else ""

    def _each(self, name: str) -> int | None:
        value = self.values.get(name)
        return value.member_bytes if value is not None else None


Home = tuple[tuple[str, int], ...]
"""The blocks around an area, from the outside: a step, and the number of its block."""


Path = tuple[tuple[Home, str], ...]
"""The areas around something, from the outside, with its box in each."""


def _homes(steps: Sequence[StepFact], home: Home, path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the names of steps with their paths."""
    for step in steps:
        here = (*path, (home, step.name))
        yield step.name, here
        for number, block in enumerate(step.blocks):
            yield from _homes(block.steps, (*home, (step.name, number)), here)


def _within(path: Path, home: Home) -> str | None:
    """Returns the box of an area that is a step or contains it."""
    return next((key for area, key in path if area == home), None)


# --- texts


def letters(text: str) -> int:
    """Returns the columns of a text in a monospaced font."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def text_width(words: Words) -> float:
    """Returns the width of a line of text in pixels."""
    return letters(words.text) * 0.61 * (TITLE if words.kind == "name" else SMALL)


def shortened(text: str, most: int = MOST) -> str:
    """Returns a line with at most so many letters."""
    text = " ".join(text.split())
    if letters(text) <= most:
        return text
    short = ""
    for character in text:
        if letters(short + character) > most - 1:
            break
        short += character
    return short.rstrip() + "…"


def place_of(line: str) -> str:
    """Returns `file.py:3` of a line of the user, without the folder and the function."""
    return os.path.basename(line.partition(" (")[0])


def label_size(words: Sequence[str]) -> tuple[float, float]:
    """Returns the width and height of the label of a line."""
    widest = max(text_width(Words(word)) for word in words)
    return widest + 8, LINE * len(words) + 4


def _shards(step: StepFact, facts: PlanFacts) -> str:
    found = next((p for p in facts.placements if p.name == step.placement), None)
    if found is None or found.shards is None:
        return "shards of " + (str(found.shard_size) if found else "members")
    return f"{found.shards} shards of {found.shard_size}" if found.shards > 1 else "1 shard"


def _handed_words(step: StepFact, block: BlockFact) -> tuple[list[str], list[str]]:
    """Returns the texts of the bars above and below a block."""
    if step.kind == "Branch":
        return [block.title], [f"gives {_sized(block.outputs)}"]
    by: dict[str, list[ValueFact]] = {"carries": [], "slices": [], "stacks": []}
    for fact in step.handed:
        by[fact.how].append(fact.inside)
    read = [(f"carried: {_sized(by['carries'])}", by["carries"])]
    read.append((f"an entry of: {_sized(by['slices'])}", by["slices"]))
    given = [(f"carries {_sized(by['carries'])}", by["carries"])]
    given.append((f"stacks {_sized(by['stacks'])}", by["stacks"]))
    below = [text for text, values in given if values] or ["gives nothing"]
    return [block.title, *(text for text, values in read if values)], (
        ["goes on?"] if block.title == "condition" else below
    )


def _sized(values: Sequence[ValueFact]) -> str:
    if not values:
        return "nothing"
    names = values[0].name if len(values) == 1 else f"{len(values)} values"
    return f"{names}, {human_bytes(_total(values))}"


def _total(things: Iterable[ValueFact | InputFact | OutputFact | Edge]) -> Bytes:
    total: Bytes = 0
    for thing in things:
        total = total + thing.nbytes
    return total


def _values(facts: PlanFacts) -> Iterator[ValueFact]:
    for step in walk_facts(facts.steps):
        yield from (*step.served, *step.placed, *step.results)
        yield from (reduction.result for reduction in step.reductions)
        yield from (fact.inside for fact in step.handed)
        for block in step.blocks:
            yield from block.outputs


def _used_inputs(facts: PlanFacts) -> list[InputFact]:
    read = {edge.source for edge in facts.edges}
    return [fact for fact in facts.inputs if fact.path in read]


def _root(path: str) -> str:
    """`args[0]` of `args[0]['w']`, `result` of `result[1]`, `constant` of `constant 3`."""
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
