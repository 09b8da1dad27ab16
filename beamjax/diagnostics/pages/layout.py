"""A layered layout of boxes and the lines between them, from top to bottom.

The algorithm is that of Sugiyama, Tagawa and Toda (1981): layers by the longest path, orders in
layers by barycentres, positions in them by weighted least squares. The label of a line is a box in
a layer between those of its ends, so that no label overlaps anything.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STARTS, LARGE = 8, 400
"""Random orders from which a search for few crossings starts; more than `LARGE` nodes have one."""
SWEEPS, SETTLING = 16, 60
"""Sweeps over the layers that improve the orders, and then the positions."""
GAP, NARROW_GAP = 26.0, 16.0
"""Pixels between two boxes of a layer, and between a line and its neighbour."""
LAYER_GAP, MOST_GAP = 14.0, 56.0
"""Least and largest distance of two layers, in pixels."""
PORT, CORNER = 14.0, 12.0
"""Pixels between the ends of two lines at a box, and between a line and the corner of the box."""


@dataclass(frozen=True)
class Box:
    """A box of the drawing.

    Attributes:
      key: the name of the box in links.
      width, height: its size in pixels.
      bar: "top" or "bottom" for a bar above or below all other boxes, as wide as the drawing.
    """

    key: str
    width: float
    height: float
    bar: str = ""


@dataclass(frozen=True)
class Link:
    """A line from a box to a later one, with the size of its label in pixels."""

    source: str
    target: str
    width: float = 0.0
    height: float = 0.0


Point = tuple[float, float]


@dataclass(frozen=True)
class Route:
    """The route of a line.

    Attributes:
      points: the line is straight from point 2i to 2i + 1, and a curve from 2i + 1 to 2i + 2.
      label: the middle of its label.
    """

    points: tuple[Point, ...]
    label: Point


@dataclass(frozen=True)
class Layout:
    """The size of a drawing, the top left corners and widths of boxes, and the routes of links."""

    width: float
    height: float
    corners: Mapping[str, Point]
    widths: Mapping[str, float]
    routes: tuple[Route, ...]


@dataclass(eq=False)
class _Node:
    """A box, or the part of a line in a layer between those of its ends."""

    width: float
    height: float
    rank: int
    box: Box | None = None
    above: list[_Node] = field(default_factory=list)
    below: list[_Node] = field(default_factory=list)
    x: float = 0.0

    @property
    def is_line(self) -> bool:
        return self.box is None


def layered(boxes: Sequence[Box], links: Sequence[Link]) -> Layout:
    """Lays out boxes.

    Args:
      boxes: the boxes, in an order in which each link leads to a later box.
      links: the links between them, at most one for each pair of boxes.

    Raises:
      ValueError: a link leads to an earlier box.
    """
    if not boxes:
        return Layout(0.0, 0.0, {}, {}, ())
    ranks = _ranks(boxes, links)
    nodes = {box.key: _Node(box.width, box.height, ranks[box.key], box) for box in boxes}
    chains = [_chain(nodes, link) for link in links]
    lines = [node for chain in chains for node in chain[1:-1]]
    layers = _layers([*nodes.values(), *lines])
    _order(layers)
    _place(layers)
    _straighten(layers, chains)
    return _layout(list(nodes.values()), layers, chains)


# --- layers


def _ranks(boxes: Sequence[Box], links: Sequence[Link]) -> dict[str, int]:
    """Returns the layer of each box, an even number; labels are in the odd layers."""
    place = {box.key: i for i, box in enumerate(boxes)}
    into: dict[str, list[str]] = {box.key: [] for box in boxes}
    out: dict[str, list[str]] = {box.key: [] for box in boxes}
    for link in links:
        if place[link.source] >= place[link.target]:
            raise ValueError(f"found a line from {link.source!r} to the earlier {link.target!r}")
        into[link.target].append(link.source)
        out[link.source].append(link.target)
    first = 2 if any(box.bar == "top" for box in boxes) else 0
    ranks: dict[str, int] = {}
    for box in boxes:
        least = 0 if box.bar == "top" else first
        ranks[box.key] = max((ranks[key] + 2 for key in into[box.key]), default=least)
    for box in reversed(boxes):  # inputs go next to the first box that reads them
        if not into[box.key] and out[box.key] and not box.bar:
            ranks[box.key] = min(ranks[key] for key in out[box.key]) - 2
    last = max(ranks.values())
    for box in boxes:
        if box.bar == "bottom":
            others = [rank for key, rank in ranks.items() if key != box.key]
            ranks[box.key] = max(last, max(others, default=-2) + 2)
    return ranks


def _chain(nodes: Mapping[str, _Node], link: Link) -> list[_Node]:
    """Returns the nodes of a line with its ends; the middle one has the size of the label."""
    source, target = nodes[link.source], nodes[link.target]
    middle = (source.rank + target.rank) // 2
    chain = [source]
    for rank in range(source.rank + 1, target.rank):
        size = (link.width, link.height) if rank == middle else (0.0, 0.0)
        chain.append(_Node(*size, rank))
    chain.append(target)
    for upper, lower in itertools.pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _layers(nodes: Iterable[_Node]) -> list[list[_Node]]:
    found: dict[int, list[_Node]] = {}
    for node in nodes:
        found.setdefault(node.rank, []).append(node)
    return [found[rank] for rank in sorted(found)]


# --- orders in layers


def _order(layers: list[list[_Node]]) -> None:
    """Orders each layer so that few lines cross."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers)
    small = sum(map(len, layers)) <= LARGE
    for start in range(STARTS if small else 1):
        for layer in layers if start else ():
            random.Random(start).shuffle(layer)
        for sweep in range(SWEEPS):
            if not fewest:
                break
            down = sweep % 2 == 0
            for layer in layers[1:] if down else layers[-2::-1]:
                _sort(layer, layers, down)
            crossings = _crossings(layers)
            if crossings < fewest:
                best, fewest = [list(layer) for layer in layers], crossings
    layers[:] = best


