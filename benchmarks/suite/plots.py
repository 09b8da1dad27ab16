"""Plots of the page, as SVG that can be read on light and on dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.suite.ways import ALL, PLAIN, WAYS

INK = "#7f7f7f"
COLORS = {
    "jit": "#8c6bb1", "loop": INK, "local": "#1b9e77", "direct": "#2b83ba", "session": "#08519c",
    "element": "#fdae61",
    "batch": "#d7822b", "dask-2": "#d7604d", "ray-2": "#c51b8a", "drjax": "#b8a04a",
    "fedjax": "#a6761d", "dask-ml": "#e41a1c", "duckdb": "#66a61e", "direct-1": "#74add1",
    "direct-2": "#2b83ba", "dask-1": "#f4a582",
    "ray-1": "#e78ac3",
}  # fmt: skip
_SHOWN = [way for way in WAYS if way not in PLAIN.values()]
MARKERS = dict(zip(_SHOWN, "ovs^*D<>pPXhd", strict=True))
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "beamjax", "font.size": 9, "font.family": "sans-serif",
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": INK, "grid.alpha": 0.3, "legend.frameon": False,
}  # fmt: skip


def write(folder: Path, found: Mapping[str, Any]) -> dict[str, str]:
    """Writes what there is to show; name to file name."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, tuple[bool, Callable[[Axes, Any], None], Any]] = {
        "time": (bool(found["cases"]), _time, found["cases"]),
        "members": ("members" in found["scale"], _members, found["scale"].get("members")),
        "workers": ("workers" in found["scale"], _workers, found["scale"].get("workers")),
        "model": (bool(found["model"]["cases"]), _model, found["model"]),
    }
    written = {}
    for name, (is_there, draw, data) in plots.items():
        if is_there:
            written[name] = f"suite-{name}.svg"
            save(folder / written[name], draw, data)
    return written


def save(
    path: Path,
    draw: Callable[[Axes, Any], None],
    data: Any,
    inches: tuple[float, float] = (7.2, 3.4),
) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.subplots(), data)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def _time(axes: Axes, cases: Mapping[str, Any]) -> None:
    for way in _SHOWN:
        points = list(_ratios(cases, way))
        if points:
            at, ratios = zip(*points, strict=True)
            axes.plot(at, ratios, MARKERS[way], color=COLORS[way], label=ALL[way].title)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xticks(range(len(cases)), list(cases))
    axes.set(yscale="log", ylabel="seconds / shard loop")
    _finish(axes)


def _ratios(cases: Mapping[str, Any], way: str) -> Iterator[tuple[float, float]]:
    spread = _SHOWN.index(way) / len(_SHOWN) - 0.5
    for number, measured in enumerate(cases.values()):
        for row in measured["rows"]:
            if row["way"] == way and row.get("x_loop"):
                yield number + 0.7 * spread, row["x_loop"]


def _members(axes: Axes, data: Mapping[str, Any]) -> None:
    for way, seconds in data["seconds"].items():
        points = sorted((int(n), value) for n, value in seconds.items())
        numbers, values = zip(*points, strict=True)
        style: dict[str, Any] = {"color": COLORS[way], "marker": MARKERS[way], "markersize": 4}
        axes.plot(numbers, values, label=ALL[way].title, **style)
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="seconds")
    _finish(axes)


def _workers(axes: Axes, data: Mapping[str, Any]) -> None:
    rows = [row for row in data["rows"] if row.get("seconds")]
    titles = [row["title"] for row in rows]
    colors = [COLORS[row["way"]] for row in rows]
    bars = axes.barh(titles, [row["seconds"] for row in rows], color=colors)
    axes.bar_label(bars, fmt="%.2f", color=INK, padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.grid(axis="x")


def _model(axes: Axes, paper: Mapping[str, Any]) -> None:
    colors = matplotlib.colormaps["tab10"]
    for number, (case, told) in enumerate(paper["cases"].items()):
        axes.plot(told["workers"], told["speed_up"], color=colors(number), label=case)
    most = next(iter(paper["cases"].values()))["workers"]
    axes.plot(most, most, color=INK, linestyle=":", label="ideal")
    axes.set(xscale="log", yscale="log", xlabel="workers, on paper", ylabel="speed-up")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
