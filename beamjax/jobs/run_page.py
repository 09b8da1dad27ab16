"""The page of a run: how it went over time, where the time went, and what went wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from beamjax._text import human_bytes
from beamjax.diagnostics.pages.charts import (
    PlotLine,
    chart,
    shares_bar,
    shares_legend,
    stacked_chart,
)
from beamjax.diagnostics.pages.markup import Markup, joined, table, tag
from beamjax.diagnostics.pages.plan_page import graph_section, tile
from beamjax.diagnostics.pages.shell import Page
from beamjax.diagnostics.text import human_seconds
from beamjax.telemetry.progress import SECONDS, Tally
from beamjax.telemetry.timeline import Samples

if TYPE_CHECKING:
    from beamjax.jobs.report import Curve, Report  # which makes such a page of itself

STATES = {
    "running": "▶ running",
    "done": "✓ done",
    "failed": "✗ failed",
    "cancelled": "■ cancelled",
    "lost": "? lost",
}
BINS = 60
"""Points of a speed over time."""
MESSAGE = 4
"""Lines of a message that is shown at once."""
LISTED = 20
"""Dropped members that are listed."""


def run_page(report: Report) -> Page:
    """The page of a run."""

    def body(prefix: str) -> Markup:
        return joined(
            [
                _head(report),
                _tiles(report),
                _error(report),
                _warnings(report),
                _over_time(report),
                _curves(report),
                _shares(report),
                _dropped(report),
                _rounds(report),
                _plan(report, prefix),
                _section("Options", _named(report.options) or tag("p", "none were given")),
                _section("Machine and versions", _named(report.machine)),
                _section("Bits", *_bits(report)),
            ]
        )

    return Page(f"run of {report.program}", body, {"run": report.to_json()})


def _section(title: str, *parts: Any) -> Markup:
    return tag("section", tag("h2", title), *parts)


def _named(found: Mapping[str, str]) -> Markup | None:
    return table(found.items(), class_="facts") if found else None


def _bits(report: Report) -> Iterator[Markup | None]:
    """What the last bits of the results depend on."""
    kinds = report.provenance.kinds
    if not kinds:
        yield tag("p", "no machine is known that has computed")
    if report.provenance.is_mixed:
        yield tag("p", "The results may have other last bits another time: machines were mixed.")
    hosts = {f"computed on {', '.join(hosts)}": kind for kind, hosts in kinds.items()}
    yield _named({**hosts, **report.fingerprint})


# --- the top


def _head(report: Report) -> Markup:
    state = tag("span", STATES.get(report.state, report.state), class_=f"state {report.state}")
    return joined(
        [
            tag("h1", "run of ", tag("code", report.program)),
            tag("p", state, " on ", report.runner, ", began ", report.started),
        ]
    )


def _tiles(report: Report) -> Markup:
    progress, done = report.progress, report.progress.done
    tiles = [tile(human_seconds(progress.seconds), "from start to end")]
    predicted = progress.predicted.get("(total)")
    if predicted is not None:
        tiles.append(tile(human_seconds(predicted), "predicted, without compiling"))
    tiles.append(tile(f"{done.members:,}", _of("members", progress.members)))
    tiles.append(tile(f"{progress.members_per_second:,.0f}", "members/s"))
    tiles.append(tile(f"{done.shards:,}", _of("shards", progress.shards)))
    if progress.rounds or progress.rounds_total:
        tiles.append(tile(f"{progress.rounds:,}", _of("rounds", progress.rounds_total)))
    tiles.append(tile(human_bytes(done.bytes_read), "read"))
    tiles.append(tile(f"{done.retries:,}", "shards again", loud=done.retries > 0))
    tiles.append(tile(f"{progress.dropped:,}", "members dropped", loud=progress.dropped > 0))
    return tag("div", *tiles, class_="tiles")


def _of(what: str, total: int | None) -> str:
    return what if total is None else f"of {total:,} {what}"


def _error(report: Report) -> Markup | None:
    error = report.error
    if error is None:
        return None
    rows = [
        (name, str(error[name]))
        for name in ("step", "shard", "members", "worker")
        if error.get(name) not in (None, "")
    ]
    lines = f"{error.get('type')}: {error.get('message')}".strip().splitlines()
    shown = lines if len(lines) <= MESSAGE else [lines[0], lines[-1]]
    more = [("Whole message", "\n".join(lines))] * (len(shown) < len(lines))
    more += [("Traceback", error["traceback"])] * bool(error.get("traceback"))
    return _section(
        "Error",
        *(tag("p", line, class_="loud-text") for line in shown),
        table(rows, class_="facts") if rows else None,
        *(
            tag("details", tag("summary", name), tag("pre", text, tabindex=0))
            for name, text in more
        ),
    )


def _warnings(report: Report) -> Markup | None:
    advice = getattr(report.progress, "advice", "")
    warnings = [*report.warnings, *[advice] * bool(advice)]
    if not warnings:
        return None
    return _section("Warnings", tag("ul", *(tag("li", warning) for warning in warnings)))


# --- over time


def _over_time(report: Report) -> Markup:
    samples = report.samples
    if len(samples.get("seconds", ())) < 3:
        return _section("Over time", tag("p", "The run was too short to be seen over time."))
    unit, scale = _unit(samples["seconds"][-1])
    x = [second / scale for second in samples["seconds"]]
    marks = [second / scale for second in report.round_ends]
    saved = [second / scale for second in report.checkpoints]
    total = report.progress.members
    charts = [
        chart(
            PlotLine(
                "Members done", x, samples["members"], unit, "members", goal=total, marks=marks,
                saved=saved, area=True, whole=True,
            )
        )
    ]  # fmt: skip
    middles, speeds = speed(samples["seconds"], samples["members"])
    at = [middle / scale for middle in middles]
    charts.append(chart(PlotLine("Members a second", at, speeds, unit, "members/s", area=True)))
    charts.append(_kinds_over_time(samples, unit, scale))
    if any(samples["rounds"]):
        rounds = PlotLine(
            "Rounds done", x, samples["rounds"], unit, "rounds", goal=report.progress.rounds_total,
            saved=saved, area=True, whole=True,
        )  # fmt: skip
        charts.append(chart(rounds))
    for name, title in (("retries", "Shards again"), ("dropped", "Members dropped")):
        if any(samples[name]):
            charts.append(
                chart(PlotLine(title, x, samples[name], unit, name, area=True, whole=True))
            )
    notes = []
    notes += ["Small lines at the bottom are ends of rounds."] * bool(marks)
    notes += ["Diamonds are checkpoints."] * bool(saved)
    note = tag("p", " ".join(notes), class_="under") if notes else None
    return _section("Over time", tag("div", *charts, class_="charts"), note)


def _unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis of time, and its seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def speed(seconds: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """What is counted a second: at the middles of parts of the time, and as many values.

    Workers report once a second, so parts of a run that is not short are some seconds long.
    """
    bins = _bins(seconds)
    middles, speeds = [], []
    for left, right in itertools.pairwise(bins):
        middles.append((seconds[left] + seconds[right]) / 2)
        speeds.append((counts[right] - counts[left]) / (seconds[right] - seconds[left]))
    return middles, speeds


def _bins(seconds: Sequence[float]) -> list[int]:
    """Places of samples that part the time."""
    length = max((seconds[-1] - seconds[0]) / BINS, min(2.0, (seconds[-1] - seconds[0]) / 8))
    found = [0]
    for i, second in enumerate(seconds):
        if second - seconds[found[-1]] >= length and second > seconds[found[-1]]:
            found.append(i)
    return found


def _kinds_over_time(samples: Samples, unit: str, scale: float) -> Markup:
    """The share of each kind of work, at each time."""
    seconds = samples["seconds"]
    x: list[float] = []
    shares: dict[str, list[float]] = {kind: [] for kind in SECONDS}
    left = 0
    for right in _bins(seconds)[1:]:
        spent = {kind: samples[kind][right] - samples[kind][left] for kind in SECONDS}
        total = sum(spent.values())
        if total <= 0:  # no worker has reported this part yet: the next report has it
            continue
        for middle in (seconds[left], seconds[right]):
            x.append(middle / scale)
            for kind in SECONDS:
                shares[kind].append(spent[kind] / total)
        left = right
    return stacked_chart("Where the time of the workers goes", x, shares, unit)


# --- results of rounds


def _curves(report: Report) -> Markup | None:
    if not report.curves:
        return None
    charts = []
    for curve in report.curves:
        title = tag("code", curve.path)
        line = PlotLine(curve.path, curve.rounds, curve.values, "round", curve.path, wide=True)
        charts.append(chart(line, title))
    texts = [_not_shown(curve) for curve in report.curves if len(curve.rounds) < curve.of]
    notes = [tag("p", text, class_="under") for text in texts]
    return _section("Results of each round", tag("div", *charts, class_="charts"), *notes)


def _not_shown(curve: Curve) -> str:
    return f"{curve.path}: {len(curve.rounds):,} of {curve.of:,} rounds are shown."


# --- where the time went


def _shares(report: Report) -> Markup | None:
    steps = report.progress.steps
    if not steps:
        return None
    cells: list[Markup] = []
    total = sum(map(seconds_of, steps.values()))
    for name, tally in [("all steps", report.progress.done), *steps.items()]:
        spent = seconds_of(tally)
        share = f", {spent / total:.0%}" if total else ""
        cells += [
            tag("code", name),
            tag("div", shares_bar(tally)),
            tag("span", f"{human_seconds(spent)}{share}", class_="under"),
        ]
    return _section(
        "Where the time went",
        shares_legend(),
        tag("div", *cells, class_="shares-of"),
        _step_table(report),
        tag("p", "Seconds are of all workers together.", class_="under"),
    )


STEP_HEAD = ("step", "members", "shards", "again", "bytes", "padding", "executables", *SECONDS)


def _step_table(report: Report) -> Markup:
    predicted = report.progress.predicted
    rows = [
        (
            tag("code", name), tally.members, tally.shards, tally.retries,
            human_bytes(tally.bytes_read), human_bytes(tally.bytes_padding), tally.executables,
            *(human_seconds(getattr(tally, kind)) for kind in SECONDS),
            *([human_seconds(predicted[name]) if name in predicted else ""] if predicted else []),
        )
        for name, tally in report.progress.steps.items()
    ]  # fmt: skip
    return table(rows, (*STEP_HEAD, *["predicted"] * bool(predicted)))


def seconds_of(tally: Tally) -> float:
    """All of its seconds."""
    return math.fsum(getattr(tally, kind) for kind in SECONDS)


# --- dropped members, rounds and the plan


def _dropped(report: Report) -> Markup | None:
    if not report.dropped:
        return None
    reasons = [(count, *key) for key, count in report.reasons.items()]
    first = [
        (each.member, each.placement, tag("code", each.step), each.reason, each.message[:500])
        for each in report.dropped[:LISTED]
    ]
    more = len(report.dropped) - len(first)
    letters = report.options.get("dead_letters")
    return _section(
        "Dropped members",
        table(reasons, ("members", "placement", "step", "reason")),
        tag("h3", "The first ones" if more else "Each of them"),
        table(first, ("member", "of", "step", "reason", "message")),
        tag("p", f"{more:,} more are not shown.", class_="under") if more else None,
        tag("p", "All are listed in ", tag("code", letters), ".") if letters else None,
    )


def _rounds(report: Report) -> Markup | None:
    progress = report.progress
    if not progress.rounds and not report.checkpoints:
        return None
    rows: list[tuple[str, Any]] = []
    if progress.rounds:
        rows.append(("rounds", f"{progress.rounds:,}"))
        last = report.round_ends[-1] if report.round_ends else progress.seconds
        rows.append(("a round took", f"{human_seconds(last / progress.rounds)} on average"))
    if report.checkpoints:
        rows.append(("checkpoints", f"{len(report.checkpoints):,}"))
        rows.append(("the last one", f"after {human_seconds(report.checkpoints[-1])}"))
    if folder := report.options.get("checkpoint"):
        rows.append(("in", tag("code", folder)))
    return _section("Rounds and checkpoints", table(rows, class_="facts"))


def _plan(report: Report, prefix: str) -> Markup | None:
    if report.plan is None:
        return None
    return graph_section(report.plan, report.source_lines, report.progress.steps, prefix)