def _sort(layer: list[_Node], layers: Sequence[Sequence[_Node]], down: bool) -> None:
    position = {id(node): i for each in layers for i, node in enumerate(each)}

    def centre(node: _Node) -> float:
        near = node.above if down else node.below
        places = [position[id(other)] for other in near]
        return sum(places) / len(places) if places else position[id(node)]

    layer.sort(key=centre)


def _crossings(layers: Sequence[Sequence[_Node]]) -> int:
    total = 0
    for upper, lower in itertools.pairwise(layers):
        position = {id(node): i for i, node in enumerate(lower)}
        seen: list[int] = []
        for node in upper:
            ends = sorted(position[id(other)] for other in node.below)
            total += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
            for end in ends:
                bisect.insort(seen, end)
    return total


# --- positions in layers


def _place(layers: Sequence[Sequence[_Node]]) -> None:
    """Sets the x of the middle of each node: near those of its neighbours in other layers, and far
    enough from the next node of its layer. Parts of one line attract each other most."""
    for layer in layers:
        _settle(layer, [0.0] * len(layer), [1.0] * len(layer))
    for sweep in range(SETTLING):
        ordered = layers if sweep % 2 == 0 else layers[::-1]
        for layer in ordered:
            targets, weights = [], []
            for node in layer:
                near = [*node.above, *node.below]
                pulls = [_pull(node, other) for other in near]
                total = sum(pulls)
                places = sum(p * o.x for p, o in zip(pulls, near, strict=True))
                targets.append(places / total if total else node.x)
                weights.append(total or 0.1)
            _settle(layer, targets, weights)


def _pull(node: _Node, other: _Node) -> float:
    return 8.0 if node.is_line and other.is_line else 2.0 if node.is_line or other.is_line else 1.0


def _settle(layer: Sequence[_Node], targets: Sequence[float], weights: Sequence[float]) -> None:
    gaps = [_apart(left, right) for left, right in itertools.pairwise(layer)]
    for node, x in zip(layer, spread(targets, gaps, weights), strict=True):
        node.x = x


def _apart(left: _Node, right: _Node) -> float:
    gap = NARROW_GAP if left.is_line or right.is_line else GAP
    return (left.width + right.width) / 2 + gap


def spread(
    targets: Sequence[float], gaps: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """Returns positions in order, at least a gap apart, by weighted least squares to the targets.

    It is an isotonic regression by the pool-adjacent-violators algorithm (Ayer et al., 1955).
    """
    weights = [1.0] * len(targets) if weights is None else weights
    offset, pools = 0.0, []  # of a pool: its mean, its weight, how many are in it
    offsets = []
    for i, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        offset += gaps[i - 1] if i else 0.0
        offsets.append(offset)
        pools.append((target - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, j), (b, n, k) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, j + k)]
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _straighten(layers: Sequence[Sequence[_Node]], chains: Sequence[Sequence[_Node]]) -> None:
    """Moves lines sideways, where there is room, so that they bend as little as possible."""
    beside = {id(node): (layer, i) for layer in layers for i, node in enumerate(layer)}

    def room(node: _Node) -> tuple[float, float]:
        if not node.is_line:
            corner = min(CORNER, node.width / 4)
            return node.x - node.width / 2 + corner, node.x + node.width / 2 - corner
        layer, i = beside[id(node)]
        low = layer[i - 1].x + _apart(layer[i - 1], node) if i else -math.inf
        high = math.inf if i + 1 == len(layer) else layer[i + 1].x - _apart(node, layer[i + 1])
        return low, high

    for chain in chains:
        group: list[_Node] = []
        low, high = -math.inf, math.inf
        for node in [*chain, None]:
            least, most = room(node) if node is not None else (math.inf, -math.inf)
            if max(low, least) <= min(high, most):
                group, low, high = [*group, *filter(None, [node])], max(low, least), min(high, most)
                continue
            lines = [each for each in group if each.is_line]
            if lines:
                x = sum(each.x for each in lines) / len(lines)
                for each in lines:
                    each.x = min(max(x, low), high)
            group, low, high = [node] if node is not None else [], least, most


