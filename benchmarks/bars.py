"""A bar chart of the suite for the first page of the documentation.

python -m benchmarks.bars    # writes docs/images/suite-tools.svg from measured.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.figures import MEASURED, ROOT, number

PATH = ROOT / "docs" / "images" / "suite-tools.svg"
CASES = {
    "A": "Local SGD of 10,000 clients",
    "B": "Local SGD, more work for each byte",
    "C": "PCA of 15.6 million rows",
    "D": "Monte Carlo with 10 million paths",
    "E": "A model of 100 MB at 24 clients",
    "F": "LeNet on 128 clients",
    "G": "100 rounds of small work",
    "H": "Slope of a loss through 4 rounds",
    "L": "Local SGD of more than ten seconds",
    "M": "Gradient of a perceptron",
    "N": "Median of each of 1,000 keys",
    "O": "1,000 rounds of 50 of 100,000 clients",
    "P": "Logistic regression of 100 million rows",
}
TOOLS = {
    "dask-2": ("Dask", "#0072b2", "#56b4e9"),
    "ray-2": ("Ray Data", "#9a5b00", "#e69f00"),
    "element": ("Beam, one element per member", "#7a3f8f", "#d49be0"),
    "duckdb": ("DuckDB", "#1b7f4b", "#66c28e"),
    "jit": ("jax.jit of the whole", "#56606b", "#9ca9b6"),
}
WIDTH, LEFT, RIGHT, TOP = 400, 8, 44, 96  # pixels: readable on a phone without scrolling
BAR, TITLE, GAP = 9, 16, 9  # pixels
LOW, HIGH = 0.01, 10_000  # times that of beamjax
STYLE = """\
svg { color-scheme: light dark; font: 11px system-ui, "DejaVu Sans", sans-serif; }
.paper { fill: #ffffff; } text { fill: #56606b; }
.name { fill: #1b2026; font-weight: 600; paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.grid { stroke: #d3dae1; } .one { stroke: #1b2026; }
@media (prefers-color-scheme: dark) {
.paper { fill: #131416; } text { fill: #9ca9b6; } .name { fill: #e4eaf0; stroke: #131416; }
.grid { stroke: #343d48; } .one { stroke: #e4eaf0; }
"""


def chart(measured: Mapping[str, Any]) -> str:
    """The time of each tool over that of a run of beamjax on DirectRunner, as SVG."""
    lines, y = [], TOP
    for case, title in CASES.items():
        rows = measured["suite"]["cases"][case]["rows"]
        seconds = {row["way"]: row["seconds"] for row in rows if row.get("seconds") is not None}
        lines.append(f'<text class="name" x="{LEFT}" y="{y + 11}">{title}</text>')
        y += TITLE
        for tool in TOOLS:
            if tool in seconds:
                lines += _bar(tool, seconds[tool] / seconds["direct"], y)
                y += BAR
        y += GAP
    light = " ".join(f".{tool} {{ fill: {color}; }}" for tool, (_, color, _) in TOOLS.items())
    dark = " ".join(f".{tool} {{ fill: {color}; }}" for tool, (_, _, color) in TOOLS.items())
    size = f'width="{WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {y}">'
    paper = f'<rect class="paper" {size}/>'
    style = f"<style>\n{light}\n{STYLE}{dark} }}\n</style>"
    return "\n".join([head, style, paper, *_legend(), *_grid(y - GAP), *lines, "</svg>", ""])


def _bar(tool: str, ratio: float, y: int) -> Iterator[str]:
    left, right = sorted((_x(1), _x(ratio)))
    width = max(right - left, 0.5)
    yield f'<rect class="{tool}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR - 1}"/>'
    text = number(ratio) if ratio >= 0.1 else "&lt; 0.1"
    yield f'<text x="{max(right, _x(1)) + 3:.1f}" y="{y + BAR - 1}" font-size="9">{text}</text>'


def _legend() -> Iterator[str]:
    for i, (tool, (title, _, _)) in enumerate(TOOLS.items()):
        x, y = LEFT + i % 2 * 210, 8 + i // 2 * 18
        yield f'<rect class="{tool}" x="{x}" y="{y}" width="12" height="10"/>'
        yield f'<text x="{x + 17}" y="{y + 9}">{title}</text>'


def _grid(bottom: int) -> Iterator[str]:
    title = "Time over that of beamjax: left is faster, right is slower"
    yield f'<text x="{LEFT}" y="{TOP - 22}">{title}</text>'
    for power in range(round(math.log10(LOW)), round(math.log10(HIGH)) + 1):
        x, kind = _x(10.0**power), "grid" if power else "one"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 8}" text-anchor="middle">{10.0**power:,g}</text>'


def _x(ratio: float) -> float:
    part = math.log(max(ratio, LOW) / LOW) / math.log(HIGH / LOW)
    return LEFT + 8 + part * (WIDTH - LEFT - 8 - RIGHT)


if __name__ == "__main__":
    PATH.write_text(chart(json.loads(MEASURED.read_text("utf-8"))), "utf-8")
