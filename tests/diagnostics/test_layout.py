"""Layouts: boxes that don't overlap, and lines that go down and don't cut through boxes."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beamjax.diagnostics.pages.layout import Box, Link, layered, spread

SIZES = st.tuples(st.integers(20, 300), st.integers(15, 200))


@st.composite
def graphs(draw):
    """Boxes in order, and links from earlier to later ones, perhaps with bars at the ends."""
    count = draw(st.integers(1, 12))
    bars = draw(st.booleans()) and count > 2
    boxes = []
    for i in range(count):
        bar = {0: "top", count - 1: "bottom"}.get(i, "") if bars else ""
        boxes.append(Box(str(i), *draw(SIZES), bar))
    pairs = list(itertools.combinations(range(count), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    links = [Link(str(a), str(b), draw(st.integers(0, 90)), 34) for a, b in chosen]
    return boxes, links


def rectangles(boxes, layout):
    """Left, top, right and bottom of each box."""
    found = {}
    for box in boxes:
        left, top = layout.corners[box.key]
        found[box.key] = left, top, left + layout.widths[box.key], top + box.height
    return found


def overlap(a, b):
    return min(a[2], b[2]) - max(a[0], b[0]) > 1e-6 and min(a[3], b[3]) - max(a[1], b[1]) > 1e-6


def crowded(*widths, links):
    """A graph of boxes of these widths, by "source target" in numbers of one digit."""
    boxes = [Box(str(i), width, 15) for i, width in enumerate(widths)]
    return boxes, [Link(source, target, 0, 34) for source, target in links.split()]


# Lines that would all start, or end, at one of the two corners of a narrow box.
CROWDED = [
    crowded(20, 20, 20, 117, 20, 23, 85, links="01 04 02 46 03 36 05 06 12 13 14 15 16 26"),
    crowded(20, 85, 20, 149, 20, 20, 20, 20, 20, links="01 02 03 12 13 14 04 07 15 05 16"),
]


@settings(max_examples=100)
@example(CROWDED[0])
@example(CROWDED[1])
@given(graphs())
def test_nothing_overlaps_and_lines_go_down(graph):
    boxes, links = graph
    layout = layered(boxes, links)
    places = rectangles(boxes, layout)
    for a, b in itertools.combinations(places.values(), 2):
        assert not overlap(a, b)
    for left, top, right, bottom in places.values():
        assert -1e-6 <= left <= right <= layout.width + 1e-6
        assert -1e-6 <= top <= bottom <= layout.height + 1e-6
    labels = []
    for link, route in zip(links, layout.routes, strict=True):
        points = np.array(route.points)
        assert len(points) % 2 == 0
        assert (np.diff(points[:, 1]) >= -1e-6).all()
        np.testing.assert_allclose(points[::2, 0], points[1::2, 0])  # straight down, by turns
        source, target = places[link.source], places[link.target]
        assert source[0] <= points[0, 0] <= source[2]
        assert target[0] <= points[-1, 0] <= target[2]
        np.testing.assert_allclose(points[[0, -1], 1], [source[3], target[1]])
        for key, (left, top, right, bottom) in places.items():
            for (x, y), (_, end) in itertools.pairwise(route.points):
                through = left + 1 < x < right - 1 and min(end, bottom) - max(y, top) > 1
                assert not through or key in (link.source, link.target)
        x, y = route.label
        labels.append((x - link.width / 2, y - 17, x + link.width / 2, y + 17))
    for a, b in itertools.combinations([*labels, *places.values()], 2):
        assert not overlap(a, b)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_spread_is_a_least_squares_fit(wanted, seed):
    rng = np.random.default_rng(seed)
    gaps, weights = rng.uniform(0, 30, len(wanted) - 1), rng.uniform(0.1, 5, len(wanted))
    found = np.array(spread(wanted, gaps, weights))
    assert (np.diff(found) >= gaps - 1e-6).all()
    cost = lambda at: np.sum(weights * (at - np.array(wanted)) ** 2)
    for _ in range(20):  # no other positions that keep the gaps are better
        steps = gaps + np.maximum(0, rng.normal(size=len(gaps)) * 20)
        other = rng.uniform(-150, 150) + np.concatenate([[0], np.cumsum(steps)])
        assert cost(found) <= cost(0.99 * found + 0.01 * other) + 1e-6


def test_lines_that_need_not_cross_do_not():
    names = [f"{kind}{i}" for i in range(5) for kind in "ab"]
    boxes = [Box(name, 80, 30) for name in sorted(names)]
    links = [Link(f"a{i}", f"b{4 - i}", 10, 10) for i in range(5)]
    layout = layered(boxes, links)
    ends = sorted((route.points[0][0], route.points[-1][0]) for route in layout.routes)
    assert [b for _, b in ends] == sorted(b for _, b in ends)


def test_bars_are_as_wide_as_all():
    bars, inner = ("in", "out"), [Box("a", 100, 30), Box("b", 100, 30)]
    boxes = [Box("in", 50, 20, "top"), *inner, Box("out", 50, 20, "bottom")]
    layout = layered(boxes, [Link("in", "a"), Link("in", "out"), Link("b", "out")])
    assert {layout.widths[key] for key in bars} == {layout.width}
    assert layout.corners["in"] == (0, 0)
    assert layout.corners["out"][1] + 20 == layout.height


def test_no_boxes_one_box_and_a_line_to_an_earlier_box():
    assert layered([], []).routes == ()
    assert layered([Box("a", 30, 20)], []).corners == {"a": (0.0, 0.0)}
    with pytest.raises(ValueError, match="from 'b' to the earlier 'a'"):
        layered([Box("a", 1, 1), Box("b", 1, 1)], [Link("b", "a")])