# --- the drawing


def _layout(
    nodes: Sequence[_Node], layers: Sequence[Sequence[_Node]], chains: Sequence[Sequence[_Node]]
) -> Layout:
    everything = [node for layer in layers for node in layer]
    left = min(node.x - node.width / 2 for node in everything)
    right = max(node.x + node.width / 2 for node in everything)
    for node in everything:
        node.x -= left
        if node.box is not None and node.box.bar:
            node.x, node.width = (right - left) / 2, right - left
    ports = _ports(nodes, chains)
    tops, y = [], 0.0
    heights = [max(node.height for node in layer) for layer in layers]
    place = {node.rank: i for i, layer in enumerate(layers) for node in layer[:1]}
    for i, height in enumerate(heights):
        tops.append(y)
        y += height + (_room(i, place, chains, ports) if i + 1 < len(layers) else 0.0)
    corners, widths = {}, {}
    for node in nodes:
        assert node.box is not None
        i = place[node.rank]
        down = tops[i] + _pad(node, heights[i])
        corners[node.box.key] = (node.x - node.width / 2, down)
        widths[node.box.key] = node.width
    routes = []
    for number, chain in enumerate(chains):
        points: list[Point] = []
        for node in chain:
            i = place[node.rank]
            over, under = tops[i], tops[i] + heights[i]
            top = over + _pad(node, heights[i])
            if node is chain[0]:
                x = ports[number, True]
                points += [(x, top + node.height), (x, under)]
            elif node is chain[-1]:
                x = ports[number, False]
                points += [(x, over), (x, top)]
            else:
                points += [(node.x, over), (node.x, under)]
        label = max(chain[1:-1], key=lambda node: (node.width, -node.rank))
        i = place[label.rank]
        routes.append(Route(tuple(points), (label.x, tops[i] + heights[i] / 2)))
    return Layout(right - left, y, corners, widths, tuple(routes))


def _pad(node: _Node, height: float) -> float:
    """Returns how far below the top of its layer a box is: an input is next to its reader."""
    return height - node.height if not node.above and node.below else 0.0


Ports = Mapping[tuple[int, bool], float]
"""The x of the ends of lines, by number of the line and whether it is the upper end."""


def _ports(nodes: Sequence[_Node], chains: Sequence[Sequence[_Node]]) -> Ports:
    """Places each end of a line near the next node of the line, and apart from other ends."""
    ports: dict[tuple[int, bool], float] = {}
    ends: dict[tuple[int, bool], list[tuple[float, int]]] = {}
    for number, chain in enumerate(chains):
        ends.setdefault((id(chain[0]), True), []).append((chain[1].x, number))
        ends.setdefault((id(chain[-1]), False), []).append((chain[-2].x, number))
    for node in nodes:
        for first in (True, False):
            found = sorted(ends.get((id(node), first), []))
            if not found:
                continue
            corner = min(CORNER, node.width / 4)
            low, high = node.x - node.width / 2 + corner, node.x + node.width / 2 - corner
            gap = min(PORT, (high - low) / len(found))
            targets = [min(max(x, low), high) for x, _ in found]
            placed = spread(targets, [gap] * (len(found) - 1))
            spare = max(high - low - gap * (len(found) - 1), 0.0)
            for i, ((_, number), x) in enumerate(zip(found, placed, strict=True)):
                least = low + gap * i
                ports[number, first] = min(max(x, least), least + spare)
    return ports


def _room(
    layer: int, place: Mapping[int, int], chains: Sequence[Sequence[_Node]], ports: Ports
) -> float:
    """Returns the distance of a layer to the next: more if lines go far to the side."""
    far = 0.0
    for number, chain in enumerate(chains):
        for upper, lower in itertools.pairwise(chain):
            if place[upper.rank] == layer:
                start = ports[number, True] if upper is chain[0] else upper.x
                end = ports[number, False] if lower is chain[-1] else lower.x
                far = max(far, abs(end - start))
    return min(max(LAYER_GAP, far / 7), MOST_GAP)
