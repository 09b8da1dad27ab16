"""Charts as SVG that need no script: values over time or rounds, and shares of time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from beamjax.diagnostics.pages.markup import Markup, joined, number, tag
from beamjax.diagnostics.text import human_seconds
from beamjax.telemetry.progress import SECONDS, Tally

WIDTH, HEIGHT = 460.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 30.0
STRIPS = 120
"""Largest number of strips of a chart that show the numbers of a point."""
LOG_RANGE = 1000.0
"""The ratio of the largest value to the smallest from which a logarithmic axis shows more."""
DECADES = 6
"""Largest number of ticks of a logarithmic axis."""


def shares_bar(tally: Tally) -> Markup:
    """Makes a bar of the shares of the time of a step, with a text."""
    spent = {kind: getattr(tally, kind) for kind in SECONDS}
    total = sum(spent.values())
    if not total:
        return tag("div", class_="shares", role="img", aria_label="no time was measured")
    text = ", ".join(f"{k} {v / total:.0%}" for k, v in spent.items() if v / total >= 0.005)
    parts = [
        tag(
            "span",
            class_=kind,
            style=f"width:{number(100 * value / total)}%",
            title=f"{kind} {human_seconds(value)}, {value / total:.0%}",
        )
        for kind, value in spent.items()
        if value
    ]
    return joined(
        [
            tag("div", *parts, class_="shares", role="img", aria_label=text),
            tag("div", text, class_="under"),
        ]
    )


def shares_legend() -> Markup:
    """Makes the legend of the colours of shares."""
    keys = [tag("span", tag("i", class_=f"full {k}"), k, class_="key") for k in SECONDS]
    return tag("div", *keys, class_="legend")


@dataclass(frozen=True)
class PlotLine:
    """A curve of y over x.

    Attributes:
      title: the title of the chart.
      x, y: the coordinates of the points; the curve is interrupted where y is NaN.
      x_name, y_name: the names or units of the axes.
      goal: a value of y with a horizontal line, or None.
      marks: values of x with a small line, such as ends of rounds.
      saved: values of x with a diamond, such as checkpoints.
      area: whether the area under the curve is filled.
      whole: whether the ticks of y are whole numbers.
      wide: whether y has a logarithmic axis if all values are positive and span decades.
    """

    title: str
    x: Sequence[float]
    y: Sequence[float]
    x_name: str
    y_name: str
    goal: float | None = None
    marks: Sequence[float] = ()
    saved: Sequence[float] = ()
    area: bool = False
    whole: bool = False
    wide: bool = False


def chart(line: PlotLine, title: Markup | None = None) -> Markup:
    """Makes a chart of one line, with the numbers under the pointer; `title` replaces its title."""
    finite = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    if not finite:
        inside: Markup = tag("p", "There are no finite values.", class_="under")
        return tag("figure", tag("figcaption", title or line.title), inside, class_="chart")
    scale = _Scale.of(line, finite)
    points = [
        (scale.x(x), scale.y(y)) if math.isfinite(y) else None
        for x, y in zip(line.x, line.y, strict=True)
    ]
    parts = [*_grid(scale, line), *_marks(scale, line), *_curve(points, scale, line.area)]
    parts += _strips(scale, line)
    last = finite[-1]
    text = _point_text(line, *last)
    svg = _svg(parts, f"{line.title}; {text}")
    readout = tag("div", text, class_="readout", aria_live="off")
    return tag("figure", tag("figcaption", title or line.title), svg, readout, class_="chart")


def _svg(parts: Sequence[Markup], label: str) -> Markup:
    return tag(
        "svg", *parts, viewBox=f"0 0 {number(WIDTH)} {number(HEIGHT)}", role="img",
        aria_label=label, xmlns="http://www.w3.org/2000/svg", fill="none", stroke="currentColor",
        width=WIDTH, height=HEIGHT,
    )  # fmt: skip


@dataclass(frozen=True)
class _Scale:
    """Converts values to coordinates of a chart."""

    x_low: float
    x_high: float
    y_ticks: tuple[float, ...]
    x_ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def of(cls, line: PlotLine, finite: Sequence[tuple[float, float]]) -> _Scale:
        xs = [x for x, _ in finite] + list(line.x)
        ys = [y for _, y in finite]
        if line.goal is not None:
            ys.append(line.goal)
        if line.area:
            ys.append(0.0)
        low, high = min(xs), max(xs)
        if low == high:
            low, high = low - 0.5, high + 0.5
        if line.wide and min(ys) > 0 and max(ys) / LOG_RANGE >= min(ys):
            return cls(low, high, decades(min(ys), max(ys)), _inside(low, high), log=True)
        return cls(low, high, ticks(min(ys), max(ys), 4, line.whole), _inside(low, high))

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        # By halves, whose difference is finite.
        part = (value / 2 - low / 2) / (high / 2 - low / 2)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def _inside(low: float, high: float) -> tuple[float, ...]:
    return tuple(x for x in ticks(low, high, 5, False) if low <= x <= high)


def ticks(low: float, high: float, about: int, whole: bool) -> tuple[float, ...]:
    """Returns round numbers from below one value to above another, at least two."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-280):  # no finer than doubles are
        pad = abs(low) / 2 or 1.0
        is_count = whole and abs(low) < 2**53
        low, high = (low, low + 1) if is_count else (low - pad, high + pad)
        low, high = max(low, -sys.float_info.max), min(high, sys.float_info.max)
    rough = high / about - low / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for m in (1, 2, 2.5, 5, 10) if (step := m * power) >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    most = sys.float_info.max
    return tuple(min(max(i * step, -most), most) for i in range(first, max(last, first + 1) + 1))


