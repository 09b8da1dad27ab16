"""The tables and curves of docs/scaling.md.

python -m benchmarks.curves    # draws and writes what is in growth.json; needs matplotlib

`python benchmarks/growth.py --record` measures rows of `growth.json`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.figures import GROWTH, ROOT

PAGE, IMAGES = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images"
INCHES = 4.2, 3.6  # 400 pixels: readable on a phone without scrolling
COLORS = {
    "local": "#1b9e77", "DirectRunner": "#2b83ba", "processes": "#d7604d",
    "Flink cluster": "#8c6bb1",
}  # fmt: skip
KINDS = {"launcher": "o-", "workers": "s--", "servers": "^:"}
Row = Mapping[str, Any]


def page(text: str, rows: Sequence[Row]) -> str:
    """The page with the tables of these rows in the place of those that it has."""
    shards = [row for row in rows if row["job"] == "shards"]
    others = [row for row in rows if row["job"] != "shards"]
    for head, *lines in (list(_shards(shards)), list(_others(others))):
        table = "\n".join((head, *lines))
        start = " +".join(head.split()[:2])
        text, count = re.subn(rf"^{start}.*?(?=\n```$)", table, text, flags=re.M | re.S)
        if count != 1:
            raise ValueError(f"found {count} tables that begin with {start!r}, expected one")
    return text


def _shards(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "runner              shards  seconds   ms each  launcher  workers  servers  loop, s"
        "      load        date"
    )
    for runner, group in itertools.groupby(rows, lambda row: row["runner"]):
        before, seconds = 0, 0.0
        for row in group:
            each = 1e3 * (row["seconds"] - seconds) / (row["count"] - before)
            loop = f"{row['loop']:.2f}" if "loop" in row else ""
            yield (
                f"{runner:14} {row['count']:11,} {row['seconds']:8.2f} {each:9.4f} "
                f"{_memory(row)} {loop:>8} {_when(row)}"
            )
            before, seconds = row["count"], row["seconds"]


def _others(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "job       runner             count  seconds  launcher  workers  servers      load"
        "        date"
    )
    for row in rows:
        more = f"  opening {row['opening']:.2f} s" if "opening" in row else ""
        if "files" in row:
            more = f"  {row['files']} file{'s' * (row['files'] != 1)}"
        yield (
            f"{row['job']:9} {row['runner']:13} {row['count']:10,} {row['seconds']:8.2f} "
            f"{_memory(row)} {_when(row)}{more}"
        )


def _when(row: Row) -> str:
    return f"{row['load']:>9}  {row['date']}"


def _memory(row: Row) -> str:
    return f"{row['launcher']:9} {row['workers']:8} {row['servers']:8}"


def time(axes: Any, rows: Sequence[Row]) -> None:
    """Milliseconds for each shard."""
    for runner, counts, group in _curves(rows):
        each = [1e3 * row["seconds"] / row["count"] for row in group]
        axes.plot(counts, each, "o-", color=COLORS[runner], label=runner, markersize=4)
    _finish(axes, "milliseconds per shard", (0.1, 0.2, 0.5, 1, 2, 5, 10))


def memory(axes: Any, rows: Sequence[Row]) -> None:
    """Peaks of anonymous memory of each kind of process that a runner has."""
    for runner, counts, group in _curves(rows):
        for kind, style in KINDS.items():
            mib = [row[kind] for row in group]
            if any(mib):
                label = f"{runner}: {kind}"
                axes.plot(counts, mib, style, color=COLORS[runner], label=label, markersize=4)
    _finish(axes, "anonymous memory, MiB", (100, 200, 500, 1000))


def _curves(rows: Sequence[Row]) -> Iterator[tuple[str, list[int], list[Row]]]:
    shards = [row for row in rows if row["job"] == "shards" and row["runner"] in COLORS]
    for runner, group in itertools.groupby(shards, lambda row: row["runner"]):
        points = list(group)
        yield runner, [row["count"] for row in points], points


def _finish(axes: Any, ylabel: str, ticks: Sequence[float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="number of shards", ylabel=ylabel)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid()
    axes.figure.legend(loc="outside lower center", ncols=2)


def main() -> None:
    from benchmarks.suite import plots

    rows = json.loads(GROWTH.read_text("utf-8"))
    for name, draw in (("time", time), ("memory", memory)):
        plots.save(IMAGES / f"growth-{name}.svg", draw, rows, INCHES)
    PAGE.write_text(page(PAGE.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main()
