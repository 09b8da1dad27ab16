"""The page of a run: its progress over time, where the time went, errors and dropped members."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from beamjax._text import human_bytes
from beamjax.diagnostics.pages.page import Page
from beamjax.diagnostics.pages.plan_page import Tile, seconds_by_kind, steps_section
from beamjax.diagnostics.text import human_seconds
from beamjax.telemetry.progress import SECONDS

if TYPE_CHECKING:
    from beamjax.jobs.report import Report  # which makes such a page of itself

STATES = {
    "running": "▶ running",
    "done": "✓ done",
    "failed": "✗ failed",
    "cancelled": "■ cancelled",
    "lost": "? lost",
}
BINS = 60
"""Largest number of points in a chart of the speed."""
MESSAGE = 4
"""Longest message of an error that is shown unfolded, in lines."""
LISTED = 20
"""Largest number of dropped members in the table."""
STEP_HEAD = ("step", "members", "shards", "retries", "bytes", "padding", "executables", *SECONDS)

Json = dict[str, Any]


def run_page(report: Report) -> Page:
    """Returns the page of a run."""
    over_time = list(_over_time(report))
    curves = [
        _chart(
            curve.path, curve.rounds, {curve.path: curve.values}, "round", curve.path, wide=True
        )
        for curve in report.curves
    ]  # fmt: skip
    kinds = report.provenance.kinds
    bits = {f"computed on {', '.join(hosts)}": kind for kind, hosts in kinds.items()}
    values: Json = {
        "report": report,
        "states": STATES,
        "tiles": list(_tiles(report)),
        "error": _error(report.error or {}),
        "warnings": report.warnings,
        "over_time": over_time,
        "curves": curves,
        "second_kinds": SECONDS,
        "shares": list(_shares(report)),
        "step_head": STEP_HEAD,
        "step_rows": list(_step_rows(report)),
        "reasons": [(count, *key) for key, count in report.reasons.items()],
        "dropped": [
            (each.member, each.placement, each.step, each.reason, each.message[:500])
            for each in report.dropped[:LISTED]
        ],
        "rounds": list(_rounds(report)),
        "bits": bits | dict(report.fingerprint),
    }
    data: Json = {"run": report.to_json(), "charts": [*over_time, *curves]}
    if report.plan is not None:
        found, graph = steps_section(report.plan, report.source_lines, report.progress.steps)
        values, data = found | values, graph | data
    return Page(f"run of {report.program}", "run", values, data)


# --- the top


def _tiles(report: Report) -> Iterator[Tile]:
    progress, done = report.progress, report.progress.done
    yield human_seconds(progress.seconds), "in total", False
    yield f"{done.members:,}", _of("members", progress.members), False
    yield f"{progress.members_per_second:,.0f}", "members/s", False
    yield f"{done.shards:,}", _of("shards", progress.shards), False
    if progress.rounds or progress.rounds_total:
        yield f"{progress.rounds:,}", _of("rounds", progress.rounds_total), False
    yield human_bytes(done.bytes_read), "read", False
    yield f"{done.retries:,}", "shards retried", done.retries > 0
    yield f"{progress.dropped:,}", "members dropped", progress.dropped > 0


def _of(what: str, total: int | None) -> str:
    return what if total is None else f"of {total:,} {what}"


def _error(error: Mapping[str, Any]) -> Json:
    """Returns the lines of an error to show, its place in the run, and the texts to fold."""
    lines = f"{error.get('type')}: {error.get('message')}".strip().splitlines()
    shown = lines if len(lines) <= MESSAGE else [lines[0], lines[-1]]
    more = [("Whole message", "\n".join(lines))] * (len(shown) < len(lines))
    if error.get("traceback"):
        more.append(("Traceback", error["traceback"]))
    names = ("step", "shard", "members", "worker")
    rows = [(name, str(error[name])) for name in names if error.get(name) not in (None, "")]
    return {"shown": shown, "rows": rows, "more": more}


# --- charts


def _chart(
    title: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    x_name: str,
    y_name: str,
    **more: Any,
) -> Json:
    """Returns a chart as JSON values, for `page.js`.

    Args:
      title: the title of the chart.
      x: the coordinates of the points.
      lines: the values of each line by its name; a line is interrupted at None.
      x_name, y_name: the names or units of the axes.
      **more: `goal`, a value of y with a horizontal line; `marks`, values of x with a small line;
        `saved`, values of x with a diamond; `area`, whether the area under the line is filled;
        `wide`, whether y has a logarithmic axis if all values are positive and span decades;
        `stacked`, whether the lines are stacked.
    """
    points = [
        (at, value)
        for y in lines.values()
        for at, value in zip(x, y, strict=True)
        if value is not None
    ]
    if not points:
        last = "There are no finite values."
    elif more.get("stacked"):
        last = ""
    elif x_name == "round":
        last = f"round {points[-1][0]:g}: {points[-1][1]:.4g}"
    else:
        last = f"{points[-1][1]:,.6g} {y_name} at {points[-1][0]:.4g} {x_name}"
    series = [
        {
            "name": name,
            "y": list(y),
            **({"color": f"--{name}"} if more.get("stacked") else {}),
        }
        for name, y in lines.items()
        if points
    ]
    return {
        "title": title, "last": last, "x": list(x), "series": series, "x_name": x_name,
        "y_name": y_name, **more,
    }  # fmt: skip


def _over_time(report: Report) -> Iterator[Json]:
    samples = report.samples
    if len(samples.get("seconds", ())) < 3:
        return
    unit, scale = _unit(samples["seconds"][-1])
    x = [second / scale for second in samples["seconds"]]
    marks = [second / scale for second in report.round_ends]
    saved = [second / scale for second in report.checkpoints]
    progress = report.progress

    def counted(title: str, name: str, **more: Any) -> Json:
        return _chart(title, x, {name: samples[name]}, unit, name, area=True, **more)

    yield counted("Members done", "members", goal=progress.members, marks=marks, saved=saved)
    middles, speeds = speed(samples["seconds"], samples["members"])
    at = [middle / scale for middle in middles]
    yield _chart(
        "Members per second", at, {"members/s": speeds}, unit, "members/s", area=True
    )  # fmt: skip
    times, shares = _kinds_over_time(report)
    if len(times) >= 2:
        title = "How workers spend their time"
        at = [second / scale for second in times]
        yield _chart(title, at, shares, unit, "share", stacked=True)
    if any(samples["rounds"]):
        yield counted("Rounds done", "rounds", goal=progress.rounds_total, saved=saved)
    for name, title in (("retries", "Shards retried"), ("dropped", "Members dropped")):
        if any(samples[name]):
            yield counted(title, name)


def _unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis of time, and its seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def speed(seconds: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns counts per second: the middles of intervals of time, and a value for each interval.

    Workers report once a second, so the intervals are some seconds long, except in a short run.
    """
    middles, speeds = [], []
    for left, right in itertools.pairwise(_bins(seconds)):
        middles.append((seconds[left] + seconds[right]) / 2)
        speeds.append((counts[right] - counts[left]) / (seconds[right] - seconds[left]))
    return middles, speeds