def decades(low: float, high: float) -> tuple[float, ...]:
    """Returns about `DECADES` powers of ten, from below one positive value to above another."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / DECADES)
    last += -(last - first) % every
    return tuple(_power_of_ten(i) for i in range(first, last + 1, every))


def _power_of_ten(exponent: int) -> float:
    return float(f"1e{exponent}") if exponent <= sys.float_info.max_10_exp else sys.float_info.max


def plain(value: float) -> str:
    """Returns a number in at most four digits, with a unit such as k or M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or (size and size < 1e-4):
        return f"{value:.3g}"
    for power, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= power:
            return f"{value / (1e3 if unit == 'k' else power):.4g} {unit}"
    return f"{value:.4g}"


def _grid(scale: _Scale, line: PlotLine) -> Iterable[Markup]:
    for tick in scale.y_ticks:
        y = scale.y(tick)
        yield tag("path", class_="grid", d=f"M{number(LEFT)} {number(y)}H{number(WIDTH - RIGHT)}")
        yield _text(LEFT - 6, y + 4, plain(tick), "end")
    for tick in scale.x_ticks:
        yield _text(scale.x(tick), HEIGHT - BOTTOM + 15, plain(tick), "middle")
    yield _text(WIDTH - RIGHT, HEIGHT - 3, line.x_name, "end")
    if line.goal is not None:
        y = scale.y(line.goal)
        yield tag("path", class_="goal", d=f"M{number(LEFT)} {number(y)}H{number(WIDTH - RIGHT)}")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, fill="currentColor", stroke="none")


def _marks(scale: _Scale, line: PlotLine) -> Iterable[Markup]:
    for x in line.marks:
        place = number(scale.x(x))
        yield tag(
            "path", class_="mark",
            d=f"M{place} {number(HEIGHT - BOTTOM)}v-6",
        )  # fmt: skip
    for x in line.saved:
        place = number(scale.x(x))
        yield tag("path", class_="saved", d=f"M{place} {number(TOP)}l5 6l-5 6l-5 -6z")


def _curve(
    points: Sequence[tuple[float, float] | None], scale: _Scale, area: bool
) -> Iterable[Markup]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    floor = number(scale.y(scale.y_ticks[0]))
    for run in filter(None, runs):
        way = "L".join(f"{number(x)} {number(y)}" for x, y in run)
        if area:
            ends = number(run[0][0]), number(run[-1][0])
            yield tag("path", class_="fill", d=f"M{way}L{ends[1]} {floor}L{ends[0]} {floor}z")
        yield tag("path", class_="curve", d=f"M{way}", fill="none")
        if len(points) <= 40:
            yield from (tag("circle", class_="dot", cx=x, cy=y, r=2.6) for x, y in run)


def _point_text(line: PlotLine, x: float, y: float) -> str:
    """Returns a point in words."""
    if line.x_name == "round":
        return f"round {plain(x)}: {plain(y)}"
    return f"{plain(y)} {line.y_name} at {plain(x)} {line.x_name}"


def _strips(scale: _Scale, line: PlotLine) -> Iterable[Markup]:
    """Makes invisible strips that show the numbers of a point under the pointer."""
    step = max(1, math.ceil(len(line.x) / STRIPS))
    chosen = list(zip(line.x, line.y, strict=True))[::step]
    places = [scale.x(x) for x, _ in chosen]
    for i, (x, y) in enumerate(chosen):
        left = (places[i - 1] + places[i]) / 2 if i else LEFT
        right = (places[i] + places[i + 1]) / 2 if i + 1 < len(places) else WIDTH - RIGHT
        yield tag(
            "rect", tag("title", _point_text(line, x, y)), class_="strip", x=left, y=TOP,
            width=max(right - left, 0.5), height=HEIGHT - TOP - BOTTOM, fill="transparent",
            stroke="none",
        )  # fmt: skip


def stacked_chart(
    title: str, x: Sequence[float], shares: Mapping[str, Sequence[float]], x_name: str
) -> Markup:
    """Makes a stacked chart of shares over time."""
    if len(x) < 2:
        text = tag("p", "Nothing was measured over time.", class_="under")
        return tag("figure", tag("figcaption", title), text, class_="chart")
    low, high = x[0], x[-1]
    scale = _Scale(low, high, (0.0, 0.25, 0.5, 0.75, 1.0), _inside(low, high))
    bands: list[Markup] = []
    below = [0.0] * len(x)
    for kind, values in shares.items():
        above = [b + v for b, v in zip(below, values, strict=True)]
        if any(values):
            there = [
                f"{number(scale.x(a))} {number(scale.y(b))}" for a, b in zip(x, above, strict=True)
            ]
            back = [
                f"{number(scale.x(a))} {number(scale.y(b))}" for a, b in zip(x, below, strict=True)
            ]
            path = "L".join([*there, *reversed(back)])
            bands.append(tag("path", tag("title", kind), class_=kind, d=f"M{path}z", stroke="none"))
        below = above
    line = PlotLine(title, x, below, x_name, "share")
    totals = {kind: sum(values) for kind, values in shares.items()}
    names = ", ".join(kind for kind in sorted(totals, key=lambda k: -totals[k]) if totals[kind])
    svg = _svg([*bands, *_grid(scale, line)], f"{title}; most first: {names}")
    keys = [
        tag("span", tag("i", class_=f"full {kind}"), kind, class_="key")
        for kind in shares
        if totals[kind]
    ]
    legend = tag("div", *keys, class_="legend")
    return tag("figure", tag("figcaption", title), svg, legend, class_="chart")
