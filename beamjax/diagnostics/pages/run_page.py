"""The page of a run: its progress over time, where the time went, errors and dropped members."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from beamjax.diagnostics.pages.graph import plan_graph
from beamjax.diagnostics.pages.page import Page
from beamjax.diagnostics.pages.plan_page import spent_by_step
from beamjax.diagnostics.plan_json import Json
from beamjax.spans import KINDS

BINS = 60
"""Largest number of points in a chart of the speed."""
STARTING = "starting"


def run_page(run: Json) -> Page:
    """Returns the page of a run, of its report from `Report.to_json`."""
    over_time, spent = list(_over_time(run)), spent_by_step(run)
    curves = [
        _chart(c["path"], c["rounds"], {c["path"]: c["values"]}, "round", c["path"], wide=True)
        for c in run["curves"]
    ]
    reasons = collections.Counter((d["placement"], d["step"], d["reason"]) for d in run["dropped"])
    values: Json = {
        "run": run, "plan": run["plan"], "over_time": over_time, "curves": curves, "spent": spent,
        "reasons": [(count, *key) for key, count in reasons.items()],
    }  # fmt: skip
    data: Json = {"run": run, "charts": [*over_time, *curves]}
    if run["plan"] is not None:
        data["graph"] = plan_graph(run["plan"], spent)
    return Page(f"run of {run['program']}", "run", values, data)


def _chart(
    title: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    x_name: str,
    y_name: str,
    **more: Any,
) -> Json:
    """Returns a chart as JSON values, for `page.js`; a line is interrupted at None."""
    # `page.js` reads of `more`: `goal`, a value of y with a horizontal line; `marks` and `saved`,
    # values of x with a tick or a diamond; `area`, whether the area under a line is filled; `wide`,
    # whether y is logarithmic if its values are positive and span decades; `stacked` lines.
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
        value = points[-1][1]
        number = f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
        last = f"{y_name}: {number} at {points[-1][0]:.4g} {x_name}"
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


def _over_time(run: Json) -> Iterator[Json]:
    samples, progress = run["samples"], run["progress"]
    if len(samples.get("seconds", ())) < 3:
        return
    unit, scale = _unit(samples["seconds"][-1])
    x = [second / scale for second in samples["seconds"]]
    marks = [second / scale for second in run["round_ends"]]
    saved = [second / scale for second in run["checkpoints"]]

    def counted(title: str, name: str, **more: Any) -> Json:
        return _chart(title, x, {name: samples[name]}, unit, name, area=True, **more)

    yield counted("Shards done", "shards", goal=progress["shards"], marks=marks, saved=saved)
    middles, speeds = speed(samples["seconds"], samples["members"])
    at = [middle / scale for middle in middles]
    yield _chart(
        "Members per second", at, {"members/s": speeds}, unit, "members/s", area=True
    )  # fmt: skip
    times, shares = _kinds_over_time(samples)
    if len(times) >= 2:
        title = "How workers spend their time"
        at = [second / scale for second in times]
        yield _chart(title, at, shares, unit, "share", stacked=True)
    for name, title in (("retries", "Shards retried"), ("dropped", "Members dropped")):
        if any(samples[name]):
            yield counted(title, name)


def _unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis of time, and its seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def speed(seconds: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns counts per second: the middles of intervals of time, and a value for each."""
    middles, speeds = [], []
    for left, right in itertools.pairwise(_bins(seconds)):
        middles.append((seconds[left] + seconds[right]) / 2)
        speeds.append((counts[right] - counts[left]) / (seconds[right] - seconds[left]))
    return middles, speeds


def _bins(seconds: Sequence[float]) -> list[int]:
    """Returns the indices of the samples at which intervals of time begin or end."""
    # Workers report once a second: shorter intervals would show a comb. A short run has eight.
    length = max((seconds[-1] - seconds[0]) / BINS, min(2.0, (seconds[-1] - seconds[0]) / 8))
    bins = [0]
    for i, second in enumerate(seconds):
        if second - seconds[bins[-1]] >= length and second > seconds[bins[-1]]:
            bins.append(i)
    # The last interval reaches the end: all work of a short run may be in its last sample.
    if seconds[-1] > seconds[bins[-1]]:
        bins[max(len(bins) - 1, 1) :] = [len(seconds) - 1]
    return bins


def _kinds_over_time(samples: Json) -> tuple[list[float], dict[str, list[float]]]:
    """Returns times in seconds, and the share of each kind of work at these times."""
    # Until a worker reports, all time is "starting". A run without such an interval lacks the kind.
    x: list[float] = []
    shares: dict[str, list[float]] = {kind: [] for kind in (*KINDS, STARTING)}
    left = 0
    for right in _bins(samples["seconds"])[1:]:
        spent = {kind: samples[kind][right] - samples[kind][left] for kind in KINDS}
        total = sum(spent.values())
        if total <= 0 and x and not shares[STARTING][-1]:
            continue  # no worker reported in this interval; the next report covers it, too
        # Both ends of the interval, so that its share is a step and not a slope.
        x += [samples["seconds"][left], samples["seconds"][right]]
        for kind in KINDS:
            shares[kind] += 2 * [spent[kind] / total if total > 0 else 0.0]
        shares[STARTING] += 2 * [float(total <= 0)]
        left = right
    if not any(shares[STARTING]):
        del shares[STARTING]
    return x, shares
