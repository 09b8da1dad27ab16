"""Draws a graph of `beamjax.diagnostics.pages.graph` as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from beamjax.diagnostics.pages.graph import LINE, PAD, Area, Item, Line, Words, label_size
from beamjax.diagnostics.pages.layout import Point, Route
from beamjax.diagnostics.pages.markup import Markup, joined, number, tag

MARGIN = 12.0
STRIPE = 4.0


def drawing(area: Area, targets: Mapping[str, str], label: str, prefix: str) -> Markup:
    """Draws an area.

    Args:
      area: the outermost area.
      targets: ids of the page by names of steps, inputs and outputs, to which their boxes link.
      label: the accessible name of the drawing.
      prefix: the prefix of ids, unique in the document.
    """
    width, height = area.layout.width + 2 * MARGIN, area.layout.height + 2 * MARGIN
    kinds = ("served", "placed", "gathered")
    heads = [_head(f"{prefix}-{kind}", kind) for kind in kinds]
    inside = tag("g", _area(area, (MARGIN, MARGIN), targets, prefix), class_="view")
    return tag(
        "svg", tag("title", label), tag("defs", *heads), inside,
        xmlns="http://www.w3.org/2000/svg", class_="graph", width=width, height=height,
        viewBox=f"0 0 {number(width)} {number(height)}", role="group", aria_label=label,
        fill="none", stroke="currentColor",
    )  # fmt: skip


def _head(name: str, kind: str) -> Markup:
    """Draws the head of an arrow."""
    return tag(
        "marker", tag("path", d="M0 0 L8 4 L0 8 z", class_=f"head {kind}", stroke="none"),
        id=name, markerWidth=8, markerHeight=8, refX=7, refY=4, orient="auto",
        markerUnits="userSpaceOnUse",
    )  # fmt: skip


def _area(area: Area, at: Point, targets: Mapping[str, str], prefix: str) -> Markup:
    """Draws the lines of an area, then its boxes and the labels of lines over them."""
    lines = list(zip(area.lines, area.layout.routes, strict=True))
    boxes = []
    for item in area.items:
        x, y = area.layout.corners[item.key]
        width = area.layout.widths[item.key]
        boxes.append(_box(item, (at[0] + x, at[1] + y), width, targets, prefix))
    return joined(
        [
            *(_line(line, route, at, prefix) for line, route in lines),
            *boxes,
            *(_label(line, route, at) for line, route in lines),
        ]
    )


# --- boxes


def _box(item: Item, at: Point, width: float, targets: Mapping[str, str], prefix: str) -> Markup:
    (x, y), (_, height) = at, item.size
    parts: list[Markup] = [tag("title", item.title)] if item.title else []
    parts += _shapes(item, at, width, height)
    parts.append(_words(item.words, x, y, width, centred=item.kind in ("in", "out")))
    areas = []
    left = x + 2 * PAD
    for area in item.areas:
        top = y + item.head
        size = (area.layout.width + 2 * PAD, height - item.head - PAD)
        areas.append(
            tag("rect", class_="block", x=left - PAD, y=top, width=size[0], height=size[1], rx=6)
        )
        areas.append(_area(area, (left, top + PAD), targets, prefix))
        left += area.layout.width + 3 * PAD
    found = next((targets[name] for name in item.names if name in targets), None)
    names = "\n".join(item.names)
    if found is None:
        own = tag("g", *parts, class_=f"box {item.kind}")
    else:
        own = tag(
            "a", *parts, href=f"#{found}", class_=f"box {item.kind}", data_target=found,
            data_names=names, data_key=item.key,
            aria_label=", ".join(words.text for words in item.words),
        )  # fmt: skip
    return joined([own, *areas])


def _shapes(item: Item, at: Point, width: float, height: float) -> Iterator[Markup]:
    (x, y), kind = at, item.kind
    radius = {"input": height / 2, "output": height / 2, "in": 3, "out": 3}.get(kind, 7)
    if kind == "map":  # a pile, as there are many members
        for shift in (6.0, 3.0):
            yield tag(
                "rect", class_="behind", x=x + shift, y=y + shift, width=width, height=height,
                rx=radius,
            )  # fmt: skip
    yield tag("rect", class_="shape", x=x, y=y, width=width, height=height, rx=min(radius, 18.0))
    if kind in ("map", "server", "scatter"):
        yield tag(
            "path", class_="stripe",
            d=f"M{number(x + STRIPE)} {number(y + 6)} V{number(y + height - 6)}",
        )  # fmt: skip
    if kind == "gather":  # a sign besides the colour
        right, top = x + width - 11, y + 10
        yield tag(
            "path", class_="sign",
            d=f"M{number(right)} {number(top - 5)} l6 11 h-12 z M{number(right)} "
            f"{number(top - 1)} v3.2 M{number(right)} {number(top + 4)} v0.4",
        )  # fmt: skip


def _words(words: Sequence[Words], x: float, y: float, width: float, centred: bool) -> Markup:
    left = x + (width / 2 if centred else PAD + STRIPE)
    return joined(
        _text(line.text, f"t {line.kind}".rstrip(), left, y + PAD, i, centred)
        for i, line in enumerate(words)
    )


def _text(text: str, class_: str, x: float, top: float, line: int, centred: bool) -> Markup:
    return tag(
        "text", text, class_=class_, x=x, y=top + LINE * (line + 0.76),
        text_anchor="middle" if centred else None, fill="currentColor", stroke="none",
    )  # fmt: skip


# --- lines


def _line(line: Line, route: Route, at: Point, prefix: str) -> Markup:
    path = tag(
        "path", class_=f"line {line.kind}", d=_path(route.points, at), fill="none",
        stroke_width=thickness(line.nbytes), marker_end=f"url(#{prefix}-{line.kind})",
    )  # fmt: skip
    return tag("g", tag("title", line.title), path, class_="edge", data_ends=_ends(line))


def _label(line: Line, route: Route, at: Point) -> Markup:
    x, y = at[0] + route.label[0], at[1] + route.label[1]
    top = y - LINE * len(line.words) / 2
    width, height = label_size(line.words)
    under = tag(
        "rect", class_="under-label", x=x - width / 2, y=y - height / 2, width=width, height=height,
        stroke="none",
    )  # fmt: skip
    texts = [
        _text(word, f"t label {line.kind}", x, top, i, centred=True)
        for i, word in enumerate(line.words)
    ]
    return tag("g", tag("title", line.title), under, *texts, class_="edge", data_ends=_ends(line))


def _ends(line: Line) -> str:
    return f"{line.source}\n{line.target}"


def thickness(nbytes: int) -> float:
    """Returns the width of a line in pixels: half a pixel more for ten times the bytes."""
    return round(1.0 + 0.5 * max(0.0, math.log10(max(nbytes, 1)) - 3), 2)


def _path(points: Sequence[Point], at: Point) -> str:
    """Returns the path of a line, alternately straight down and curved."""
    moved = [(at[0] + x, at[1] + y) for x, y in points]
    parts = [f"M{number(moved[0][0])} {number(moved[0][1])}"]
    for i, ((x, y), (to_x, to_y)) in enumerate(itertools.pairwise(moved)):
        if i % 2 == 0:
            if to_y != y:
                parts.append(f"V{number(to_y)}")
        elif abs(to_x - x) < 0.5:
            parts.append(f"L{number(to_x)} {number(to_y)}")
        else:
            half = (y + to_y) / 2
            parts.append(
                f"C{number(x)} {number(half)} {number(to_x)} {number(half)} "
                f"{number(to_x)} {number(to_y)}"
            )
    return "".join(parts)