def _bins(seconds: Sequence[float]) -> list[int]:
    """Returns the indices of the samples at which intervals of time begin or end."""
    length = max((seconds[-1] - seconds[0]) / BINS, min(2.0, (seconds[-1] - seconds[0]) / 8))
    found = [0]
    for i, second in enumerate(seconds):
        if second - seconds[found[-1]] >= length and second > seconds[found[-1]]:
            found.append(i)
    return found


def _kinds_over_time(report: Report) -> tuple[list[float], dict[str, list[float]]]:
    """Returns times in seconds, and the share of each kind of work at these times."""
    samples = report.samples
    x: list[float] = []
    shares: dict[str, list[float]] = {kind: [] for kind in SECONDS}
    left = 0
    for right in _bins(samples["seconds"])[1:]:
        spent = {kind: samples[kind][right] - samples[kind][left] for kind in SECONDS}
        total = sum(spent.values())
        if total <= 0:  # no worker reported in this interval; the next report covers it, too
            continue
        x += [samples["seconds"][left], samples["seconds"][right]]
        for kind in SECONDS:
            shares[kind] += 2 * [spent[kind] / total]
        left = right
    return x, shares


# --- where the time went


def _shares(report: Report) -> Iterator[tuple[str, dict[str, float], str]]:
    steps = {name: seconds_by_kind(tally) for name, tally in report.progress.steps.items()}
    if not steps:
        return
    total = sum(sum(spent.values()) for spent in steps.values())
    every = {"all steps": seconds_by_kind(report.progress.done)}
    for name, spent in (every | steps).items():
        seconds = sum(spent.values())
        share = f", {seconds / total:.0%}" if total else ""
        yield name, spent, f"{human_seconds(seconds)}{share}"


def _step_rows(report: Report) -> Iterator[tuple[Any, ...]]:
    for name, tally in report.progress.steps.items():
        yield (
            name, tally.members, tally.shards, tally.retries, human_bytes(tally.bytes_read),
            human_bytes(tally.bytes_padding), tally.executables,
            *map(human_seconds, seconds_by_kind(tally).values()),
        )  # fmt: skip


def _rounds(report: Report) -> Iterator[tuple[str, str]]:
    progress = report.progress
    if progress.rounds:
        yield "rounds", f"{progress.rounds:,}"
    if computed := progress.rounds - progress.rounds_resumed:
        last = report.round_ends[-1] if report.round_ends else progress.seconds
        yield "time per round", human_seconds(last / computed)
    if report.checkpoints:
        yield "checkpoints", f"{len(report.checkpoints):,}"
        yield "last checkpoint", f"after {human_seconds(report.checkpoints[-1])}"
    if (progress.rounds or report.checkpoints) and "checkpoint" in report.options:
        yield "folder", report.options["checkpoint"]
